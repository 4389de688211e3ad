"""Tells whether arrays are the same objects as at the last call."""

from __future__ import annotations

import weakref
from collections.abc import Collection


class ArrayIdentity:
    """Tells whether arrays are the same objects as those of the last call. It holds them by weak
    references, so that it keeps no array alive."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref] = []

    def update(self, arrays: Collection[object]) -> bool:
        """Records these arrays. Returns whether they are others than the last ones."""
        if len(self._seen) == len(arrays) and all(
            ref() is array for ref, array in zip(self._seen, arrays, strict=True)
        ):
            return False
        self._seen = [weakref.ref(array) for array in arrays]
        return True
