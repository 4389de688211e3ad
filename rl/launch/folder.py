"""Writes the files of a launch into a folder. It replaces files that it wrote before and nobody has
changed since, and no others."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl.errors import ConfigError

WRITTEN = "launch.json"
"""Holds the SHA-256 of each file that was written."""


def write(
    directory: Path, files: Mapping[str, str], copied: Mapping[str, Path], *, force: bool
) -> list[str]:
    """Writes texts and copies by their relative paths, and returns the paths.

    copied: file or folder of this machine by path. force: replaces files of others.
    Raises ConfigError, before anything is written, if a file of somebody else is in the way, or one
    to copy cannot be read.
    """
    contents = {name: text.encode() for name, text in files.items()} | _read(copied)
    recorded = _recorded(directory)
    known = recorded or {}
    others = [WRITTEN] if recorded is None else []
    others += [
        name
        for name, content in contents.items()
        if (directory / name).exists() and not _ours(directory / name, content, known.get(name))
    ]
    if others and not force:
        raise ConfigError(
            f"{directory}: {', '.join(others)}: `rl launch` has not written this, or somebody "
            "has changed it since; give another folder, or --force to replace it"
        )
    try:
        for name, content in contents.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        hashes = known | {name: _hash(content) for name, content in contents.items()}
        (directory / WRITTEN).write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise ConfigError(f"-o {directory}: {error.filename}: {error.strerror}") from None
    return list(contents)


def _read(copied: Mapping[str, Path]) -> dict[str, bytes]:
    contents = {}
    for name, source in copied.items():
        try:
            contents |= {path: file.read_bytes() for path, file in _files(name, source)}
        except OSError as error:
            raise ConfigError(f"{source} is to be copied: {error}") from None
    return contents


def _files(name: str, source: Path) -> Iterator[tuple[str, Path]]:
    if source.is_file():
        yield name, source
        return
    for file in sorted(source.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield f"{name}/{file.relative_to(source).as_posix()}", file


def _recorded(directory: Path) -> dict[str, str] | None:
    """Returns the hashes of launch.json; None if a file of somebody else has its name."""
    try:
        hashes = json.loads((directory / WRITTEN).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError):
        return None
    is_ours = isinstance(hashes, dict) and all(map(_is_hash, hashes.values()))
    return hashes if is_ours else None


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _ours(path: Path, content: bytes, known: str | None) -> bool:
    if not path.is_file():
        return False
    present = path.read_bytes()
    return present == content or _hash(present) == known


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
