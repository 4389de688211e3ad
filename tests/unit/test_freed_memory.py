"""Freed memory goes back to the operating system."""

from pathlib import Path

import pytest

from policy.programs import freed_memory

PIECE, COUNT = 4_000, 10_000  # 40 MB, in pieces that the C library does not map one by one


def resident() -> int:
    """Bytes of the process that lie in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


@pytest.mark.skipif(freed_memory._trim() is None, reason="needs glibc")
def test_pieces_below_one_that_is_kept_go_back():
    pieces = [bytearray(b"1" * PIECE) for _ in range(COUNT)]
    last = pieces.pop()  # the heap ends after it, so the C library alone shortens nothing
    del pieces
    before = resident()
    freed_memory.give_back()
    assert resident() < before - PIECE * COUNT / 2
    assert len(last) == PIECE
