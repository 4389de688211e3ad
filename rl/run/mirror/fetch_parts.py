"""Fetches what a process needs of a checkpoint whose parts are in a remote folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy.json_types import JsonObject
from rl.errors import ResourceError, disk_room
from rl.remote.faults import RemoteError
from rl.remote.store import Store
from rl.run.manifest import CHECKPOINT_FOLDER, HOST, MANIFEST, PART, file_hash, seal
from rl.run.mirror.fetch import Damaged, manifest_of
from rl.run.mirror.remote_run import save_of
from rl.run.mirror.requests import WRITER, is_shard

if TYPE_CHECKING:
    from rl.run.arrays import ArrayOrShape

ARRAYS = "arrays"
_FETCHING = "tmp-remote"


@dataclass(frozen=True)
class PartFolder:
    """Where a process has its parts of checkpoints."""

    path: Path
    process: int
    processes: int

    def checkpoint(self, name: str) -> Path:
        """The part of a checkpoint, by the name of its folder."""
        return self.path / CHECKPOINT_FOLDER / name


def fetch_part(store: Store, name: str, folder: PartFolder) -> None:
    """Makes the part of a checkpoint: host.json and the files that this process wrote, or a process
    that is not there any more. The part appears in one step. Raises Damaged."""
    manifest = manifest_of(store, f"{CHECKPOINT_FOLDER}/{name}")
    files = manifest["files"]
    own = [each for each, facts in files.items() if each == HOST or _is_own(facts, folder)]
    target = folder.checkpoint(name)
    unfinished = target.with_name(f"{name}.{_FETCHING}")
    shutil.rmtree(unfinished, ignore_errors=True)
    part: JsonObject = {
        "process": folder.process,
        "processes": folder.processes,
        "save": save_of(manifest),
    }
    try:
        _take(store, name, own, files, target, unfinished)
        content = {"number": manifest["number"], "arrays": manifest["arrays"], PART: part}
        seal(unfinished, content)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def fetch_needed(
    store: Store, name: str, folder: PartFolder, requested: Mapping[str, ArrayOrShape], target: Path
) -> None:
    """Fills a new folder with the files of a checkpoint from which these arrays can be read, as far
    as the devices of this process hold them. Raises RemoteError."""
    try:
        files = manifest_of(store, f"{CHECKPOINT_FOLDER}/{name}")["files"]
        part = folder.checkpoint(name)
        inside = [each for each in files if each.startswith(f"{ARRAYS}/")]
        _take(store, name, [each for each in inside if not is_shard(each)], files, part, target)
        needed = _Needed(target, requested)
        shards = [each for each in inside if is_shard(each) and needed.has(each)]
        _take(store, name, shards, files, part, target)
    except Damaged as error:
        raise RemoteError(
            f"{store.url}/{CHECKPOINT_FOLDER}/{name}: {error}. Restore the file, or remove "
            f"{MANIFEST} there to go on from the checkpoint before"
        ) from None


def _is_own(facts: Mapping[str, Any], folder: PartFolder) -> bool:
    return facts.get(WRITER, 0) % folder.processes == folder.process


def _take(
    store: Store,
    name: str,
    names: Iterable[str],
    files: Mapping[str, Any],
    part: Path,
    target: Path,
) -> None:
    """Writes files of a checkpoint to a folder: links those that the part has, and fetches the
    others. Raises Damaged."""
    here = _files_of(part)
    target.mkdir(parents=True, exist_ok=True)
    linked, missing = [], []
    for each in names:
        is_here = here.get(each, {}).get("sha256") == files[each]["sha256"]
        (linked if is_here and (part / each).is_file() else missing).append(each)
    size = sum(files[each]["size"] for each in missing)
    if shutil.disk_usage(target).free < size:
        raise ResourceError(
            f"run.remote: no room for {size:,} bytes of {store.url}/{CHECKPOINT_FOLDER}/{name} "
            f"({disk_room(target, size)})"
        )

    def check(each: str) -> None:
        if file_hash(target / each) != files[each]["sha256"]:
            raise Damaged(f"{each}: its bytes changed (SHA-256)")

    def get(each: str) -> None:
        store.get(f"{CHECKPOINT_FOLDER}/{name}/{each}", target / each)
        check(each)

    for each in linked:
        (target / each).parent.mkdir(parents=True, exist_ok=True)
        _link(part / each, target / each)
        try:
            check(each)
        except Damaged:  # of the local copy
            (target / each).unlink()
            missing.append(each)
    try:
        store.for_each(get, missing)
    except FileNotFoundError as error:
        raise Damaged(f"{error}: missing") from None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _files_of(part: Path) -> Mapping[str, Any]:
    try:
        return json.loads((part / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class _Needed:
    """Which shards of a checkpoint the devices of this process hold numbers of."""

    def __init__(self, folder: Path, requested: Mapping[str, ArrayOrShape]):
        """folder: has the shapes of the shards (`.zarray`)."""
        self._folder = folder / ARRAYS
        self._requested = requested
        self._shards: dict[str, list[int] | None] = {}

    def has(self, file: str) -> bool:
        """Tells whether a file is needed. One of an unknown kind is."""
        array, _, place = file.removeprefix(f"{ARRAYS}/").rpartition("/")
        if array not in self._shards:
            self._shards[array] = self._shard_shape(array)
        shape = self._shards[array]
        requested = self._requested.get(array)
        if shape is None or requested is None or not requested.shape:
            return True
        starts = [int(at) * size for at, size in zip(place.split("."), shape, strict=True)]
        return any(
            all(
                first < start + size and start < last
                for start, size, (first, last) in zip(starts, shape, bounds, strict=True)
            )
            for bounds in _bounds(requested)
        )

    def _shard_shape(self, array: str) -> list[int] | None:
        try:
            return json.loads((self._folder / array / ".zarray").read_bytes())["chunks"]
        except (OSError, ValueError, KeyError):
            return None


def _bounds(array: ArrayOrShape) -> set[tuple[tuple[int, int], ...]]:
    """Returns the first and the last place (exclusive) by dimension, for each device of this
    process."""
    sharding: Any = array.sharding
    slices = sharding.addressable_devices_indices_map(tuple(array.shape)).values()
    return {
        tuple(each.indices(size)[:2] for each, size in zip(index, array.shape, strict=True))
        for index in slices
    }
