"""What is wrong with the remote folder of a run: its lock, its newest checkpoint, and what the local
folder has and it lacks. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rewards.text import quoted
from rl.errors import DuetError, Fault
from rl.remote.faults import Retries
from rl.remote.lock import LOCK, holder_in
from rl.remote.store import Store
from rl.run.manifest import CHECKPOINT_FOLDER, MANIFEST, complete, examine
from rl.run.mirror.fetch import Damaged, check_same_run, manifest_of
from rl.run.mirror.remote_run import Listing, RemoteCheckpoint, RemoteRun

_NAME = "remote folder"


def faults(url: str, run: Path, retries: Retries = Retries(tries=2)) -> list[Fault]:
    """Returns what there is to say of the remote folder of the run in a local folder. One of the
    level `note` is nothing wrong."""
    try:
        store = Store(url, retries)
        listing = Listing(store.list())
        check_same_run(RemoteRun(store, run, keep=1), run, listing)
        lock = _lock(store, listing)
        if not listing.records():
            return [lock, _warning(f"{url}: nothing has been sent there yet")]
        return [lock, *_checkpoints(store, listing, run)]
    except DuetError as error:
        return [Fault(str(error), "See docs/remote.md for packages and credentials", name=_NAME)]


def _lock(store: Store, listing: Listing) -> Fault:
    if LOCK not in listing.objects:
        return _note(f"{store.url}: no run holds its lock")
    present = store.read_versioned(LOCK)
    holder = None if present is None else holder_in(present.data)
    if holder is None:
        return _warning(f"{store.url}/{LOCK} names no run; the next start takes it over")
    if holder.expires > time.time():
        return _note(f"{store.url} is in use by {holder}")
    when = datetime.fromtimestamp(holder.expires).isoformat(" ", "minutes")
    return _warning(
        f"{store.url} was in use by {holder}, which is gone: its lock expired at {when}",
        "The next start takes it over",
    )


def _checkpoints(store: Store, listing: Listing, run: Path) -> Iterator[Fault]:
    there = [each for each in listing.checkpoints() if not each.is_replaced]
    usable = None
    for each in there:
        problem = _problem(store, listing, each)
        if problem is None:
            usable = each
            break
        yield Fault(
            f"checkpoint {each.number} is damaged: {store.url}/{each.folder}: {problem}",
            "Restore the file; else a start goes on from the checkpoint before",
            name=_NAME,
        )
    for each in listing.unfinished():
        if usable is None or each.number > usable.number:
            yield _warning(
                f"checkpoint {each.number} has no {MANIFEST}: its upload goes on or was cut off"
            )
    here = [
        number
        for number, path in complete(run / CHECKPOINT_FOLDER)
        if not examine(path, hashes=False, part=True)[1]
    ]
    yield from _difference(None if usable is None else usable.number, here, run)


def _difference(there: int | None, here: list[int], run: Path) -> Iterator[Fault]:
    if there is None and not here:
        yield _note("there is no checkpoint yet, neither there nor here")
    elif here and (there is None or here[0] > there):
        newest = "no checkpoint" if there is None else f"checkpoint {there}"
        yield _warning(
            f"it has {newest}, and {run} has checkpoint {here[0]}",
            f"If the run is over, `rl-train {quoted(run)}` sends it",
        )
    elif not here:
        yield _note(
            f"its newest checkpoint is {there}; {run} has none, so a start there fetches it"
        )
    elif here[0] < (there or 0):
        yield _note(
            f"its newest checkpoint is {there}; {run} has {here[0]}, and a start fetches it"
        )
    else:
        yield _note(f"its newest checkpoint is {there}, as that of {run}")


def _problem(store: Store, listing: Listing, checkpoint: RemoteCheckpoint) -> str | None:
    """Returns what is wrong with a checkpoint, as far as its manifest and the sizes of its files
    tell; None: nothing."""
    try:
        files = manifest_of(store, checkpoint.folder)["files"]
    except Damaged as error:
        return str(error)
    for name, facts in files.items():
        present = listing.objects.get(f"{checkpoint.folder}/{name}")
        if present is None:
            return f"{name}: missing"
        if present.size != facts["size"]:
            return f"{name}: {present.size} bytes long instead of {facts['size']}"
    return None


def _note(text: str) -> Fault:
    return Fault(text, level="note", name=_NAME)


def _warning(text: str, change: str = "") -> Fault:
    return Fault(text, change, level="warn", name=_NAME)


def url_of(run: Path) -> str | None:
    """Returns `run.remote` of the run in a local folder; None: it has none, or there is no run."""
    from policy.json_types import as_object
    from rl.records.run_files import read_config

    value = as_object(read_config(run, []).get("run")).get("remote")
    return value if isinstance(value, str) else None
