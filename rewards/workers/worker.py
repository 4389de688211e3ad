"""The process in which rewards run: reads calls from one pipe, writes answers to another, owns nothing that matters.

Frames are JSON behind a length of 4 bytes, on pipes of their own, so that what a reward prints cannot be taken for an
answer, and nothing that comes back can execute anything in the run (no pickle). Two kinds of call:

    {"load": slot, "spec": ..., "options": {...}}  -> {"ok": true} or {"error": kind, "text": traceback}
    {"call": slot, "count": n, "arguments": {...}} -> {"values": [...], "bad": [[index, kind, text], ...]} or error

Every answer says besides how many child processes there are, so that the run can replace a worker that gathers them.

Beside the worker stands its guard, a fork that does nothing but wait for the end of the run or of the worker, and then
kills whatever the worker left: a reward that hangs inside C code holds the interpreter lock, so that no thread of the
worker could do it.

Imports the standard library and `registry`, no numpy: a worker starts in about 50 ms.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
import os
import select
import signal
import struct
import sys
import time
import traceback
from contextlib import suppress

from rewards import registry

MARKER = "DUET_REWARD_WORKER"
_TEXT_LIMIT = 8000
_LENGTH = struct.Struct("!I")
HEAD_BYTES = _LENGTH.size


def pack(message: dict) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    return _LENGTH.unpack(head)[0]


def main(request: int, response: int, lifeline: int, parent: int, memory_limit_mb: int | None) -> None:
    """Serves calls until the request pipe ends. The arguments are three file descriptors, the process id of the run
    and the limit of the address space in MiB."""
    for descriptor in (request, response, lifeline):
        os.set_inheritable(descriptor, False)
    sys.stdout.reconfigure(line_buffering=True)
    _start_guard(request, response, lifeline, parent)
    if memory_limit_mb is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20, memory_limit_mb << 20))
    own = os.getpid()
    loaded: dict[int, tuple] = {}
    while (message := _read(request)) is not None:
        answer = _load(message, loaded) if "load" in message else _call(message, loaded)
        answer["children"] = _children()
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the reward left behind would end the next call
        if os.getpid() != own:  # a fork of the reward that came back here instead of ending
            os._exit(0)
        _write(response, pack(answer))


def _load(message: dict, loaded: dict) -> dict:
    try:
        function = registry.load(message["spec"])
        registry.prepare(function)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code are faults of it as well
        return {"error": "load", "text": _text_of_error(error)}
    loaded[message["load"]] = (function, message["options"])
    return {"ok": True}


def _call(message: dict, loaded: dict) -> dict:
    function, options = loaded[message["call"]]
    try:
        result = function(**message["arguments"], **options)
        if inspect.isawaitable(result):
            result = _event_loop().run_until_complete(_awaited(result))
        return _values(result, message["count"])
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code are faults of it as well
        return {"error": "raised", "text": _text_of_error(error)}


async def _awaited(result):
    return await result


def _event_loop():
    """One loop for the life of the worker, so that a client which a reward keeps between calls stays usable."""
    import asyncio

    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    return _loop


_loop = None


def _values(result: object, count: int) -> dict:
    """Turns what a reward returned into floats; wrong elements are named one by one, a wrong whole as one error."""
    if not isinstance(result, (list, tuple)):
        if type(getattr(result, "ndim", None)) is not int or result.ndim != 1:
            text = f"returned a {type(result).__name__}; expected a list of {count} numbers, one for each completion"
            return {"error": "wrong_type", "text": text}
        result = result.tolist()
    if len(result) != count:
        return {"error": "wrong_length", "text": f"returned {len(result)} values for {count} completions"}
    values, bad = [], []
    for index, element in enumerate(result):
        try:
            values.append(None if element is None else _number(element))
        except (TypeError, ArithmeticError) as error:
            values.append(None)
            kind = "wrong_type" if isinstance(error, TypeError) else "not_finite"
            bad.append([index, kind, str(error)])
    return {"values": values, "bad": bad}


def _number(element: object) -> float:
    """A finite float. TypeError: not a real number; ArithmeticError: NaN, infinite, or too large for float64."""
    if not isinstance(element, numbers.Real) and callable(getattr(element, "item", None)):
        element = element.item()  # scalars and arrays of one element of numpy, torch and jax
    if not isinstance(element, numbers.Real):
        raise TypeError(f"returned {_short(element)} ({type(element).__name__}) as a score; expected a number or None")
    value = float(element)
    if not math.isfinite(value):
        raise ArithmeticError(f"returned {value} as a score; return None for a completion that has none")
    return value


def _short(element: object) -> str:
    text = repr(element)
    return text if len(text) <= 80 else text[:77] + "..."


def _text_of_error(error: BaseException) -> str:
    """The traceback from the first frame of the user's code on; its end, where it is long."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text if len(text) <= _TEXT_LIMIT else "[...]\n" + text[-_TEXT_LIMIT:]


def _children() -> int:
    """Number of child processes, the guard and those ended but not waited for too; 0 where the system does not say."""
    count = 0
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                count += len(file.read().split())
    return count


def _read(descriptor: int) -> dict | None:
    head = _read_exactly(descriptor, HEAD_BYTES)
    body = _read_exactly(descriptor, frame_length(head)) if head else b""
    return json.loads(body) if body else None


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
    """Forks the guard. It sees the end of the run by the lifeline, a pipe whose other end only the run holds, and by
    the process itself where the system offers that (Linux), in case a fork of the run still holds the pipe."""
    worker = os.getpid()
    if os.fork():
        os.close(lifeline)
        return
    os.close(request)
    os.close(response)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
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
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kills the processes, but this one, that inherited this mark in their environment: those too that left the
    worker's process group. Linux only; elsewhere killing the group has to do. Repeated until two looks in a row find
    none: one may fork meanwhile, and in the middle of an exec a process shows no environment."""
    wanted = f"{MARKER}={mark}".encode()
    looks_left = 2
    for _ in range(20):
        found = [process for process in _processes() if process != os.getpid() and _carries(process, wanted)]
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        looks_left = 2 if found else looks_left - 1
        if not looks_left:
            return
        time.sleep(0.005)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _carries(process: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:
        return False
