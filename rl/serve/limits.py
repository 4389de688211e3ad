"""What a server accepts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """What a server accepts.

    queue: most completions that wait for a slot. samples: most of a prompt. body: most bytes of a
    request. drain: seconds that requests have to end after SIGTERM. sending: seconds that a client
    has to send a body.
    """

    queue: int = 256
    samples: int = 16
    body: int = 4 << 20
    drain: float = 30.0
    sending: float = 60.0
