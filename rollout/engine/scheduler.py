"""The scheduler: which requests run, which wait, and which give up their pages. Pure Python: no
arrays, no device, and nothing that depends on time. engine.py defines the words step, decode, slot,
preempt and prompt of a request.

A request that is admitted gets a slot and keeps it until it is released. It is in one of these
states:

- prefilling: its prompt is not all in the cache. It may wait for another slot whose prompt has the
  same first tokens (PrefixWaiters), or for pages (`waiting_for_pages`): it got none when it was
  admitted, or it was preempted. It starts when there are pages for another decode of all running
  requests.
- decoding: all in the cache but the token to feed next.
- ended: `finish` says how; the caller of `Engine.collect` releases the slot.

A layer may keep a state of fixed size instead of an entry per token: the recurrent state of a delta
net, a sliding-window cache, the last hidden states for drafts. Such a state is only valid after the
last token that it has seen, so a request can begin with it only if it continues exactly these
tokens (`supports_truncation` is False). It moves past the prompt when its slot decodes. For a
sample of the same prompt that still waits, the scheduler therefore pins the prompt: it saves the
state, and keeps the pages of a paged cache in use (PinnedPrefix).
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

# While pages are short, the scheduler halves the decoding steps of a decode as long as they are
# more than this. Then it preempts requests.
MIN_DECODE_STEPS = 16

# Most decoding steps of a decode with stop strings. The host searches for the strings afterwards
# and discards the tokens past one.
MAX_STOP_STRING_STEPS = 16


def prefill_rows(prompts: int) -> int:
    """Rows of the next prefill call for `prompts` ready prompts: the largest size that is at least
    three quarters full.

    Three prompts in a call of four rows cost less than three calls.
    """
    return max(rows for rows in PREFILL_ROWS if rows == 1 or prompts >= rows - rows // 4)


def prefill_lengths(entries: int, chunk: int) -> list[int]:
    """Lengths C of the calls that prefill up to `entries` entries from an empty slot, in chunks of
    at most `chunk`."""
    lengths = [min(SHORTEST_PREFILL, chunk)]
    while lengths[-1] < min(entries, chunk):
        lengths.append(min(2 * lengths[-1], chunk))
    return lengths


@dataclass(frozen=True)
class SchedulerLimits:
    """Properties of the runner's programs, which decide how far the scheduler may plan.

    decode_steps: the most decoding steps of one decode.
    drafts: draft tokens that a decoding step may write beyond the accepted ones.
    copies_rows: whether a slot that shares a prefix also copies the row of the other slot: its
    entries in a contiguous cache, its states of fixed size in any cache. If not, the slots share
    pages, and nothing else belongs to a slot. pins_prefixes: whether a prompt's state is saved for
    the next sample of the same prompt: once a slot decodes, its state has moved past the prompt, or
    its last page is not indexed.
    """

    decode_steps: int
    drafts: int = 0
    copies_rows: bool = True
    pins_prefixes: bool = False


class Scheduler:
    """Admits requests to slots, shares prefixes between them, and preempts the youngest when pages
    run out.

    running: the requests by slot, in the order of admission; also those that prefill, wait for
    pages or have ended. prefilling: the requests whose prompt is not all in the cache, also those
    that wait for pages. waiting_for_pages: the slots of admitted requests that have no pages. No
    other request is admitted while there are any.
    updates: the changes of the cache that must run before the next program.
    next_request: the request that gets the next free slot, if one waits.
    adapter: whose turn it is: a prefill call and a decode compute with one adapter, and the engine
    gives each step to another one that has requests.
    batch_changed: whether the host added or removed a decoding request, so that the device state
    must be rebuilt.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        limits: SchedulerLimits,
        counts: dict[str, int] | None = None,
    ):
        """counts: its key "preempted" counts the preemptions. A request that must wait for its
        first pages is none."""
        self.cache_manager = cache_manager
        self._limits = limits
        self._counts = {"preempted": 0} if counts is None else counts
        self.running: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        self.waiting_for_pages: set[int] = set()
        self.updates = CacheUpdates()
        self.next_request: Request | None = None
        self.adapter: str | None = None
        self.batch_changed = True
        self._waiters = PrefixWaiters()
        self._pinned = PinnedPrefix(cache_manager, self.updates, copies_states=limits.copies_rows)

    @property
    def free_slots(self) -> int:
        """Slots that a request can be admitted to: none while a request waits for pages."""
        return 0 if self.waiting_for_pages else self.cache_manager.num_free

    @property
    def decoding(self) -> list[int]:
        """Returns the slots whose prompt is in the cache, and whose request has not ended as far as
        the host knows, of the adapter whose turn it is."""
        return [s for s in self.in_turn if s not in self.prefilling]

    @property
    def in_turn(self) -> dict[int, Request]:
        """Returns the requests by slot that have not ended, of the adapter whose turn it is."""
        return {
            s: request
            for s, request in self.running.items()
            if request.adapter == self.adapter and request.finish is None
        }

    def next_turn(self) -> None:
        """Gives the turn to the next adapter that has requests, in the order of their oldest
        ones."""
        alive = (request for request in self.running.values() if request.finish is None)
        adapters = list(dict.fromkeys(request.adapter for request in alive))
        if not adapters:
            return
        at = adapters.index(self.adapter) + 1 if self.adapter in adapters else 0
        turn = adapters[at % len(adapters)]
        if turn != self.adapter:
            self.adapter = turn
            self.batch_changed = True

    def admit(self, request: Request) -> int:
        """Returns the slot that the request runs in. There must be a free one."""
        slot, source, num_shared = self.cache_manager.allocate(request.cacheable)
        self.running[slot] = self.prefilling[slot] = request
        self._start(slot, source, num_shared)
        return slot

    def _start(self, slot: int, source: int, num_shared: int) -> None:
        """Starts a request whose first `num_shared` entries slot `source` holds, or will hold when
        it has prefilled.

        The source can be the slot itself: then the entries are in a free slot that the request took
        over, or in pages that the cache manager has already given to it.
        """
        request = self.running[slot]
        request.cached = 0
        if not self._can_start(slot, num_shared):
            self._wait_for_pages(slot)
        elif source in self.prefilling and source != slot:
            self._waiters.add(slot, source, num_shared)
        elif num_shared < request.needed and self._pinned.start(slot, request.cacheable):
            self.mark_prefilled(slot, request.needed)  # the pinned prompt is all of this one
        elif num_shared:
            if self._share(source, slot, num_shared):
                self.mark_prefilled(slot, num_shared)
        else:
            self._reserve(slot, request.needed)

    def release(self, slot: int) -> Request:
        """Frees a slot and returns its request, which may have ended or not."""
        # the pages may get another owner, so later copies run in another program
        self.updates.start_copy_group()
        request = self.running.pop(slot)
        waiters = self._stop_prefill(slot)
        if request.finish is None:
            self.batch_changed = True
        # Later requests may begin with the entries of this one. A state of fixed size must not be
        # reused if the host ended the request (stop string, cancel): the device may have fed tokens
        # that were then discarded.
        valid = self.cache_manager.supports_truncation or (
            request.finish is not None and not request.params.stop
        )
        self.cache_manager.free(slot, request.shared_keys(request.cached) if valid else ())
        self._readmit(waiters)
        return request

    def _stop_prefill(self, slot: int) -> list[int]:
        """Removes a slot from the slots that prefill, wait for a prefix or wait for pages.

        Returns the slots that waited for its prompt, directly or through others.
        """
        waiters = self._waiters.remove(slot)
        self.prefilling.pop(slot, None)
        self.waiting_for_pages.discard(slot)
        return waiters

    def _readmit(self, slots: Sequence[int]) -> None:
        """Restarts prefilling of these slots from their longest shared prefix."""
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
        """Returns the number of entries that the request may have after so many decoding steps. The
        last step may also write drafts that are rejected."""
        drafts = self._limits.drafts
        return request.needed + min(request.left, steps * (1 + drafts)) + drafts

    def _can_start(self, slot: int, num_shared: int) -> bool:
        """Whether all running requests, the one of this slot included, can have pages for another
        decode.

        If they cannot while a prefix is pinned, it unpins the prefix and counts again.
        """
        active = {
            s: r.cached
            for s, r in self.running.items()
            if s not in self.waiting_for_pages and r.finish is None
        }
        starts = active | {slot: num_shared}
        steps = min(MIN_DECODE_STEPS, self._limits.decode_steps)
        if not self._fits(starts, steps) and self._pinned:
            self._pinned.clear()
        return self._fits(starts, steps)

    def _fits(self, starts: dict[int, int], steps: int) -> bool:
        """Whether these slots can have pages for so many steps. `starts`: the entries that each has
        now."""
        return self.cache_manager.fits(
            (slot, start, self._max_entries(self.running[slot], steps))
            for slot, start in starts.items()
        )

    def _reserve(self, slot: int, end: int) -> bool:
        """Allocates pages for the entries `cached` .. `end` - 1 of a slot, and preempts the
        youngest requests for it. Returns False if the slot itself was preempted, as the youngest.
        """
        while (copies := self.cache_manager.reserve(slot, self.running[slot].cached, end)) is None:
            if self._pinned:
                self._pinned.clear()
                continue
            youngest = next(
                s
                for s in reversed(self.running)
                if s not in self.waiting_for_pages and self.running[s].finish is None
            )
            self._counts["preempted"] += 1
            self._wait_for_pages(youngest)
            if youngest == slot:
                return False
        self.updates.copy_pages(copies)
        return True

    def _wait_for_pages(self, slot: int) -> None:
        """Takes the pages of a slot, if it has any, and lets it wait for others. Its request keeps
        the slot and its tokens, and is prefilled from the start."""
        self.updates.start_copy_group()
        waiters = self._stop_prefill(slot)
        self.cache_manager.clear(slot)
        self.running[slot].cached = 0
        self.batch_changed = True
        self.prefilling[slot] = self.running[slot]
        self.waiting_for_pages.add(slot)
        self._readmit(waiters)

    def resume(self) -> None:
        """Starts the requests that wait for pages, the oldest first, as far as there are pages."""
        for slot in [slot for slot in self.running if slot in self.waiting_for_pages]:
            self.waiting_for_pages.discard(slot)
            self._readmit([slot])
            if slot in self.waiting_for_pages:
                break

    # Prompts.

    def next_prefill(self) -> list[int]:
        """Returns the slots of the next prefill call, of the adapter whose turn it is. The oldest
        slot that can be prefilled decides
        whether the call is for first or for later chunks, and for which table of pictures if any,
        because these are other programs.
        """
        waiting = self.waiting_for_pages
        candidates = [
            slot
            for slot, request in self.prefilling.items()
            if request.adapter == self.adapter and slot not in self._waiters and slot not in waiting
        ]
        group = [
            slot for slot in candidates if self.running[slot].cached == 0
        ]  # at their first chunk
        if group[:1] != candidates[:1]:
            group = [slot for slot in candidates if self.running[slot].cached]
        group = [slot for slot in group if self.running[slot].table is self.running[group[0]].table]
        return group[: prefill_rows(len(group))]

    def mark_prefilled(self, slot: int, cached: int) -> None:
        """Notes that the first `cached` entries of a request are in the cache.

        If the full prompt is cached, waiting slots start from it, transitively. If the next request
        has the same prompt and decoding slots cannot be shared, the prompt's state is saved.
        """
        self.running[slot].cached = cached
        ready = [slot]
        while ready:
            slot = ready.pop()
            request = self.running[slot]
            if (
                not request.ready or slot in self.waiting_for_pages
            ):  # an earlier slot here may have taken its pages
                continue
            del self.prefilling[slot]
            self.batch_changed = True
            tokens = request.cacheable
            self.cache_manager.mark_cached(slot, tokens)
            if (
                self._limits.pins_prefixes
                and self.next_request
                and self.next_request.cacheable == tokens
            ):
                self._pinned.pin(slot, tokens)
            for other, num_shared in self._waiters.waiting_for(slot):
                if self._waiters.start(other, slot, num_shared) and self._share(
                    slot, other, num_shared
                ):
                    ready.append(other)

    def _share(self, source: int, slot: int, num_shared: int) -> bool:
        """Makes a slot begin with the first `num_shared` entries of `source`, which may be the slot
        itself. Allocates pages for the rest of its prompt. Returns False if the slot was preempted
        because pages ran out."""
        if source != slot:
            self.cache_manager.share(source, slot, num_shared)
            if self._limits.copies_rows:
                self.updates.copy_row(source, slot)
        self.running[slot].cached = num_shared
        return self._reserve(slot, self.running[slot].needed)

    # Decoding.

    def reserve_decode(self) -> int:
        """Allocates pages for the next decode and returns the most decoding steps that it may make.
        Requests may be preempted for it."""
        steps = self._decode_steps()
        for slot in self.decoding:
            if slot not in self.waiting_for_pages:
                self._reserve(slot, self._max_entries(self.running[slot], steps))
        return steps

    def _decode_steps(self) -> int:
        """Returns the most decoding steps of the next decode: the limit, halved while pages are
        short, and one where a request has a constraint, since the host says which tokens may come
        next."""
        decoding = self.decoding
        if any(self.running[slot].params.constraint for slot in decoding):
            return 1
        has_stop_strings = any(self.running[slot].params.stop for slot in decoding)
        steps = (
            min(self._limits.decode_steps, MAX_STOP_STRING_STEPS)
            if has_stop_strings
            else self._limits.decode_steps
        )
        starts = {slot: self.running[slot].cached for slot in decoding}
        while steps > MIN_DECODE_STEPS and not self._fits(starts, steps):
            steps //= 2
        return steps
