"""Which pages of the cache hold the tokens of which sequence. Pure Python: no arrays, no device, nothing that depends on time.

A page has room for the entries of `size` tokens, in every layer. Sequences may share pages: the completions of one prompt share
those of the prompt, and a prompt shares those of an earlier one that begins with the same tokens. Nobody writes to a page that
somebody else uses too; who has to gets a copy.

Pages that are full of known tokens can be found by what they hold, together with all that stands before them. They stay findable
when nobody uses them any more, until their room is needed; the one that was given up first goes first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollout.engine.scheduler import common, worth_a_copy

# The tokens of a page behind those of the pages before it, as nested pairs.
Key = tuple["Key | None", tuple[int, ...]]


@dataclass
class Chain:
    """The pages of a sequence in the order of its tokens. `weights`: the number of the weights that made the first of its
    entries."""

    pages: list[int] = field(default_factory=list)
    weights: int = 0


@dataclass(frozen=True)
class Copy:
    """Page `source` has to be copied to page `target` before the sequence writes."""

    source: int
    target: int


class PageTable:
    """Pages first .. first + pages - 1, of which the first is never given away, with room for `size` tokens each."""

    def __init__(self, pages: int, size: int, first: int = 0):
        if pages < 2 or size < 1:
            raise ValueError(
                f"PageTable: {pages} pages of {size} tokens; there must be at least 2, of at least 1 token"
            )
        self.size = size
        self._free = list(range(first + 1, first + pages))  # a heap: the lowest is given away first
        self._users, self._weights = dict.fromkeys(self._free, 0), 0
        self._known: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages without a user, the first given up first

    @property
    def available(self) -> int:
        """Pages that can be given away."""
        return len(self._free) + len(self._idle)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of these tokens, as far as they are known."""
        pages = []
        for key in self._keys_of(tokens):
            if (page := self._known.get(key)) is None:
                break
            pages.append(page)
        return pages

    def _keys_of(self, tokens: Sequence[int]) -> Iterator[Key]:
        """What each page that these tokens fill is found by."""
        key = None
        for start in range(0, len(tokens) - self.size + 1, self.size):
            key = (key, tuple(tokens[start : start + self.size]))
            yield key

    def open(self, pages: Sequence[int] = ()) -> Chain:
        """A sequence that begins with these pages."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        return Chain(list(pages), self._weights)

    def share(self, chain: Chain, tokens: int) -> Chain:
        """Another sequence with the same first tokens."""
        other = self.open(chain.pages[: -(-tokens // self.size)])
        other.weights = chain.weights
        return other

    def missing(self, chain: Chain, start: int, end: int) -> int:
        """Pages that `reserve` would take."""
        return self._copied(chain, start, end) + max(0, -(-end // self.size) - len(chain.pages))

    def reserve(self, chain: Chain, start: int, end: int) -> list[Copy] | None:
        """Makes room for tokens start .. end - 1, of which those before `start` are there: the pages that have to be copied first.
        None, with nothing changed, where there are not enough pages."""
        if self.missing(chain, start, end) > self.available:
            return None
        copies = []
        if self._copied(chain, start, end):
            first = start // self.size
            copies = [Copy(chain.pages[first], self._take())]
            self._drop(chain.pages[first])
            chain.pages[first] = copies[0].target
        chain.pages += [self._take() for _ in range(-(-end // self.size) - len(chain.pages))]
        return copies

    def _copied(self, chain: Chain, start: int, end: int) -> bool:
        """Whether the first page that is written is somebody else's too, or is to be found by what it holds."""
        first = start // self.size
        if end <= start or first >= len(chain.pages):
            return False
        return self._users[chain.pages[first]] > 1 or chain.pages[first] in self._keys

    def remember(self, chain: Chain, tokens: Sequence[int]) -> None:
        """Lets the pages that these tokens fill be found; their entries are there. Of pages that hold the same the first stays
        the one that is found, and of entries that older weights made none."""
        if chain.weights != self._weights:
            return
        for page, key in zip(chain.pages, self._keys_of(tokens), strict=False):
            if key not in self._known and page not in self._keys:
                self._known[key], self._keys[page] = page, key

    def close(self, chain: Chain) -> None:
        """Gives the pages back. The last ones first, for a page is of no use without those before it."""
        for page in reversed(chain.pages):
            self._drop(page)
        chain.pages = []

    def forget(self) -> None:
        """Lets no page be found any more: the weights have changed."""
        for page in self._idle:
            heapq.heappush(self._free, page)
        for kept in (self._idle, self._known, self._keys):
            kept.clear()
        self._weights += 1

    def _take(self) -> int:
        """A page of one's own: a free one, else the idle one that was given up first."""
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._keys.pop(page)]
        self._users[page] = 1
        return page

    def _drop(self, page: int) -> None:
        if self._users[page] < 1:
            raise ValueError(f"page {page} is given back by a sequence that does not have it")
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._keys:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)


class PagedRows:
    """What the slots of a paged cache hold, and which of them are free: the calls of `rollout.engine.scheduler.Rows`.

    `tables`: one for each part into which a mesh cuts the slots; those of a part have their pages in its table. `supports_truncation`: whether
    pages are all that a sequence has. If not, states of fixed size go with them, and only what holds exactly the wanted tokens can
    be begun with. `ample`: whether there are pages for every slot at full length.
    """

    def __init__(self, slots: int, tables: Sequence[PageTable], *, rewinds: bool, ample: bool = False):
        self.supports_truncation, self.parts, self._ample = rewinds, len(tables), ample
        self._tables, self._free = tables, dict.fromkeys(range(slots))
        self._held: list[tuple[int, ...]] = [()] * slots
        self._chains = [Chain() for _ in range(slots)]
        self._begun: dict[tuple[int, ...], int] = {}  # the slot that last began with these tokens
        self._kept: tuple[PageTable, Chain] | None = None

    @property
    def free(self) -> int:
        return len(self._free)

    def part(self, slot: int) -> int:
        return slot * self.parts // len(self._held)

    def table(self, slot: int) -> PageTable:
        return self._tables[self.part(slot)]

    def take(self, tokens: tuple[int, ...]) -> tuple[int, int, int]:
        """(slot, source, same): a free slot for these tokens, and the slot whose first `same` tokens it begins with: itself where
        it has pages that hold them."""
        offered: dict[int, list[int]] = {}
        for slot in self._free:
            offered.setdefault(self.part(slot), []).append(slot)
        part = max(offered, key=lambda part: (self._find(part, tokens)[1], len(offered[part]), -part))
        slot = offered[part][0]
        del self._free[slot]
        return slot, *self.again(slot, tokens)

    def again(self, slot: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """(source, same) for a slot that is in use, and begins from nothing."""
        self.drop(slot)
        source, same, pages = self._find(self.part(slot), tokens)
        self._held[slot], self._begun[tokens], self._chains[slot] = tokens, slot, self.table(slot).open(pages)
        if source < 0:
            return slot, same
        self.share(source, slot, same)
        return source, same

    def share(self, source: int, slot: int, same: int) -> None:
        """Gives a slot the pages of the first tokens of another in the place of its own."""
        table = self.table(slot)
        if table is not self.table(source):
            raise ValueError(f"slots {source} and {slot} are in different parts of the cache")
        self._exchange(slot, table.share(self._chains[source], same))

    def _exchange(self, slot: int, chain: Chain) -> None:
        """Gives a slot other pages; they are in use already, for some may be its own."""
        before, self._chains[slot] = self._chains[slot], chain
        self.table(slot).close(before)

    def _find(self, part: int, tokens: tuple[int, ...]) -> tuple[int, int, list[int]]:
        """(slot or -1, tokens, known pages): where most of the first of these tokens are."""
        begun = self._begun.get(tokens, -1) if tokens else -1
        if begun >= 0 and begun not in self._free and self.part(begun) == part and self._held[begun] == tokens:
            return begun, len(tokens), []
        pages = self._tables[part].find(tokens) if self.supports_truncation else []
        known = len(pages) * self._tables[part].size
        running = (slot for slot in range(len(self._held)) if slot not in self._free and self.part(slot) == part)
        same, slot = max(((self._same(slot, tokens), -slot) for slot in running), default=(0, 0))
        return (-slot, same, []) if same > known and worth_a_copy(same, tokens) else (-1, known, pages)

    def _same(self, slot: int, tokens: tuple[int, ...]) -> int:
        same = common(self._held[slot], tokens)
        return same if self.supports_truncation or same == len(tokens) == len(self._held[slot]) else 0

    def room(self, wanted: Iterable[tuple[int, int, int]]) -> bool:
        """Whether each (slot, start, end) can have pages for its tokens start .. end - 1."""
        missing = [0] * self.parts
        for slot, start, end in () if self._ample else wanted:
            missing[self.part(slot)] += self.table(slot).missing(self._chains[slot], start, end)
        return all(m <= table.available for m, table in zip(missing, self._tables, strict=True))

    def reserve(self, slot: int, start: int, end: int) -> list[Copy] | None:
        """As PageTable.reserve."""
        return self.table(slot).reserve(self._chains[slot], start, end)

    def pages(self, slot: int) -> list[int]:
        return self._chains[slot].pages

    def filled(self, slot: int, tokens: tuple[int, ...]) -> None:
        """The slot has the entries of these tokens."""
        if self.supports_truncation:
            self.table(slot).remember(self._chains[slot], tokens)

    def moves(self, slot: int) -> None:
        """The slot goes on from what it was taken for."""
        if not self.supports_truncation:
            self._held[slot] = ()

    def drop(self, slot: int) -> None:
        """Gives back the pages of a slot that stays in use."""
        self.table(slot).close(self._chains[slot])
        self._held[slot] = ()

    def give(self, slot: int, tokens: tuple[int, ...]) -> None:
        """The slot is free; it held these tokens."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self.filled(slot, tokens)
        self.drop(slot)
        self._free[slot] = None
        if len(self._begun) > 4 * len(self._held):
            self._begun = {held: n for n, held in enumerate(self._held) if held}

    def keep(self, slot: int | None, tokens: int = 0) -> None:
        """Keeps the pages of a slot's first tokens, whatever becomes of it, in place of those that were kept. None: nothing."""
        if self._kept:
            table, chain = self._kept
            table.close(chain)
        self._kept = None if slot is None else (self.table(slot), self.table(slot).share(self._chains[slot], tokens))

    def begin_with_kept(self, slot: int) -> bool:
        """Gives the pages that are kept to a slot, in the place of its own. False where they lie in another part."""
        table, chain = self._kept
        if table is not self.table(slot):
            return False
        self._exchange(slot, table.share(chain, len(chain.pages) * table.size))
        return True

    def forget(self) -> None:
        """What the slots hold begins no other sequence. The next to be taken is the first, whatever ran before."""
        self.keep(None)
        for table in self._tables:
            table.forget()
        self._held = [()] * len(self._held)
        self._free = dict.fromkeys(sorted(self._free))
