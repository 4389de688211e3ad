"""Where the entries of blocks lie: entries that stand for `rate` tokens of a sequence each, not for
one.

The entry of a block has the position of the last token of the block. It is written when that token
is, so pages with the same tokens hold the same entries, and rows may share them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import numpy as np

Positions = TypeVar("Positions", jax.Array, np.ndarray)


class BlockEntries(NamedTuple):
    """Entries of blocks of `rate` tokens. page: the tokens of a page; None: entries are contiguous,
    entry w for block w."""

    rate: int
    page: int | None = None

    @property
    def per_page(self) -> int:
        """Returns the places of a page for entries. Where `rate` does not divide its tokens some
        stay free."""
        assert self.page is not None, "contiguous entries have no pages"
        return -(-self.page // self.rate)

    def places(self, ends: Positions) -> Positions:
        """Returns the place among all places of a row of the entries at these positions."""
        if self.page is None:
            return ends // self.rate
        return ends // self.page * self.per_page + ends % self.page // self.rate

    def ends(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the position of the entry at each of the first `count` places int32[count],
        whether the place is ever filled bool[count])."""
        place = np.arange(count, dtype=np.int32)
        if self.page is None:
            return (place + 1) * self.rate - 1, np.ones(count, bool)
        page, slot = np.divmod(place, self.per_page)
        first = page * self.page + slot * self.rate
        ends = first + (self.rate - 1 - first) % self.rate
        return ends, ends < np.minimum(first + self.rate, (page + 1) * self.page)
