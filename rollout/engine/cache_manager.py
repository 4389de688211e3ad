"""The cache managers, which know what the slots of a cache hold and which slots are free; and the
shape of a cache.

A contiguous cache and a paged one have a manager each; `CacheManager` says what both do. Pure
Python: no arrays, no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rollout.engine.page_allocator import Chain, PageAllocator, PageCopy
from rollout.engine.prefix_index import PrefixIndex, common_length, is_worth_sharing


@dataclass(frozen=True)
class CacheGeometry:
    """The shape of a cache.

    num_shards: into how many equal shards a mesh splits the slots.
    supports_truncation: whether the entries of a slot can be used up to any of its tokens. A state
    of fixed size cannot: it is only valid after the last token that it has seen.
    table_width: pages of a slot at most; None: the cache is contiguous.
    listed_sizes: numbers of rows, besides all slots, that a decode can run on; None: 1, 4, 8, 16,
    ... times the shards. (A step of 2 rows takes as long as one of 4.)
    on_one_cpu: whether one CPU device decodes. The time of a step grows with its rows there, so 24,
    48, 96, ... are sizes too (12 rows take almost as long as 16).
    """

    slots: int
    num_shards: int = 1
    supports_truncation: bool = True
    table_width: int | None = None
    listed_sizes: tuple[int, ...] | None = None
    on_one_cpu: bool = False

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
        """Whether a slot that decodes leaves nothing to the next sample of its prompt: its states
        have moved on, or its last page is not indexed."""
        return self.paged or not self.supports_truncation

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of rows that a decode can run on: the listed ones that the mesh can split as it
        splits the slots, and all slots."""
        listed = self.listed_sizes
        if listed is None:
            bits = range(self.slots.bit_length())
            listed = tuple(self.num_shards << n for n in bits if n != 1)
            listed += tuple(3 << n for n in bits if n > 2 and self.on_one_cpu)
        return (
            *(n for n in sorted(set(listed)) if n < self.slots and n % self.num_shards == 0),
            self.slots,
        )


class Allocation(NamedTuple):
    """A slot for a request, which begins with the first `num_shared` entries of slot `source`."""

    slot: int
    source: int
    num_shared: int


class CachedPrefix(NamedTuple):
    """The first `num_shared` of some tokens, which a slot in use holds, or pages of the page index;
    then the slot is -1."""

    slot: int
    num_shared: int
    pages: list[int]


class CacheManager(Protocol):
    """Tracks what the slots of a cache hold, and which slots are free.

    The scheduler calls, for a request from its admission to its end: `allocate` (or `reallocate`,
    when a request starts again in its slot), `reserve` before each program that makes entries,
    `mark_cached` after its prefill, `advance` when it decodes, and `free`. A prefix is always
    described by (source, num_shared): the first `num_shared` entries of slot `source`.

    The methods from `shard_of` on matter for pages. By default every slot has all entries that it
    may need, and there is nothing to do.

    supports_truncation: as in CacheGeometry. num_shards: into how many equal shards a mesh splits
    the slots.
    """

    supports_truncation: bool
    num_shards: int = 1

    @property
    def num_free(self) -> int:
        """How many requests can be admitted now: one to each free slot."""
        ...

    def allocate(self, tokens: tuple[int, ...]) -> Allocation:
        """Takes a free slot for a request whose prompt is `tokens`."""
        ...

    def reallocate(self, slot: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (source, num_shared), as `allocate` does, for a slot in use that begins again
        and will hold these tokens."""
        ...

    def clear(self, slot: int) -> None:
        """Empties a slot that stays in use."""
        ...

    def advance(self, slot: int) -> None:
        """Notes that the slot decodes: its state of fixed size, if it has one, has moved past the
        prompt, so no other slot can begin with it."""
        ...

    def free(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Frees a slot that holds these tokens. Raises ValueError if it is free already."""
        ...

    def reset_prefix_cache(self) -> None:
        """Lets no later sequence share entries that the slots hold now. The lowest free slot is
        allocated next, whatever ran before."""
        ...

    def shard_of(self, slot: int) -> int:
        """Returns the shard that a slot belongs to."""
        return 0

    def fits(self, spans: Iterable[tuple[int, int, int]]) -> bool:
        """Whether each (slot, start, end) can have entries for its tokens start .. end - 1, all at
        the same time."""
        return True

    def reserve(self, slot: int, start: int, end: int) -> list[PageCopy] | None:
        """Allocates pages for the tokens start .. end - 1 of a slot, as PageAllocator.reserve
        does."""
        return []

    def pages(self, slot: int) -> list[int]:
        """Returns the pages of a slot, in the order of its tokens."""
        return []

    def share(self, source: int, slot: int, num_shared: int) -> None:
        """Replaces the pages of a slot by the pages of the first `num_shared` tokens of another."""
        return

    def mark_cached(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Notes that the entries of these tokens of the slot are in the cache."""
        return

    def pin(self, slot: int, tokens: int) -> None:
        """Keeps the pages of a slot's first `tokens` tokens in use, whatever becomes of the slot.
        Unpins earlier ones."""
        return

    def unpin(self) -> None:
        """Releases the pinned pages, if there are any."""
        return

    def start_from_pinned(self, slot: int) -> bool:
        """Replaces the pages of a slot by the pinned ones. False if they lie in another shard of
        the cache."""
        return True


class ContiguousCacheManager(CacheManager):
    """Tracks the tokens in the slots of a contiguous cache, and the free slots.

    A prefix is always described by (source, num_shared): the first `num_shared` entries of slot
    `source`. A slot keeps its entries when its request ends, until another request takes it. So a
    prompt can begin with the entries of an earlier one: the samples of one prompt, the turns of a
    conversation, prompts with one system message.

    supports_truncation: as in CacheGeometry.
    """

    def __init__(self, slots: int, *, supports_truncation: bool):
        self.supports_truncation = supports_truncation
        self._free = dict.fromkeys(range(slots))  # in the order in which they became free
        self._outdated: set[int] = set()  # slots that were in use when the prefix cache was reset
        self._tokens: list[tuple[int, ...]] = [()] * slots
        self._index = PrefixIndex()  # of `_tokens`
        self._last_started: dict[
            tuple[int, ...], int
        ] = {}  # the slot that was last allocated for these tokens

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (slot, num_shared): the slot that holds the most of the first of these tokens,
        and how many.

        Of equal slots a free one goes first, then the lowest. (-1, 0) if no slot is worth copying.
        """
        slot = self._last_started.get(tokens) if tokens else None
        if slot is not None and self._num_shared(slot, tokens) == len(tokens):
            return slot, len(tokens)
        search = (
            self._index.longest_all if self.supports_truncation else self._index.longest_prefixes
        )
        slots, num_shared = search(tokens)
        if not is_worth_sharing(num_shared, tokens):
            return -1, 0
        return min(slots, key=lambda slot: (slot not in self._free, slot)), num_shared

    def _num_shared(self, slot: int, tokens: tuple[int, ...]) -> int:
        """Returns how many of the first of these tokens a sequence could take from a slot."""
        held = self._tokens[slot]
        length = common_length(held, tokens)
        return length if self.supports_truncation or length == len(held) else 0

    def _set_tokens(self, slot: int, tokens: tuple[int, ...]) -> None:
        self._tokens[slot] = tokens
        self._index.add(slot, tokens)

    def allocate(self, tokens: tuple[int, ...]) -> Allocation:
        """Takes a free slot for a request whose prompt is `tokens`.

        Without a shared prefix the source is -1 and `num_shared` 0. If the source is free, it is
        the slot itself, and nothing is copied. Otherwise the slot is the one that became free
        first, and the caller copies the row.
        """
        source, num_shared = self.find(tokens)
        slot = source if source in self._free else next(iter(self._free))
        del self._free[slot]
        self._set_tokens(slot, tokens)
        self._last_started[tokens] = slot
        return Allocation(slot, source, num_shared)

    def clear(self, slot: int) -> None:
        """Empties a slot that stays in use."""
        self._set_tokens(slot, ())

    def reallocate(self, slot: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (source, num_shared), as `allocate` does, for an empty slot in use that will hold
        these tokens."""
        source, num_shared = self.find(tokens)
        self._set_tokens(slot, tokens)
        self._last_started[tokens] = slot
        return source, num_shared

    def advance(self, slot: int) -> None:
        """Notes that the slot decodes: its state of fixed size, if it has one, has moved past the
        prompt, so no other slot can begin with it."""
        if not self.supports_truncation:
            self._set_tokens(slot, ())

    def free(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Frees a slot that holds these tokens. Raises ValueError if it is free already."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._free[slot] = None
        self._set_tokens(slot, () if slot in self._outdated else tokens)
        self._outdated.discard(slot)
        if len(self._last_started) > 4 * len(self._tokens):
            self._last_started = {
                t: s for t, s in self._last_started.items() if self._num_shared(s, t) == len(t)
            }

    def reset_prefix_cache(self) -> None:
        """Lets no later sequence share entries that the slots hold now. The lowest free slot is
        allocated next, whatever ran before."""
        self._free = dict.fromkeys(sorted(self._free))
        self._outdated = set(range(len(self._tokens))) - self._free.keys()
        self._tokens = [()] * len(self._tokens)
        self._index = PrefixIndex()
        self._last_started.clear()


class PagedCacheManager(CacheManager):
    """Tracks the pages of the slots of a paged cache, and the free slots.

    allocators: one for each shard into which a mesh splits the slots. A slot has its pages in its
    shard. supports_truncation: whether a sequence has nothing but pages. If not, states of fixed
    size belong to it, and a sequence can only begin with another that holds exactly its tokens.
    full_capacity: whether there are pages for every slot at full length.
    """

    def __init__(
        self,
        slots: int,
        allocators: Sequence[PageAllocator],
        *,
        supports_truncation: bool,
        full_capacity: bool = False,
    ):
        self.supports_truncation = supports_truncation
        self.num_shards = len(allocators)
        self._full_capacity = full_capacity
        self._allocators = allocators
        self._slots = slots
        self._allocator_of = [allocators[self.shard_of(slot)] for slot in range(slots)]
        self._free: list[dict[int, None]] = [
            {} for _ in allocators
        ]  # by shard, in the order in which they became free
        for slot in range(slots):
            self._free[self.shard_of(slot)][slot] = None
        self._tokens: list[tuple[int, ...]] = [()] * slots
        self._index = [PrefixIndex() for _ in allocators]  # the tokens of `_tokens`, by shard
        self._chains = [Chain() for _ in range(slots)]
        self._last_started: dict[
            tuple[int, ...], int
        ] = {}  # the slot that was last allocated for these tokens
        self._pinned: tuple[PageAllocator, Chain] | None = None

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def shard_of(self, slot: int) -> int:
        return slot * self.num_shards // self._slots

    def allocate(self, tokens: tuple[int, ...]) -> Allocation:
        """Takes a free slot for a request whose prompt is `tokens`.

        The slot now shares the pages of the source that hold its first `num_shared` entries. The
        source is the slot itself if pages of the page index hold them, or if nothing is shared
        (num_shared 0).
        """
        shards = [shard for shard in range(self.num_shards) if self._free[shard]]
        shard = max(
            shards,
            key=lambda shard: (
                self._longest(shard, tokens).num_shared,
                len(self._free[shard]),
                -shard,
            ),
        )
        slot = next(iter(self._free[shard]))
        del self._free[shard][slot]
        return Allocation(slot, *self.reallocate(slot, tokens))

    def reallocate(self, slot: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Returns (source, num_shared), as `allocate` says, for a slot that is in use and begins
        from nothing."""
        self.clear(slot)
        source, num_shared, pages = self._longest(self.shard_of(slot), tokens)
        self._set_tokens(slot, tokens)
        self._last_started[tokens] = slot
        self._chains[slot] = self._allocator_of[slot].open(pages)
        if source < 0:
            return slot, num_shared
        self.share(source, slot, num_shared)
        return source, num_shared

    def _set_tokens(self, slot: int, tokens: tuple[int, ...]) -> None:
        self._tokens[slot] = tokens
        self._index[self.shard_of(slot)].add(slot, tokens)

    def share(self, source: int, slot: int, num_shared: int) -> None:
        """Replaces the pages of a slot by the pages of the first `num_shared` tokens of another.

        Raises ValueError if the two slots are in different shards of the cache."""
        allocator = self._allocator_of[slot]
        if allocator is not self._allocator_of[source]:
            raise ValueError(f"slots {source} and {slot} are in different shards of the cache")
        self._replace(slot, allocator.share(self._chains[source], num_shared))

    def _replace(self, slot: int, chain: Chain) -> None:
        """Replaces the pages of a slot. The new ones are open already, because some may be its
        own."""
        before = self._chains[slot]
        self._chains[slot] = chain
        self._allocator_of[slot].close(before)

    def _longest(self, shard: int, tokens: tuple[int, ...]) -> CachedPrefix:
        """Returns the longest prefix of these tokens that a shard holds."""
        last = self._last_started.get(tokens, -1) if tokens else -1
        if (
            last >= 0
            and last not in self._free[shard]
            and self.shard_of(last) == shard
            and self._tokens[last] == tokens
        ):
            return CachedPrefix(last, len(tokens), [])
        if not self.supports_truncation:
            slot = self._index[shard].exact(tokens)
            return CachedPrefix(slot, len(tokens) if slot >= 0 else 0, [])
        pages = self._allocators[shard].find(tokens)
        indexed = len(pages) * self._allocators[shard].size
        slot, num_shared = self._index[shard].longest(tokens)
        if num_shared > indexed and is_worth_sharing(num_shared, tokens):
            return CachedPrefix(slot, num_shared, [])
        return CachedPrefix(-1, indexed, pages)

    def fits(self, spans: Iterable[tuple[int, int, int]]) -> bool:
        """Whether each (slot, start, end) can have pages for its tokens start .. end - 1, all at
        the same time."""
        missing = [0] * self.num_shards
        for slot, start, end in () if self._full_capacity else spans:
            missing[self.shard_of(slot)] += self._allocator_of[slot].missing(
                self._chains[slot], start, end
            )
        return all(
            m <= allocator.available for m, allocator in zip(missing, self._allocators, strict=True)
        )

    def reserve(self, slot: int, start: int, end: int) -> list[PageCopy] | None:
        """Allocates pages for a slot, as PageAllocator.reserve does."""
        return self._allocator_of[slot].reserve(self._chains[slot], start, end)

    def pages(self, slot: int) -> list[int]:
        return self._chains[slot].pages

    def mark_cached(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Notes that the entries of these tokens of the slot are in the cache. Their full pages
        enter the page index, by which later requests find them."""
        if self.supports_truncation:
            self._allocator_of[slot].index_pages(self._chains[slot], tokens)

    def advance(self, slot: int) -> None:
        """Notes that the slot decodes: its state of fixed size, if it has one, has moved past the
        prompt, so no other slot can begin with it."""
        if not self.supports_truncation:
            self._set_tokens(slot, ())

    def clear(self, slot: int) -> None:
        """Releases the pages of a slot that stays in use."""
        self._allocator_of[slot].close(self._chains[slot])
        self._set_tokens(slot, ())

    def free(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Frees a slot that holds these tokens. Raises ValueError if it is free already."""
        free = self._free[self.shard_of(slot)]
        if slot in free:
            raise ValueError(f"slot {slot} is free already")
        self.mark_cached(slot, tokens)
        self.clear(slot)
        free[slot] = None
        if len(self._last_started) > 4 * self._slots:
            self._last_started = {
                tokens: slot for slot, tokens in enumerate(self._tokens) if tokens
            }

    def pin(self, slot: int, tokens: int) -> None:
        """Keeps the pages of a slot's first `tokens` tokens in use, whatever becomes of the slot.
        Unpins earlier ones."""
        self.unpin()
        self._pinned = (
            self._allocator_of[slot],
            self._allocator_of[slot].share(self._chains[slot], tokens),
        )

    def unpin(self) -> None:
        """Releases the pinned pages, if there are any."""
        if self._pinned:
            allocator, chain = self._pinned
            allocator.close(chain)
        self._pinned = None

    def start_from_pinned(self, slot: int) -> bool:
        """Replaces the pages of a slot by the pinned ones. False if they lie in another shard of
        the cache."""
        if self._pinned is None or self._pinned[0] is not self._allocator_of[slot]:
            return False
        allocator, chain = self._pinned
        self._replace(slot, allocator.share(chain, len(chain.pages) * allocator.size))
        return True

    def reset_prefix_cache(self) -> None:
        """Lets no later sequence share entries that the slots hold now. The lowest free slot is
        allocated next, whatever ran before."""
        self.unpin()
        for allocator in self._allocators:
            allocator.reset_prefix_cache()
        self._tokens = [()] * self._slots
        self._index = [PrefixIndex() for _ in self._allocators]
        self._free = [dict.fromkeys(sorted(free)) for free in self._free]
