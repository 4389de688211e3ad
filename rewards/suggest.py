"""Suggests the nearest valid names for an unknown name. Every "unknown ..." message uses it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

_LISTED = 14  # names in a list that one line can show
_NEAREST = 3  # names shown of a longer list
_READ = 5000  # names of a folder that are compared
_CLOSE_PATH = 0.7  # similarity of a part of a path


def nearest(name: object, valid: Iterable[object]) -> str:
    """Returns the hint ` (nearest: x; valid: x, y, z)`, or ` (nearest: x, y, z; 30 are valid)` for
    more than 14 names.

    The hint has no `nearest` if a short list has no close name, and is "" if there is no valid
    name.
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


def nearest_path(path: str | Path) -> str:
    """Returns the hint ` (nearest: runs/first)` of a path that does not exist, or "" if none that
    exists is close.

    The nearest path has, for each part that does not exist, the most similar name in the folder so
    far.
    """
    path = Path(path)
    result = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not (result / part).exists():
            try:
                names = sorted(entry.name for entry in os.scandir(result))[:_READ]
            except OSError:
                return ""
            close = difflib.get_close_matches(part, names, n=1, cutoff=_CLOSE_PATH)
            if not close:
                return ""
            part = close[0]
        result /= part
    return "" if result == path else f" (nearest: {result})"
