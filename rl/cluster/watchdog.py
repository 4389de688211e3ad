"""How the processes of a run end when one of them is lost.

Left alone, jax ends the others in one of three ways: a collective fails with a message about a socket, it waits for ever, or missed
heartbeats abort the process. None says which process it was. So process 0 keeps a connection to each of the others here. A process
that dies takes its connections with it, at once; one whose machine is gone falls silent. Process 0 tells the rest, and all end
with the text and the exit code of `ProcessLost`.

A process that ends by an error of its own says so first, and leaves the others a moment: most errors are found by all.
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

# Seconds: between two signs of life, and of silence after which a process is lost.
BEAT, SILENCE = 1.0, 12.0
# Seconds for a process to come to its own end once another has said why it ends.
GRACE = 4.0
# Seconds to connect.
START = 60.0


@dataclass(eq=False)
class _Peer:
    """A connection to another process. It carries lines of JSON; {} is a sign of life."""

    socket: socket.socket
    name: str = ""
    heard: float = field(default_factory=time.monotonic)
    rest: bytes = b""

    def say(self, **message) -> None:
        with contextlib.suppress(OSError):  # who has gone is noticed by listening
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> list[dict] | None:
        """What it has said; None: it has gone."""
        try:
            found = self.socket.recv(1 << 16)
        except OSError:
            return None
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + found).split(b"\n")
        return [json.loads(line) for line in lines] if found else None


class Watch:
    """Connections between process 0 and each of the others, and the thread that listens to them. Entered around what all do
    together; `leave` ends the process afterwards."""

    def __init__(self, host: str, local: bool):
        """Connects, with the help of all. `host`: the machine of process 0; `local`: no other machine may reach it."""
        self.index, self.count = processes.index(), processes.count()
        self.name = f"process {self.index} of {self.count} ({socket.gethostname()}, pid {os.getpid()})"
        self._leaving, self._saying, self._silent = threading.Lock(), threading.Lock(), False
        self._doom: tuple[float, str] | None = None  # when this process ends, and why
        self._doomed, self._over = threading.Event(), threading.Event()
        if self.index == 0:
            with socket.create_server((host if local else "", 0), backlog=self.count) as server:
                server.settimeout(START)
                token = secrets.token_hex(16)
                processes.broadcast((server.getsockname()[1], token))
                self._peers: list[_Peer] = []
                while len(self._peers) < self.count - 1:
                    self._peers += self._met(server.accept()[0], token)
        else:
            port, token = processes.broadcast(None)
            self._peers = self._met(socket.create_connection((host, port), timeout=START), token)
        # Where process 0 is gone jax aborts within 0.1 s, before a thread of Python could say why. With this handler the thread of
        # jax sleeps first, for as many seconds as the number of the signal is, 6.
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def _met(self, connection: socket.socket, token: str) -> list[_Peer]:
        """The process at the other end, after both have said who they are; none if it is a stranger."""
        connection.settimeout(SILENCE)
        peer = _Peer(connection)
        peer.say(token=token, name=self.name)
        said: list[dict] | None = []
        while said == []:
            with contextlib.suppress(ValueError):
                said = peer.hear()
        if not said or said[0].get("token") != token:
            connection.close()
            return []
        peer.name = said[0]["name"]
        return [peer]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind, error, _) -> None:
        if error is None:
            return
        from jax.errors import JaxRuntimeError

        # A collective that failed, or a barrier that was not reached: in a moment it is known for whom, and this process ends.
        if isinstance(error, (JaxRuntimeError, TimeoutError)) and self._doomed.wait(2 * BEAT):
            time.sleep(60)
        text = f"{error.heading}: {error}" if isinstance(error, DuetError) else f"{kind.__name__}: {error}"
        self._tell(lost=f"{self.name} ended: {text}", grace=GRACE)

    def leave(self, code: int) -> None:
        """Ends the process with this exit code, after the others have been told; returns if it is 0 and all have done."""
        if code == 0:
            import jax

            with self._saying:
                self._silent = True
                for peer in self._peers:
                    peer.say(done=True)
            self._over.wait()  # until all have said so
            jax.distributed.shutdown()
            return
        self._exit(code)

    def _tell(self, **message) -> None:
        """Nothing follows `done`: what a process has not read when it closes a connection takes away what the other has not."""
        with self._saying:
            for peer in () if self._silent else self._peers:
                peer.say(**message)

    def _listen(self) -> None:
        """The thread: what the others say, and whether they do."""
        selector, beat = selectors.DefaultSelector(), 0.0
        for peer in self._peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        watched = list(self._peers)
        while watched or self._doom or not self._silent:
            for key, _ in selector.select(BEAT / 2):
                if self._take(key.data):
                    selector.unregister(key.fileobj)
                    watched.remove(key.data)
            now = time.monotonic()
            if now >= beat:
                self._tell()
                beat = now + BEAT
            for peer in watched:
                if now - peer.heard > SILENCE:
                    self._lose(f"{peer.name} has been silent for {SILENCE:.0f} s")
            if self._doom and now >= self._doom[0]:
                print(f"{ProcessLost.heading}: {self._doom[1]}", file=sys.stderr)
                self._exit(ProcessLost.exit_code)
        self._over.set()

    def _take(self, peer: _Peer) -> bool:
        """Hears a process; whether that was its last word."""
        said = peer.hear()
        if said is None:
            self._lose(f"{peer.name} has gone without a word")
        gone = said is None
        for message in said or ():
            gone = gone or "done" in message
            if "lost" in message:
                self._lose(message["lost"], message["grace"])
        return gone

    def _lose(self, text: str, grace: float = 0.0) -> None:
        """Lets this process end after the grace, and process 0 tell the others. What came first is the reason."""
        if self._doom is None:
            if self.index == 0:
                self._tell(lost=text, grace=grace)
            self._doom = time.monotonic() + grace, text
            self._doomed.set()

    def _exit(self, code: int) -> None:
        """Ends the process without jax's own farewell, which waits for all. Process 0 goes last: without a coordinator jax aborts
        the others before they have said why they end."""
        with self._leaving:  # of two threads the first; it never comes back
            until = time.monotonic() + GRACE + 1
            while any(list(map(_alive, self._peers))) and self.index == 0 and time.monotonic() < until:
                time.sleep(0.02)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _alive(peer: _Peer) -> bool:
    """Whether the other end is still open. What it says is of no matter any more."""
    try:
        peer.socket.setblocking(False)
        return peer.socket.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
