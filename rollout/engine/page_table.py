"""The page allocator: which pages of the cache hold the tokens of which sequence. Pure Python: no arrays, no device,
no clock.

A page has room for the entries of `size` tokens, in every layer. Sequences may share pages: the completions of a
prompt share the pages of the prompt, and a prompt shares the pages of an earlier one that begins with the same
tokens. A sequence never writes to a page that another one uses too; it writes to a copy.

A full page is indexed by its tokens and all tokens before them. It stays in the index when no sequence uses it any
more, until its room is needed; the page that became idle first is reused first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollout.engine.prefix_index import PrefixIndex, is_worth_sharing

# The index key of a page: the key of the page before it, and its own tokens.
Key = tuple["Key | None", tuple[int, ...]]


@dataclass
class Chain:
    """The pages of a sequence in the order of its tokens. weights: the version of the weights that computed its first
    entries."""

    pages: list[int] = field(default_factory=list)
    weights: int = 0


@dataclass(frozen=True)
class PageCopy:
    """Page `source` must be copied to page `target` before the sequence writes."""

    source: int
    target: int


class PageTable:
    """Allocates pages first + 1 .. first + pages - 1, with room for `size` tokens each. Page `first` is never
    allocated: table entries without a page point to it.

    Raises ValueError for fewer than 2 pages and for pages without room."""

    def __init__(self, pages: int, size: int, first: int = 0):
        if pages < 2 or size < 1:
            raise ValueError(
                f"PageTable: {pages} pages of {size} tokens; there must be at least 2, of at least 1 token"
            )
        self.size = size
        self._free = list(range(first + 1, first + pages))  # a heap: the lowest is allocated first
        self._users, self._weights = dict.fromkeys(self._free, 0), 0
        self._known: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # indexed pages without a user, in the order in which they became idle

    @property
    def available(self) -> int:
        """Returns the number of pages that can be allocated."""
        return len(self._free) + len(self._idle)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Returns the indexed pages that hold the first of these tokens, as many as follow each other."""
        pages = []
        for key in self._keys_of(tokens):
            if (page := self._known.get(key)) is None:
                break
            pages.append(page)
        return pages

    def _keys_of(self, tokens: Sequence[int]) -> Iterator[Key]:
        """Yields the index key of each page that these tokens fill."""
        key = None
        for start in range(0, len(tokens) - self.size + 1, self.size):
            key = (key, tuple(tokens[start : start + self.size]))
            yield key

    def open(self, pages: Sequence[int] = ()) -> Chain:
        """Opens a sequence that begins with these pages."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        return Chain(list(pages), self._weights)

    def share(self, chain: Chain, tokens: int) -> Chain:
        """Opens another sequence with the same first `tokens` tokens."""
        other = self.open(chain.pages[: -(-tokens // self.size)])
        other.weights = chain.weights
        return other

    def missing(self, chain: Chain, start: int, end: int) -> int:
        """Returns the number of pages that `reserve` would allocate."""
        return self._copied(chain, start, end) + max(0, -(-end // self.size) - len(chain.pages))

    def reserve(self, chain: Chain, start: int, end: int) -> list[PageCopy] | None:
        """Allocates pages for tokens start .. end - 1 of a sequence that has its tokens before `start`. Returns the
        page copies that must run first. Returns None and changes nothing if there are not enough pages."""
        if self.missing(chain, start, end) > self.available:
            return None
        copies = []
        if self._copied(chain, start, end):
            first = start // self.size
            copies = [PageCopy(chain.pages[first], self._take())]
            self._drop(chain.pages[first])
            chain.pages[first] = copies[0].target
        chain.pages += [self._take() for _ in range(-(-end // self.size) - len(chain.pages))]
        return copies

    def _copied(self, chain: Chain, start: int, end: int) -> bool:
        """Whether the first page to write is shared with another sequence, or is in the index."""
        first = start // self.size
        if end <= start or first >= len(chain.pages):
            return False
        return self._users[chain.pages[first]] > 1 or chain.pages[first] in self._keys

    def remember(self, chain: Chain, tokens: Sequence[int]) -> None:
        """Indexes the pages that these tokens fill; their entries must be in the cache. Of pages with equal tokens
        the first stays in the index. Pages that older weights computed are not indexed."""
        if chain.weights != self._weights:
            return
        for page, key in zip(chain.pages, self._keys_of(tokens), strict=False):
            if key not in self._known and page not in self._keys:
                self._known[key], self._keys[page] = page, key

    def close(self, chain: Chain) -> None:
        """Releases the pages, the last one first: a page is of no use without the pages before it."""
        for page in reversed(chain.pages):
            self._drop(page)
        chain.pages = []

    def forget(self) -> None:
        """Empties the index: the weights have changed."""
        for page in self._idle:
            heapq.heappush(self._free, page)
        for index in (self._idle, self._known, self._keys):
            index.clear()
        self._weights += 1

    def _take(self) -> int:
        """Allocates a page: a free one, else the one that became idle first."""
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._keys.pop(page)]
        self._users[page] = 1
        return page

    def _drop(self, page: int) -> None:
        if self._users[page] < 1:
            raise ValueError(f"page {page} is released by a sequence that does not have it")
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._keys:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)


class PagedRows:
    """Tracks the pages of the slots of a paged cache, and the free slots: the same calls as `rollout.engine.rows.Rows`.

    tables: one allocator for each part into which a mesh splits the slots; slots of a part have their pages in its
    table.
    supports_truncation: whether a sequence has nothing but pages. If not, states of fixed size belong to it, and a
    sequence can only begin with another that holds exactly its tokens.
    ample: whether there are pages for every slot at full length.
    """

    def __init__(self, slots: int, tables: Sequence[PageTable], *, supports_truncation: bool, ample: bool = False):
        self.supports_truncation, self.parts, self._ample = supports_truncation, len(tables), ample
        self._tables, self._slots = tables, slots
        self._table_of = [tables[self.part(slot)] for slot in range(slots)]
        self._free: list[dict[int, None]] = [{} for _ in tables]  # by part, in the order in which they became free
        for slot in range(slots):
            self._free[self.part(slot)][slot] = None
        self._held: list[tuple[int, ...]] = [()] * slots
        self._index = [PrefixIndex() for _ in tables]  # the tokens of `_held`, by part
        self._chains = [Chain() for _ in range(slots)]
        self._begun: dict[tuple[int, ...], int] = {}  # the slot that last began with these tokens
        self._pinned: tuple[PageTable, Chain] | None = None

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def part(self, slot: int) -> int:
        return slot * self.parts // self._slots

    def allocate(self, tokens: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns (slot, source, same): a free slot for these tokens, and the slot whose first `same` entries it begins
        with. The source is the slot itself if indexed pages hold them.
        """
        offers = [part for part in range(self.parts) if self._free[part]]
        part = max(offers, key=lambda part: (self._find(part, tokens)[1], len(self._free[part]), -part))
        slot = next(iter(self._free[part]))
        del self._free[part][slot]
        return slot, *self.reallocate(slot, tokens)

    def reallocate(self, slot: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (source, same), as `allocate` says, for a slot that is in use and begins from nothing."""
        self.clear(slot)
        source, same, pages = self._find(self.part(slot), tokens)
        self._hold(slot, tokens)
        self._begun[tokens], self._chains[slot] = slot, self._table_of[slot].open(pages)
        if source < 0:
            return slot, same
        self.share(source, slot, same)
        return source, same

    def _hold(self, slot: int, tokens: tuple[int, ...]) -> None:
        self._held[slot] = tokens
        self._index[self.part(slot)].add(slot, tokens)

    def share(self, source: int, slot: int, same: int) -> None:
        """Replaces the pages of a slot by the pages of the first `same` tokens of another.

        Raises ValueError if the two slots are in different parts of the cache."""
        table = self._table_of[slot]
        if table is not self._table_of[source]:
            raise ValueError(f"slots {source} and {slot} are in different parts of the cache")
        self._replace(slot, table.share(self._chains[source], same))

    def _replace(self, slot: int, chain: Chain) -> None:
        """Replaces the pages of a slot. The new ones are open already, because some may be its own."""
        before, self._chains[slot] = self._chains[slot], chain
        self._table_of[slot].close(before)

    def _find(self, part: int, tokens: tuple[int, ...]) -> tuple[int, int, list[int]]:
        """Returns (slot or -1, same, indexed pages): who has the most of the first of these tokens, a slot in use or
        the page index.
        """
        begun = self._begun.get(tokens, -1) if tokens else -1
        if begun >= 0 and begun not in self._free[part] and self.part(begun) == part and self._held[begun] == tokens:
            return begun, len(tokens), []
        if not self.supports_truncation:
            slot = self._index[part].exact(tokens)
            return (slot, len(tokens), []) if slot >= 0 else (-1, 0, [])
        pages = self._tables[part].find(tokens)
        indexed = len(pages) * self._tables[part].size
        slot, same = self._index[part].longest(tokens)
        return (slot, same, []) if same > indexed and is_worth_sharing(same, tokens) else (-1, indexed, pages)

    def fits(self, spans: Iterable[tuple[int, int, int]]) -> bool:
        """Whether each (slot, start, end) can have pages for its tokens start .. end - 1, all at the same time."""
        missing = [0] * self.parts
        for slot, start, end in () if self._ample else spans:
            missing[self.part(slot)] += self._table_of[slot].missing(self._chains[slot], start, end)
        return all(m <= table.available for m, table in zip(missing, self._tables, strict=True))

    def reserve(self, slot: int, start: int, end: int) -> list[PageCopy] | None:
        """Allocates pages for a slot, as PageTable.reserve does."""
        return self._table_of[slot].reserve(self._chains[slot], start, end)

    def pages(self, slot: int) -> list[int]:
        return self._chains[slot].pages

    def filled(self, slot: int, tokens: tuple[int, ...]) -> None:
        """The slot has the entries of these tokens in the cache."""
        if self.supports_truncation:
            self._table_of[slot].remember(self._chains[slot], tokens)

    def advance(self, slot: int) -> None:
        """The slot decodes beyond the tokens that it was allocated for."""
        if not self.supports_truncation:
            self._hold(slot, ())

    def clear(self, slot: int) -> None:
        """Releases the pages of a slot that stays in use."""
        self._table_of[slot].close(self._chains[slot])
        self._hold(slot, ())

    def free(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Frees a slot that holds these tokens. Raises ValueError if it is free already."""
        free = self._free[self.part(slot)]
        if slot in free:
            raise ValueError(f"slot {slot} is free already")
        self.filled(slot, tokens)
        self.clear(slot)
        free[slot] = None
        if len(self._begun) > 4 * self._slots:
            self._begun = {held: n for n, held in enumerate(self._held) if held}

    def pin(self, slot: int, tokens: int) -> None:
        """Keeps the pages of a slot's first `tokens` tokens in use, whatever becomes of the slot. Unpins earlier
        ones."""
        self.unpin()
        self._pinned = self._table_of[slot], self._table_of[slot].share(self._chains[slot], tokens)

    def unpin(self) -> None:
        """Releases the pinned pages, if there are any."""
        if self._pinned:
            table, chain = self._pinned
            table.close(chain)
        self._pinned = None

    def start_from_pinned(self, slot: int) -> bool:
        """Replaces the pages of a slot by the pinned ones. False if they lie in another part of the cache."""
        if self._pinned is None or self._pinned[0] is not self._table_of[slot]:
            return False
        table, chain = self._pinned
        self._replace(slot, table.share(chain, len(chain.pages) * table.size))
        return True

    def forget(self) -> None:
        """Lets no sequence begin with what the slots hold. The lowest free slot is allocated next, whatever ran
        before."""
        self.unpin()
        for table in self._tables:
            table.forget()
        self._held = [()] * self._slots
        self._index = [PrefixIndex() for _ in self._tables]
        self._free = [dict.fromkeys(sorted(free)) for free in self._free]
