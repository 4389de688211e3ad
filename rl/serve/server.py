"""Listens, answers until it is asked to end, and lets running requests end first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

import uvicorn

from rl.listener import listen, read_token, valid_token
from rl.serve.app import application
from rl.serve.connections import Connection, most_connections
from rl.serve.service import Service

_LOOK = 0.05  # seconds between looks at what still runs, while the server ends


class DrainingServer(uvicorn.Server):
    """A server that refuses new requests after the first signal and ends when the others have
    ended, or after the second signal."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers requests until a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Takes SIGINT and SIGTERM. (uvicorn would raise the signal again at its end.)"""
        if self._service.draining or self._loop is None:
            self.force_exit = True
            self.should_exit = True
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        end = time.monotonic() + self._service.limits.drain
        while self._service.active and time.monotonic() < end:
            await asyncio.sleep(_LOOK)
        self.force_exit = bool(self._service.active)
        self.should_exit = True


def server_config(service: Service, host: str, token: str | None) -> uvicorn.Config:
    """Returns how uvicorn runs the server."""
    return uvicorn.Config(
        application(service, host, token),
        http=Connection,
        limit_concurrency=most_connections(),
        ws="none",
        log_level="error",  # requests that are no HTTP are the client's matter
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=30,
    )


def serve(service: Service, listener: socket.socket, host: str, token: str | None) -> None:
    """Serves on a bound socket until SIGTERM or Ctrl-C. Raises ResourceError if another process
    has taken the port."""
    listen(listener)
    config = server_config(service, host, token)
    service.engine.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            DrainingServer(config, service).run(sockets=[listener])
    finally:
        service.close()


def key(token_file: str | None) -> str | None:
    """Returns the key that requests must have: that of the file or of DUET_API_KEY; None: none."""
    if token_file is not None:
        return read_token(token_file)
    if text := os.environ.get("DUET_API_KEY", "").strip():
        return valid_token(text, "DUET_API_KEY")
    return None
