"""A directory whose last file, manifest.json, holds the size and SHA-256 of every other one.

The manifest's own "sha256" covers its other keys, so that every change in the directory is
detected. A manifest with the key "part" is of a checkpoint of which other processes have the other
files, in folders of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from policy.json_types import JsonObject, JsonValue

FORMAT = 1
MANIFEST = "manifest.json"
CHECKPOINT_FOLDER = "checkpoints"  # of a run
HOST = "host.json"  # of a checkpoint: what it holds besides arrays
PART = "part"
_PART = (
    "holds the shards of process {process} of {processes} only; `rl fetch URL FOLDER --weights` "
    "gets all of them from run.remote"
)
_COMPLETE = re.compile(r"(\d+)(\.replaced)?")
# A network file system answers many reads at once; one core hashes about 1 GB a second.
_THREADS = 8


def seal(directory: Path, content: JsonObject) -> None:
    """Hashes and syncs every file below, then writes the manifest: `content`, "format" and "files".

    The manifest appears in one step. Returns when files and directories are on the disk. Raises
    OSError.
    """
    names = _files(directory)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(lambda name: file_hash(directory / name, sync=True), names))
    sizes = [(directory / name).stat().st_size for name in names]
    files = {
        name: {"size": s, "sha256": h} for name, s, h in zip(names, sizes, hashes, strict=True)
    }
    temporary = directory / f"{MANIFEST}.tmp"
    with temporary.open("w") as file:
        file.write(manifest_text(content, files))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / MANIFEST)
    for parent, _, _ in os.walk(directory):
        sync_directory(parent)


def manifest_text(content: JsonObject, files: JsonObject) -> str:
    """Returns a manifest: `content`, "format", "files" and "sha256". files: size and SHA-256 of each
    by its name."""
    manifest = {**content, "format": FORMAT, "files": files}
    return _canonical({**manifest, "sha256": _digest(manifest)})


def examine(
    directory: Path, hashes: bool = True, *, part: bool = False
) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns (manifest, problems): "FILE: problem" for each file that has changed since `seal`.

    The manifest is None where it is itself missing or altered. Without `hashes` only the files'
    names and sizes are compared. part: whether the part of one process is enough; else that it is
    one is a problem. Nothing is raised: what cannot be read is in the list.
    """
    try:
        manifest, problem = _read_manifest(directory / MANIFEST)
        if manifest is None:
            return None, [f"{MANIFEST}: {problem}"]
        recorded = manifest["files"]
        present = _files(directory)
        problems = [] if part or PART not in manifest else [_PART.format(**manifest[PART])]
        problems += [f"{name}: missing" for name in recorded.keys() - set(present)]
        problems += [
            f"{name}: not one of the files that were saved"
            for name in set(present) - recorded.keys()
        ]
        for name in recorded.keys() & set(present):
            size = (directory / name).stat().st_size
            if size != recorded[name]["size"]:
                problems.append(f"{name}: {size} bytes long instead of {recorded[name]['size']}")
        if hashes and not problems:
            with ThreadPoolExecutor(_THREADS) as pool:
                hashes_now = dict(
                    zip(
                        present,
                        pool.map(lambda name: file_hash(directory / name), present),
                        strict=True,
                    )
                )
            problems = [
                f"{n}: its bytes changed (SHA-256)"
                for n in present
                if hashes_now[n] != recorded[n]["sha256"]
            ]
    except OSError as error:
        return None, [str(error)]
    return manifest, sorted(problems)


def complete(directory: Path) -> list[tuple[int, Path]]:
    """Returns number and path of every finished checkpoint in a directory, newest first.

    A checkpoint that is being replaced comes after its successor.
    """
    if not directory.is_dir():
        return []
    names = (
        (_COMPLETE.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()
    )
    matches = [(match, path) for match, path in names if match is not None]
    matches.sort(key=lambda item: (-int(item[0][1]), item[0][2] is not None))
    return [(int(match[1]), path) for match, path in matches]


def sync_directory(directory: str | Path) -> None:
    """Returns when the names in the directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        manifest = json.loads(path.read_text())
        intact = manifest.pop("sha256") == _digest(manifest)
    except FileNotFoundError:
        return None, "missing"
    except (ValueError, KeyError, AttributeError):
        intact = False
    if not intact:
        return None, "truncated or altered"
    if manifest["format"] != FORMAT:
        return None, f"written in format {manifest['format']}, this version reads format {FORMAT}"
    return manifest, ""


def _canonical(value: JsonValue) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


def _digest(value: JsonValue) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _files(directory: Path) -> list[str]:
    """Returns the relative paths of all files below, the manifest excepted."""
    walked = (
        (Path(parent).relative_to(directory), names) for parent, _, names in os.walk(directory)
    )
    return sorted(
        path
        for parent, names in walked
        for name in names
        if (path := (parent / name).as_posix()) != MANIFEST
    )


def file_hash(path: Path, sync: bool = False) -> str:
    """Returns the SHA-256 of a file. sync: returns when the file is on the disk. Raises OSError."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
