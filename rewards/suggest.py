"""Suggests the nearest valid names for an unknown name. Every "unknown ..." message uses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 14  # names in a list that one line can show
_NEAREST = 3  # names shown of a longer list


def nearest(name: object, valid: Iterable[object]) -> str:
    """Returns the hint ` (nearest: x; valid: x, y, z)`, or ` (nearest: x, y, z; 30 are valid)` for more than 14 names.

    The hint has no `nearest` if a short list has no close name, and is "" if there is no valid name.
    """
    names = sorted(set(map(str, valid)))
    if not names:
        return ""
    if len(names) > _LISTED:
        close = difflib.get_close_matches(str(name), names, n=_NEAREST, cutoff=0.0)
        return f" (nearest: {', '.join(close)}; {len(names)} are valid)"
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    parts = [f"nearest: {close[0]}"] if close else []
    return f" ({'; '.join([*parts, 'valid: ' + ', '.join(names)])})"
