"""The command `rl launch`: from the command line to files and the commands to type."""

from __future__ import annotations

import argparse
import shlex
import tomllib
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import rl
from rewards.suggest import nearest
from rl.errors import ConfigError
from rl.launch import folder
from rl.launch.configuration import LaunchedConfig, launched_config
from rl.launch.containers import FILES
from rl.launch.job import (
    RUN_FILE,
    Capacity,
    CloudNames,
    ClusterJob,
    Folders,
    Launched,
    Packages,
    RestartLimits,
    Secret,
    bucket_name,
    job_name,
    plain_name,
)
from rl.launch.kinds import KINDS
from rl.launch.machines import Machines
from rl.remote.urls import scheme_of

_LEAST_GRACE = 300
_MAX_RESTARTS = 50
_STARTED_AGAIN = ("jobset", "xpk", "tpu-vm", "slurm")
_OF_KINDS = {
    "project": ("xpk", "tpu-vm"),
    "zone": ("xpk", "tpu-vm", "sky"),
    "cluster": ("xpk",),
    "namespace": ("jobset", "xpk"),
    "service_account": ("jobset", "tpu-vm"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "time": ("slurm",),
    "cpus_per_task": ("slurm",),
    "setup": ("slurm",),
    "grace": _STARTED_AGAIN,
    "max_restarts": _STARTED_AGAIN,
}
"""Options that only some kinds read."""


def launch(arguments: argparse.Namespace, files: list[str], overrides: list[str]) -> int:
    """Writes the files of a kind and prints the commands to type. Raises ConfigError.

    files, overrides: of the configuration.
    """
    kind = arguments.kind
    if kind not in KINDS:
        raise ConfigError(f"{kind}: `rl launch` knows no such kind{nearest(kind, KINDS)}")
    _check_extras(arguments.extra)
    if not files:
        raise ConfigError("CONFIG is missing: name the file of the run first, then key=value")
    machines = _machines(arguments)
    KINDS[kind].check(machines, _capacity(arguments))
    config = launched_config(files, overrides, machines, check=not arguments.no_check)
    job = _job(arguments, machines, files[0], _packages(arguments, config))
    launched = KINDS[kind].launched(job)
    texts = {**launched.files, f"{FILES}/{RUN_FILE}": config.yaml}
    remarks = [*launched.remarks, *config.remarks, *_remarks(kind, job, config)]
    copied = {}
    if kind != "slurm":  # whose nodes see the folder of the command line
        copied = {f"{FILES}/{path.as_posix()}": path for path in config.local}
        remarks += config.left_out
    remarks += _unused(arguments)
    written = folder.write(arguments.output, texts, copied, force=arguments.force)
    print(_summary(job, launched, remarks, arguments.output, written))
    return 0


def _machines(arguments: argparse.Namespace) -> Machines:
    machines = Machines.read(arguments.topology, arguments.chips_per_host)
    if arguments.kind == "xpk" and machines.platform == "tpu" and machines.chips == 8:
        return replace(machines, hosts=2, chips=4)  # the machines that xpk takes for 2x4
    return machines


def _capacity(arguments: argparse.Namespace) -> Capacity:
    return Capacity(arguments.spot, plain_name("--reservation", arguments.reservation))


def _packages(arguments: argparse.Namespace, config: LaunchedConfig) -> Packages:
    """Returns what the image installs."""
    bucket = {scheme for scheme in [scheme_of(arguments.bucket or "")] if scheme}
    extras = tuple(dict.fromkeys([*config.extras, *arguments.extra]))
    return Packages(_wheel(), _version(), extras, config.schemes | bucket)


def _job(
    arguments: argparse.Namespace, machines: Machines, file: str, packages: Packages
) -> ClusterJob:
    secrets = KINDS[arguments.kind].secrets
    return ClusterJob(
        name=job_name(arguments.name, Path(file).stem),
        machines=machines,
        bucket=bucket_name(arguments.bucket),
        image=plain_name("--image", arguments.image),
        secrets=tuple(Secret.read(text, secrets) for text in arguments.secret),
        capacity=_capacity(arguments),
        limits=_limits(arguments),
        packages=packages,
        folders=Folders(str(Path.cwd()), str(arguments.output.absolute())),
        places=_places(arguments),
    )


def _limits(arguments: argparse.Namespace) -> RestartLimits:
    grace = _LEAST_GRACE if arguments.grace is None else arguments.grace
    if grace < _LEAST_GRACE:
        raise ConfigError(
            f"--grace {grace}: a step has to end and be saved; at least {_LEAST_GRACE}"
        )
    restarts = _MAX_RESTARTS if arguments.max_restarts is None else arguments.max_restarts
    return RestartLimits(grace, restarts)


def _places(arguments: argparse.Namespace) -> CloudNames:
    names = {
        each.name: plain_name(f"--{each.name.replace('_', '-')}", getattr(arguments, each.name))
        for each in fields(CloudNames)
        if each.name not in ("cpus_per_task", "setup")
    }
    return CloudNames(**names, cpus_per_task=arguments.cpus_per_task, setup=tuple(arguments.setup))


def _version() -> str:
    try:
        return version("duet-rl")
    except PackageNotFoundError:
        return "dev"


def _checkout() -> Path | None:
    """Returns the folder of the source that runs here; None: an installed wheel runs."""
    root = Path(rl.__file__).parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def _wheel() -> str:
    """Returns what `pip wheel` takes: the checkout that runs here, or the installed version."""
    root = _checkout()
    return f"duet-rl=={_version()}" if root is None else str(root)


def _check_extras(names: list[str]) -> None:
    """Raises ConfigError for a name that is no extra of duet-rl: pip only warns about it."""
    if (root := _checkout()) is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        known = list(project["optional-dependencies"])
    else:
        known = metadata("duet-rl").get_all("Provides-Extra") or []
    for name in names:
        if name not in known:
            raise ConfigError(f"--extra {name}: duet-rl has no such extra{nearest(name, known)}")


def _summary(
    job: ClusterJob, launched: Launched, remarks: list[str], directory: Path, written: list[str]
) -> str:
    """Returns what was written, remarks, and the commands to type."""
    lines = [f"{job.name}: {job.machines.name}: {job.machines.described()}", "written:"]
    lines += [f"  {directory / name}" for name in sorted(written)]
    if remarks:
        lines += ["note:", *(f"  {remark}" for remark in remarks)]
    lines += ["type:", f"  cd {shlex.quote(str(directory))}"]
    for command in launched.commands:
        lines += [f"  # {command.purpose}", f"  {command.line}"]
    return "\n".join(lines)


def _unused(arguments: argparse.Namespace) -> list[str]:
    """Returns remarks on options that are given and that the kind does not read."""
    return [
        f"--{name.replace('_', '-')} is not used: it is for {', '.join(kinds)}"
        for name, kinds in _OF_KINDS.items()
        if getattr(arguments, name) not in (None, []) and arguments.kind not in kinds
    ]


def _remarks(kind: str, job: ClusterJob, config: LaunchedConfig) -> list[str]:
    """Returns what the user should know about the folder of the run."""
    if kind == "slurm":
        return [f"all nodes have to see {job.folders.working}"]
    if job.bucket is not None or config.is_remote:
        return []
    several = "; several hosts cannot run without it" if job.machines.all_hosts > 1 else ""
    return [f"--bucket is missing: a run that starts again begins at its first step{several}"]
