"""File systems of fsspec that fail on purpose: `faulty://` keeps its files in memory,
`faulty-disk://` on the disk, where they outlive a process that is killed.

A plan says what happens at which operation. Operations are counted over all threads.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

WRITES = ("put_file", "pipe_file", "cp_file", "rm_file", "mv")
READS = ("cat_file", "get_file", "info", "find", "ls")

Action = Callable[["Call"], None]
"""Is called before an operation. Raises, waits, kills the process, or sets `Call.cut`."""


@dataclass
class Call:
    """An operation, before it happens. number: of this kind of operations, from 1. cut: how many
    bytes of what is written arrive; None: all."""

    name: str
    path: str
    number: int
    cut: int | None = None


@dataclass
class Plan:
    """What happens to operations. log: those so far, as (name, path). names: those that count."""

    act: Action = lambda call: None
    names: tuple[str, ...] = WRITES
    log: list[tuple[str, str]] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def before(self, name: str, path: str) -> Call:
        """Counts an operation and lets the plan act on it."""
        if name not in self.names:
            return Call(name, path, 0)
        with self.guard:
            self.log.append((name, path))
            call = Call(name, path, len(self.log))
        self.act(call)
        return call


plan = Plan()
"""Of both file systems."""


def use(act: Action = lambda call: None, names: tuple[str, ...] = WRITES) -> Plan:
    """Replaces the plan, and returns it."""
    global plan
    plan = Plan(act, names)
    return plan


def fail(error: Exception, *numbers: int) -> Action:
    """Raises the error at these operations; without numbers, at all."""

    def act(call: Call) -> None:
        if not numbers or call.number in numbers:
            raise error

    return act


def truncate(*numbers: int) -> Action:
    """Lets half of what these operations write arrive, and reports success."""

    def act(call: Call) -> None:
        if call.number in numbers:
            call.cut = 2

    return act


def wait(seconds: float) -> Action:
    """Makes every operation slow."""
    return lambda call: time.sleep(seconds)


def die(number: int) -> Action:
    """Kills the process at this operation, before it happens."""

    def act(call: Call) -> None:
        if call.number == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def die_within(number: int) -> Action:
    """Kills the process when this operation has written half of its bytes, or before it if it
    writes nothing."""

    def act(call: Call) -> None:
        if call.number == number and call.name in ("put_file", "pipe_file", "get_file"):
            call.cut = -2
        elif call.number == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


class _Faulty:
    """What both file systems have in common."""

    def put_file(self, lpath: Any, rpath: Any, **kwargs: Any) -> None:
        call = plan.before("put_file", str(rpath))
        with open(lpath, "rb") as file:
            data = file.read()
        self._store(rpath, data, call)

    def pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        call = plan.before("pipe_file", str(path))
        if mode == "create" and self.exists(path):  # type: ignore[attr-defined]
            raise FileExistsError(path)
        self._store(path, value, call)

    def _store(self, path: Any, data: bytes, call: Call) -> None:
        kept = data if call.cut is None else data[: len(data) // abs(call.cut)]
        super().pipe_file(path, kept)  # type: ignore[misc]
        if call.cut is not None and call.cut < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def get_file(self, rpath: Any, lpath: Any, **kwargs: Any) -> None:
        call = plan.before("get_file", str(rpath))
        super().get_file(rpath, lpath, **kwargs)  # type: ignore[misc]
        if call.cut is not None:
            os.truncate(lpath, os.path.getsize(lpath) // abs(call.cut))
            if call.cut < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _planned(name: str) -> Callable[..., Any]:
    def operation(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        plan.before(name, str(path))
        return getattr(super(type(self), self), name)(path, *args, **kwargs)

    return operation


class FaultyMemory(_Faulty, MemoryFileSystem):
    """Objects appear when they are complete, as those of object stores."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).replace("faulty://", "memory://"))


class FaultyDisk(_Faulty, LocalFileSystem):
    """Files on the disk, `faulty-disk:///folder`. As on any file system with folders, a write that is
    cut off leaves half a file."""

    protocol = ("faulty-disk", "file")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("faulty-disk://"))

    def _store(self, path: Any, data: bytes, call: Call) -> None:
        os.makedirs(os.path.dirname(str(path)), exist_ok=True)
        super()._store(path, data, call)

    def cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        plan.before("cp_file", str(path1))
        os.makedirs(os.path.dirname(str(path2)), exist_ok=True)
        LocalFileSystem.cp_file(self, path1, path2)


for _kind in (FaultyMemory, FaultyDisk):
    for _name in ("cp_file", "rm_file", "cat_file", "info", "find", "ls"):
        if _name not in vars(_kind):
            setattr(_kind, _name, _planned(_name))
fsspec.register_implementation("faulty", FaultyMemory, clobber=True)
fsspec.register_implementation("faulty-disk", FaultyDisk, clobber=True)


def clear() -> None:
    """Removes all files in memory, and the plan."""
    use()
    FaultyMemory.store.clear()
    FaultyMemory.pseudo_dirs[:] = [""]
