"""Runs that commands only look at, by a folder or by the URL of a remote folder."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path, PurePosixPath


def local_run(place: str) -> str:
    """Returns the folder of a run. Of a URL it is a copy of the records, in the cache.

    Raises ConfigError if there is no run, RemoteError if it cannot be read.
    """
    from rl.remote.urls import is_remote

    if not is_remote(place):
        return place
    from rl.errors import ConfigError
    from rl.remote.cache import runs
    from rl.run.folder import FolderLock
    from rl.run.mirror.fetch import fetch_copy

    url = place.rstrip("/")
    folder = runs() / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{PurePosixPath(url).name}"
    with FolderLock(folder):
        try:
            fetch_copy(url, folder, weights=False)
        except ConfigError:  # the copy may be of another run that was there
            _empty(folder)
            fetch_copy(url, folder, weights=False)
    return str(folder)


def _empty(folder: Path) -> None:
    """Removes all files of a folder but its lock."""
    from rl.run.unfinished import stop

    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != stop.LOCK:
            each.unlink()
