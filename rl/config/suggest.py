"""Suggests the nearest valid name for one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(name: str, valid: Sequence[str]) -> str:
    """Hint for a name that does not exist: ` (nearest: x; valid: x, y, z)`."""
    valid = sorted(map(str, valid))
    if not valid:
        return ""
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    parts = [f"nearest: {close[0]}"] if close else []
    return f" ({'; '.join([*parts, 'valid: ' + ', '.join(valid)])})"
