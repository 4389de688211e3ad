"""The folder of an export: it appears in one step, and only a folder that an export wrote is
replaced."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from policy.json_types import JsonValue
from rl.errors import ConfigError, ResourceError, disk_room

MARKER = "duet_export.json"
"""What an export wrote, and from which weights. A folder without it is never replaced."""
_UNFINISHED = ".unfinished-export"
"""Ends the name of the folder in which an export is written."""
_REPLACED = ".replaced-export"
"""Ends the name of an export until the one that replaces it is in its place."""


def check(directory: Path, force: bool) -> None:
    """Raises ConfigError for a directory that exists and may not be replaced, and for names that
    exports need. force: one that an export wrote may be replaced. First puts back the directory
    that a killed export had moved aside."""
    if directory.name in ("", ".."):
        raise ConfigError(f"{directory}: name a new directory")
    if directory.name.endswith((_UNFINISHED, _REPLACED)):
        raise ConfigError(f"{directory}: exports that are killed leave this name; choose another")
    _put_back(directory)
    if not directory.is_dir():
        if directory.exists():
            raise ConfigError(f"{directory}: a file; name another directory")
        return
    if not any(directory.iterdir()):
        return
    others = _other_files(directory)
    if others is None:
        raise ConfigError(
            f"{directory}: exists, and `rl export` did not write it; name another directory"
        )
    if others:
        raise ConfigError(
            f"{directory}: exists, and has a file that `rl export` did not write, {others[0]}; move "
            "it, or name another directory"
        )
    if not force:
        raise ConfigError(
            f"{directory}: exists; name another directory, or replace the export there with --force"
        )


@contextlib.contextmanager
def written(directory: Path, force: bool, facts: Mapping[str, JsonValue]) -> Iterator[Path]:
    """Yields an empty folder next to `directory`, which takes its place when the block ends.

    If the block raises, the folder is removed. facts: what the marker says of the export. Raises
    ConfigError as `check`, ResourceError if the disk has no room or refuses.
    """
    check(directory, force)
    unfinished = directory.with_name(directory.name + _UNFINISHED)
    if unfinished.exists() and not (unfinished / MARKER).is_file():
        raise ConfigError(f"{unfinished}: exists, and the export is written there; move it away")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
        unfinished.mkdir(parents=True)
        (unfinished / MARKER).write_text("{}\n", encoding="utf-8")
        yield unfinished
        _mark(unfinished, facts)
        _replace(directory, unfinished)
    except OSError as error:
        raise ResourceError(
            f"{directory}: the export cannot be written: {error}. Make room or choose another disk, "
            f"then type the command again ({disk_room(unfinished.parent)})"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _mark(directory: Path, facts: Mapping[str, JsonValue]) -> None:
    content = {**facts, "files": sorted({*_files(directory), MARKER})}
    (directory / MARKER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace(directory: Path, unfinished: Path) -> None:
    if not directory.is_dir() or not any(directory.iterdir()):
        unfinished.replace(directory)
        return
    old = directory.with_name(directory.name + _REPLACED)
    directory.rename(old)
    unfinished.rename(directory)
    _remove(old)


def _put_back(directory: Path) -> None:
    """Ends what an export that was killed while it replaced `directory` had begun. Raises
    ConfigError where other files are in the way."""
    old = directory.with_name(directory.name + _REPLACED)
    if not old.is_dir() or directory.is_file():
        return
    is_there = directory.is_dir() and any(directory.iterdir())
    if _other_files(old) != []:
        if is_there:
            raise ConfigError(
                f"{old}: exists, and the replaced export is moved there; move it away"
            )
        return
    if is_there:
        _remove(old)
    else:
        old.replace(directory)


def _remove(export: Path) -> None:
    """Removes an export, its marker last: so what a kill leaves is known as one."""
    for each in export.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != MARKER:
            each.unlink()
    shutil.rmtree(export)


def _files(directory: Path) -> list[str]:
    return sorted(
        str(file.relative_to(directory)) for file in directory.rglob("*") if not file.is_dir()
    )


def _other_files(directory: Path) -> list[str] | None:
    """Returns the files of a directory that the export which wrote it did not write; None if no
    export wrote it."""
    try:
        listed = json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]
        return sorted(set(_files(directory)) - set(listed))
    except (OSError, ValueError, KeyError, TypeError):
        return None
