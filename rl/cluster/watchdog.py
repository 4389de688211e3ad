"""Ends all processes of a run when one of them is lost.

Without this module, jax ends the others in one of three ways: a collective fails with a message
about a socket, it waits forever, or missed heartbeats abort the process. None of them names the
lost process. Therefore process 0 keeps a connection to each other process. The connection of a
process that dies closes immediately; the connection of a machine that is gone falls silent. Process
0 tells the rest, and all end with the message and exit code of `ProcessLost`.

A process that ends with its own error announces it and gives the others a few seconds: most errors
occur on all.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

from policy.mesh import processes
from rl.errors import DuetError, ProcessLost

# Seconds between two heartbeats, and without a message until a process counts as lost.
BEAT = 1.0
SILENCE = 12.0
# Seconds in which a process can end with its own error after another has announced its end.
GRACE = 4.0
# Seconds in which a process must connect.
START = 60.0


@dataclass(eq=False)
class _Peer:
    """A connection to another process. It carries lines of JSON; {} is a heartbeat."""

    socket: socket.socket
    name: str = ""
    last_message: float = field(default_factory=time.monotonic)
    rest: bytes = b""

    def send(self, **message: object) -> None:
        """Sends a message. Ignores a closed connection, which `receive` reports."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """Returns the messages that have arrived, or None if the connection is closed."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        self.last_message = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None


class Watch:
    """Connections between process 0 and each other process, and the thread that reads them.

    The context manager encloses the work of all processes; `leave` ends the process afterwards.
    """

    def __init__(self, host: str, local: bool):
        """Connects; all processes must call this.

        host: machine of process 0.
        local: whether process 0 accepts connections from its own machine only.
        """
        self.index = processes.index()
        self.count = processes.count()
        self.name = (
            f"process {self.index} of {self.count} ({socket.gethostname()}, pid {os.getpid()})"
        )
        self._exiting = threading.Lock()
        self._sending = threading.Lock()
        self._silent = False
        self._end: tuple[float, str] | None = (
            None  # time at which this process ends, and the reason
        )
        self._end_set = threading.Event()
        self._all_done = threading.Event()
        if self.index == 0:
            with socket.create_server((host if local else "", 0), backlog=self.count) as server:
                server.settimeout(START)
                token = secrets.token_hex(16)
                processes.broadcast((server.getsockname()[1], token))
                self._peers: list[_Peer] = []
                while len(self._peers) < self.count - 1:
                    self._peers += self._handshake(server.accept()[0], token)
        else:
            port, token = processes.broadcast(None)
            self._peers = self._handshake(
                socket.create_connection((host, port), timeout=START), token
            )
        # When process 0 is gone, jax aborts before a Python thread can print the reason. With this
        # handler the thread of jax first sleeps for as many seconds as the number of the signal, 6.
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def _handshake(self, connection: socket.socket, token: str) -> list[_Peer]:
        """Exchanges token and name. Returns the peer, or an empty list if the token is wrong."""
        connection.settimeout(SILENCE)
        peer = _Peer(connection)
        peer.send(token=token, name=self.name)
        messages: list[dict] | None = []
        while messages == []:
            with contextlib.suppress(ValueError):
                messages = peer.receive()
        if not messages or messages[0].get("token") != token:
            connection.close()
            return []
        peer.name = messages[0]["name"]
        return [peer]

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is None:
            return
        from jax.errors import JaxRuntimeError

        # After a failed collective or barrier, wait until the reader knows the lost process and
        # ends this one.
        if isinstance(error, (JaxRuntimeError, TimeoutError)) and self._end_set.wait(2 * BEAT):
            time.sleep(60)
        text = (
            f"{error.heading}: {error}"
            if isinstance(error, DuetError)
            else f"{type(error).__name__}: {error}"
        )
        self._send_all(lost=f"{self.name} ended: {text}", grace=GRACE)

    def leave(self, code: int) -> None:
        """Tells the others and ends the process with this exit code. Returns only for code 0, once
        all are done."""
        if code == 0:
            import jax

            with self._sending:
                self._silent = True
                for peer in self._peers:
                    peer.send(done=True)
            self._all_done.wait()
            jax.distributed.shutdown()
            return
        self._exit(code)

    def _send_all(self, **message: object) -> None:
        """Sends a message to all peers, none after `done`: a socket that is closed with unread data
        loses output."""
        with self._sending:
            for peer in () if self._silent else self._peers:
                peer.send(**message)

    def _listen(self) -> None:
        """Reads messages and checks heartbeats, in a thread of its own."""
        selector = selectors.DefaultSelector()
        beat = 0.0
        for peer in self._peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        watched = list(self._peers)
        while watched or self._end or not self._silent:
            for key, _ in selector.select(BEAT / 2):
                if self._process_messages(key.data):
                    selector.unregister(key.fileobj)
                    watched.remove(key.data)
            now = time.monotonic()
            if now >= beat:
                self._send_all()
                beat = now + BEAT
            for peer in watched:
                if now - peer.last_message > SILENCE:
                    self._lose(f"{peer.name} has been silent for {SILENCE:.0f} s")
            if self._end and now >= self._end[0]:
                print(f"{ProcessLost.heading}: {self._end[1]}", file=sys.stderr)
                self._exit(ProcessLost.exit_code)
        self._all_done.set()

    def _process_messages(self, peer: _Peer) -> bool:
        """Processes the messages of a peer. Returns whether it has sent its last."""
        messages = peer.receive()
        if messages is None:
            self._lose(f"{peer.name} has gone without a word")
        gone = messages is None
        for message in messages or ():
            gone = gone or "done" in message
            if "lost" in message:
                self._lose(message["lost"], message["grace"])
        return gone

    def _lose(self, text: str, grace: float = 0.0) -> None:
        """Schedules the end of this process in `grace` seconds; process 0 tells the others. The
        first reason counts."""
        if self._end is None:
            if self.index == 0:
                self._send_all(lost=text, grace=grace)
            self._end = time.monotonic() + grace, text
            self._end_set.set()

    def _exit(self, code: int) -> None:
        """Ends the process without jax's shutdown, which waits for all.

        Process 0 ends last: without a coordinator jax aborts the others before they print their
        reason.
        """
        with self._exiting:  # held by the first thread, which does not return
            until = time.monotonic() + GRACE + 1
            while (
                any(list(map(_alive, self._peers))) and self.index == 0 and time.monotonic() < until
            ):
                time.sleep(0.02)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _alive(peer: _Peer) -> bool:
    """Tells whether the other end is still open. Discards its messages."""
    try:
        peer.socket.setblocking(False)
        return peer.socket.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
