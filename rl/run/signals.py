"""Signals that stop a run after its step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """While entered, SIGTERM and the first Ctrl-C only set `received`, so that the loop stops after
    its step.

    The second Ctrl-C stops at once.
    """

    def __init__(self):
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._receive)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
