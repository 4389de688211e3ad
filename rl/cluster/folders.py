"""Whether all processes see the folder of the run, and copies of a folder for those that do not."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

from policy.mesh import processes
from rl.cluster.launch import raise_on_all
from rl.errors import ResourceError

SHOWN_AFTER_S = 60.0
"""Seconds after which a file of one machine shows on another, on network file systems."""
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "apfs")
"""Kinds of file systems of one machine, whose files are seen at once."""
_LOOK_S = 0.1
_PIECE = 2**24


def is_shared(run: Path) -> bool:
    """Tells whether all processes see the folder of the first one, which is made. All processes
    call it. Raises ResourceError for a folder that cannot be made."""
    raise_on_all(lambda: _make(run))
    seen = run / f".seen-{processes.broadcast(uuid.uuid4().hex[:8])}"
    if processes.first():
        seen.touch()
    try:
        processes.broadcast(None)  # it is there
        return all(processes.all_gather_object(_is_seen(seen)))
    finally:
        if processes.first():
            seen.unlink(missing_ok=True)


def copy_to_all(directory: Path) -> None:
    """Copies a folder of the first process to the same path in the others, in one step. Where the
    same files are, nothing is written. All processes call it. Raises ResourceError."""
    files = processes.broadcast(_hashes(directory) if processes.first() else None)
    lacks = not processes.first() and _hashes(directory) != files
    if not any(processes.all_gather_object(lacks)):
        return
    unfinished = directory.with_name(f"{directory.name}.tmp-{processes.index()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    problem = None
    for name in files:
        problem = _receive(directory / name, unfinished / name if lacks else None) or problem
    raise_on_all(lambda: _finish(unfinished, directory, problem) if lacks else None)


def _make(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"run.dir: cannot make {run}: {error.strerror}") from None


def _is_seen(file: Path) -> bool:
    end = time.monotonic() + (0 if _kind(file.parent) in _LOCAL else SHOWN_AFTER_S)
    while not file.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_S)
    return True


def _kind(folder: Path) -> str:
    """Returns the kind of the file system of a folder; "" where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    mounts = {line.split()[1]: line.split()[2] for line in lines}
    path = folder.resolve()
    place = next((each for each in (path, *path.parents) if str(each) in mounts), None)
    return "" if place is None else mounts[str(place)]


def _hashes(directory: Path) -> dict[str, str]:
    files = sorted(each for each in directory.rglob("*") if each.is_file())
    return {each.relative_to(directory).as_posix(): _hash(each) for each in files}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _receive(source: Path, target: Path | None) -> OSError | None:
    """Copies a file of the first process. target: where this process writes it; None: nowhere.
    Returns the error of a write, after which the other processes go on."""
    problem = None
    size = processes.broadcast(source.stat().st_size if processes.first() else None)
    file = source.open("rb") if processes.first() else None
    try:
        for _ in range(0, max(size, 1), _PIECE):
            piece = processes.broadcast(file.read(_PIECE) if file is not None else None)
            if target is None or problem is not None:
                continue
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("ab") as copy:
                    copy.write(piece)
            except OSError as error:
                problem = error
    finally:
        if file is not None:
            file.close()
    return problem


def _finish(unfinished: Path, directory: Path, problem: OSError | None) -> None:
    if problem is not None:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ResourceError(f"{directory}: {problem}")
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):  # another process of this machine was faster
        os.rename(unfinished, directory)
    shutil.rmtree(unfinished, ignore_errors=True)
