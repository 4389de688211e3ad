"""The rows of a contiguous cache: what they hold, and which are free; and the shape of a cache. Pure Python: no
arrays, no device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout.engine.page_table import PageCopy
from rollout.engine.prefix_index import common_length, is_worth_sharing


@dataclass(frozen=True)
class CacheGeometry:
    """The shape of a cache.

    parts: into how many equal parts a mesh splits the slots.
    supports_truncation: whether a row can be used up to any of its tokens. A state of fixed size cannot: it is only
    valid after the last token that it has seen.
    table_width: pages of a row; None: the cache is contiguous.
    listed_sizes: numbers of rows, besides all slots, that a decode can run on; None: powers of two.
    """

    slots: int
    parts: int = 1
    supports_truncation: bool = True
    table_width: int | None = None
    listed_sizes: tuple[int, ...] | None = None

    @property
    def paged(self) -> bool:
        return self.table_width is not None

    @property
    def copies_batch(self) -> bool:
        """Whether a decode on fewer rows than all has a cache of its own."""
        return not self.paged

    @property
    def copies_rows(self) -> bool:
        """Whether a slot that begins like another needs more than its pages."""
        return not (self.paged and self.supports_truncation)

    @property
    def pins_prefixes(self) -> bool:
        """Whether a slot that decodes leaves nothing to the next sample of its prompt: its states have moved on, or
        its last page is not indexed."""
        return self.paged or not self.supports_truncation

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of rows that a decode can run on: the listed ones that the mesh can split as it splits the slots, and
        all slots."""
        listed = self.listed_sizes
        if listed is None:
            listed = tuple(1 << n for n in range(self.slots.bit_length()))
        return (*(n for n in sorted(set(listed)) if n < self.slots and n % self.parts == 0), self.slots)


class Rows:
    """Tracks the tokens in the rows of a contiguous cache, and the free rows.

    A row keeps its entries when its request ends, until another request takes it. So a prompt can begin with the
    entries of an
    earlier one: the samples of one prompt, the turns of a conversation, prompts with one system message.

    supports_truncation: as in CacheGeometry.
    """

    parts = 1

    def __init__(self, slots: int, *, supports_truncation: bool):
        self.supports_truncation = supports_truncation
        self._free = dict.fromkeys(range(slots))  # in the order in which they became free
        self._outdated: set[int] = set()  # rows that were in use when everything was forgotten
        self._held: list[tuple[int, ...]] = [()] * slots
        self._begun: dict[tuple[int, ...], int] = {}  # the row that was last allocated for these tokens

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (row, same): the row that holds the most of the first of these tokens, and how many.

        Of equal rows a free one goes first, then the lowest. (-1, 0) if no row is worth copying.
        """
        row = self._begun.get(tokens) if tokens else None
        if row is not None and self._same(row, tokens) == len(tokens):
            return row, len(tokens)
        same, _, negative = max(
            ((self._same(row, tokens), row in self._free, -row) for row in range(len(self._held))),
            default=(0, False, 0),
        )
        return (-negative, same) if is_worth_sharing(same, tokens) else (-1, 0)

    def _same(self, row: int, tokens: tuple[int, ...]) -> int:
        held = self._held[row]
        same = common_length(held, tokens)
        return same if self.supports_truncation or same == len(held) else 0

    def allocate(self, tokens: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns (row, source, same): a free row for these tokens, and the row whose first `same` entries it begins
        with. A free source is itself allocated; otherwise the row that became free first.
        """
        source, same = self.find(tokens)
        row = source if source in self._free else next(iter(self._free))
        del self._free[row]
        self._held[row], self._begun[tokens] = tokens, row
        return row, source, same

    def clear(self, row: int) -> None:
        """Empties a row that stays in use."""
        self._held[row] = ()

    def reallocate(self, row: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (source, same), as `allocate` does, for an empty row in use that will hold these tokens."""
        source, same = self.find(tokens)
        self._held[row], self._begun[tokens] = tokens, row
        return source, same

    def advance(self, row: int) -> None:
        """The row decodes beyond the tokens that it was allocated for."""
        if not self.supports_truncation:
            self._held[row] = ()

    def free(self, row: int, tokens: tuple[int, ...]) -> None:
        """Frees a row that holds these tokens. Raises ValueError if it is free already."""
        if row in self._free:
            raise ValueError(f"row {row} is free already")
        self._free[row] = None
        self._held[row] = () if row in self._outdated else tokens
        self._outdated.discard(row)
        if len(self._begun) > 4 * len(self._held):
            self._begun = {t: r for t, r in self._begun.items() if self._same(r, t) == len(t)}

    def forget(self) -> None:
        """Lets no sequence begin with what the rows hold. The lowest free row is allocated next, whatever ran
        before."""
        self._free = dict.fromkeys(sorted(self._free))
        self._outdated = set(range(len(self._held))) - self._free.keys()
        self._held = [()] * len(self._held)
        self._begun.clear()

    # The calls that matter for pages only (PagedRows). Here every row has room for all that it may hold.

    def part(self, row: int) -> int:
        return 0

    def fits(self, spans: Iterable[tuple[int, int, int]]) -> bool:
        return True

    def reserve(self, row: int, start: int, end: int) -> list[PageCopy] | None:
        return []

    def pages(self, row: int) -> list[int]:
        return []

    def share(self, source: int, row: int, same: int) -> None: ...

    def filled(self, row: int, tokens: tuple[int, ...]) -> None: ...

    def pin(self, row: int, tokens: int) -> None: ...

    def unpin(self) -> None: ...

    def start_from_pinned(self, row: int) -> bool:
        return True
