"""Fetches a run from its remote folder, where that is further than the local one.

The files of a checkpoint are fetched and checked first, then records and folders with weights; last
the checkpoint appears in one step. A process that is killed meanwhile leaves a local folder without
that checkpoint, and the next start fetches it again.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rl.errors import ConfigError, ResourceError, disk_room, no_room
from rl.records.run_files import ATTEMPTS, attempt_entries
from rl.remote.faults import RemoteError, Retries
from rl.remote.lock import LOCK
from rl.remote.store import Store
from rl.run.manifest import CHECKPOINT_FOLDER, MANIFEST, complete, examine, file_hash
from rl.run.mirror.remote_run import FILES, Listing, RemoteCheckpoint, RemoteRun

_FETCHING = "tmp-remote"
_TRIES = 4
_LOG = logging.getLogger("duet.remote")


@dataclass(frozen=True)
class Fetched:
    """What a start took from the remote folder. checkpoint: its number; None: there is none
    there. problems: checkpoints that were passed over."""

    checkpoint: int | None
    problems: tuple[str, ...] = ()


class Damaged(Exception):
    """A checkpoint or folder that cannot be used; the text says why."""


def fetch(remote: RemoteRun, run: Path) -> Fetched:
    """Makes the local folder of a run as far as the remote one. A local checkpoint with the same or
    a larger number wins, and nothing is fetched then.

    Raises ConfigError if the folders hold different runs, or the remote one something else,
    RemoteError if it cannot be read or holds damaged checkpoints only, ResourceError without room.
    """
    listing = look(remote, run)
    checkpoints = complete(run / CHECKPOINT_FOLDER)
    undamaged = [n for n, path in checkpoints if not examine(path, hashes=False)[1]]
    newer = [each for each in listing.checkpoints() if not undamaged or each.number > undamaged[0]]
    if not newer and checkpoints:
        return Fetched(None)
    with written_to(run):
        return _fetch_newest(remote, run, listing, newer)


@contextmanager
def written_to(run: Path) -> Iterator[None]:
    """Raises ResourceError, with the room that there is, where the folder of a run cannot be
    written."""
    try:
        yield
    except OSError as error:
        room = f" ({disk_room(run)})" if no_room(error) else ""
        raise ResourceError(f"run.dir: {run}: {error}{room}") from None


def look(remote: RemoteRun, run: Path) -> Listing:
    """Returns the objects of the remote folder, whose checkpoints `remote` then knows. Raises
    ConfigError if the folders hold different runs, or the remote one something else."""
    listing = Listing(remote.store.list())
    check_same_run(remote, run, listing)
    remote.known |= {each.name for each in listing.checkpoints()}
    for each in listing.unfinished():
        _LOG.warning(
            "%s/%s: its upload was cut off (no %s); passed over",
            remote.store.url,
            each.folder,
            MANIFEST,
        )
    return listing


def fetch_copy(url: str, run: Path, *, weights: bool, retries: Retries = Retries(tries=5)) -> None:
    """Copies the records of a remote run to a local folder, with `weights` also its newest
    checkpoint and the folders with weights. Takes no lock of the remote folder.

    Raises ConfigError if there is no run, or the local folder has another one or checkpoints of its
    own, and what `fetch` raises.
    """
    remote = RemoteRun(Store(url, retries), run, keep=1)
    listing = Listing(remote.store.list())
    if not listing.records():
        raise ConfigError(f"{url}: no run there")
    check_same_run(remote, run, listing)
    checkpoint = None
    if weights:
        checkpoint = fetch(remote, run).checkpoint  # with its records
        with written_to(run):
            fetch_models(remote, run, listing)  # also where the checkpoint was here already
    elif complete(run / CHECKPOINT_FOLDER):
        raise ConfigError(
            f"{run} has checkpoints, so it is a run and no copy of records; name another folder"
        )
    if checkpoint is None:
        with written_to(run):
            _fetch_changing_records(remote, run, listing)


def _fetch_changing_records(remote: RemoteRun, run: Path, listing: Listing) -> None:
    """Replaces the local records while a run may move full files of samples and remove old ones."""
    for left in reversed(range(_TRIES)):
        try:
            fetch_records(remote, run, listing)
            return
        except FileNotFoundError as error:
            if not left:
                raise RemoteError(f"{remote.store.url}: {error} is gone again and again") from None
            listing = Listing(remote.store.list())


def _fetch_newest(
    remote: RemoteRun, run: Path, listing: Listing, newer: list[RemoteCheckpoint]
) -> Fetched:
    is_new = not (run / ATTEMPTS).exists()
    problems = []
    for each in newer:
        try:
            with _unfinished_checkpoint(remote, run, each) as unfinished:
                _fetch_changing_records(remote, run, listing)
                fetch_models(remote, run, listing)
                _put(unfinished, run / CHECKPOINT_FOLDER / f"{each.number:010d}")
        except Damaged as error:
            problems.append(f"{remote.store.url}/{each.folder}: {error}")
            remote.damaged.add(each.name)
            _LOG.warning("%s; passed over", problems[-1])
            continue
        _LOG.warning("%s: checkpoint %d is fetched to %s", remote.store.url, each.number, run)
        return Fetched(each.number, tuple(problems))
    if problems and not complete(run / CHECKPOINT_FOLDER):
        lines = "\n".join(f"  {each}" for each in problems)
        raise RemoteError(
            f"run.remote: no checkpoint is undamaged:\n{lines}\nChoose another run.remote and "
            "run.dir for a new run, or restore these files"
        )
    if not newer and is_new and listing.records():
        fetch_records(remote, run, listing)
    return Fetched(None, tuple(problems))


def check_same_run(remote: RemoteRun, run: Path, listing: Listing) -> None:
    """Raises ConfigError if the remote folder holds something else than the run of the local
    one."""
    url = remote.store.url
    if listing.is_foreign():
        some = ", ".join(sorted(listing.objects.keys() - {LOCK})[:3])
        raise ConfigError(
            f"run.remote: {url} holds files but no run ({some}); choose a folder of its own, such "
            f"as {url}/run-1"
        )
    here = attempt_entries(run, [])
    if not here or ATTEMPTS not in listing.objects:
        return
    try:
        there = json.loads(remote.store.read(ATTEMPTS))["attempts"]
        is_same = _first(there) == _first(here)
    except (ValueError, KeyError, TypeError, IndexError, FileNotFoundError):
        return
    if not is_same:
        raise ConfigError(
            f"run.remote: {url} holds another run than {run}. Choose another run.remote, or an "
            "empty run.dir to go on with the run that is there"
        )


def _first(attempts: Sequence[Mapping[str, Any]]) -> tuple[object, object]:
    """Returns by what a run is known: start and machine of its first attempt."""
    return attempts[0].get("start"), attempts[0].get("host")


def manifest_of(store: Store, folder: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, by the name of its folder. Raises Damaged."""
    try:
        manifest = json.loads(store.read(f"{folder}/{MANIFEST}"))
        files = manifest["files"]
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        raise Damaged(f"{MANIFEST}: truncated or altered") from None
    if not isinstance(files, dict):
        raise Damaged(f"{MANIFEST}: truncated or altered")
    for name, facts in files.items():
        if not (_is_below(name) and isinstance(facts, dict) and {"sha256", "size"} <= facts.keys()):
            raise Damaged(f"{MANIFEST}: {name!r} is no file of a checkpoint")
    return manifest


@contextmanager
def _unfinished_checkpoint(
    remote: RemoteRun, run: Path, checkpoint: RemoteCheckpoint
) -> Iterator[Path]:
    """Yields a folder with the files of a checkpoint, and removes it at the end if it is still
    there. Raises Damaged."""
    manifest = manifest_of(remote.store, checkpoint.folder)
    unfinished = run / CHECKPOINT_FOLDER / f"{checkpoint.number:010d}.{_FETCHING}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    names = [*manifest["files"], MANIFEST]
    size = sum(facts["size"] for facts in manifest["files"].values())
    if shutil.disk_usage(run).free < size:
        raise ResourceError(
            f"run.remote: no room for checkpoint {checkpoint.number} of {remote.store.url} "
            f"({disk_room(run, size)})"
        )
    try:
        try:
            _get_all(remote, checkpoint.folder, names, unfinished)
        except FileNotFoundError as error:
            raise Damaged(f"{error}: missing") from None
        if wrong := examine(unfinished)[1]:
            raise Damaged("; ".join(wrong))
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put(unfinished: Path, target: Path) -> None:
    """Moves a fetched checkpoint to its place."""
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)


def fetch_records(remote: RemoteRun, run: Path, listing: Listing) -> None:
    """Replaces the local records by the remote ones."""

    def get(name: str) -> None:
        temporary = run / f"{name}.tmp"
        remote.store.get(name, temporary)
        temporary.replace(run / name)

    names = listing.records()
    remote.store.for_each(get, names)
    remote.mark_sent(names)


def fetch_models(remote: RemoteRun, run: Path, listing: Listing) -> None:
    """Writes the folders with weights that the local folder lacks, each in one step."""
    for folder in listing.model_folders():
        target = run / folder
        if target.exists() or not _is_below(folder):
            continue
        unfinished = target.with_name(f"{target.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            files = _files_of(remote, folder)
            _get_all(remote, folder, files, unfinished)
            _check_files(remote, folder, files, unfinished)
            unfinished.rename(target)
        except FileNotFoundError as error:
            raise RemoteError(f"{remote.store.url}/{folder}: {error}: missing") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _files_of(remote: RemoteRun, folder: str) -> dict[str, Any]:
    """Returns the list of the files of a folder with weights, with their SHA-256. Raises
    RemoteError for one that no run wrote."""
    name = f"{folder}{FILES}"
    try:
        files = json.loads(remote.store.read(name))
        if all(_is_below(each) and facts["sha256"] for each, facts in files.items()):
            return files
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise RemoteError(
        f"{remote.store.url}/{name}: truncated or altered. Restore the object, or remove it if the "
        "run can do without this folder"
    )


def _check_files(remote: RemoteRun, folder: str, files: Mapping[str, Any], directory: Path) -> None:
    for name, facts in files.items():
        if file_hash(directory / name) != facts["sha256"]:
            raise RemoteError(
                f"{remote.store.url}/{folder}/{name}: its bytes changed (SHA-256). Restore the "
                f"object, or remove {folder}{FILES} if the run can do without this folder"
            )


def _get_all(remote: RemoteRun, folder: str, names: Any, directory: Path) -> None:
    directory.mkdir(parents=True)
    remote.store.for_each(
        lambda name: remote.store.get(f"{folder}/{name}", directory / name), list(names)
    )


def _is_below(name: str) -> bool:
    """Tells whether a name from a remote file stays in the folder that it is relative to."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts
