"""Checkpoints of a run: written in the background, complete or absent, and checked byte for byte
before they are used.

`<directory>/<number>/` holds

    arrays/         every array of the run, by its path in the tree, in Orbax's format (OCDBT, zarr)
    host.json       values of the caller that are no arrays: stage, step, counters
    manifest.json   format version; path, shape and dtype of every array; size and SHA-256 of every
                    other file

The manifest is the last file written. Everything is written and synced under
`<number>.tmp-<attempt>`, and the finished directory is renamed, so that a process killed at any
moment leaves a complete checkpoint or one that is recognised as unfinished, and removed by the next
save.

Several processes, which all see the directory, write and read the shards of their own devices. The
first process does everything else. Where each process has a directory of its own
(rl/run/mirror/parts.py), each does everything for its part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from policy.mesh import processes, serialization
from rl.cluster.launch import on_first
from rl.errors import ModelError, disk_room
from rl.run.arrays import ArrayDescription, ArrayStore, by_name, description, is_storage_error
from rl.run.manifest import HOST, PART, complete, examine, seal, sync_directory
from rl.run.mirror.parts import Parts

if TYPE_CHECKING:
    from rl.run.arrays import ArrayOrShape

ARRAYS = "arrays"
_UNFINISHED = re.compile(r"\d+(\.replaced)?\.tmp-.+")
_log = logging.getLogger("duet.checkpoint")


@serialization.register_type
class CheckpointError(ModelError):
    """No checkpoint is undamaged, or its arrays differ from the arrays of the run."""


@serialization.register_type
class _Good(NamedTuple):
    number: int
    path: Path
    manifest: Mapping[str, Any]
    host: dict


class Checkpoints:
    """Saves and restores the checkpoints of one run. All its processes call the same methods in the
    same order.

    Args:
      directory: folder of the checkpoints; the first save makes it.
      keep: how many of the newest undamaged checkpoints stay, at least 1.
      writing: a context around every write in the background.
      needed: returns the numbers of further checkpoints that stay as long as a checkpoint with this
      host does.
      written: called in the background when a checkpoint is complete, on the first process; with
      parts, on each when its part is.
      parts: the part of this process in checkpoints of which each process has its own folder; None:
      all processes see the directory.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int,
        writing: Callable[[], AbstractContextManager] = contextlib.nullcontext,
        needed: Callable[[dict], Iterable[int]] = lambda host: (),
        written: Callable[[], None] = lambda: None,
        parts: Parts | None = None,
    ):
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least the newest checkpoint has to stay")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._writing = writing
        self._needed = needed
        self._written = written
        self._damaged: set[str] = set()
        self._attempts: set[str] = (
            set()
        )  # names of the directories in which this object wrote, or tried to
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._parts = parts
        self._arrays = ArrayStore(apart=parts is not None)
        self._bytes = 0  # of the arrays of the newest save

    def save(self, number: int, arrays: object, host: dict, wait: bool = False) -> None:
        """Copies the arrays to the host, then writes them in the background; `wait` returns when
        they are on the disk.

        After the return the arrays may be donated. (On CPU the copy is a view of them: a step that
        would take an array still being written copies it instead.) Saving the newest number again
        replaces it. Waits for an earlier save that is still running.

        A full disk, a quota or a missing permission is not an error: it is logged, the unfinished
        files are removed, older checkpoints stay, and the next save tries again.

        Args:
          number: steps done since the start of the run, over all stages.
          arrays: pytree of jax arrays (random keys as their `jax.random.key_data`).
          host: anything that JSON can hold.

        Raises:
          TypeError: a leaf that is not a jax array, or a host that JSON cannot hold.
          ValueError: an existing checkpoint has a larger number.
        """
        self.wait()
        named = by_name(arrays)
        self._bytes = sum(each.nbytes for each in named.values() if hasattr(each, "nbytes"))
        content = {
            "number": number,
            "arrays": {name: description(name, x) for name, x in named.items()},
        }
        host_text = json.dumps(host, indent=1)
        self._check_order(number)
        temporary = self.directory / f"{number:010d}.tmp-{len(self._attempts) + 1}"
        self._attempts.add(temporary.name)
        try:
            error = self._make_directory(temporary) if self._writes else None
            for each in processes.all_gather_object(error):
                if each is not None:
                    raise each
            if self._parts is not None:
                self._parts.ask()
                content[PART] = self._parts.content(len(self._attempts))
            self._arrays.begin(temporary / ARRAYS, named)
        except Exception as error:
            self._not_saved(number, error)
            return
        self._thread = threading.Thread(
            target=self._write, args=(temporary, content, host_text), name="checkpoint"
        )
        self._thread.start()
        if wait:
            self.wait()

    def restore(self, template: object) -> tuple[int, Any, dict] | None:
        """Returns the newest undamaged checkpoint, each array with the template's `sharding`.

        A warning names each damaged checkpoint with its file and problem; it is left out.

        Args:
          template: pytree of jax.ShapeDtypeStruct with a sharding, or of jax arrays.

        Returns:
          (number, arrays in the template's structure, host), or None if there is no checkpoint.

        Raises:
          CheckpointError: there are checkpoints, all damaged; or the arrays' paths, shapes or
          dtypes differ from the
            template's.
        """
        good = self._newest()
        return None if good is None else (good.number, self.read(good, template), good.host)

    def read(self, checkpoint: _Good, template: object) -> Any:
        """Returns the arrays of a checkpoint from `find`; template and errors as in `restore`."""
        import jax

        requested = by_name(template)
        _compare(checkpoint.path, checkpoint.manifest["arrays"], requested)
        if self._parts is None:
            restored = self._arrays.read(checkpoint.path / ARRAYS, requested)
        else:
            with self._parts.put_together(checkpoint.number, requested) as folder:
                restored = self._arrays.read(folder / ARRAYS, requested)
        return jax.tree.unflatten(
            jax.tree.structure(template), [restored[name] for name in requested]
        )

    def find(self, number: int) -> _Good | None:
        """Returns the checkpoint with this number; None, with a warning, if it is absent or
        damaged."""
        self.wait()
        return on_first(partial(self._find, number))

    def numbers(self) -> set[int]:
        """Returns the numbers of all finished checkpoints, damaged ones included; with parts, of
        those that every process has. Waits for a save that is running."""
        self.wait()
        if self._parts is None:
            return set(on_first(lambda: [number for number, _ in self._complete()]))
        own = [number for number, _ in self._complete()]
        return set.intersection(*map(set, processes.all_gather_object(own)))

    def host(self) -> tuple[int, dict] | None:
        """Returns number and host of the checkpoint that `restore` would take. Loads no arrays, but
        hashes them."""
        good = self._newest()
        return None if good is None else (good.number, good.host)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises the error of a background save unless it is
        a storage error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits, and releases the threads and files of Orbax."""
        try:
            self.wait()
        finally:
            self._arrays.close()

    # Writing.

    @property
    def _writes(self) -> bool:
        """Whether this process makes directories and manifests."""
        return self._parts is not None or processes.first()

    def _make_directory(self, temporary: Path) -> OSError | None:
        """Makes the directory of a new attempt. Returns the error if that fails."""
        try:
            self._sweep()
            temporary.mkdir(parents=True)
        except OSError as error:
            return error
        return None

    def _write(self, temporary: Path, content: dict, host_text: str) -> None:
        """Completes a save in its background thread: writes the copied arrays, then host, hashes
        and name."""
        try:
            with self._writing():
                self._arrays.wait()
                if not self._writes:
                    return
                (temporary / HOST).write_text(host_text)
                seal(temporary, content)
                self._publish(temporary, content["number"])
                self._rotate()
            self._written()
        except Exception as error:
            try:
                self._not_saved(content["number"], error)
            except Exception as failure:
                self._failure = failure

    def _publish(self, temporary: Path, number: int) -> None:
        final = self.directory / f"{number:010d}"
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            if replaced.exists():
                _remove(replaced)
            final.rename(replaced)
        temporary.rename(final)
        sync_directory(self.directory)
        self._damaged.discard(final.name)
        if replaced.exists():
            _remove(replaced)

    def _rotate(self) -> None:
        """Removes damaged checkpoints, and all but the newest `keep` checkpoints whose files have
        the right sizes and whose hosts can be read, with those that they need."""
        good = [
            (number, path, needs)
            for number, path in self._complete()
            if path.name not in self._damaged and not examine(path, hashes=False, part=True)[1]
            if (needs := self._needs(path)) is not None
        ]
        needed = set().union(*(needs for _, _, needs in good[: self.keep]))
        kept = [
            path
            for place, (number, path, _) in enumerate(good)
            if place < self.keep or number in needed
        ]
        for _, path in self._complete():
            if path not in kept:
                _remove(path)

    def _needs(self, path: Path) -> set[int] | None:
        """Returns the numbers of the checkpoints that this one needs; None: its host is damaged."""
        try:
            return set(self._needed(json.loads((path / HOST).read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _not_saved(self, number: int, error: BaseException) -> None:
        """Logs a storage error with the newest safe checkpoint; raises any other error."""
        self._arrays.discard()
        # Writers of the failed save may still be at work, for as long as one write takes.
        for _ in range(20 if self._writes else 0):
            self._sweep()
            if not any(self._entries(_UNFINISHED)):
                break
            time.sleep(0.05)
        if not is_storage_error(error):
            raise error
        safe = next((path for _, path in self._complete() if path.name not in self._damaged), None)
        _log.error(
            "checkpoint %d was NOT saved: %s (%s). The run goes on and the next save tries again. "
            "%s",
            number,
            error,
            disk_room(self.directory, self._bytes),
            "There is no earlier checkpoint: all progress is lost if the run stops now."
            if safe is None
            else f"Progress is safe up to checkpoint {int(safe.name.split('.')[0])} ({safe}).",
        )

    def _check_order(self, number: int) -> None:
        newest = next((n for n, path in self._complete() if path.name not in self._damaged), number)
        if number < newest:
            raise ValueError(
                f"{self.directory} holds checkpoint {newest}: {number}, saved after it, is never "
                "restored"
            )

    def _sweep(self) -> None:
        for path in self._entries(_UNFINISHED) if self._writes else ():
            shutil.rmtree(path, ignore_errors=True)

    # Reading.

    def _newest(self) -> _Good | None:
        if self._parts is None:
            self.wait()
            return on_first(self._newest_good)
        return on_first(partial(self._newest_good, self.numbers()))

    def _newest_good(self, numbers: Collection[int] | None = None) -> _Good | None:
        """Returns the newest undamaged checkpoint with one of these numbers; None: with any."""
        for path in self._entries(_UNFINISHED):
            if (
                path.name in self._attempts
            ):  # a writer of a save that failed, and was reported, came after the sweep
                shutil.rmtree(path, ignore_errors=True)
            else:
                _log.warning(
                    "%s: unfinished (the process was killed while it saved); left out", path
                )
        problems = []
        for number, path in self._complete():
            if numbers is not None and number not in numbers:
                continue
            good, wrong = self._examined(number, path)
            if good is not None:
                return good
            self._damaged.add(path.name)
            problems.append(damaged(number, path, wrong))
            _log.warning("%s. An earlier checkpoint is looked for.", problems[-1])
        if problems:
            raise none_undamaged(
                problems,
                f"Restore {self.directory} from a backup, or start a new run in another directory.",
            )
        return None

    def _find(self, number: int) -> _Good | None:
        for each, path in self._complete():
            if each != number:
                continue
            good, wrong = self._examined(number, path)
            if good is None:
                _log.warning("%s", damaged(number, path, wrong))
            return good
        _log.warning("%s holds no checkpoint %d", self.directory, number)
        return None

    def _examined(self, number: int, path: Path) -> tuple[_Good | None, Sequence[str]]:
        """Returns (the checkpoint, None if it is damaged; what is wrong with it)."""
        manifest, wrong = examine(path, part=self._parts is not None)
        if manifest is None or wrong:
            return None, wrong
        return _Good(number, path, manifest, json.loads((path / HOST).read_text())), wrong

    def _complete(self) -> list[tuple[int, Path]]:
        return complete(self.directory)

    def _entries(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        return iter(_matching(self.directory, pattern))


def damaged(number: int, path: Path, wrong: Sequence[str]) -> str:
    """Returns what to say of a checkpoint with these problems."""
    return f"checkpoint {number} is damaged: {path}: {'; '.join(wrong)}"


def none_undamaged(problems: Sequence[str], advice: str) -> CheckpointError:
    """Returns the error for checkpoints that are all damaged. problems: a line on each."""
    return CheckpointError(
        "no undamaged checkpoint is left:\n" + "\n".join(f"  {p}" for p in problems) + f"\n{advice}"
    )


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]


def _compare(
    path: Path, stored: Mapping[str, ArrayDescription], requested: Mapping[str, ArrayOrShape]
) -> None:
    """Raises CheckpointError for arrays that differ: Orbax itself would cast and pad them."""
    problems = []
    for name in sorted(stored.keys() | requested.keys()):
        if name not in requested:
            problems.append(f"{name}: in the checkpoint, not in the run")
        elif name not in stored:
            problems.append(f"{name}: in the run, not in the checkpoint")
        elif stored[name] != (
            here := ArrayDescription(
                shape=list(requested[name].shape), dtype=requested[name].dtype.name
            )
        ):
            problems.append(
                f"{name}: {_shown(stored[name])} in the checkpoint, {_shown(here)} in the run"
            )
        elif getattr(requested[name], "sharding", None) is None:
            raise ValueError(
                f"{name}: the template says no sharding, so where to restore it is not known"
            )
    if problems:
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"{path} was written by a run with other arrays (another model, optimizer or "
            "algorithm):\n" + "\n".join(f"  {p}" for p in problems[:10]) + more
        )


def _shown(array: ArrayDescription) -> str:
    return f"{array['dtype']}{array['shape']}"


def _remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that a kill in the middle leaves nothing like a
    damaged checkpoint."""
    removed = path.with_name(f"{path.name}.tmp-removed")
    try:
        path.rename(removed)
    except OSError as error:
        _log.warning("%s: an old checkpoint that cannot be removed: %s", path, error)
    shutil.rmtree(removed, ignore_errors=True)
