"""Memory that a program has freed and the C library still holds."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Gives freed memory back to the operating system, where the C library is glibc.

    A compiler and programs free hundreds of MB in small pieces. glibc keeps them, next to the large
    arrays of the programs that run afterwards.
    """
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """Returns glibc's function; None: the system has none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
