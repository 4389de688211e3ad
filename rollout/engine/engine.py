"""Slots: requests are inserted, stepped together, and released. The cache, what its rows hold, and when which program runs.

A turn (`step`) first reads prompts in, at most `prefill_budget` tokens while others decode, so that a long one never stalls them;
then all slots that have their prompt decode together, many steps of them in one dispatch. A dispatch ends early on the device:
as soon as slots have ended that other requests wait for, or so many that a program of fewer rows will do. While it runs the host
does what is to be done with completions that have ended (`start`, then `collect`).

Over a paged cache a slot has pages for what it holds and for the next dispatch. When they run out the youngest request pauses: it
keeps its slot and its tokens, gives its pages back, and is read in again when all that run can have theirs for another dispatch.

S slots, s rows of a dispatch, P prompts of one prefill call, C tokens of it, K decoding steps of one dispatch, M pages of a row.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollout.engine.pages import Copy, PagedRows
from rollout.engine.programs import Made, Programs, prefill_rows, stop_width
from rollout.engine.scheduler import Request, Rows

# While requests wait, a dispatch ends when this share of its rows has ended: one row in a small batch.
REFILL_SHARE = 16

# Most steps of a dispatch where stop strings are looked for: the host does that, and what is made past one is thrown away.
WATCHED_STEPS = 16

# Steps that a dispatch takes before requests pause for want of pages.
FEWEST_STEPS = 16


class _View(NamedTuple):
    """The slots that a dispatch runs on, row by row (None: padding), and their own cache; None: the whole cache."""

    rows: tuple[int | None, ...]
    part: tuple | None


class _Flight(NamedTuple):
    """A dispatch on its way: the request of each row, and what it makes."""

    requests: tuple[Request | None, ...]
    made: Made


class Engine:
    """S slots over one cache. `weights()` gives the arrays to compute with, asked for at every dispatch; none is kept."""

    def __init__(
        self,
        programs: Programs,
        weights: Callable[[], dict],
        seed: int,
        *,
        stop_string: Callable | None,
        prefill_budget: int,
    ):
        """`stop_string(tokens, before, strings)`: how many tokens there are up to the one, after the first `before`, that completes
        one of the strings; None if none does. Without it there can be no stop strings."""
        self.programs, self._weights, self._seed = programs, weights, seed
        self._stop_string, self._budget = stop_string, prefill_budget
        self._rewinds = programs.supports_truncation
        self.counts = {"steps": 0, "rows": 0, "useful": 0, "prefill": 0, "dispatches": 0, "preempted": 0}
        self._made_by: list[weakref.ref] = []
        self.reset()

    def reset(self) -> None:
        """Gives up the cache and all requests."""
        self._cache, self._view, self._slots, self._flight, self._known = None, None, None, None, None
        self._running: dict[int, Request] = {}
        self._pending: dict[int, Request] = {}  # those of which the prompt is not in yet
        self._after: dict[
            int, tuple[int, int]
        ] = {}  # of these, those that begin with so many tokens that another slot will hold
        self._paused: set[int] = set()  # and those that wait for pages
        self._copies: list[tuple[int, int]] = []
        self._page_copies: list[Copy] = []
        self._following: Request | None = None
        self._shelf: tuple | None = (
            None  # the tokens of a prompt, and a cache of one row with what of it is not in pages
        )

    @property
    def _rows(self) -> Rows | PagedRows:
        """What the slots hold. Made when it is first asked for: how many pages there are depends on the memory that is left."""
        if self._known is None:
            self._known = self.programs.rows()
        return self._known

    @property
    def free(self) -> int:
        """Slots that a request can be inserted into: none while one waits for pages."""
        return 0 if self._paused else self._rows.free

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def insert(self, request: Request) -> int:
        """The slot that the request runs in from the next step on. ValueError if none is free, or as `check` does."""
        self.check(request)
        if not self.free:
            waiting, slots = len(self._paused), self.programs.slots
            why = (
                f"{waiting} requests wait for pages; step" if waiting else f"all {slots} slots are in use; release one"
            )
            raise ValueError(f"insert: {why} first")
        self._watch_weights()
        slot, source, same = self._rows.take(request.seen(0, request.needed))
        self._running[slot] = self._pending[slot] = request
        self._seat(slot, source, same)
        return slot

    def check(self, request: Request) -> None:
        """Raises ValueError for a prompt that is empty, too long with its completion, or not of this vocabulary, for stop strings
        without a tokenizer, and for a request that has ended or runs already."""
        if problem := request.problem(self.programs.vocab_size, self.programs.max_length):
            raise ValueError(f"a request of which the prompt {problem}")
        if request.params.stop and self._stop_string is None:
            raise ValueError(
                "a request with stop strings needs a tokenizer; pass one to Generator, or use stop_token_ids"
            )
        if request.finish or request.left < 1:
            raise ValueError(f"a request that has ended: {len(request.tokens)} tokens, finish {request.finish}")
        if any(running is request for running in self._running.values()):
            raise ValueError("a request that runs already")

    def _seat(self, slot: int, source: int, same: int) -> None:
        """Lets a request begin, whose first `same` tokens `source` holds."""
        request = self._running[slot]
        request.cached = 0
        if not self._room(slot, same):
            self._pause(slot)
        elif source in self._pending and source != slot:
            self._after[slot] = source, same
        elif same < request.needed and self._begin_with_kept(slot):
            self._begin(slot, request.needed)
        elif same:
            if self._follow(source, slot, same):
                self._begin(slot, same)
        else:
            self._make_room(slot, request.needed)

    def release(self, slot: int) -> Request:
        """The request that ran there; the slot is free. Its completion may have ended or not."""
        self._copy()
        request = self._running.pop(slot)
        followers = self._unseat(slot)
        if request.finish is None:
            self._slots = None
        elif self.programs.records:
            request.routes = self._routes(slot)
        # A state of fixed size is past the tokens where the host alone has ended the request.
        known = self._rewinds or (request.finish is not None and not request.params.stop)
        self._rows.give(slot, request.seen(0, request.cached) if known else ())
        self._reseat(followers)
        return request

    def _routes(self, slot: int) -> dict:
        """The experts of the entries of a slot, which are in the cache of the view if it has one."""
        cache, rows, row = self._cache, self.programs.slots, slot
        if self._view and self._view.part is not None and slot in self._view.rows:
            cache, rows, row = self._view.part, len(self._view.rows), self._view.rows.index(slot)
        tables = self._tables([slot])
        return self.programs.routes(cache, rows, row, None if tables is None else tables[0])

    def _unseat(self, slot: int) -> list[int]:
        """Takes a slot out of those that wait; the slots that waited for its prompt, and those that waited for theirs."""
        left = [slot]
        for each in left:
            left += [other for other, (source, _) in self._after.items() if source == each]
        for each in left:
            self._after.pop(each, None)
        self._pending.pop(slot, None)
        self._paused.discard(slot)
        return left[1:]

    def _reseat(self, slots: Sequence[int]) -> None:
        """Lets requests begin anew."""
        for slot in slots:  # or each would wait for what another, that waits too, was to hold
            self._rows.drop(slot)
        for slot in slots:
            request = self._running[slot]
            self._seat(slot, *self._rows.again(slot, request.seen(0, request.needed)))

    def cancel(self, request: Request) -> None:
        """Releases the slot of a request, if it has one."""
        for slot in [slot for slot, running in self._running.items() if running is request]:
            self.release(slot)

    def step(self, following: Request | None = None) -> list[int]:
        """One turn: `start`, and its `collect` at once."""
        self.start(following)
        return self.collect()

    def start(self, following: Request | None = None) -> None:
        """Reads prompts in and starts a dispatch of all slots that have theirs; the device works while the host goes on. What the
        last dispatch made must have been collected. `following`: the request that waits for the next free slot, if one does."""
        if self._flight is not None:
            raise ValueError("start: the last dispatch has not been collected")
        self._following = following
        self._read_prompts()
        self._dispatch()

    def collect(self) -> list[int]:
        """Waits for the dispatch that was started, and gives its tokens to their requests. The slots whose requests ended; they are
        to be released."""
        flight, self._flight = self._flight, None
        return [] if flight is None else self._land(flight)

    # Pages.

    def _end(self, request: Request, steps: int) -> int:
        """Entries that the request may have after so many decoding steps."""
        drafts = self.programs.drafts
        return request.needed + min(request.left, steps * (1 + drafts)) + drafts

    def _room(self, slot: int, same: int) -> bool:
        """Whether all that run can have pages for another dispatch, this slot with them."""
        starts = {s: r.cached for s, r in self._running.items() if s not in self._paused and r.finish is None} | {
            slot: same
        }
        steps = min(FEWEST_STEPS, self.programs.dispatch)
        if not self._fits(starts, steps) and self._shelf:
            self._clear_shelf()
        return self._fits(starts, steps)

    def _fits(self, starts: dict[int, int], steps: int) -> bool:
        """Whether these slots can have pages for so many steps; each has `start` entries now."""
        return self._rows.room((slot, start, self._end(self._running[slot], steps)) for slot, start in starts.items())

    def _steps(self, decoding: list[int]) -> int:
        """Most steps of the next dispatch of these slots. Where pages are short it takes fewer, before requests pause for it."""
        watched = any(self._running[slot].params.stop for slot in decoding)
        steps = min(self.programs.dispatch, WATCHED_STEPS) if watched else self.programs.dispatch
        starts = {slot: self._running[slot].cached for slot in decoding}
        while steps > FEWEST_STEPS and not self._fits(starts, steps):
            steps //= 2
        return steps

    def _make_room(self, slot: int, end: int) -> bool:
        """Gets pages for what the slot is about to write, up to entry `end`; the youngest pause for it. False if that is itself."""
        while (copies := self._rows.reserve(slot, self._running[slot].cached, end)) is None:
            if self._shelf:
                self._clear_shelf()
                continue
            active = (s for s in reversed(self._running) if s not in self._paused and self._running[s].finish is None)
            youngest = next(active)
            self.counts["preempted"] += 1
            self._pause(youngest)
            if youngest == slot:
                return False
        self._page_copies += copies
        return True

    def _pause(self, slot: int) -> None:
        """Takes the pages of a slot; its request will be read in again."""
        self._copy()
        followers = self._unseat(slot)
        self._rows.drop(slot)
        self._running[slot].cached, self._slots = 0, None
        self._pending[slot] = self._running[slot]
        self._paused.add(slot)
        self._reseat(followers)

    def _resume(self) -> None:
        """Lets requests that wait for pages begin again, the oldest first, as far as there are pages."""
        for slot in [slot for slot in self._running if slot in self._paused]:
            self._paused.discard(slot)
            self._reseat([slot])
            if slot in self._paused:
                break

    # Prompts.

    def _begin(self, slot: int, cached: int) -> None:
        """The first `cached` entries of the request's tokens are there. If that is all of its prompt, those that begin with it get
        a copy, and then those that begin with theirs; so does the request that still waits for a slot, where a row is of no use to
        others once it decodes."""
        self._running[slot].cached = cached
        begun = [slot]
        while begun:
            slot = begun.pop()
            request = self._running[slot]
            if not request.ready or slot in self._paused:  # paused for one before it
                continue
            del self._pending[slot]
            self._slots = None
            tokens = request.seen(0, request.needed)
            self._rows.filled(slot, tokens)
            if self.programs.shelves and self._following and self._following.seen(0, self._following.needed) == tokens:
                self._keep(slot, tokens)
            for other, same in [(other, same) for other, (source, same) in self._after.items() if source == slot]:
                if self._after.get(other) == (slot, same):
                    del self._after[other]
                    begun += [other] if self._follow(slot, other, same) else []

    def _follow(self, source: int, slot: int, same: int) -> bool:
        """Gives a slot the first `same` entries of another, or its own; False if it paused for want of pages."""
        if source != slot:
            self._rows.share(source, slot, same)
            self._copies += [(source, slot)] if self.programs.copies_rows else []
        self._running[slot].cached = same
        return self._make_room(slot, self._running[slot].needed)

    def _keep(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Puts what the slot holds on the shelf."""
        self._copy()
        self._rows.keep(slot, len(tokens))
        part = self.programs.enter(self._whole(), np.asarray([slot], np.int32)) if self.programs.copies_rows else None
        self._shelf = tokens, part

    def _begin_with_kept(self, slot: int) -> bool:
        """Gives a slot what is on the shelf, if that is the prompt of its request."""
        request = self._running[slot]
        if not self._shelf or self._shelf[0] != request.seen(0, request.needed) or not self._rows.begin_with_kept(slot):
            return False
        self._copy()
        if self._shelf[1] is not None:
            self._cache = self.programs.leave(self._whole(), self._shelf[1], np.asarray([slot], np.int32))
        return True

    def _clear_shelf(self) -> None:
        self._shelf = None
        self._rows.keep(None)

    def _read_prompts(self) -> None:
        """Prefills what is inserted, chunk after chunk. While slots decode it stops when the budget is spent."""
        self._resume()
        spent, budget = 0, self._budget if len(self._running) > len(self._pending) else float("inf")
        while True:
            self._copy()
            chosen = self._next_call()
            if not chosen or spent >= budget:
                break
            spent += self._prefill(chosen)

    def _copy(self) -> None:
        if self._copies:
            self._cache = self.programs.copy(self._whole(), self._copies)
            self._copies = []
        if self._page_copies:
            self._cache = self.programs.copy_pages(self._whole(), self._page_copies)
            self._page_copies = []

    def _next_call(self) -> list[int]:
        """The slots of the next prefill call: the first that can go on, and others of its kind."""
        able = [slot for slot in self._pending if slot not in self._after and slot not in self._paused]
        fresh = [slot for slot in able if self._running[slot].cached == 0]
        kind = fresh if fresh[:1] == able[:1] else [slot for slot in able if self._running[slot].cached]
        return kind[: prefill_rows(len(kind))]

    def _prefill(self, chosen: list[int]) -> int:
        """The tokens computed in one call that reads the next chunk of these requests."""
        requests, programs = [self._running[slot] for slot in chosen], self.programs
        fresh, P = requests[0].cached == 0, prefill_rows(len(chosen))
        longest = max(request.needed - request.cached for request in requests)
        C = programs.prefill_lengths(longest + 1)[-1] if fresh else programs.chunk
        rows = self._numbers([*chosen, *[None] * (P - len(chosen))])
        tokens, starts, lengths = (
            np.zeros((P, C + programs.ahead), np.int32),
            np.zeros(P, np.int32),
            np.zeros(P, np.int32),
        )
        for row, request in enumerate(requests):
            seen = request.seen(request.cached, request.cached + C + programs.ahead)
            tokens[row, : len(seen)] = seen
            starts[row], lengths[row] = request.cached, request.needed
        tables = self._tables([*chosen, *[None] * (P - len(chosen))])
        self._cache = programs.prefill(
            self._weights(), self._whole(), rows, tokens, starts, lengths, tables, fresh=fresh
        )
        for slot, request in zip(chosen, requests, strict=True):
            if slot not in self._paused:  # for one before it
                self._begin(slot, min(request.needed, request.cached + C))
        self.counts["prefill"] += int(sum(np.minimum(lengths - starts, C)))
        return P * C

    # Decoding.

    @property
    def _decoding(self) -> list[int]:
        """The slots that have their prompt, and have not ended as far as the host knows."""
        return [slot for slot, request in self._running.items() if slot not in self._pending and request.finish is None]

    def _view_fits(self, decoding: list[int]) -> bool:
        """Whether a dispatch can go on from the last one: with the rows it left, and no change that the device does not know of."""
        return self._slots is not None and self._size(decoding) == len(self._view.rows)

    def _size(self, decoding: list[int]) -> int:
        """Rows of a dispatch of these slots, of which each part of the cache has as many."""
        rows = self._rows.parts * max(Counter(map(self._rows.part, decoding)).values())
        return next(size for size in self.programs.sizes if size >= rows)

    def _dispatch(self) -> None:
        """Starts a dispatch if there is something to decode."""
        steps = self._steps(self._decoding)
        for slot in self._decoding:
            if slot not in self._paused:
                self._make_room(slot, self._end(self._running[slot], steps))
        self._copy()
        decoding = self._decoding
        if not decoding:
            return
        if not self._view_fits(decoding):
            self._arrange(decoding)
            width = max(len(self._running[slot].params.stop_token_ids) for slot in decoding)
            self._requests = tuple(self._running[slot] if slot in decoding else None for slot in self._view.rows)
            self._slots = self.programs.slots_of(self._requests, len(self._requests), stop_width(width), self._seed)
            for slot in decoding:
                self._rows.moves(slot)
        size, part = len(self._view.rows), self._view.part
        refill = len(decoding) - 1 - size // REFILL_SHARE
        smaller = max((s for s in self.programs.sizes if s < size), default=0)
        if smaller >= len(decoding):  # they are not spread evenly over the parts
            smaller //= self._rows.parts
        limits = steps, refill if self._following or self._pending else smaller
        tables = self._tables(self._view.rows)
        if tables is not None:
            self._slots = self.programs.seated(self._slots, self._numbers(self._view.rows), tables)
        given = self._cache if part is None else part
        cache, self._slots, made = self.programs.decode(self._weights(), given, self._slots, limits)
        if part is None:
            self._cache = cache
        else:
            self._view = self._view._replace(part=cache)
        self.counts["dispatches"] += 1
        self._flight = _Flight(self._requests, made)

    def _arrange(self, decoding: list[int]) -> None:
        """Makes a view of these slots. A view that has them all and no row too many stays as it is."""
        size = self._size(decoding)
        if self._view and len(self._view.rows) == size and set(decoding) <= set(self._view.rows):
            return
        cache, self._slots = self._whole(), None
        if size == self.programs.slots:
            self._view = _View(tuple(range(size)), None)
            return
        rows: list[int | None] = []
        for part in range(self._rows.parts):
            rows += [slot for slot in decoding if self._rows.part(slot) == part]
            rows += [None] * ((part + 1) * size // self._rows.parts - len(rows))
        self._view = _View(
            tuple(rows), self.programs.enter(cache, self._numbers(rows)) if self.programs.copies_views else None
        )

    def _whole(self):
        """The whole cache, with what a view has written in its place again."""
        if self._cache is None:
            self._cache = self.programs.empty()
        if self._view and self._view.part is not None:
            self._cache = self.programs.leave(self._cache, self._view.part, self._numbers(self._view.rows))
            self._view = self._slots = None
        return self._cache

    def _numbers(self, rows: Sequence[int | None]) -> np.ndarray:
        """The slots of these rows as programs take them; padding has numbers past the end, each its own."""
        return np.asarray([self.programs.slots + n if slot is None else slot for n, slot in enumerate(rows)], np.int32)

    def _tables(self, rows: Sequence[int | None]) -> np.ndarray | None:
        """The pages of these rows, int32[s, M]; None over a cache without."""
        width = self.programs.table_width
        if width is None:
            return None
        tables = np.zeros((len(rows), width), np.int32)
        for row, slot in enumerate(rows):
            pages = [] if slot is None else self._rows.pages(slot)
            tables[row, : len(pages)] = pages
        return tables

    def _land(self, flight: _Flight) -> list[int]:
        """Takes what a dispatch made; the slots that ended."""
        made = Made(*(None if array is None else np.asarray(array) for array in flight.made))
        counts = (made.tokens >= 0).sum(axis=0).tolist()
        steps = int(np.max(made.opens.sum(axis=0)))
        for name, number in ("steps", steps), ("rows", steps * len(flight.requests)), ("useful", int(made.opens.sum())):
            self.counts[name] += number
        ended, slot_of = [], {id(request): slot for slot, request in self._running.items()}
        for row, request in enumerate(flight.requests):
            slot = slot_of.get(id(request))
            if slot is None or not counts[row] or request.finish is not None:
                continue
            self._take(request, made.of(row), counts[row])
            if request.finish is not None:
                ended.append(slot)
        return ended

    def _take(self, request: Request, made: Made, count: int) -> None:
        """Adds what a dispatch made for one request, and says how it ended if it did."""
        before, params = len(request.tokens), request.params
        for grown, new in zip((request.tokens, request.logprobs, request.opens, request.values), made, strict=True):
            grown += [] if new is None else new[:count].tolist()
        request.cached = request.needed
        end = self._stop_string(request.tokens, before, params.stop) if params.stop else None
        if end is not None:
            del request.tokens[end:], request.logprobs[end:], request.opens[end:], request.values[end:]
            request.cached, request.finish, self._slots = request.needed, "stop", None
        elif request.tokens[-1] in params.stop_token_ids:
            request.finish = "stop"
        elif request.left == 0:
            request.finish = "length"

    # Weights.

    def _watch_weights(self) -> None:
        """Entries that other weights have made begin no prompt."""
        arrays = self._weights().values()
        known = self._made_by
        if len(known) == len(arrays) and all(ref() is array for ref, array in zip(known, arrays, strict=True)):
            return
        self.forget()
        self._made_by = [weakref.ref(array) for array in arrays]

    def forget(self) -> None:
        """Lets no prompt begin with entries of earlier ones."""
        self._clear_shelf()
        self._rows.forget()
