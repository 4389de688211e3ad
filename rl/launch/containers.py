"""Writes the Dockerfile of a platform, and the commands that make its image."""

from __future__ import annotations

import shlex

from rl.launch.job import ClusterJob, Command

FILES = "files"
"""Folder of what goes into the image: the wheel, the configuration, and files that it names."""

_DOCKERFILE = """\
# Image of a run on {what}: Duet from its wheel, the configuration, and the files that it names.
FROM python:3.12-slim
{environment}WORKDIR /work
COPY {files}/*.whl /tmp/wheel/
RUN pip install --no-cache-dir "$(echo /tmp/wheel/*.whl){extras}"{packages} && rm -r /tmp/wheel
COPY {files}/ ./
"""
_CLIENTS = {"s3": "s3fs", "s3a": "s3fs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"}
"""Packages by the scheme of a URL."""
_WHAT = {"tpu": "TPUs", "gpu": "GPUs (jax brings CUDA; the host has the driver)", "cpu": "CPUs"}
_ENVIRONMENT = {
    "tpu": "ENV PYTHONUNBUFFERED=1\n",
    "cpu": "ENV PYTHONUNBUFFERED=1\n",
    "gpu": "ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility\n",
}


def extras(job: ClusterJob) -> str:
    """Returns the extras of the wheel that the run needs, in brackets."""
    platform = {"tpu": ["tpu"], "gpu": ["cuda"], "cpu": []}[job.machines.platform]
    buckets = ["gcs"] if job.packages.schemes & {"gs", "gcs"} else []
    names = dict.fromkeys([*platform, *buckets, *job.packages.extras])
    return f"[{','.join(names)}]" if names else ""


def packages(job: ClusterJob) -> str:
    """Returns what else `pip install` gets: clients of remote folders that no extra has."""
    names = {_CLIENTS[scheme] for scheme in job.packages.schemes if scheme in _CLIENTS}
    return "".join(f" {name}" for name in sorted(names))


def dockerfile(job: ClusterJob) -> dict[str, str]:
    """Returns the Dockerfile of the job's platform, by its name."""
    platform = job.machines.platform
    text = _DOCKERFILE.format(
        what=_WHAT[platform],
        environment=_ENVIRONMENT[platform],
        files=FILES,
        extras=extras(job),
        packages=packages(job),
    )
    return {f"Dockerfile.{platform}": text}


def wheel_command(job: ClusterJob) -> Command:
    """Returns the command that makes the wheel, in the place of one of an earlier version: the
    image takes the only one that is there."""
    make = f"pip wheel --no-deps -w {FILES} {shlex.quote(job.packages.wheel)}"
    return Command("make the wheel", f"rm -f {FILES}/duet_rl-*.whl && {make}")


def image_commands(job: ClusterJob) -> list[Command]:
    """Returns the commands that make the image and send it to its registry."""
    image = shlex.quote(job.tag)
    platform = job.machines.platform
    return [
        wheel_command(job),
        Command(
            "make the image",
            f"docker build --platform linux/amd64 -f Dockerfile.{platform} -t {image} .",
        ),
        Command("send it to its registry", f"docker push {image}"),
    ]


def image_remarks(job: ClusterJob) -> list[str]:
    """Returns what the user should know about the image."""
    if job.image is not None:
        return []
    return [f"--image is missing: the files say {job.tag}; name one that the machines can pull"]
