"""Checkpoints of a run: written in the background, complete or absent, and checked byte for byte before they are used.

`<directory>/<number>/` holds

    arrays/         every array of the run, by its path in the tree, as Orbax (OCDBT, zarr) writes it
    host.json       what the caller stores beside them: stage, step, counters
    manifest.json   format version; path, shape and dtype of every array; size and SHA-256 of every other file

The manifest is the last file written. Everything is written and synced under `<number>.tmp-<attempt>`, and the finished
directory is renamed, so that a process killed at any moment leaves a complete checkpoint or one that is recognised as
unfinished, and removed by the next save.

Several processes, which all see the directory, write and read the shards of their own devices; everything else the first does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from policy.mesh import processes, serialization
from rl.cluster.launch import on_first
from rl.errors import ModelError, no_room
from rl.run.manifest import examine, seal, sync_directory

ARRAYS, HOST = "arrays", "host.json"
_COMPLETE = re.compile(r"(\d+)(\.replaced)?")
_UNFINISHED = re.compile(r"\d+(\.replaced)?\.tmp-.+")
_OS_ERROR = "os_error_code="
_log = logging.getLogger("duet.checkpoint")


@serialization.register_type
class CheckpointError(ModelError):
    """No checkpoint is undamaged, or the arrays of one are not those that the run asks for."""


@serialization.register_type
class _Good(NamedTuple):
    number: int
    path: Path
    manifest: Mapping[str, Any]
    host: dict


class Checkpoints:
    """The checkpoints of one run. All its processes call the same methods in the same order.

    Args:
      directory: where they lie; made by the first save.
      keep: how many of the newest undamaged ones stay, at least 1.
      writing: a context that every writing in the background is done in.
    """

    def __init__(
        self, directory: str | Path, keep: int, writing: Callable[[], AbstractContextManager] = contextlib.nullcontext
    ):
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least the newest checkpoint has to stay")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._writing = writing
        self._damaged: set[str] = set()
        self._attempts: set[str] = set()  # names of the directories in which this object wrote, or tried to
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._orbax: Any = None

    def save(self, number: int, arrays: Any, host: dict, wait: bool = False) -> None:
        """Copies the arrays to the host, then writes them in the background; `wait` returns when they are on the disk.

        After the return the arrays may be donated. (On CPU the copy is a view of them: a step that is given one still
        being written copies it instead of taking it.) Saving the newest number again replaces it. An earlier save still
        running is waited for.

        A full disk, a quota or a missing permission is not an error: it is logged, what was written is removed, older
        checkpoints stay, and the next save tries again.

        Args:
          number: steps done over the whole run.
          arrays: pytree of jax arrays (random keys as their `jax.random.key_data`).
          host: anything that JSON can hold.

        Raises:
          TypeError: a leaf that is not a jax array, or a host that JSON cannot hold.
          ValueError: a number smaller than that of an existing checkpoint.
        """
        self.wait()
        named = _by_name(arrays)
        content = {"number": number, "arrays": {name: _described(name, x) for name, x in named.items()}}
        host_text = json.dumps(host, indent=1)
        self._check_order(number)
        temporary = self.directory / f"{number:010d}.tmp-{len(self._attempts) + 1}"
        self._attempts.add(temporary.name)
        try:
            if (error := processes.broadcast(self._made(temporary) if processes.first() else None)) is not None:
                raise error
            self._begin(temporary / ARRAYS, named)
        except Exception as error:
            self._not_saved(number, error)
            return
        self._thread = threading.Thread(target=self._write, args=(temporary, content, host_text), name="checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def restore(self, template: Any) -> tuple[int, Any, dict] | None:
        """The newest undamaged checkpoint, each array placed as the template's `sharding` says.

        Damaged ones are named in a warning, with the file and what is wrong with it, and left out.

        Args:
          template: pytree of jax.ShapeDtypeStruct with a sharding, or of jax arrays.

        Returns:
          (number, arrays in the template's structure, host), or None where there is no checkpoint.

        Raises:
          CheckpointError: there are checkpoints, all damaged; or the arrays' paths, shapes or dtypes differ from the
            template's.
        """
        self.wait()
        good = on_first(self._newest_good)
        if good is None:
            return None
        import jax

        wanted = _by_name(template)
        _compare(good.path, good.manifest["arrays"], wanted)
        restored = self._read(good.path / ARRAYS, wanted)
        arrays = jax.tree.unflatten(jax.tree.structure(template), [restored[name] for name in wanted])
        return good.number, arrays, good.host

    def host(self) -> tuple[int, dict] | None:
        """Number and host of the checkpoint that `restore` would take; the arrays are hashed, not loaded."""
        self.wait()
        good = on_first(self._newest_good)
        return None if good is None else (good.number, good.host)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises what a background save failed with, storage errors excepted."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits, and gives back what Orbax holds."""
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None

    # Writing.

    def _made(self, temporary: Path) -> OSError | None:
        """Makes the directory of a new attempt; what is wrong if it cannot be."""
        try:
            self._sweep()
            temporary.mkdir(parents=True)
        except OSError as error:
            return error
        return None

    def _begin(self, path: Path, named: Mapping[str, Any]) -> None:
        """Copies to the host, in the caller's thread: no device program may start beside the ones of the loop."""
        import orbax.checkpoint as ocp

        # Orbax refuses arrays without elements; their shape in the manifest says all of them.
        self._checkpointer().save(path, args=ocp.args.PyTreeSave({name: x for name, x in named.items() if x.size}))

    def _write(self, temporary: Path, content: dict, host_text: str) -> None:
        """The background thread of one save: what `_begin` copied, then host, hashes and name."""
        try:
            with self._writing():
                self._orbax.wait_until_finished()  # all processes have written their shards then
                if not processes.first():
                    return
                (temporary / HOST).write_text(host_text)
                seal(temporary, content)
                self._publish(temporary, content["number"])
                self._rotate()
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
        """Removes the damaged ones, and all but the newest `keep` of those whose files have the right sizes."""
        kept = 0
        for _, path in self._complete():
            good = path.name not in self._damaged and not examine(path, hashes=False)[1]
            if good and kept < self.keep:
                kept += 1
            else:
                _remove(path)

    def _not_saved(self, number: int, error: BaseException) -> None:
        """Logs a storage error with what is still safe; raises any other."""
        # Orbax would raise the same error again in its next call.
        failed, self._orbax = self._orbax, None
        if failed is not None:
            with contextlib.suppress(Exception):
                failed.close()
        # Writers of the failed save may still be at work, for as long as one write takes.
        for _ in range(20 if processes.first() else 0):
            self._sweep()
            if not any(self._entries(_UNFINISHED)):
                break
            time.sleep(0.05)
        if not _is_storage_error(error):
            raise error
        safe = next((path for _, path in self._complete() if path.name not in self._damaged), None)
        _log.error(
            "checkpoint %d was NOT saved: %s. The run goes on and the next save tries again. %s",
            number,
            error,
            "There is no earlier checkpoint: all progress is lost if the run stops now."
            if safe is None
            else f"Progress is safe up to checkpoint {int(safe.name.split('.')[0])} ({safe}).",
        )

    def _check_order(self, number: int) -> None:
        newest = next((n for n, path in self._complete() if path.name not in self._damaged), number)
        if number < newest:
            raise ValueError(f"{self.directory} holds checkpoint {newest}: {number}, saved after it, is never restored")

    def _sweep(self) -> None:
        for path in self._entries(_UNFINISHED) if processes.first() else ():
            shutil.rmtree(path, ignore_errors=True)

    # Reading.

    def _newest_good(self) -> _Good | None:
        for path in self._entries(_UNFINISHED):
            if path.name in self._attempts:  # a writer of a save that failed, and was reported, came after the sweep
                shutil.rmtree(path, ignore_errors=True)
            else:
                _log.warning("%s: unfinished (the process was killed while it saved); left out", path)
        problems = []
        for number, path in self._complete():
            manifest, wrong = examine(path)
            if manifest is not None and not wrong:
                return _Good(number, path, manifest, json.loads((path / HOST).read_text()))
            self._damaged.add(path.name)
            problems.append(f"checkpoint {number} is damaged: {path}: {'; '.join(wrong)}")
            _log.warning("%s. An earlier checkpoint is looked for.", problems[-1])
        if problems:
            raise CheckpointError(
                "no undamaged checkpoint is left:\n"
                + "\n".join(f"  {p}" for p in problems)
                + f"\nRestore {self.directory} from a backup, or start a new run in another directory."
            )
        return None

    def _read(self, path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np
        import orbax.checkpoint as ocp

        full = {name: x for name, x in wanted.items() if x.size}
        args = ocp.args.PyTreeRestore(item=full, restore_args=ocp.checkpoint_utils.construct_restore_args(full))
        restored = dict(self._checkpointer().restore(path, args=args))
        for name, x in wanted.items():
            if not x.size:
                restored[name] = processes.device_put_global(np.zeros(x.shape, x.dtype), x.sharding)
        return restored

    def _complete(self) -> list[tuple[int, Path]]:
        """Number and directory of every finished checkpoint, newest first; one being replaced after its successor."""
        found = [(_COMPLETE.fullmatch(path.name), path) for path in self._entries(_COMPLETE)]
        found.sort(key=lambda item: (-int(item[0][1]), item[0][2] is not None))
        return [(int(match[1]), path) for match, path in found]

    def _entries(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        if not self.directory.is_dir():
            return iter(())
        return iter([path for path in self.directory.iterdir() if pattern.fullmatch(path.name) and path.is_dir()])

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            import orbax.checkpoint as ocp

            for name in ("absl", "asyncio"):
                logging.getLogger(name).addFilter(_is_not_repeated)
            sys.unraisablehook = _without_late_writers
            warnings.filterwarnings(
                "ignore", "coroutine 'async_serialize_from_host.* was never awaited", RuntimeWarning
            )
            # Directories made in the background make a failure there a wait of ten minutes for a signal.
            options = ocp.AsyncOptions(create_directories_asynchronously=False)
            self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
        return self._orbax


def _by_name(tree: Any) -> dict[str, Any]:
    """{path in the tree, as "params/layers/0/kernel": leaf}."""
    import jax

    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the tree have the same path when its keys are joined by '/'")
    return named


def _described(name: str, leaf: Any) -> dict[str, Any]:
    import jax

    if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} is {type(leaf).__name__}: a checkpoint holds jax arrays of numbers; put it in `host`")
    return {"shape": list(leaf.shape), "dtype": leaf.dtype.name}


def _compare(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Orbax casts and pads on restore, so what differs is found here."""
    problems = []
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in wanted:
            problems.append(f"{name}: in the checkpoint, not in the run")
        elif name not in stored:
            problems.append(f"{name}: in the run, not in the checkpoint")
        elif stored[name] != (here := {"shape": list(wanted[name].shape), "dtype": wanted[name].dtype.name}):
            problems.append(f"{name}: {_shown(stored[name])} in the checkpoint, {_shown(here)} in the run")
        elif getattr(wanted[name], "sharding", None) is None:
            raise ValueError(f"{name}: the template says no sharding, so where to restore it is not known")
    if problems:
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"{path} was written by a run with other arrays (another model, optimizer or algorithm):\n"
            + "\n".join(f"  {p}" for p in problems[:10])
            + more
        )


def _shown(array: Mapping[str, Any]) -> str:
    return f"{array['dtype']}{array['shape']}"


def _remove(path: Path) -> None:
    """Renamed first, so that a kill in the middle does not leave something that looks like a damaged checkpoint."""
    removed = path.with_name(f"{path.name}.tmp-removed")
    try:
        path.rename(removed)
    except OSError as error:
        _log.warning("%s: an old checkpoint that cannot be removed: %s", path, error)
    shutil.rmtree(removed, ignore_errors=True)


def _is_storage_error(error: BaseException) -> bool:
    """Orbax raises what the operating system said to TensorStore as a ValueError with the number in its text."""
    return isinstance(error, OSError) or _OS_ERROR in str(error) or no_room(error)


def _is_not_repeated(record: logging.LogRecord) -> bool:
    """Orbax logs a background error four times with its traceback (200 lines) and then raises it to the caller too.

    Its writers that fail after the first one are in asyncio's log, whenever the garbage is collected.
    """
    if not record.exc_info:
        return True
    files = [record.pathname, *(frame.filename for frame in traceback.extract_tb(record.exc_info[2]))]
    return not any(f"{os.sep}orbax{os.sep}" in file for file in files) and _OS_ERROR not in str(record.exc_info[1])


_unraisable = sys.unraisablehook


def _without_late_writers(what: Any) -> None:
    """Shows what Python cannot raise, except writes of a failed save that end after Orbax has closed their event loop."""
    frames = traceback.extract_tb(what.exc_traceback)
    if not (frames and frames[0].name == "call_soon_threadsafe" and "closed" in str(what.exc_value)):
        _unraisable(what)
