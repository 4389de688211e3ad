"""Suggests the nearest valid name for an unknown name. Every "unknown ..." message uses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, valid: Iterable[object]) -> str:
    """Returns the hint ` (nearest: x; valid: x, y, z)`.

    The hint has no `nearest` if no name is close, and is "" if there is no valid name.
    """
    names = sorted(map(str, valid))
    if not names:
        return ""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    parts = [f"nearest: {close[0]}"] if close else []
    return f" ({'; '.join([*parts, 'valid: ' + ', '.join(names)])})"
