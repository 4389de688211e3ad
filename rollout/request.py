"""Requests, and the queue in which they wait for a slot. Pure Python: no device.

The words of the folder `engine` about a request, from the smallest to the largest:

- entry: what the cache keeps of one token.
- `cached`: how many of the first tokens of prompt and completion have entries now.
- `needed`: how many entries decoding needs: one for each token but the last. `cacheable`: the keys
  of these tokens. The key of a token is its id, or a number below 0 for a part of a picture or
  sound (`prefix_keys`).
- `last`: the token without an entry. The next decoding step feeds it, makes its entry and samples
  the token after it.
- `ready`: `cached` has reached `needed`, so the request can decode.
- `left`: how many tokens may still be sampled.

Shapes: C entries of a slot, R repeats of a stack, k experts of a token, I ids that filters left.

The `cacheable` tokens are the user's prompt without its last token, and also a part of the
completion if the request was preempted or continues.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import QueueOrder, SamplingParams, TokenScores

if TYPE_CHECKING:
    from policy.cache.media import Media
    from rollout.constraints import Matcher


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """A prompt with pictures or sounds: its token ids, the rows that stand in the place of some of
    them, and its keys (`prefix_keys`)."""

    tokens: tuple[int, ...]
    media: Media
    keys: tuple[int, ...]


def prefix_keys(tokens: Sequence[int], parts: Sequence[tuple[str, int] | None]) -> tuple[int, ...]:
    """Returns the tokens of a prompt with a number below 0 in the place of each one that stands for
    a part of a picture or sound. The number follows from (digest, number of the part), parts[t] of
    token t; None: token t is text. In requests with an adapter the number of the first token
    follows from (name of the adapter, token).

    Equal prompts have equal keys only if they show equal pictures, so prefixes are compared by
    them.
    """
    return tuple(
        int(token)
        if part is None
        else -1 - int.from_bytes(hashlib.blake2b(repr(part).encode(), digest_size=8).digest())
        for token, part in zip(tokens, parts, strict=True)
    )


@dataclass(eq=False)
class Request:
    """One completion to sample.

    prompt: the tokens that the caller gave. They stay as they are, also after a preemption.
    prompt_id, sample: numbers for the random draws. With the seed and a position they determine
    each draw. prompt_id is the running number of the prompt in the run, sample the number of the
    completion of this prompt.
    index: index of the prompt in the call that made the request.

    The engine appends to these lists until `finish` is "stop" or "length":

    - tokens: the completion.
    - logprobs: the log-probability of each token.
    - starts_step: true for the first token of a decoding step; false for further tokens that the
      step gains from accepted drafts. Its sum is the number of decoding steps.
    - values: where they are recorded, the value of the state that each token was drawn from.
    - filtered_logprobs, kept, kept_counts: where filters are recorded and the request has one, as
      in rollout/engine/sampling.py:Drawn. `kept` has an array int32[I] for each token.
    - raw_logprobs, top_ids, top_logprobs: under `params.top_logprobs`, as in TokenScores; arrays
      int32[k] and float32[k] for each token. `scores` has them as arrays.

    prompt_scores: under `params.prompt_logprobs`, of the tokens of the prompt. It is there before
    the first token is; under GeneratorOptions.exact these and the raw log-probabilities are there
    when the request ends.

    cached: how many tokens of prompt and completion have entries in the cache.
    verified_tokens: how many tokens of the completion the scoring programs have confirmed, under
    GeneratorOptions.exact (rollout/engine/exact.py).
    routes: where they are recorded, once the request has ended: the experts of its entries, the
    first `needed` of int[C, R, k], by path of the layer.
    media: the pictures and sounds of the prompt; None: it is text.
    keys: what prefixes are compared by, one number for each token of the prompt; None: its tokens.
    bad_words: the token sequences of `params.bad_words`. The engine sets them.
    adapter: the name of the adapter that computes it (rollout/adapter_pool.py); None: none.
    matcher: where the completion stands in the grammar of `params.constraint`. The engine sets it.
    arrival: its number in the order in which requests came to the queue, which sets it.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    prompt_id: int = 0
    sample: int = 0
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts_step: list[bool] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    filtered_logprobs: list[float] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    kept_counts: list[int] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    top_ids: list[Any] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    prompt_scores: TokenScores | None = None
    finish: str | None = None
    cached: int = 0
    verified_tokens: int = 0
    routes: dict[str, Any] | None = None
    media: Media | None = None
    keys: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None
    matcher: Matcher | None = None
    arrival: int | None = None

    @property
    def needed(self) -> int:
        """Returns the number of entries that decoding needs: one for each token of prompt and
        completion but the last."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def ready(self) -> bool:
        """Whether the request can decode: its first `needed` tokens are in the cache."""
        return self.cached >= self.needed

    @property
    def last(self) -> int:
        """Returns the token to feed next."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def left(self) -> int:
        """Returns the number of tokens that may still be sampled."""
        return self.params.max_new_tokens - len(self.tokens)

    @property
    def cacheable(self) -> tuple[int, ...]:
        """Returns the keys of the first `needed` tokens. Other requests can share their entries."""
        return self.shared_keys(self.needed)

    @property
    def scores(self) -> TokenScores | None:
        """Returns the raw log-probabilities of the completion up to now; None: they are not asked
        for."""
        k = self.params.top_logprobs
        if k is None:
            return None
        ids = np.asarray(self.top_ids, np.int32).reshape(len(self.raw_logprobs), -1)
        logprobs = np.asarray(self.top_logprobs, np.float32).reshape(ids.shape)
        return TokenScores(np.asarray(self.raw_logprobs, np.float32), ids[:, :k], logprobs[:, :k])

    @scores.setter
    def scores(self, scores: TokenScores) -> None:
        self.raw_logprobs = scores.logprobs.tolist()
        self.top_ids = list(scores.top_ids)
        self.top_logprobs = list(scores.top_logprobs)

    def span(self, start: int, end: int) -> tuple[int, ...]:
        """Returns tokens start .. end - 1 of prompt and completion."""
        n = len(self.prompt)
        return (*self.prompt[start:end], *self.tokens[max(0, start - n) : max(0, end - n)])

    def shared_keys(self, end: int) -> tuple[int, ...]:
        """Returns the keys of the tokens before `end` of prompt and completion."""
        keys = self.prompt if self.keys is None else self.keys
        text = (*keys[:end], *self.tokens[: max(0, end - len(keys))])
        if self.adapter is None or not text:
            return text
        # A prefix begins with the first token, so this is enough to tell adapters apart.
        return (*prefix_keys(text[:1], [(self.adapter, text[0])]), *text[1:])

    def call_end(self, tokens: int) -> int:
        """Returns where the next prefill call of so many tokens ends: `needed` at the latest, and
        in no block of a picture that sees itself."""
        end = min(self.needed, self.cached + tokens)
        return end if self.media is None else self.media.call_end(end)

    @property
    def table(self) -> Any:
        """Returns the table of the rows of its pictures and sounds; None: it has none. Requests
        with different tables are not prefilled in one call."""
        return None if self.media is None else self.media.table

    def refusal(self, vocab_size: int, max_length: int) -> str | None:
        """Returns why a cache of `max_length` tokens per slot cannot take the prompt, as the end of
        a sentence.

        None: it can.
        """
        if not self.prompt:
            return "is empty"
        text = self.prompt
        if self.media is not None:
            if refusal := self.media.refusal(len(self.prompt)):
                return refusal
            if self.keys is None or len(self.keys) != len(self.prompt):
                return (
                    "has pictures or sounds and no key for each token; make them with prefix_keys"
                )
            text = [
                token
                for token, row in zip(self.prompt, self.media.index.tolist(), strict=True)
                if row < 0
            ]
        if min(text, default=0) < 0 or max(text, default=0) >= vocab_size:
            return f"holds a token id outside 0..{vocab_size - 1}"
        if len(self.prompt) + self.params.max_new_tokens > max_length:
            return (
                f"has {len(self.prompt)} tokens; with max_new_tokens {self.params.max_new_tokens} "
                f"it is longer than max_length {max_length}"
            )
        return None


class Queue:
    """Requests that wait for a slot, in the order "longest" or "arrival".

    "longest": those with the largest max_new_tokens go first, because a long completion that starts
    last keeps the others waiting; equal ones go in order of arrival, so the samples of a prompt
    stay together. A batch of known requests ends soonest so. "arrival": the oldest goes first, so
    that no later request can keep one waiting. A request that returns keeps its place."""

    def __init__(self, order: QueueOrder = "longest") -> None:
        self._longest_first = order == "longest"
        self._heap: list[tuple[int, int, int, Request]] = []
        self._count = 0

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.arrival is None:
                request.arrival = self._count
            length = -request.params.max_new_tokens if self._longest_first else 0
            heapq.heappush(self._heap, (length, request.arrival, self._count, request))
            self._count += 1

    @property
    def first(self) -> Request | None:
        """Returns the request that `pop` would return; None if the queue is empty."""
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        """Removes a request if it is in the queue."""
        others = [entry for entry in self._heap if entry[-1] is not request]
        if len(others) < len(self._heap):
            heapq.heapify(others)
            self._heap = others

    def clear(self) -> None:
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)
