"""Copies of remote files on this machine: models and data, fetched once.

`$DUET_CACHE/remote`, by default `~/.cache/duet-rl/remote`, has a folder for each URL, and in it one
for each state of its objects, named by a hash of their names, sizes and tags (etag, generation or
time of change). It appears in one step, when all objects are there, and is never changed: an object
that has changed makes another folder, which shares the unchanged files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rl.errors import ResourceError, disk_room
from rl.remote.faults import RemoteError, Retries
from rl.remote.store import ObjectFacts, Store
from rl.remote.urls import scheme_of

CACHE = "DUET_CACHE"
"""Environment variable of the folder of the cache."""
_OBJECTS = "objects.json"
_RETRIES = Retries(tries=5)
_ON_THIS_MACHINE = ("file", "local", "memory")
"""Schemes that need no network."""


@dataclass(frozen=True)
class _Copy:
    """A state of the objects of a URL on this machine. folder: has the files, next to
    objects.json."""

    folder: Path
    objects: Mapping[str, ObjectFacts]

    @property
    def files(self) -> Path:
        """The folder of the files."""
        return self.folder / "files"


def root() -> Path:
    """Returns the folder of the cache."""
    return _base() / "remote"


def runs() -> Path:
    """Returns the folder with copies of the records of remote runs."""
    return _base() / "runs"


def _base() -> Path:
    return Path(os.environ.get(CACHE) or "~/.cache/duet-rl").expanduser()


_FAILURE_S = 60.0
"""Seconds for which a URL that cannot be read is not asked for again: checks of a configuration ask
several times."""
_failures: dict[tuple[str, tuple[str, ...]], tuple[float, RemoteError]] = {}


def fetched(url: str, patterns: tuple[str, ...] = ()) -> Path:
    """Returns the local copy of an object, or of the folder of objects below a URL. A process looks
    once whether it has changed.

    patterns: names of the objects directly in the folder that are fetched, as for fnmatch; none:
    all, also in folders below. Under HF_HUB_OFFLINE, and if the service does not answer, it is the
    newest copy. Raises ConfigError for a URL that cannot be used, RemoteError if there is nothing
    below it or neither service nor cache has it, ResourceError if the cache has no room.
    """
    key = url, patterns
    if key in _failures and time.monotonic() - _failures[key][0] < _FAILURE_S:
        raise _failures[key][1]
    try:
        return _fetched(url, patterns)
    except RemoteError as error:
        _failures[key] = time.monotonic(), error
        raise


def forget() -> None:
    """Has this process look again whether objects have changed."""
    _fetched.cache_clear()
    _failures.clear()


@functools.cache
def _fetched(url: str, patterns: tuple[str, ...]) -> Path:
    kind = hashlib.sha256("\n".join((url, *patterns)).encode()).hexdigest()[:16]
    place = root() / f"{kind}-{PurePosixPath(url).name}"
    if _is_offline() and scheme_of(url) not in _ON_THIS_MACHINE:
        return _path(_newest(place, url, "this process is offline (HF_HUB_OFFLINE)"), url)
    try:
        store = Store(url, _RETRIES)
        objects = _objects(store, patterns)
    except RemoteError as error:
        try:
            copy = _newest(place, url, str(error))
        except RemoteError:
            raise error from None
        print(f"{url}: {error}; the copy in {copy.folder} is used", file=sys.stderr)
        return _path(copy, url)
    if not objects:
        some = f" ({', '.join(patterns[:2])}, ...)" if patterns else ""
        raise RemoteError(f"{url}: no such object, and no folder with objects{some}")
    return _path(_with_all(place, store, objects), url)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _path(copy: _Copy, url: str) -> Path:
    name = PurePosixPath(url).name
    is_file = list(copy.objects) == [""]
    return copy.files / name if is_file else copy.files


def _objects(store: Store, patterns: Sequence[str]) -> dict[str, ObjectFacts]:
    """Returns the objects below a URL that are fetched, by name; "" for the URL itself."""
    if not patterns and store.is_file() and (facts := store.facts("")) is not None:
        return {"": facts}
    return {
        name: facts
        for name, facts in store.list().items()
        if ".." not in PurePosixPath(name).parts
        and (not patterns or ("/" not in name and any(fnmatch.fnmatch(name, p) for p in patterns)))
    }


def _with_all(place: Path, store: Store, objects: Mapping[str, ObjectFacts]) -> _Copy:
    lines = [f"{name} {facts.size} {facts.tag}" for name, facts in sorted(objects.items())]
    state = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    copy = _Copy(place / state, objects)
    if copy.folder.is_dir():
        os.utime(copy.folder)
        return copy
    unfinished = _Copy(place / f"{state}.tmp-{os.getpid()}", objects)
    shutil.rmtree(unfinished.folder, ignore_errors=True)
    try:
        unfinished.files.mkdir(parents=True)
        _share(_copies(place), unfinished)
        _download(store, unfinished)
        values = {name: [facts.size, facts.tag] for name, facts in objects.items()}
        (unfinished.folder / _OBJECTS).write_text(json.dumps(values), encoding="utf-8")
        unfinished.folder.rename(copy.folder)
    except FileNotFoundError as error:
        raise RemoteError(f"{store.url}: {error}: it was removed while it was fetched") from None
    except OSError as error:
        if not copy.folder.is_dir():  # else another process was faster
            raise ResourceError(
                f"{store.url}: {place} cannot be written: {error.strerror or error}. Make room, or "
                f"set {CACHE} to another folder ({disk_room(place)})"
            ) from None
    finally:
        shutil.rmtree(unfinished.folder, ignore_errors=True)
    return copy


def _share(copies: Iterator[_Copy], target: _Copy) -> None:
    """Links the files of older copies that have not changed."""
    for copy in copies:
        for name, facts in target.objects.items():
            path = target.files / (name or "")
            is_same = facts.tag and copy.objects.get(name) == facts
            if name and is_same and (copy.files / name).is_file() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):  # of a disk without hard links: it is fetched
                    os.link(copy.files / name, path)


def _download(store: Store, copy: _Copy) -> None:
    name_of_url = PurePosixPath(store.url).name
    missing = {
        name: facts
        for name, facts in copy.objects.items()
        if not (copy.files / (name or name_of_url)).exists()
    }
    size = sum(facts.size for facts in missing.values())
    if shutil.disk_usage(copy.files).free < size:
        raise ResourceError(
            f"{store.url}: the cache has no room; set {CACHE} to another folder "
            f"({disk_room(copy.files, size)})"
        )
    with _progress(store.url, size) as progress:
        store.for_each(
            lambda name: store.get(name, copy.files / (name or name_of_url), progress.of(name)),
            missing,
        )


class _Bar:
    """Adds up the bytes of downloads that go on at the same time, and shows the sum."""

    def __init__(self, show):
        self._show = show
        self._bytes: dict[str, int] = {}
        self._guard = threading.Lock()

    def of(self, name: str):
        """Returns what takes the bytes of one object so far."""

        def tell(count: int) -> None:
            with self._guard:
                self._bytes[name] = count
                self._show(sum(self._bytes.values()))

        return tell


@contextmanager
def _progress(url: str, size: int) -> Iterator[_Bar]:
    """Shows a download on standard error: a bar on a terminal, else a line."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"fetching {url} ({size / 2**20:,.1f} MiB) to {root()}", file=sys.stderr, flush=True)
        yield _Bar(lambda done: None)
        return
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(url, total=size)
        yield _Bar(lambda done: bars.update(task, completed=done))


def _copies(place: Path) -> Iterator[_Copy]:
    """Yields the complete copies of a URL, the newest first."""
    folders = [each for each in place.glob("*") if (each / _OBJECTS).is_file()]
    for folder in sorted(folders, key=lambda each: -each.stat().st_mtime):
        if ".tmp-" in folder.name:
            continue
        values = json.loads((folder / _OBJECTS).read_text(encoding="utf-8"))
        yield _Copy(folder, {name: ObjectFacts(*facts) for name, facts in values.items()})


def _newest(place: Path, url: str, reason: str) -> _Copy:
    copy = next(_copies(place), None)
    if copy is None:
        raise RemoteError(f"{url}: {reason}, and {root()} has no copy of it")
    return copy
