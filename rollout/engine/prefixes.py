"""Prefix sharing: a request whose tokens begin like another request uses the cache entries that the other computed.

The scheduler decides on copies of rows, pages and states; `CacheUpdates` records them, and the engine runs them on
the device later. Pure Python: no arrays, no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.engine.page_table import PageCopy, PagedRows
from rollout.engine.rows import Rows


@dataclass
class Copies:
    """Copies of rows (source, target), one after the other, and of pages."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    pages: list[PageCopy] = field(default_factory=list)


@dataclass(frozen=True)
class PinStates:
    """Keeps a copy of the states of a slot, in the place of an earlier copy."""

    slot: int


@dataclass(frozen=True)
class RestoreStates:
    """Writes the pinned states to a slot."""

    slot: int


@dataclass(frozen=True)
class UnpinStates:
    """Drops the copy."""


CacheUpdate = Copies | PinStates | RestoreStates | UnpinStates


class CacheUpdates:
    """A log of updates. They must run in this order before the next program that reads or writes entries."""

    def __init__(self) -> None:
        self._log: list[CacheUpdate] = []
        self._open = Copies()

    def copy_row(self, source: int, target: int) -> None:
        self._open.rows.append((source, target))

    def copy_pages(self, copies: list[PageCopy]) -> None:
        self._open.pages += copies

    def barrier(self) -> None:
        """Lets no later copy run in one program with the earlier ones: pages may change hands in between."""
        if self._open.rows or self._open.pages:
            self._log.append(self._open)
            self._open = Copies()

    def add(self, update: PinStates | RestoreStates | UnpinStates) -> None:
        self.barrier()
        self._log.append(update)

    def take(self) -> list[CacheUpdate]:
        """Empties the log and returns it."""
        self.barrier()
        log, self._log = self._log, []
        return log


class PrefixWaiters:
    """Slots that wait for another slot to have its prompt in the cache, because theirs begins with the same tokens."""

    def __init__(self) -> None:
        self._source: dict[int, tuple[int, int]] = {}

    def add(self, slot: int, source: int, same: int) -> None:
        """The slot will begin with the first `same` entries of slot `source`."""
        self._source[slot] = source, same

    def of(self, source: int) -> list[tuple[int, int]]:
        """Returns (slot, same) of the slots that wait for this slot."""
        return [(slot, same) for slot, (other, same) in self._source.items() if other == source]

    def start(self, slot: int, source: int, same: int) -> bool:
        """Takes out a slot that waits for exactly this. False if it does so no longer."""
        if self._source.get(slot) != (source, same):
            return False
        del self._source[slot]
        return True

    def remove(self, slot: int) -> list[int]:
        """Takes out a slot and all that wait for it, directly or through others; returns the latter."""
        removed = [slot]
        for each in removed:
            removed += [other for other, (source, _) in self._source.items() if source == each]
        for each in removed:
            self._source.pop(each, None)
        return removed[1:]

    def __contains__(self, slot: int) -> bool:
        return slot in self._source


class PinnedPrefix:
    """The prompt of a group that is kept in the cache for a sample that still waits for a slot.

    The samples of a prompt start from the entries of the first one. Where a slot that decodes leaves nothing to the
    next sample (its states have moved on, or its last page is not indexed), its prompt is pinned: the pages stay in
    use, and a copy of the states of fixed size is kept.
    """

    def __init__(self, rows: Rows | PagedRows, updates: CacheUpdates, *, copies_states: bool):
        """copies_states: whether a row has more than its pages."""
        self._rows, self._updates, self._copies_states = rows, updates, copies_states
        self._tokens: tuple[int, ...] | None = None

    def pin(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Pins the entries of these tokens, which are all that the slot holds, in the place of earlier ones."""
        self._updates.barrier()
        self._rows.pin(slot, len(tokens))
        self._tokens = tokens
        if self._copies_states:
            self._updates.add(PinStates(slot))

    def start(self, slot: int, tokens: tuple[int, ...]) -> bool:
        """Starts a slot from the pinned entries. False if they are not the entries of exactly these tokens, or lie in
        another part of the cache."""
        if self._tokens is None or self._tokens != tokens or not self._rows.start_from_pinned(slot):
            return False
        self._updates.barrier()
        if self._copies_states:
            self._updates.add(RestoreStates(slot))
        return True

    def clear(self) -> None:
        """Unpins the entries, if there are any."""
        self._rows.unpin()
        if self._tokens is not None and self._copies_states:
            self._updates.add(UnpinStates())
        self._tokens = None

    def __bool__(self) -> bool:
        return self._tokens is not None
