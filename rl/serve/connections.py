"""Connections of clients: how many there may be, and how long each may wait without a request."""

from __future__ import annotations

import asyncio
import contextlib
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 4096
"""Most connections at a time."""
HEAD_SECONDS = 60.0
"""Seconds that a client has from one request, or its connection, to the head of the next one."""
_OTHER_FILES = 256  # that the process may have open besides connections


def most_connections() -> int:
    """Returns how many connections the server takes, and lets the process open as many files as
    that needs, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MOST_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - _OTHER_FILES))


class Connection(H11Protocol):
    """A connection that is closed if no complete head of a request comes in time, or if there are
    more than `limit_concurrency` of uvicorn, which answers the requests of the last one with 503.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, or closes it if there are too many."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of the client."""
        super().data_received(data)
        self._expect_head()

    def on_response_complete(self) -> None:
        """Goes on to the next request."""
        super().on_response_complete()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        super().connection_lost(exc)
        self._stop_waiting()

    def _expect_head(self) -> None:
        """Starts to wait for a request, unless one is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
