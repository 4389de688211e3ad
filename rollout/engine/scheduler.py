"""Which request runs next, and what the rows of the cache hold. Pure Python: no arrays, no device, nothing that depends on time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.engine.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """One completion to be made: sample number `sample` of prompt number `prompt_id` of a run. `index` is the caller's number of
    the prompt.

    `tokens`, `logprobs`, `opens` (whether a token is the first that its decoding step made) and, where they are recorded, `values`
    (of the states that tokens were drawn in) grow until `finish` says stop or length. `cached`: tokens of prompt and completion
    whose entries are in the cache. `settled`: of `tokens`, those that an exact check has confirmed (rollout/engine/exact.py). `routes`:
    where they are recorded, once it has ended: the experts of its entries, the first `needed` of int[C, R, k] by path of the layer.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    prompt_id: int = 0
    sample: int = 0
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0
    settled: int = 0
    routes: dict | None = None

    @property
    def needed(self) -> int:
        """Entries that decoding starts from: those of all tokens but the last, which is fed first."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def ready(self) -> bool:
        """Whether the next step can be a decoding step."""
        return self.cached >= self.needed

    @property
    def last(self) -> int:
        """The token to feed next."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def left(self) -> int:
        """Tokens that may still be made."""
        return self.params.max_new_tokens - len(self.tokens)

    def problem(self, vocab_size: int, max_length: int) -> str | None:
        """What is wrong with its prompt where rows have room for `max_length` tokens; None: nothing."""
        if not self.prompt:
            return "is empty"
        if min(self.prompt) < 0 or max(self.prompt) >= vocab_size:
            return f"holds a token id outside 0..{vocab_size - 1}"
        if len(self.prompt) + self.params.max_new_tokens > max_length:
            return (
                f"has {len(self.prompt)} tokens; with max_new_tokens {self.params.max_new_tokens} it is longer than max_length "
                f"{max_length}"
            )
        return None

    def seen(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens start .. end - 1 of prompt and completion."""
        n = len(self.prompt)
        return (*self.prompt[start:end], *self.tokens[max(0, start - n) : max(0, end - n)])


class Queue:
    """Requests that wait for a slot: those that may have the longest completions first, for a long one that starts last keeps the
    others waiting; among equals the first that came. The samples of a prompt stay together."""

    def __init__(self):
        self._heap: list[tuple[int, int, Request]] = []
        self._count = 0

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            heapq.heappush(self._heap, (-request.params.max_new_tokens, self._count, request))
            self._count += 1

    @property
    def first(self) -> Request | None:
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request) -> None:
        """Takes out a request if it is here."""
        kept = [entry for entry in self._heap if entry[2] is not request]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept

    def clear(self) -> None:
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)


# A prompt that begins like what another row holds is copied from there, if that saves so many tokens of prefill.
WORTH_A_COPY = 32


def worth_a_copy(same: int, tokens: tuple[int, ...]) -> bool:
    """Whether to begin these tokens with a copy of the first `same`."""
    return same >= min(WORTH_A_COPY, max(1, len(tokens)))


class Rows:
    """What the rows of a contiguous cache hold, and which of them are free.

    A row keeps its entries when its request ends, until another takes it, so that a prompt can begin with what is there: the
    samples of one prompt, the turns of a conversation, prompts with one system message. `supports_truncation`: whether a row can be used up to
    any of its tokens, and not only as far as it is filled, as states of fixed size can.
    """

    parts = 1

    def __init__(self, slots: int, *, rewinds: bool):
        self.supports_truncation = rewinds
        self._free = dict.fromkeys(range(slots))  # those that were given up first stand first
        self._old: set[int] = set()  # rows in use when everything was forgotten
        self._held: list[tuple[int, ...]] = [()] * slots
        self._begun: dict[tuple[int, ...], int] = {}  # the row that was last taken for these tokens

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """(row, how many of these tokens it holds from the first on): the most there are, in a free row rather than in one in use;
        (-1, 0) if none is worth a copy."""
        row = self._begun.get(tokens) if tokens else None
        if row is not None and self._same(row, tokens) == len(tokens):
            return row, len(tokens)
        found = max(
            ((self._same(row, tokens), row in self._free, -row) for row in range(len(self._held))),
            default=(0, False, 0),
        )
        return (-found[2], found[0]) if worth_a_copy(found[0], tokens) else (-1, 0)

    def _same(self, row: int, tokens: tuple[int, ...]) -> int:
        held = self._held[row]
        same = common(held, tokens)
        return same if self.supports_truncation or same == len(held) else 0

    def take(self, tokens: tuple[int, ...]) -> tuple[int, int, int]:
        """(row, source, same): a free row that will hold these tokens, and the row whose first `same` entries it begins with. A row
        that is free begins with its own; else the one that was given up first is taken."""
        source, same = self.find(tokens)
        taken = source if source in self._free else next(iter(self._free))
        del self._free[taken]
        self._held[taken], self._begun[tokens] = tokens, taken
        return taken, source, same

    def drop(self, row: int) -> None:
        """A row in use holds nothing."""
        self._held[row] = ()

    def again(self, row: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """(source, same), as `take` says, for a row in use that holds nothing and will hold these tokens."""
        source, same = self.find(tokens)
        self._held[row], self._begun[tokens] = tokens, row
        return source, same

    def moves(self, row: int) -> None:
        """The row goes on from what it was taken for."""
        if not self.supports_truncation:
            self._held[row] = ()

    def give(self, row: int, tokens: tuple[int, ...]) -> None:
        """The row is free; it holds these tokens."""
        if row in self._free:
            raise ValueError(f"row {row} is free already")
        self._free[row] = None
        self._held[row] = () if row in self._old else tokens
        self._old.discard(row)
        if len(self._begun) > 4 * len(self._held):
            self._begun = {t: r for t, r in self._begun.items() if self._same(r, t) == len(t)}

    def forget(self) -> None:
        """What the rows hold is of no use any more. The next to be taken is the first, whatever ran before."""
        self._free = dict.fromkeys(sorted(self._free))
        self._old = set(range(len(self._held))) - self._free.keys()
        self._held = [()] * len(self._held)
        self._begun.clear()

    # What only pages need (rollout/engine/pages.py): every row has room for all that it may hold.

    def part(self, row: int) -> int:
        return 0

    def room(self, wanted) -> bool:
        return True

    def reserve(self, row: int, start: int, end: int) -> list:
        return []

    def share(self, source: int, row: int, same: int) -> None: ...

    def filled(self, row: int, tokens: tuple[int, ...]) -> None: ...

    def keep(self, row: int | None, tokens: int = 0) -> None: ...

    def begin_with_kept(self, row: int) -> bool:
        return True


def common(a: tuple, b: tuple) -> int:
    """Number of equal elements at the beginning of both."""
    if not a or not b or a[0] != b[0]:
        return 0
    low, high = 1, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] are equal, a[:high] are not
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low
