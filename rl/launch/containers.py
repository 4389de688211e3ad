"""Writes the Dockerfile of a platform, and the commands that make its image."""

from __future__ import annotations

import shlex

from rl.launch.job import Job

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
_OF_SCHEME = {"s3": "s3fs", "abfs": "adlfs", "az": "adlfs"}
_WHAT = {"tpu": "TPUs", "gpu": "GPUs (jax brings CUDA; the host has the driver)", "cpu": "CPUs"}
_ENVIRONMENT = {
    "tpu": "ENV PYTHONUNBUFFERED=1\n",
    "cpu": "ENV PYTHONUNBUFFERED=1\n",
    "gpu": "ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility\n",
}


def extras(job: Job) -> str:
    """Returns the extras of the wheel that the run needs, in brackets."""
    platform = {"tpu": ["tpu"], "gpu": ["cuda"], "cpu": []}[job.machines.platform]
    names = [*platform, *job.extras]
    return f"[{','.join(names)}]" if names else ""


def packages(job: Job) -> str:
    """Returns what else `pip install` gets: the package of the bucket, if no extra has it."""
    name = _OF_SCHEME.get((job.bucket or "").partition("://")[0])
    return f" {name}" if name else ""


def dockerfile(job: Job) -> dict[str, str]:
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


def wheel_command(job: Job) -> tuple[str, str]:
    return ("make the wheel", f"pip wheel --no-deps -w {FILES} {shlex.quote(job.wheel)}")


def image_commands(job: Job) -> list[tuple[str, str]]:
    """Returns the commands that make the image and send it to its registry."""
    image = shlex.quote(job.tag)
    platform = job.machines.platform
    return [
        wheel_command(job),
        (
            "make the image",
            f"docker build --platform linux/amd64 -f Dockerfile.{platform} -t {image} .",
        ),
        ("send it to its registry", f"docker push {image}"),
    ]


def image_remarks(job: Job) -> list[str]:
    if job.image is not None:
        return []
    return [f"--image is missing: the files say {job.tag}; name one that the machines can pull"]
