"""The command `rl launch`: from the command line to files and the commands to type."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rl
from rewards.suggest import nearest
from rl.errors import ConfigError
from rl.launch import folder
from rl.launch.configuration import LaunchedConfig, launched_config
from rl.launch.containers import FILES
from rl.launch.job import (
    RUN_FILE,
    Job,
    Launched,
    Places,
    Secret,
    bucket_name,
    job_name,
)
from rl.launch.kinds import KINDS
from rl.launch.machines import Machines

_LEAST_GRACE = 300


def launch(arguments: argparse.Namespace, files: list[str], overrides: list[str]) -> int:
    """Writes the files of a kind and prints the commands to type. Raises ConfigError.

    files, overrides: of the configuration.
    """
    kind = arguments.kind
    if kind not in KINDS:
        raise ConfigError(f"{kind}: `rl launch` knows no such kind{nearest(kind, KINDS)}")
    machines = Machines.read(arguments.topology, arguments.chips_per_host)
    if kind == "xpk" and machines.platform == "tpu" and machines.chips == 8:
        machines = replace(machines, hosts=2, chips=4)  # the machines that xpk takes for 2x4
    job = _job(arguments, machines, files)
    KINDS[kind](job)  # refuses machines before the configuration is read
    config = launched_config(files, overrides, machines, check=not arguments.no_check)
    job = replace(job, extras=_extras(arguments, config))
    launched = KINDS[kind](job)
    texts = {**launched.files, f"{FILES}/{RUN_FILE}": config.yaml}
    remarks = [*launched.remarks, *config.remarks, *_remarks(kind, job, config)]
    copied = {}
    if kind != "slurm":  # whose nodes see the folder of the command line
        copied = {f"{FILES}/{path.as_posix()}": path for path in config.local}
        remarks += config.left_out
    written = folder.write(arguments.output, texts, copied, force=arguments.force)
    print(_summary(job, launched, remarks, arguments.output, written))
    return 0


def _job(arguments: argparse.Namespace, machines: Machines, files: list[str]) -> Job:
    if not files:
        raise ConfigError("CONFIG is missing: name the file of the run first, then key=value")
    if arguments.grace < _LEAST_GRACE:
        raise ConfigError(
            f"--grace {arguments.grace}: a step has to end and be saved; at least {_LEAST_GRACE}"
        )
    secrets = tuple(Secret.read(text) for text in arguments.secret)
    return Job(
        name=job_name(arguments.name, Path(files[0]).stem),
        machines=machines,
        bucket=bucket_name(arguments.bucket),
        image=arguments.image,
        secrets=secrets,
        spot=arguments.spot,
        reservation=arguments.reservation,
        grace=arguments.grace,
        max_restarts=arguments.max_restarts,
        setup=tuple(arguments.setup),
        wheel=_wheel(),
        version=_version(),
        extras=(),
        folder=str(Path.cwd()),
        directory=str(arguments.output.absolute()),
        places=Places(
            project=arguments.project,
            zone=arguments.zone,
            cluster=arguments.cluster,
            namespace=arguments.namespace,
            service_account=arguments.service_account,
            partition=arguments.partition,
            account=arguments.account,
            time=arguments.time,
        ),
    )


def _version() -> str:
    try:
        return version("duet-rl")
    except PackageNotFoundError:
        return "dev"


def _wheel() -> str:
    """Returns what `pip wheel` takes: the checkout that runs here, or the installed version."""
    root = Path(rl.__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return str(root)
    return f"duet-rl=={_version()}"


def _summary(
    job: Job, launched: Launched, remarks: list[str], directory: Path, written: list[str]
) -> str:
    """Returns what was written, remarks, and the commands to type."""
    lines = [f"{job.name}: {job.machines.name}: {job.machines.described()}", "written:"]
    lines += [f"  {directory / name}" for name in sorted(written)]
    if remarks:
        lines += ["note:", *(f"  {remark}" for remark in remarks)]
    lines += ["type:", f"  cd {shlex.quote(str(directory))}"]
    for what, command in launched.commands:
        lines += [f"  # {what}", f"  {command}"]
    return "\n".join(lines)


def _extras(arguments: argparse.Namespace, config: LaunchedConfig) -> tuple[str, ...]:
    """Returns those that the user names, and those that the bucket and the configuration need."""
    bucket = ["gcs"] if (arguments.bucket or "").startswith(("gs://", "gcs://")) else []
    return tuple(dict.fromkeys([*bucket, *config.extras, *arguments.extra]))


def _remarks(kind: str, job: Job, config: LaunchedConfig) -> list[str]:
    """Returns what the user should know about the folder of the run."""
    if kind == "slurm":
        return [f"all nodes have to see {job.folder}"]
    if job.bucket is not None or config.is_remote:
        return []
    several = "; several hosts cannot run without it" if job.machines.all_hosts > 1 else ""
    return [f"--bucket is missing: a run that starts again begins at its first step{several}"]
