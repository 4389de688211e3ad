"""Controls a worker process: starts it, sends it calls with a deadline, and kills it with all its
children."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from rewards.workers.worker import HEAD_BYTES, MARKER, frame_length, kill_group, kill_marked, pack

_CHUNK = 1 << 16
_OUTPUT_KEPT = 4000
_ANSWER_LIMIT = 1 << 26
_GRACE_S = 0.5
_BOOT = """\
import importlib.util, json, sys
sys.path[:] = json.loads(sys.argv[1])
__spec__ = importlib.util.find_spec("rewards.workers.spawned")
from rewards.workers.worker import main
main(*json.loads(sys.argv[2]))
"""


class WorkerLost(Exception):
    """The worker gave no answer and must be replaced. `kind` is "timeout" or "died"."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind
        self.text = text


class WorkerProcess:
    """One worker process in a session of its own.

    Ctrl-C in the terminal does not reach it, and killing its group also kills the children of the
    reward. Its output is read while a call runs, and the last 4,000 bytes are kept. A reward that
    uses jax runs on the CPU, because the run uses the accelerators.

    One thread uses the object; only `kill` may be called from others.
    """

    def __init__(self, memory_limit_mb: int | None = None):
        self._mark = uuid.uuid4().hex
        self._lock = threading.Lock()
        request_read, self._request = os.pipe()
        self._response, response_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        theirs = (request_read, response_write, lifeline_read)
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOT,
                    _search_path(),
                    json.dumps([*theirs, os.getpid(), memory_limit_mb]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=theirs,
                start_new_session=True,
                env={**os.environ, MARKER: self._mark, "JAX_PLATFORMS": "cpu"},
            )
        except OSError:
            for descriptor in (self._request, self._response, self._lifeline):
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        assert self._process.stdout is not None  # stdout=PIPE
        self._stdout = self._process.stdout
        self._output = self._stdout.fileno()
        self._tail = bytearray()
        self._incoming = bytearray()
        self._ended = None
        self._selector = selectors.DefaultSelector()
        for descriptor in (self._response, self._output):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        os.set_blocking(self._request, False)
        if hasattr(os, "pidfd_open"):
            self._ended = os.pidfd_open(self._process.pid)
            self._selector.register(self._ended, selectors.EVENT_READ)

    def ask(self, message: dict, timeout_s: float) -> dict:
        """Sends one message and returns its answer.

        Raises WorkerLost after `timeout_s` seconds without an answer, or if the process ends or
        breaks the protocol. The caller then closes this object.
        """
        deadline = time.monotonic() + timeout_s
        outgoing = memoryview(pack(message))
        self._selector.register(self._request, selectors.EVENT_WRITE)
        try:
            while True:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise WorkerLost(
                        "timeout", f"no answer within {timeout_s:.3g} s{self._printed()}"
                    )
                ready = {key.fd for key, _ in self._selector.select(remaining)}
                if self._request in ready:
                    outgoing = self._send(outgoing)
                    if not outgoing:
                        self._selector.unregister(self._request)
                if self._output in ready:
                    self._drain_output()
                if self._response in ready or self._ended in ready:
                    answer = self._receive()
                    if answer is not None:
                        return answer
                if self._ended in ready:  # a child of the reward may hold the pipe open
                    raise self._death()
        finally:
            if self._request in self._selector.get_map():
                self._selector.unregister(self._request)

    def kill(self) -> None:
        """Kills the process, its group and all other processes with its mark. Safe from any thread,
        at any time."""
        with self._lock:
            if (
                self._process.returncode is None
            ):  # after a wait the id may belong to another process
                kill_group(self._process.pid)
        kill_marked(self._mark)

    def close(self, grace: bool = False) -> None:
        """Ends the process and closes its pipes. With `grace` an idle worker has half a second to
        end by itself."""
        os.close(self._request)
        if grace:
            self._exit_status()
        self.kill()
        with self._lock:
            self._process.wait()
        self._selector.close()
        self._stdout.close()
        for descriptor in (self._response, self._lifeline, self._ended):
            if descriptor is not None:
                os.close(descriptor)

    def _send(self, outgoing: memoryview) -> memoryview:
        try:
            return outgoing[os.write(self._request, outgoing[:_CHUNK]) :]
        except BlockingIOError:
            return outgoing
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self) -> dict | None:
        """Returns the next answer, or None if it is not complete yet."""
        while piece := _read_available(self._response):
            self._incoming += piece
            if len(self._incoming) < HEAD_BYTES:
                continue
            size = frame_length(bytes(self._incoming[:HEAD_BYTES]))
            if size > _ANSWER_LIMIT:
                raise WorkerLost(
                    "died",
                    "the worker's answer is damaged: the reward wrote to the worker's own pipe",
                )
            if len(self._incoming) >= HEAD_BYTES + size:
                body = bytes(self._incoming[HEAD_BYTES : HEAD_BYTES + size])
                del self._incoming[: HEAD_BYTES + size]
                return _parse(body)
        if piece == b"":
            raise self._death()
        return None

    def _drain_output(self) -> bool:
        piece = _read_available(self._output)
        if piece == b"":
            self._selector.unregister(self._output)
        self._tail += piece or b""
        del self._tail[:-_OUTPUT_KEPT]
        return bool(piece)

    def _printed(self) -> str:
        for _ in range(
            64
        ):  # reads the rest of the pipe; bounded, because the process may go on printing
            if self._output not in self._selector.get_map() or not self._drain_output():
                break
        text = self._tail.decode(errors="replace").strip()
        return f"\nlast output of the worker:\n{text}" if text else ""

    def _death(self) -> WorkerLost:
        status = self._exit_status()
        if status is None:
            return WorkerLost("died", f"the worker ended or closed its pipe{self._printed()}")
        how = "exit code" if status.si_code == os.CLD_EXITED else "killed by signal"
        return WorkerLost(
            "died", f"the worker process ended ({how} {status.si_status}){self._printed()}"
        )

    def _exit_status(self) -> os.waitid_result | None:
        """Returns how the process ended, or None if it does not end within half a second.

        Does not reap the process, so that its id, which is also the id of its group, is not reused.
        """
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return None
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                return status
            time.sleep(0.002)
        return None


def _search_path() -> str:
    """Returns the worker's sys.path as JSON: the sys.path of this process, and the folder of this
    package."""
    package = str(Path(__file__).resolve().parents[2])
    path = [entry or os.getcwd() for entry in sys.path]
    return json.dumps(path if package in path else [*path, package])


def _read_available(descriptor: int) -> bytes | None:
    """Reads the available bytes: b"" at the end of the pipe, None if there are none yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None


def _parse(body: bytes) -> dict:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise WorkerLost(
            "died", "the worker's answer is damaged: the reward wrote to the worker's own pipe"
        )
    return answer
