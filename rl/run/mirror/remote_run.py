"""A run in a remote folder: which of its checkpoints are complete there, and an upload that makes
the remote folder like the local one.

A checkpoint counts once its manifest is there, which is sent last: after its other files, the
records and the folders with weights, so that a checkpoint that counts has all that a run needs to
go on from it. It is deleted in the reverse order. A folder with weights is complete once
`<folder>.files.json` is there, with size and SHA-256 of its files.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.records.run_files import ATTEMPTS, CONFIG, SEGMENTS
from rl.remote.faults import RemoteError
from rl.remote.lock import LOCK
from rl.remote.store import ObjectFacts, Store
from rl.run.manifest import (
    CHECKPOINT_FOLDER,
    HOST,
    MANIFEST,
    PART,
    complete,
    examine,
    file_hash,
    manifest_text,
)
from rl.run.mirror.local_files import (
    Record,
    Stamp,
    clear_staging,
    is_record,
    kept,
    model_folders,
    records,
    staged_checkpoint,
    staged_names,
)
from rl.run.mirror.requests import WRITER, Requests
from rl.run.unfinished import stop

SAVE = "save"
"""Key of a manifest that was put together from parts: what these have in common."""
FILES = ".files.json"
"""Ending of the object that lists the files of a folder with weights."""
_NAME = re.compile(rf"{CHECKPOINT_FOLDER}/(?P<name>(?P<number>\d+)(\.replaced)?)/")
_PLACES = 3
_LOG = logging.getLogger("duet.remote")


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint whose manifest is in the remote folder. name: of its folder."""

    number: int
    name: str

    @property
    def folder(self) -> str:
        """The name of the folder in the run."""
        return f"{CHECKPOINT_FOLDER}/{self.name}"

    @property
    def is_replaced(self) -> bool:
        """Whether a later one with the same number takes its place."""
        return self.name.endswith(".replaced")


@dataclass(frozen=True)
class Listing:
    """The objects of a remote run at one moment, by name."""

    objects: Mapping[str, ObjectFacts]

    def checkpoints(self) -> list[RemoteCheckpoint]:
        """Returns the checkpoints with a manifest, the newest first."""
        return self._checkpoints(lambda folder: f"{folder}/{MANIFEST}" in self.objects)

    def unfinished(self) -> list[RemoteCheckpoint]:
        """Returns the checkpoints without a manifest, the newest first."""
        return self._checkpoints(lambda folder: f"{folder}/{MANIFEST}" not in self.objects)

    def below(self, folder: str) -> list[str]:
        """Returns the objects in a folder."""
        return [name for name in self.objects if name.startswith(f"{folder}/")]

    def records(self) -> list[str]:
        """Returns the records: all but the lock, checkpoints and folders with weights."""
        return [
            name
            for name in self.objects
            if name != LOCK and not name.endswith(FILES) and is_record(name)
        ]

    def is_foreign(self) -> bool:
        """Tells whether there are objects, but none of a run."""
        names = self.objects.keys() - {LOCK}
        return bool(names) and not names & {CONFIG, ATTEMPTS} and not any(map(_NAME.match, names))

    def model_folders(self) -> list[str]:
        """Returns the folders with weights that are complete."""
        return [name.removesuffix(FILES) for name in self.objects if name.endswith(FILES)]

    def _checkpoints(self, fits: Callable[[str], bool]) -> list[RemoteCheckpoint]:
        matches = {match for name in self.objects if (match := _NAME.match(name)) is not None}
        numbers = {match["name"]: int(match["number"]) for match in matches}
        result = [
            RemoteCheckpoint(number, name)
            for name, number in numbers.items()
            if fits(f"{CHECKPOINT_FOLDER}/{name}")
        ]
        return sorted(result, key=lambda each: (-each.number, each.is_replaced))


class RemoteRun:
    """Sends a run to its remote folder. One thread calls it at a time."""

    def __init__(
        self,
        store: Store,
        run: Path,
        keep: int,
        needed: Callable[[dict], Iterable[int]] = lambda host: (),
        may_write: Callable[[], None] = lambda: None,
    ):
        """keep, needed: as of `Checkpoints`. may_write: raises if another run has taken the
        lock."""
        self.store = store
        self.damaged: set[str] = set()
        """Names of remote checkpoints that have a manifest and cannot be used."""
        self.known: set[str] = set()
        """Names of remote checkpoints that `fetch` has seen, or that this object has sent."""
        self.requests: Requests | None = None
        """To the processes that have the other parts of the checkpoints; None: the folder of the
        run has all."""
        self._run = run
        self._keep = keep
        self._needed = needed
        self._may_write = may_write
        self._sent: dict[str, Stamp] = {}
        self._manifests: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, Stamp]] = {}

    def mark_sent(self, names: Iterable[str]) -> None:
        """Takes note that these records are the same here and there."""
        for name in names:
            self._sent[name] = Stamp.of(self._run / name)

    def upload(self) -> int | None:
        """Sends what the remote folder lacks and removes what the run has removed. Returns the
        number of the newest checkpoint there; None: there is none.

        Raises RemoteError; FileNotFoundError if the run has removed a checkpoint before it was
        read, in which case a newer one waits.
        """
        self._may_write()
        listing = Listing(self.store.list())
        self._check_known(listing)
        local = self._to_send()
        try:
            if not local:
                self._send_records(listing)
                self._send_models(listing)
            for name in local:
                self._send_checkpoint(name, listing)
            if self.requests is not None:
                self.requests.end()
        finally:
            clear_staging(self._run)
        self._rotate()
        newest = Listing(self.store.list()).checkpoints()
        return newest[0].number if newest else None

    def _check_known(self, listing: Listing) -> None:
        """Raises RemoteError for checkpoints that another run has sent, or that the start of this one
        did not see: what follows would replace their records."""
        others = [each for each in listing.checkpoints() if each.name not in self.known]
        if others:
            raise RemoteError(
                f"{self.store.url} has checkpoint {others[0].number}, which this run has neither "
                "sent nor seen when it started; start it again"
            )

    def _to_send(self) -> list[str]:
        """Returns the newest undamaged checkpoint, after those that it needs."""
        if self.requests is not None:
            return staged_names(self._run)
        return newest_with_needed(self._run, self._needed)

    def _send_checkpoint(self, name: str, listing: Listing) -> None:
        apart = self.requests is not None
        folder = f"{CHECKPOINT_FOLDER}/{name}"
        there = kept(self._run, name) if apart else self._run / CHECKPOINT_FOLDER / name
        manifest = (there / MANIFEST).read_bytes()
        if f"{folder}/{MANIFEST}" in listing.objects and is_same(self._manifest(name), manifest):
            self._send_records(listing)
            self._send_models(listing)
            return
        source = there if apart else staged_checkpoint(self._run, name)
        self._make_way(folder, listing)
        complete_manifest = self._send_files(name, source)
        self._send_records(listing)
        self._send_models(listing)
        self._may_write()
        self.known.add(name)
        self.store.put(complete_manifest, f"{folder}/{MANIFEST}")
        self._manifests[name] = complete_manifest.read_bytes()
        self.damaged.discard(name)

    def _send_files(self, name: str, source: Path) -> Path:
        """Sends the files of a checkpoint, and has the other processes send theirs. Returns the
        file with its manifest."""
        folder = f"{CHECKPOINT_FOLDER}/{name}"
        content = json.loads((source / MANIFEST).read_bytes())
        part = content.pop(PART, None)
        if part is not None and self.requests is not None:
            self.requests.ask(name)
        files = content.pop("files")
        self.store.for_each(lambda file: self._put(source / file, f"{folder}/{file}"), files)
        if part is None or self.requests is None:
            return source / MANIFEST
        content.pop("sha256")
        for process, theirs in self.requests.answers(part["save"]).items():
            files = {each: facts | {WRITER: process} for each, facts in theirs.items()} | files
        file = source.with_name(f"{name}.{MANIFEST}.tmp")
        file.write_text(manifest_text(content | {SAVE: part["save"]}, files))
        return file

    def _put(self, file: Path, name: str) -> None:
        self._may_write()
        self.store.put(file, name)

    def _make_way(self, folder: str, listing: Listing) -> None:
        """Empties the folder of a checkpoint. One that counts is kept under another name until its
        successor counts."""
        before = listing.below(folder)
        manifest = f"{folder}/{MANIFEST}"
        if manifest in before and Path(folder).name not in self.damaged:
            kept = f"{folder}.replaced"
            self.known.add(Path(kept).name)
            self._delete_checkpoint(kept, listing.below(kept))
            moved = [each for each in before if each != manifest]
            pairs = [(each, f"{kept}{each.removeprefix(folder)}") for each in (*moved, manifest)]
            self.store.for_each(lambda pair: self.store.copy(*pair), pairs[:-1])
            self.store.copy(*pairs[-1])
        self._manifests.pop(Path(folder).name, None)
        self._delete_checkpoint(folder, before)

    def _delete_checkpoint(self, folder: str, names: Iterable[str]) -> None:
        """Removes the objects of a checkpoint, its manifest first."""
        names = list(names)
        if (manifest := f"{folder}/{MANIFEST}") in names:
            self.store.delete(manifest)
        self.store.delete_all(name for name in names if name != manifest)

    def _send_records(self, listing: Listing) -> None:
        local = records(self._run)
        changed = [each for each in local if not self._is_there(each, listing)]
        for place in range(_PLACES):
            part = [each for each in changed if _place(each.name) == place]
            self.store.for_each(self._send_record, part)
        here = {each.name for each in local}
        removed = [each for each in listing.objects if _may_vanish(each) and each not in here]
        self.store.delete_all(removed)

    def _is_there(self, record: Record, listing: Listing) -> bool:
        """Tells whether the remote folder has a record. Files of samples/ and media/ only get
        shorter, once they are there."""
        there = listing.objects.get(record.name)
        if there is None:
            return False
        is_fixed = "/" in record.name and there.size == record.stamp.size
        return is_fixed or self._sent.get(record.name) == record.stamp

    def _send_record(self, record: Record) -> None:
        try:
            self._put(record.file, record.name)
        except FileNotFoundError:  # samples beyond run.samples.keep_gib, or a replaced file
            return
        self._sent[record.name] = record.stamp

    def _send_models(self, listing: Listing) -> None:
        here = model_folders(self._run)
        for folder in here:
            self._send_model(folder, listing)
        for folder in listing.model_folders():
            if folder not in here:
                self.store.delete(f"{folder}{FILES}")
                self.store.delete_all(listing.below(folder))
                self._folders.pop(folder, None)

    def _send_model(self, folder: str, listing: Listing) -> None:
        root = self._run / folder
        stamps = {
            path.relative_to(root).as_posix(): Stamp.of(path)
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }
        if self._folders.get(folder) == stamps:
            return
        files = {
            name: {"size": stamp.size, "sha256": file_hash(root / name)}
            for name, stamp in stamps.items()
        }
        seal = f"{folder}{FILES}"
        if seal not in listing.objects or self._read_json(seal) != files:
            self.store.delete(seal)
            old = listing.below(folder)
            self.store.delete_all(each for each in old if each[len(folder) + 1 :] not in files)
            self.store.for_each(lambda name: self._put(root / name, f"{folder}/{name}"), files)
            self._may_write()
            self.store.write(seal, json.dumps(files, indent=1).encode())
        self._folders[folder] = stamps

    def _rotate(self) -> None:
        """Removes damaged and unfinished checkpoints, and all but the newest ones with those that
        they need."""
        listing = Listing(self.store.list())
        good = [each for each in listing.checkpoints() if each.name not in self.damaged]
        numbers = sorted({each.number for each in good if not each.is_replaced}, reverse=True)
        kept = set(numbers[: self._keep])
        for each in good:
            if each.number in kept and not each.is_replaced:
                kept |= set(self._needed(self._host(each)))
        stays = {each.name for each in good if each.number in kept and not each.is_replaced}
        if not stays:
            return
        self._may_write()
        for each in (*listing.checkpoints(), *listing.unfinished()):
            if each.name not in stays:
                self._delete_checkpoint(each.folder, listing.below(each.folder))
                self._manifests.pop(each.name, None)
                self.damaged.discard(each.name)

    def _host(self, checkpoint: RemoteCheckpoint) -> dict[str, Any]:
        local = self._run / checkpoint.folder / HOST
        try:
            text = local.read_bytes()
        except OSError:
            text = self.store.read(f"{checkpoint.folder}/{HOST}")
        try:
            return json.loads(text)
        except ValueError:
            return {}

    def _manifest(self, name: str) -> bytes:
        if name not in self._manifests:
            self._manifests[name] = self.store.read(f"{CHECKPOINT_FOLDER}/{name}/{MANIFEST}")
        return self._manifests[name]

    def _read_json(self, name: str) -> Any:
        try:
            return json.loads(self.store.read(name))
        except (ValueError, FileNotFoundError):
            return None


def newest_with_needed(
    run: Path,
    needed: Callable[[dict], Iterable[int]],
    *,
    part: bool = False,
    up_to: float = math.inf,
) -> list[str]:
    """Returns the newest undamaged checkpoint in the folder of a run, after those that it needs.
    needed: as of `Checkpoints`. part: whether parts of checkpoints count. up_to: the largest
    number that counts."""
    checkpoints = complete(run / CHECKPOINT_FOLDER)
    for newest, path in checkpoints:
        if newest > up_to or examine(path, hashes=False, part=part)[1]:
            continue
        numbers = set(needed(json.loads((path / HOST).read_bytes())))
        others = [
            other.name
            for number, other in reversed(checkpoints)
            if number in numbers
            and other != path
            and not examine(other, hashes=False, part=part)[1]
        ]
        return [*others, path.name]
    return []


def is_same(there: bytes, here: bytes) -> bool:
    """Tells whether a manifest in the remote folder is of the same save as a local one, which may
    be of a part."""
    if there == here:
        return True
    try:
        return save_of(json.loads(there)) == save_of(json.loads(here))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def save_of(manifest: Mapping[str, Any]) -> str:
    """Returns what the manifests of one save have in common, those of its parts among them.
    Raises KeyError."""
    return manifest[PART]["save"] if PART in manifest else manifest.get(SAVE) or manifest["sha256"]


def _may_vanish(name: str) -> bool:
    """Tells whether a run removes a record of this name: full files of samples beyond
    run.samples.keep_gib, and where it was stopped. Anything else in the remote folder stays."""
    return name.startswith(f"{SEGMENTS}/") or name == stop.STOPPED


def _place(name: str) -> int:
    """Returns the place of a record in the order of uploads: first what tells a run from other files,
    and tokens after the lines that they belong to."""
    if name in (CONFIG, ATTEMPTS):
        return 0
    return 2 if name.endswith(".bin") else 1
