"""The scheduler: which requests run, which wait, and which give up their pages. Pure Python: no arrays, no device,
and nothing that depends on time.

A request that is admitted gets a slot and keeps it until it is released. It is in one of these states:

- prefilling: its prompt is not all in the cache. It may wait for another slot whose prompt has the same first tokens
  (PrefixWaiters). Or it is preempted: the scheduler took its pages because they ran out. It starts again when there
  are pages for another decode of all running requests.
- decoding: all in the cache but the token to feed next.
- ended: `finish` says how; the engine releases the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.engine.cache_manager import CacheManager
from rollout.engine.prefixes import CacheUpdates, PinnedPrefix, PrefixWaiters
from rollout.request import Request

# Rows of a prefill call: few sizes, few programs.
PREFILL_ROWS = (1, 4, 16)

# Tokens of the shortest prefill call; others have twice as many, and so on up to a chunk.
SHORTEST_PREFILL = 16

# The scheduler shortens a decode to this many steps before it preempts a request because pages ran out.
MIN_DECODE_STEPS = 16

# Most steps of a decode with stop strings. The host searches for them afterwards and discards the tokens past one.
MAX_STOP_STRING_STEPS = 16


def prefill_rows(prompts: int) -> int:
    """Rows of the next prefill call if so many prompts can go on. Three in a call of four rows cost less than three
    calls."""
    return max(rows for rows in PREFILL_ROWS if rows == 1 or prompts >= rows - rows // 4)


def prefill_lengths(longest: int, chunk: int) -> list[int]:
    """Tokens of the prefill calls that prompts of up to `longest` tokens can need, in chunks of at most `chunk`."""
    lengths = [min(SHORTEST_PREFILL, chunk)]
    while lengths[-1] < min(longest - 1, chunk):
        lengths.append(min(2 * lengths[-1], chunk))
    return lengths


@dataclass(frozen=True)
class SchedulerLimits:
    """Properties of the programs that the scheduler needs.

    decode_steps: steps of one multi-step decode.
    drafts: tokens past a request's last that a step may write.
    copies_rows: whether sharing a prefix also copies arrays by slot (contiguous entries, states of fixed size).
    pins_prefixes: whether a prompt is pinned for its next sample, because a decoding slot can no longer share it.
    """

    decode_steps: int
    drafts: int = 0
    copies_rows: bool = True
    pins_prefixes: bool = False


class Scheduler:
    """Admits requests to slots, shares prefixes between them, and preempts the youngest when pages run out.

    updates: the changes of the cache that must run before the next program.
    next_request: the request that gets the next free slot, if one waits.
    batch_changed: whether the host added or removed a decoding request, so that the device state must be rebuilt.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        limits: SchedulerLimits,
        counts: dict[str, int] | None = None,
    ):
        """counts: where the number of preempted requests is added up, under "preempted"."""
        self.cache_manager, self._limits = cache_manager, limits
        self._counts = {"preempted": 0} if counts is None else counts
        self.running: dict[int, Request] = {}  # by slot, in the order of admission
        self.prefilling: dict[int, Request] = {}
        self.preempted: set[int] = set()  # some of those that prefill
        self.updates = CacheUpdates()
        self.next_request: Request | None = None
        self.batch_changed = True
        self._waiters = PrefixWaiters()
        self._pinned = PinnedPrefix(cache_manager, self.updates, copies_states=limits.copies_rows)

    @property
    def free_slots(self) -> int:
        """Slots that a request can be admitted to: none while a request is preempted."""
        return 0 if self.preempted else self.cache_manager.num_free

    @property
    def decoding(self) -> list[int]:
        """Returns the slots whose prompt is in the cache, and whose request has not ended as far as the host knows."""
        return [s for s, request in self.running.items() if s not in self.prefilling and request.finish is None]

    def admit(self, request: Request) -> int:
        """Returns the slot that the request runs in. There must be a free one."""
        slot, source, num_shared = self.cache_manager.allocate(request.cacheable)
        self.running[slot] = self.prefilling[slot] = request
        self._start(slot, source, num_shared)
        return slot

    def _start(self, slot: int, source: int, num_shared: int) -> None:
        """Starts a request that shares its first `num_shared` tokens with slot `source`."""
        request = self.running[slot]
        request.cached = 0
        if not self._has_pages(slot, num_shared):
            self._preempt(slot)
        elif source in self.prefilling and source != slot:
            self._waiters.add(slot, source, num_shared)
        elif num_shared < request.needed and self._pinned.start(slot, request.cacheable):
            self.mark_prefilled(slot, request.needed)
        elif num_shared:
            if self._share(source, slot, num_shared):
                self.mark_prefilled(slot, num_shared)
        else:
            self._reserve(slot, request.needed)

    def release(self, slot: int) -> Request:
        """Frees a slot and returns its request, which may have ended or not."""
        self.updates.start_copy_group()
        request = self.running.pop(slot)
        waiters = self._evict(slot)
        if request.finish is None:
            self.batch_changed = True
        # A state of fixed size may include discarded tokens if the host, not the device, ended the request.
        valid = self.cache_manager.supports_truncation or (request.finish is not None and not request.params.stop)
        self.cache_manager.free(slot, request.span(0, request.cached) if valid else ())
        self._readmit(waiters)
        return request

    def _evict(self, slot: int) -> list[int]:
        """Removes a slot from prefill. Returns the slots that waited for its prompt, directly or through others."""
        waiters = self._waiters.remove(slot)
        self.prefilling.pop(slot, None)
        self.preempted.discard(slot)
        return waiters

    def _readmit(self, slots: Sequence[int]) -> None:
        """Starts requests again that have a slot and prefill."""
        # All slots are cleared before one starts: otherwise two could wait for each other's prefix.
        for slot in slots:
            self.cache_manager.clear(slot)
        for slot in slots:
            self._start(slot, *self.cache_manager.reallocate(slot, self.running[slot].cacheable))

    def reset_prefix_cache(self) -> None:
        """Clears the prefix cache: later requests share no entries of earlier ones."""
        self._pinned.clear()
        self.cache_manager.reset_prefix_cache()

    # Preemption.

    def _max_entries(self, request: Request, steps: int) -> int:
        """Returns the number of entries that the request may have after so many decoding steps."""
        drafts = self._limits.drafts
        return request.needed + min(request.left, steps * (1 + drafts)) + drafts

    def _has_pages(self, slot: int, num_shared: int) -> bool:
        """Whether all that run, and this slot with them, can have pages for another decode."""
        active = {s: r.cached for s, r in self.running.items() if s not in self.preempted and r.finish is None}
        starts = active | {slot: num_shared}
        steps = min(MIN_DECODE_STEPS, self._limits.decode_steps)
        if not self._fits(starts, steps) and self._pinned:
            self._pinned.clear()
        return self._fits(starts, steps)

    def _fits(self, starts: dict[int, int], steps: int) -> bool:
        """Whether these slots can have pages for so many steps. `starts`: the entries that each has now."""
        return self.cache_manager.fits(
            (slot, start, self._max_entries(self.running[slot], steps)) for slot, start in starts.items()
        )

    def _reserve(self, slot: int, end: int) -> bool:
        """Allocates pages for what the slot is about to write, up to entry `end`, and preempts the youngest requests
        for it. False if the slot itself was preempted."""
        while (copies := self.cache_manager.reserve(slot, self.running[slot].cached, end)) is None:
            if self._pinned:
                self._pinned.clear()
                continue
            youngest = next(
                s for s in reversed(self.running) if s not in self.preempted and self.running[s].finish is None
            )
            self._counts["preempted"] += 1
            self._preempt(youngest)
            if youngest == slot:
                return False
        self.updates.copy_pages(copies)
        return True

    def _preempt(self, slot: int) -> None:
        """Takes the pages of a slot. Its request keeps the slot and its tokens, and will be prefilled again."""
        self.updates.start_copy_group()
        waiters = self._evict(slot)
        self.cache_manager.clear(slot)
        self.running[slot].cached, self.batch_changed = 0, True
        self.prefilling[slot] = self.running[slot]
        self.preempted.add(slot)
        self._readmit(waiters)

    def resume(self) -> None:
        """Starts preempted requests again, the oldest first, as far as there are pages."""
        for slot in [slot for slot in self.running if slot in self.preempted]:
            self.preempted.discard(slot)
            self._readmit([slot])
            if slot in self.preempted:
                break

    # Prompts.

    def next_prefill(self) -> list[int]:
        """Returns the slots of the next prefill call: the oldest that can be prefilled, and others that are, like it,
        at their first chunk or past it.
        """
        candidates = [slot for slot in self.prefilling if slot not in self._waiters and slot not in self.preempted]
        group = [slot for slot in candidates if self.running[slot].cached == 0]  # at their first chunk
        if group[:1] != candidates[:1]:
            group = [slot for slot in candidates if self.running[slot].cached]
        return group[: prefill_rows(len(group))]

    def mark_prefilled(self, slot: int, cached: int) -> None:
        """Notes that the first `cached` entries of a request are in the cache.

        If that is all of its prompt, the slots that wait for it start from it, and then those that wait for them. The
        prompt is pinned if the next request in the queue has the same and could not start from a slot that decodes."""
        self.running[slot].cached = cached
        ready = [slot]
        while ready:
            slot = ready.pop()
            request = self.running[slot]
            if not request.ready or slot in self.preempted:  # an earlier slot of this loop may have taken its pages
                continue
            del self.prefilling[slot]
            self.batch_changed = True
            tokens = request.cacheable
            self.cache_manager.mark_cached(slot, tokens)
            if self._limits.pins_prefixes and self.next_request and self.next_request.cacheable == tokens:
                self._pinned.pin(slot, tokens)
            for other, num_shared in self._waiters.waiting_for(slot):
                if self._waiters.start(other, slot, num_shared) and self._share(slot, other, num_shared):
                    ready.append(other)

    def _share(self, source: int, slot: int, num_shared: int) -> bool:
        """Lets a slot use the first `num_shared` entries of another, or its own. Returns False if it was preempted
        because pages ran out."""
        if source != slot:
            self.cache_manager.share(source, slot, num_shared)
            if self._limits.copies_rows:
                self.updates.copy_row(source, slot)
        self.running[slot].cached = num_shared
        return self._reserve(slot, self.running[slot].needed)

    # Decoding.

    def reserve_decode(self) -> int:
        """Allocates pages for the next decode and returns its number of steps; requests may be preempted for it."""
        steps = self._decode_steps()
        for slot in self.decoding:
            if slot not in self.preempted:
                self._reserve(slot, self._max_entries(self.running[slot], steps))
        return steps

    def _decode_steps(self) -> int:
        """Returns the steps of the next decode: the limit, or fewer (halved) while there are too few pages."""
        decoding = self.decoding
        has_stop_strings = any(self.running[slot].params.stop for slot in decoding)
        steps = min(self._limits.decode_steps, MAX_STOP_STRING_STEPS) if has_stop_strings else self._limits.decode_steps
        starts = {slot: self.running[slot].cached for slot in decoding}
        while steps > MIN_DECODE_STEPS and not self._fits(starts, steps):
            steps //= 2
        return steps
