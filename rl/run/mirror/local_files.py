"""Which files of a run's folder the mirror sends, and copies of them that do not change meanwhile.

The folder `.uploading` of the run holds these copies: hard links to the files of a checkpoint, so
that it may be removed while it is sent, and the first bytes of files that grow.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rl.records.run_files import EVENTS, MEDIA, SAMPLES, SEGMENTS, TOKENS
from rl.run.manifest import CHECKPOINT_FOLDER
from rl.run.unfinished import stop

STAGING = ".uploading"
_KEPT = "parts"
_FOLDERS_OF_RECORDS = (SEGMENTS, MEDIA)
_MODELS = ("export", "base", "export-*", "reward_models/*")
"""Folders with weights. Each appears in one step."""
_TRIES = 20


@dataclass(frozen=True)
class Stamp:
    """By what a changed file is known: size, and time of the last change in ns."""

    size: int
    time: int

    @classmethod
    def of(cls, file: Path) -> Stamp:
        """Returns the stamp of a file. Raises OSError."""
        status = file.stat()
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Record:
    """A file of records, by its name in the folder of the run; the stamp is of its content in
    `file`."""

    name: str
    file: Path
    stamp: Stamp


def is_record(name: str) -> bool:
    """Tells whether the mirror has the file of this name in the folder of a run: events, samples,
    thumbnails, the configuration and other small files, neither hidden nor temporary."""
    folder, _, file = name.rpartition("/")
    if folder and folder not in _FOLDERS_OF_RECORDS:
        return False
    is_temporary = file.endswith((".tmp", ".new")) or ".tmp-" in file
    return not (file.startswith(".") or is_temporary or file == stop.REQUEST)


def records(run: Path) -> list[Record]:
    """Returns the records of a run as they are at one moment. Files that grow are copied to the
    staging folder: lines of samples before their tokens, so that each line has its tokens."""
    staged = run / STAGING / "records"
    staged.mkdir(parents=True, exist_ok=True)
    for _ in range(_TRIES):
        before = _segments(run)
        listed = _listed(run)
        with contextlib.suppress(FileNotFoundError):
            growing = {name: _copied(run / name, staged / name) for name in _growing(listed)}
            if _segments(run) == before and _is_rotated(run):
                return [growing.get(each.name, each) for each in listed]
    raise OSError(
        f"{run}: samples were moved to {SEGMENTS}/ again and again while they were copied"
    )


def model_folders(run: Path) -> list[str]:
    """Returns the folders with weights that are complete, as names in the folder of the run."""
    folders = [path for pattern in _MODELS for path in sorted(run.glob(pattern))]
    return [
        path.relative_to(run).as_posix()
        for path in folders
        if path.is_dir() and not path.name.endswith(".tmp")
    ]


def staged_checkpoint(run: Path, name: str) -> Path:
    """Returns a folder with the files of a checkpoint, which stays when the run removes it. Raises
    FileNotFoundError if the run has removed it."""
    source = run / CHECKPOINT_FOLDER / name
    target = run / STAGING / CHECKPOINT_FOLDER / name
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except shutil.Error as error:
        shutil.rmtree(target, ignore_errors=True)
        if not source.is_dir():
            raise FileNotFoundError(source) from None
        if any("No such file" in str(reason) for *_, reason in error.args[0]):
            raise FileNotFoundError(source) from None
        return source  # a file system without hard links
    return target


def keep_staged(run: Path, names: Iterable[str]) -> None:
    """Has `kept` and `staged_names` know these checkpoints until `clear_staging`. Raises OSError."""
    for name in names:
        target = run / STAGING / _KEPT / name
        if not target.exists():
            unfinished = target.with_name(f"{name}.tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            source = run / CHECKPOINT_FOLDER / name
            try:
                shutil.copytree(source, unfinished, copy_function=os.link)
            except shutil.Error:  # a file system without hard links
                shutil.rmtree(unfinished, ignore_errors=True)
                shutil.copytree(source, unfinished)
            unfinished.rename(target)


def kept(run: Path, name: str) -> Path:
    """Returns the folder of a checkpoint that `keep_staged` keeps."""
    return run / STAGING / _KEPT / name


def staged_names(run: Path) -> list[str]:
    """Returns the names of the checkpoints that `keep_staged` keeps, those that others need
    first."""
    folder = run / STAGING / _KEPT
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if not name.endswith(".tmp"))


def clear_staging(run: Path) -> None:
    """Removes the staging folder."""
    shutil.rmtree(run / STAGING, ignore_errors=True)


def _listed(run: Path) -> list[Record]:
    folders = [run, *(run / name for name in _FOLDERS_OF_RECORDS)]
    result = []
    for file in sorted(file for folder in folders if folder.is_dir() for file in folder.iterdir()):
        name = file.relative_to(run).as_posix()
        if is_record(name) and file.is_file():
            with contextlib.suppress(FileNotFoundError):
                result.append(Record(name, file, Stamp.of(file)))
    return result


def _growing(listed: list[Record]) -> list[str]:
    """Returns the files that grow, lines of samples before their tokens."""
    names = [each.name for each in listed if "/" not in each.name]
    grow = [each for each in names if each.endswith((".jsonl", ".bin", ".json", ".yml"))]
    return sorted(grow, key=lambda name: (name == TOKENS, name == EVENTS, name != SAMPLES))


def _copied(file: Path, target: Path) -> Record:
    stamp = Stamp.of(file)
    with file.open("rb") as source, target.open("wb") as copy:
        left = os.fstat(source.fileno()).st_size
        while left and (data := source.read(min(left, 2**20))):
            copy.write(data)
            left -= len(data)
    return Record(file.name, target, stamp)


def _segments(run: Path) -> list[str]:
    folder = run / SEGMENTS
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def _is_rotated(run: Path) -> bool:
    """Tells whether all tokens in samples/ have their lines there: a rotation is not under way."""
    names = set(_segments(run))
    return all(name.removesuffix(".bin") + ".jsonl" in names for name in names if ".bin" in name)
