"""Prefix sharing: a request whose tokens begin like another request uses the cache entries that the
other computed.

The scheduler decides on copies of rows, pages and states; `CacheUpdates` records them, and the
engine runs them on the device later. Pure Python: no arrays, no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.engine.cache_manager import CacheManager
from rollout.engine.page_allocator import PageCopy


@dataclass
class Copies:
    """Copies of rows (source, target), one after the other, and of pages."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    pages: list[PageCopy] = field(default_factory=list)


@dataclass(frozen=True)
class PinStates:
    """Stores a copy of the states of a slot and drops an earlier copy."""

    slot: int


@dataclass(frozen=True)
class RestoreStates:
    """Writes the pinned states to a slot."""

    slot: int


@dataclass(frozen=True)
class UnpinStates:
    """Tells the engine to drop the copy of the recurrent states of a pinned prefix."""


CacheUpdate = Copies | PinStates | RestoreStates | UnpinStates


class CacheUpdates:
    """A log of updates. They must run in this order before the next program that reads or writes
    entries."""

    def __init__(self) -> None:
        self._log: list[CacheUpdate] = []
        self._open_copies = Copies()

    def copy_row(self, source: int, target: int) -> None:
        self._open_copies.rows.append((source, target))

    def copy_pages(self, copies: list[PageCopy]) -> None:
        self._open_copies.pages += copies

    def start_copy_group(self) -> None:
        """Starts a new group of copies. Copies of different groups do not run in one program,
        because pages may go to another sequence in between."""
        if self._open_copies.rows or self._open_copies.pages:
            self._log.append(self._open_copies)
            self._open_copies = Copies()

    def add(self, update: PinStates | RestoreStates | UnpinStates) -> None:
        self.start_copy_group()
        self._log.append(update)

    def drain(self) -> list[CacheUpdate]:
        """Empties the log and returns it."""
        self.start_copy_group()
        log = self._log
        self._log = []
        return log


class PrefixWaiters:
    """Slots that wait for another slot to have its prompt in the cache, because theirs begins with
    the same tokens."""

    def __init__(self) -> None:
        self._source: dict[int, tuple[int, int]] = {}

    def add(self, slot: int, source: int, num_shared: int) -> None:
        """Notes that the slot will begin with the first `num_shared` entries of slot `source`."""
        self._source[slot] = source, num_shared

    def waiting_for(self, source: int) -> list[tuple[int, int]]:
        """Returns (slot, num_shared) of the slots that wait for this slot."""
        return [
            (slot, num_shared)
            for slot, (other, num_shared) in self._source.items()
            if other == source
        ]

    def start(self, slot: int, source: int, num_shared: int) -> bool:
        """Removes a slot that waits for exactly this source. Returns False if it does not wait for
        it any more."""
        if self._source.get(slot) != (source, num_shared):
            return False
        del self._source[slot]
        return True

    def remove(self, slot: int) -> list[int]:
        """Removes a slot and all slots that wait for it, directly or through others. Returns the
        latter."""
        removed = [slot]
        for each in removed:
            removed += [other for other, (source, _) in self._source.items() if source == each]
        for each in removed:
            self._source.pop(each, None)
        return removed[1:]

    def __contains__(self, slot: int) -> bool:
        return slot in self._source


class PinnedPrefix:
    """One prompt whose entries stay in the cache for the next sample of the same prompt, which
    waits for a slot.

    The samples of a prompt start from the entries of the first one. A slot that decodes may have
    nothing that the next sample can use: its states have moved on, or its last page is not indexed.
    Then its prompt is pinned: the pages stay in use, and a copy of the states of fixed size is
    stored. At most one prompt is pinned. It is unpinned when another one is pinned, when pages run
    out, and with the prefix cache.
    """

    def __init__(self, cache_manager: CacheManager, updates: CacheUpdates, *, copies_states: bool):
        """copies_states: whether a slot has more than pages: its row of the cache is then saved
        with them."""
        self._cache_manager = cache_manager
        self._updates = updates
        self._copies_states = copies_states
        self._tokens: tuple[int, ...] | None = None

    def pin(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Pins the entries of these tokens, which are all that the slot holds. Unpins earlier
        ones."""
        self._updates.start_copy_group()
        self._cache_manager.pin(slot, len(tokens))
        self._tokens = tokens
        if self._copies_states:
            self._updates.add(PinStates(slot))

    def start(self, slot: int, tokens: tuple[int, ...]) -> bool:
        """Starts a slot from the pinned entries. False if they are not the entries of exactly these
        tokens, or lie in another shard of the cache."""
        if (
            self._tokens is None
            or self._tokens != tokens
            or not self._cache_manager.start_from_pinned(slot)
        ):
            return False
        self._updates.start_copy_group()
        if self._copies_states:
            self._updates.add(RestoreStates(slot))
        return True

    def clear(self) -> None:
        """Unpins the entries, if there are any."""
        self._cache_manager.unpin()
        if self._tokens is not None and self._copies_states:
            self._updates.add(UnpinStates())
        self._tokens = None

    def __bool__(self) -> bool:
        return self._tokens is not None
