"""Runs rewards in a worker process: reads calls from one pipe and writes answers to another.

Frames are JSON (rewards/workers/media.py) after a length of 4 bytes, on separate pipes, so that the
output of a reward cannot be mistaken for an answer, and no answer can execute code in the run (no
pickle). There are two kinds of call:

    {"load": slot, "spec": ..., "options": {...}}  -> {"ok": true} or {"error": kind, "text":
    traceback}
    {"call": slot, "count": n, "arguments": {...}} -> {"values": [...], "bad": [[index, kind, text],
    ...]} or error

The answer of a call has `logs`, texts by index: what the function returned with a score, and what
it printed, under index 0.

Every answer also says how many child processes the worker has, so that the run can replace a worker
with too many.

Each worker has a guard, a fork that waits for the end of the run or of the worker, and then kills
what the worker started. No thread of the worker could do this: a reward that hangs inside C code
holds the interpreter lock.

Imports the standard library, `registry` and `media`, no numpy: a worker starts in about 50 ms.
"""

from __future__ import annotations

import inspect
import io
import math
import numbers
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Awaitable
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, cast

from rewards import registry
from rewards.workers import media, spawned

if TYPE_CHECKING:
    import asyncio

MARKER = "DUET_REWARD_WORKER"
_TEXT_LIMIT = 8000
LOG_LIMIT = 2048  # characters that are kept for each sample
_LENGTH = struct.Struct("!I")
HEAD_BYTES = _LENGTH.size


def pack(message: dict) -> bytes:
    """Returns the frame of a message."""
    body = media.dump(message).encode()
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Returns the number of bytes that follow the head of a frame."""
    return _LENGTH.unpack(head)[0]


def main(
    request: int, response: int, lifeline: int, parent: int, memory_limit_mb: int | None
) -> None:
    """Serves calls until the request pipe ends.

    request, response, lifeline: file descriptors.
    parent: process id of the run.
    memory_limit_mb: limit of the address space in MiB, or None.
    """
    for descriptor in (request, response, lifeline):
        os.set_inheritable(descriptor, False)
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True, errors="backslashreplace")
    _start_guard(request, response, lifeline, parent)
    if memory_limit_mb is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20, memory_limit_mb << 20))
    own = os.getpid()
    loaded: dict[int, tuple] = {}
    while (message := _read(request)) is not None:
        answer = _load(message, loaded) if "load" in message else _call(message, loaded)
        answer["children"] = _children()
        signal.setitimer(
            signal.ITIMER_REAL, 0
        )  # an alarm that the reward set would end the next call
        if os.getpid() != own:  # a fork of the reward that returned here
            os._exit(0)
        _write(response, pack(answer))


def _load(message: dict, loaded: dict) -> dict:
    try:
        function = registry.load(message["spec"])
        spawned.announce(registry.loaded_files())
        registry.prepare(function)
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt of the user's code are faults too
        return {"error": "load", "text": _text_of_error(error)}
    loaded[message["load"]] = (function, message["options"])
    return {"ok": True}


def _call(message: dict, loaded: dict) -> dict:
    function, options = loaded[message["call"]]
    registry.activate(function)
    spawned.announce(registry.loaded_files())
    printed = _Printed()
    try:
        with redirect_stdout(printed):
            result = function(**message["arguments"], **options)
            if inspect.isawaitable(result):
                result = _event_loop().run_until_complete(_await(result))
            answer = _values(result, message["count"])
        if printed.text:
            answer["logs"]["0"] = "\n".join(
                filter(None, (printed.text.strip(), answer["logs"].get("0")))
            )
        return answer
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt of the user's code are faults too
        return {"error": "raised", "text": _text_of_error(error)}


class _Printed(io.TextIOBase):
    """Keeps the first characters that a function prints, and passes all on to the output of the
    worker."""

    text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text[: max(0, LOG_LIMIT - len(self.text))]
        return cast(io.TextIOWrapper, sys.__stdout__).write(text)

    def flush(self) -> None:
        cast(io.TextIOWrapper, sys.__stdout__).flush()


async def _await(result: Awaitable[object]) -> object:
    return await result


def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of the worker. It lives as long as the worker, so that a reward can
    keep clients open."""
    import asyncio

    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    return _loop


_loop: asyncio.AbstractEventLoop | None = None


def _values(result: Any, count: int) -> dict:
    """Turns the return value of a reward into floats, and texts that explain them.

    An element is a score, None, or a pair of one of these and its explanation. Lists wrong
    elements; a wrong type or length is one error.
    """
    if not isinstance(result, (list, tuple)):
        if type(getattr(result, "ndim", None)) is not int or result.ndim != 1:
            text = (
                f"returned a {type(result).__name__}; expected a list of {count} numbers, one "
                "for each completion"
            )
            return {"error": "wrong_type", "text": text}
        result = result.tolist()
    if len(result) != count:
        return {
            "error": "wrong_length",
            "text": f"returned {len(result)} values for {count} completions",
        }
    values = []
    bad = []
    logs = {}
    for index, element in enumerate(result):
        if isinstance(element, (list, tuple)) and len(element) == 2 and isinstance(element[1], str):
            logs[str(index)] = element[1][:LOG_LIMIT]
            element = element[0]
        try:
            values.append(None if element is None else _number(element))
        except (TypeError, ArithmeticError) as error:
            values.append(None)
            kind = "wrong_type" if isinstance(error, TypeError) else "not_finite"
            bad.append([index, kind, str(error)])
    return {"values": values, "bad": bad, "logs": logs}


def _number(element: Any) -> float:
    """Returns a finite float. Raises TypeError for other types, ArithmeticError for NaN, infinity
    and overflow."""
    if not isinstance(element, numbers.Real) and callable(getattr(element, "item", None)):
        element = element.item()  # scalars and arrays of one element of numpy, torch and jax
    if not isinstance(element, numbers.Real):
        raise TypeError(
            f"returned {_short(element)} ({type(element).__name__}) as a score; expected a number "
            "or None"
        )
    value = float(element)
    if not math.isfinite(value):
        raise ArithmeticError(
            f"returned {value} as a score; return None for a completion that has none"
        )
    return value


def _short(element: object) -> str:
    text = repr(element)
    return text if len(text) <= 80 else text[:77] + "..."


def _text_of_error(error: BaseException) -> str:
    """Returns the traceback from the first frame of the user's code on, cut to its last
    characters."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text if len(text) <= _TEXT_LIMIT else "[...]\n" + text[-_TEXT_LIMIT:]


def _children() -> int:
    """Counts child processes, including the guard and zombies. Returns 0 if the system does not
    tell."""
    count = 0
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                count += len(file.read().split())
    return count


def _read(descriptor: int) -> dict | None:
    head = _read_exactly(descriptor, HEAD_BYTES)
    body = _read_exactly(descriptor, frame_length(head)) if head else b""
    return media.parse(body) if body else None


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _start_guard(request: int, response: int, lifeline: int, parent: int) -> None:
    """Forks the guard.

    The guard notices the end of the run by the lifeline, a pipe whose other end only the run holds.
    On Linux it also watches the process of the run, because a fork of the run may still hold the
    pipe.
    """
    worker = os.getpid()
    if os.fork():
        os.close(lifeline)
        return
    os.close(request)
    os.close(response)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    with suppress(AttributeError, OSError):
        for process in (worker, parent):
            watched.register(os.pidfd_open(process), select.POLLIN)
    with suppress(BaseException):
        watched.poll()
    kill_marked(os.environ[MARKER])
    kill_group(worker)
    os._exit(0)


def kill_group(group: int) -> None:
    """Kills all processes of a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kills all other processes that inherited this mark in their environment, also outside the
    worker's group.

    Does nothing on systems other than Linux. Scans until two scans in a row see no such process: a
    process may fork meanwhile, and shows no environment during an exec.
    """
    entry = f"{MARKER}={mark}".encode()
    scans_left = 2
    for _ in range(20):
        marked = [
            process
            for process in _processes()
            if process != os.getpid() and _has_variable(process, entry)
        ]
        for process in marked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        scans_left = 2 if marked else scans_left - 1
        if not scans_left:
            return
        time.sleep(0.005)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _has_variable(process: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except OSError:
        return False
