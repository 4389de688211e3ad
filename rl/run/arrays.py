"""Reads and writes the arrays of a checkpoint with Orbax, in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from policy.mesh import processes
from rl.errors import no_room

if TYPE_CHECKING:
    import jax

    ArrayOrShape: TypeAlias = jax.Array | jax.ShapeDtypeStruct

_OS_ERROR = "os_error_code="
_OF_PARTS = ("Global object size logging disabled", "[process")


class ArrayDescription(TypedDict):
    """Shape and dtype of an array, as the manifest of a checkpoint has them."""

    shape: list[int]
    dtype: str


class ArrayStore:
    """Writes and reads arrays by name. All processes call the same methods in the same order.

    apart: each process has a folder of its own, where it writes the shards of its devices, one file
    a shard: the files of all, put together, can be read as those that processes wrote to one
    folder.
    """

    def __init__(self, *, apart: bool = False):
        self._orbax: Any = None
        self._apart = apart

    def begin(self, path: Path, arrays: Mapping[str, jax.Array]) -> None:
        """Copies arrays to the host, in the caller's thread, and starts to write them to `path`.

        A copy in another thread could start a device program at the same time as the loop.
        """
        import orbax.checkpoint as ocp

        # Orbax refuses arrays without elements; the manifest holds their shape, which is enough.
        args = ocp.args.PyTreeSave({name: x for name, x in arrays.items() if x.size})
        self._checkpointer().save(path, args=args)

    def wait(self) -> None:
        """Returns when all processes have written their shards. Raises the errors of the
        background."""
        self._checkpointer().wait_until_finished()

    def read(
        self, path: Path, template: Mapping[str, ArrayOrShape], *, partial: bool = False
    ) -> dict[str, jax.Array]:
        """Returns the arrays at `path` by name, with the shapes, dtypes and shardings of
        `template`.

        partial: the files may hold further arrays, which are not read.
        """
        import numpy as np
        import orbax.checkpoint as ocp

        full = {name: x for name, x in template.items() if x.size}
        how = ocp.checkpoint_utils.construct_restore_args(full)
        args = ocp.args.PyTreeRestore(item=full, restore_args=how, partial_restore=partial)
        restored = dict(self._checkpointer().restore(path.absolute(), args=args))
        for name, x in template.items():
            if not x.size:
                restored[name] = processes.device_put_global(np.zeros(x.shape, x.dtype), x.sharding)
        return restored

    def close(self) -> None:
        """Releases the threads and files of Orbax."""
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def discard(self) -> None:
        """Closes Orbax after a failed save. Orbax would raise the same error again in its next
        call."""
        failed = self._orbax
        self._orbax = None
        if failed is not None:
            with contextlib.suppress(Exception):
                failed.close()

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            import orbax.checkpoint as ocp

            for name in ("absl", "asyncio"):
                logging.getLogger(name).addFilter(_is_not_repeated)
            sys.unraisablehook = _without_late_writers
            warnings.filterwarnings(
                "ignore", "coroutine 'async_serialize_from_host.* was never awaited", RuntimeWarning
            )
            # If Orbax makes directories in the background, a failure there is a wait of ten minutes
            # for a signal.
            options = ocp.AsyncOptions(create_directories_asynchronously=False)
            self._orbax = (
                _alone(options)
                if self._apart
                else ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
            )
        return self._orbax


def _alone(options: Any) -> Any:
    """Returns a checkpointer of Orbax that waits for no other process, and writes the metadata of
    arrays in each. Its files are not merged to OCDBT: no process has all of them."""
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    alone = ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={processes.index()}
    )
    arrays = type_handlers.ArrayHandler(
        primary_host=None,
        replica_id=0,
        use_replica_parallel=False,
        enable_write_sharding_file=False,
    )
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, multiprocessing_options=alone, type_handler_registry=registry
    )
    return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=alone)


def by_name(tree: object) -> dict[str, Any]:
    """Returns {path in the tree, as "params/layers/0/kernel": leaf}."""
    import jax

    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError(
            "two leaves of the tree have the same path when its keys are joined by '/'"
        )
    return named


def description(name: str, leaf: object) -> ArrayDescription:
    """Returns shape and dtype of an array. Raises TypeError for a leaf that is not a jax array of
    numbers."""
    import jax
    import jax.numpy as jnp

    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{name} is {type(leaf).__name__}: a checkpoint holds jax arrays of numbers; put it "
            "in `host`"
        )
    return {"shape": list(leaf.shape), "dtype": leaf.dtype.name}


def is_storage_error(error: BaseException) -> bool:
    """Returns whether the operating system refused to store something.

    Orbax raises such an error of TensorStore as a ValueError with the error number in its text.
    """
    return isinstance(error, OSError) or _OS_ERROR in str(error) or no_room(error)


def _is_not_repeated(record: logging.LogRecord) -> bool:
    """Returns False for records of errors that Orbax also raises to the caller.

    Orbax logs a background error four times with its traceback (200 lines). Its writers that fail
    after the first one appear in asyncio's log when the garbage is collected. Of processes with
    folders of their own it warns at each save that it does not do what they do without.
    """
    if not record.exc_info:
        return not (record.getMessage().startswith(_OF_PARTS) and record.levelno < logging.ERROR)
    files = [
        record.pathname,
        *(frame.filename for frame in traceback.extract_tb(record.exc_info[2])),
    ]
    return not any(f"{os.sep}orbax{os.sep}" in file for file in files) and _OS_ERROR not in str(
        record.exc_info[1]
    )


_unraisable = sys.unraisablehook


def _without_late_writers(event: sys.UnraisableHookArgs) -> None:
    """Shows errors that Python cannot raise, except writes of a failed save that outlive their
    event loop, and reads after the first one that failed, which Orbax has raised."""
    frames = traceback.extract_tb(event.exc_traceback)
    written = (
        frames and frames[0].name == "call_soon_threadsafe" and "closed" in str(event.exc_value)
    )
    read = isinstance(event.object, CoroutineType) and event.object.__name__.startswith(
        "_read_array"
    )
    if not (written or read):
        _unraisable(event)
