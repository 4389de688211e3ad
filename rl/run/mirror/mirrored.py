"""The mirror around a run, for all its processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from policy.mesh import processes
from rl.cluster.folders import is_shared
from rl.cluster.launch import on_first, raise_on_all
from rl.config.run import RunConfig
from rl.errors import Interrupted
from rl.run.folder import FolderLock
from rl.run.mirror.mirror import RunMirror
from rl.run.mirror.parts import Parts
from rl.run.resume import best
from rl.run.signals import StopSignal

_LOG = logging.getLogger("duet.remote")
_LOOK_S = 0.5
"""Seconds between two looks of the other processes at the last upload of the first one."""


@dataclass(frozen=True)
class OpenMirror:
    """What a run needs of its mirror. checkpoint_written: to be called after a checkpoint. lock: of
    the local folder, which the mirror holds in the first process; None: there is no mirror. parts:
    of this process, if no folder is seen by all processes."""

    checkpoint_written: Callable[[], None] = lambda: None
    lock: FolderLock | None = None
    parts: Parts | None = None


@contextmanager
def mirrored(config: RunConfig) -> Iterator[OpenMirror]:
    """Holds the local and the remote folder of a run (`run.remote`), after fetching what is newer in
    the remote one. At the end all processes wait for the last upload.

    Without a remote folder it does nothing. Raises what `RunMirror` and `FolderLock` raise.
    """
    remote = config.run.remote
    if remote is None:
        yield OpenMirror()
    elif processes.count() == 1 or is_shared(config.directory):
        with _in_one_folder(config, remote) as mirror:
            yield mirror
    else:
        with _apart(config, remote) as mirror:
            yield mirror


@contextmanager
def _in_one_folder(config: RunConfig, remote: str) -> Iterator[OpenMirror]:
    mirrors: list[RunMirror] = []
    lock = FolderLock(config.directory)
    with ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(lock)
            mirror = RunMirror(remote, config.directory, config.run.keep_checkpoints, best.named_by)
            mirrors.append(stack.enter_context(mirror))

        on_first(enter)
        written = mirrors[0].checkpoint_written if mirrors else lambda: None
        with _waiting_at_the_end(lambda: _wait_together(mirrors)):
            yield OpenMirror(written, lock)


@contextmanager
def _apart(config: RunConfig, remote: str) -> Iterator[OpenMirror]:
    # An option of several processes; one process loads nothing of it.
    from rl.run.mirror.apart import Apart

    parts = raise_on_all(lambda: Apart(remote, config.directory, config.run.keep_checkpoints))
    lock = FolderLock(parts.folder)
    if processes.first():
        _LOG.warning(
            "run.dir: not all processes see %s: each keeps and uploads its part of the checkpoints "
            "(docs/remote.md)",
            config.directory,
        )
    with parts.entered(lock), _waiting_at_the_end(parts.end):
        yield OpenMirror(parts.written, lock if processes.first() else None, parts)


@contextmanager
def _waiting_at_the_end(wait: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except Interrupted:  # all processes raise it
        wait()
        raise
    wait()


def _wait_together(mirrors: list[RunMirror]) -> None:
    """Returns in all processes when the first one has made its last upload: one that ended earlier
    would end the others."""
    if processes.count() == 1:
        return
    for mirror in mirrors:
        mirror.uploads.begin_last_upload()
    with StopSignal():
        while processes.broadcast(any(mirror.uploads.is_at_work for mirror in mirrors)):
            time.sleep(_LOOK_S)
