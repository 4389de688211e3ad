"""The configuration that a launched run gets: that of the user, for its machines."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewards import plugins
from rl import tasks
from rl.config.data import datasets_of
from rl.config.files import RunConfig, merged, report, resolved_yaml, validate
from rl.errors import ConfigError
from rl.launch.machines import Machines
from rl.remote.urls import scheme_of
from rl.run.load import load

_LARGEST = 64 * 2**20


@dataclass(frozen=True)
class LaunchedConfig:
    """yaml: the file of the run. local: files and folders of this machine that the run reads, by
    their relative paths. extras: of the wheel, that its keys need. schemes: of the URLs that it
    names. is_remote: whether it names a remote folder. remarks: what differs from the
    configuration. left_out: remarks on files that cannot be copied."""

    yaml: str
    local: list[Path]
    extras: list[str]
    schemes: frozenset[str]
    is_remote: bool
    remarks: list[str]
    left_out: list[str]


def launched_config(
    files: Sequence[str], overrides: Sequence[str], machines: Machines, *, check: bool
) -> LaunchedConfig:
    """Reads a configuration for these machines.

    check: whether names and paths have to exist on this machine too.
    Raises ConfigError for a fault, or a mesh that does not fit the machines.
    """
    config = load(files, overrides) if check else _unchecked(files, overrides)
    remarks = []
    added = []
    if config.platform not in ("auto", machines.platform):
        remarks.append(f"platform: {machines.platform} (the configuration says {config.platform})")
        added.append(f"platform={machines.platform}")
    if machines.slices > 1 and config.mesh.dcn is None:
        remarks.append(
            "mesh.dcn.data: -1 (the configuration does not say which axis goes over slices)"
        )
        added.append("mesh.dcn.data=-1")
    if added:
        overrides = [*overrides, *added]
        config = load(files, overrides) if check else _unchecked(files, overrides)
    _check_mesh(config, machines)
    local, left_out = _local_files(config)
    schemes = (scheme_of(text) for text in _texts(config.model_dump()))
    return LaunchedConfig(
        yaml=resolved_yaml(config),
        local=local,
        extras=_extras(config),
        schemes=frozenset(filter(None, schemes)),
        is_remote=config.run.remote is not None,
        remarks=remarks,
        left_out=left_out,
    )


def _extras(config: RunConfig) -> list[str]:
    """Returns the extras of the wheel that keys of the configuration need, where they say so."""
    made = [each.task for each in datasets_of(config.data) if each.task is not None]
    rewards = [config.rewards, *(stage.rewards for stage in config.stages)]
    names = [each.name for settings in rewards if settings for each in settings.functions]
    needs = {
        "mlflow": config.run.mlflow is not None,
        "trackio": config.run.trackio is not None,
        "tasks": bool({"math", "reasoning_gym"} & {*names}) or any(map(_is_of_gym, made)),
    }
    return [name for name, needed in needs.items() if needed]


def _is_of_gym(task: str) -> bool:
    return not plugins.is_plugin(task) and task not in tasks.names()


def _unchecked(files: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    tree = merged(list(files), list(overrides))
    config, faults = validate(tree)
    if faults or config is None:
        raise ConfigError(report(tree, faults))
    return config


def _check_mesh(config: RunConfig, machines: Machines) -> None:
    """Compares the sizes of the mesh with the devices of a slice, and those over slices."""
    dcn = {} if config.mesh.dcn is None else config.mesh.dcn.model_dump()
    for where, sizes, there, what in (
        ("mesh", config.mesh.degrees, machines.devices, "devices of a slice"),
        ("mesh.dcn", dcn, machines.slices, "slices"),
    ):
        product = math.prod(size for size in sizes.values() if size != -1)
        fits = there % product == 0 if -1 in sizes.values() else there == product
        if not fits:
            known = {axis: size for axis, size in sizes.items() if size != 1}
            raise ConfigError(
                f"{where}: {known or 'every axis 1'} does not fit the {there} {what} of --topology "
                f"{machines.name} ({machines.described()}); set {where}.AXIS=NUMBER, -1 for "
                "what is left"
            )


def _local_files(config: RunConfig) -> tuple[list[Path], list[str]]:
    """Returns relative paths of this machine that the configuration names, and remarks on those
    that are not copied."""
    tree = config.model_dump(exclude={"run": {"dir"}})
    paths = {path for text in _texts(tree) if (path := _path(text)) is not None}
    copied = []
    remarks = []
    size = 0
    for path in sorted(paths):
        if path.is_absolute() or ".." in path.parts:
            remarks.append(
                f"{path} is not copied: it has to be there on the machines of the run too"
            )
            continue
        size += _size(path)
        if size > _LARGEST:
            size -= _size(path)
            remarks.append(
                f"{path} is not copied: it is too large ({_size(path) / 2**20:,.0f} MiB); put it "
                "where the machines can read it"
            )
        else:
            copied.append(path)
    return copied, remarks


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _texts(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _texts(child)


def _path(text: str) -> Path | None:
    """Returns the file or folder that a text names, also as `file.py:function`."""
    for each in (text, text.rpartition(":")[0]):
        if each and ("/" in each or "." in each) and "\n" not in each:
            path = Path(each)
            # Path.exists raises for long texts, and for folders that may not be read.
            if os.path.exists(each) and path.resolve() != Path.cwd():
                return path
    return None


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    try:
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError as error:
        raise ConfigError(f"{path} is to be copied: {error}") from None
