"""Parts of checkpoints: what each process has where no folder is seen by all of them.

The part of a process is a folder with the shards of its devices, host.json and a manifest of its
own, which names the process and the save. The files of all parts, put together, are a checkpoint
like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from policy.json_types import JsonObject

if TYPE_CHECKING:
    from rl.run.arrays import ArrayOrShape


class Parts(Protocol):
    """Puts parts together (rl/run/mirror/apart.py). All processes call the same methods in the same
    order, in their main threads."""

    @property
    def folder(self) -> Path:
        """The folder of this process for its part of the run."""
        ...

    def content(self, attempt: int) -> JsonObject:
        """Returns what the manifest of a part says of it: process, number of processes, and what
        the parts of one save have in common. attempt: number of the save in this process."""
        ...

    def ask(self) -> None:
        """Called before a checkpoint is written."""
        ...

    def put_together(
        self, number: int, requested: Mapping[str, ArrayOrShape]
    ) -> AbstractContextManager[Path]:
        """Yields a folder with the files of a checkpoint that this process needs to read these
        arrays. Raises RemoteError."""
        ...
