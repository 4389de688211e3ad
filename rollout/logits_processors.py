"""Logits processors: what penalties, biases and forbidden tokens do to the logits of the next
token.

They run in the order of vLLM (v1/sample/sampler.py), before temperature and filters
(rollout/engine/sampling.py):

1. `logit_bias`: logit + bias of the token.
2. `constraint`, `bad_words`, `min_tokens`: the logits of forbidden tokens are -inf.
3. `repetition_penalty` r (arXiv 1909.05858): of tokens that occur in prompt or completion, logit /
   r where it is positive, else logit * r.
4. `frequency_penalty` f: logit - f n, for a token that the completion has n times.
5. `presence_penalty` p: logit - p, for a token that the completion has.

A program has them only if one of its rows needs them; the others compute as if they were not there.

Where a constraint and the settings after it forbid every token, the constraint alone holds.

S rows, Q = d + 1 places of a step with d drafts, V vocabulary, H tokens of prompt and completion, B
biases of a row, N sequences of forbidden words of at most M tokens, W tokens that end a completion,
U = ceil(V / 32) words of a mask.
Letters after an underscore are the axes: history_SH is [S, H].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rollout.request import Request

NO_TOKEN = -1
"""Fills rows of token ids."""


class ProcessorSizes(NamedTuple):
    """What the arrays of a program have room for. They grow in few steps, so that few programs are
    compiled.

    counts: 1 where tokens are counted, for a penalty; else 0. biases, words, longest: biases of a
    row, sequences of its bad words, and tokens of one. ends: tokens that end a completion. masks: 1
    where a row has a constraint; else 0.
    """

    counts: int
    biases: int
    words: int
    longest: int
    ends: int
    masks: int = 0

    @classmethod
    def of(cls, requests: Iterable[Request | None]) -> ProcessorSizes | None:
        """Returns the sizes for these rows; None: the logits of all of them stay as they are."""
        needing = [each for each in requests if each is not None and _needs_processors(each)]
        if not needing:
            return None
        params = [each.params for each in needing]
        sequences = [len(word) for each in needing for word in each.bad_words]
        return cls(
            counts=int(any(each.has_penalty for each in params)),
            biases=_room(max(len(each.logit_bias or ()) for each in params), 8),
            words=_room(max(len(each.bad_words) for each in needing), 8),
            longest=_room(max(sequences, default=0), 4),
            ends=_room(
                max(len(each.stop_token_ids) if each.min_tokens else 0 for each in params), 4
            ),
            masks=int(any(each.constraint for each in params)),
        )


MOST_OF_A_ROW = ProcessorSizes(counts=1, biases=2048, words=128, longest=64, ends=64, masks=1)
"""Sizes of the one program that a generator for clients has for all logits processors."""


def _needs_processors(request: Request) -> bool:
    params = request.params
    forbids_ends = params.min_tokens and params.stop_token_ids
    return bool(
        params.has_penalty
        or params.logit_bias
        or params.bad_words
        or forbids_ends
        or params.constraint
    )


def _room(number: int, least: int) -> int:
    """Returns `least` times the smallest power of 4 that makes it `number` or more; 0 for 0."""
    room = least if number else 0
    while room < number:
        room *= 4
    return room


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """The tokens that each row has, up to the one to feed next.

    history: int32[S, H], prompt and completion, NO_TOKEN after them. counts: int32[S, V], how often
    the completion has each token. in_prompt: bool[S, V]. Both are None where no row has a penalty.
    """

    history: jax.Array
    counts: jax.Array | None
    in_prompt: jax.Array | None

    def with_token(self, at_S: jax.Array, tokens_S: jax.Array, active_S: jax.Array) -> Seen:
        """Returns it with a token of each active row at index `at` of prompt and completion."""
        rows = jnp.arange(len(at_S))
        H = self.history.shape[1]
        history = self.history.at[rows, jnp.where(active_S, at_S, H)].set(tokens_S, mode="drop")
        if self.counts is None:
            return replace(self, history=history)
        counted = jnp.where(active_S, tokens_S, self.counts.shape[1])
        return replace(
            self, history=history, counts=self.counts.at[rows, counted].add(1, mode="drop")
        )

    def with_each_draft(self, at_S: jax.Array, drafted_Sd: jax.Array) -> Seen:
        """Returns it for S (d + 1) rows: row (s, j) has the first j drafts of row s, from index
        at[s] on."""
        S, d = drafted_Sd.shape
        H = self.history.shape[1]
        Q = d + 1
        # A row never looks at tokens from the place of its own token on, so all of a slot have one
        # history.
        places = jnp.minimum(at_S[:, None] + jnp.arange(d), H)
        history = self.history.at[jnp.arange(S)[:, None], places].set(drafted_Sd, mode="drop")
        repeated = jax.tree.map(
            lambda array: jnp.repeat(array, Q, axis=0), replace(self, history=history)
        )
        if repeated.counts is None:
            return repeated
        V = repeated.counts.shape[1]
        is_before = jnp.arange(d) < jnp.arange(Q)[:, None]
        drafts_SQd = jnp.where(is_before, drafted_Sd[:, None], V).reshape(S * Q, d)
        counts = repeated.counts.at[jnp.arange(S * Q)[:, None], drafts_SQd].add(1, mode="drop")
        return replace(repeated, counts=counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsProcessors:
    """The logits processors of the rows of a program, numpy or jax arrays.

    history: as in Seen, at the start of the program. prompt_lengths, min_tokens: int32[S]. ends:
    int32[S, W]. bias_tokens: int32[S, B], and biases: float32[S, B]. words: int32[S, N, M], token
    sequences that may not occur, each in the last columns of its row. NO_TOKEN fills them up.
    repetition, frequency, presence: float32[S]; None where no row has a penalty. masks: uint32[S, U],
    the tokens that may come next under constraints; None where no row has one.
    """

    history: Any
    prompt_lengths: Any
    min_tokens: ArrayLike
    ends: Any
    bias_tokens: ArrayLike
    biases: Any
    words: Any
    repetition: Any = None
    frequency: Any = None
    presence: Any = None
    masks: Any = None

    @classmethod
    def of(
        cls, requests: Sequence[Request | None], rows: int, length: int, sizes: ProcessorSizes
    ) -> LogitsProcessors:
        """Builds the processors of `rows` rows on the host, row i for request i; other rows have
        none.

        length: H. A longer prompt and completion is cut off.
        """
        history = _no_tokens(rows, length)
        words = _no_tokens(rows, sizes.words, sizes.longest)
        ends = _no_tokens(rows, sizes.ends)
        bias_tokens = _no_tokens(rows, sizes.biases)
        biases = np.zeros((rows, sizes.biases), np.float32)
        prompt_lengths, min_tokens = np.zeros((2, rows), np.int32)
        penalties = np.tile(np.asarray([[1], [0], [0]], np.float32), rows)
        for row, request in enumerate(requests):
            if request is None:
                continue
            params = request.params
            tokens = (*request.prompt, *request.tokens)[:length]
            history[row, : len(tokens)] = tokens
            prompt_lengths[row] = len(request.prompt)
            min_tokens[row] = params.min_tokens
            if params.min_tokens:
                ends[row, : len(params.stop_token_ids)] = params.stop_token_ids
            for column, (token, bias) in enumerate((params.logit_bias or {}).items()):
                bias_tokens[row, column] = token
                biases[row, column] = bias
            for number, word in enumerate(request.bad_words):
                words[row, number, sizes.longest - len(word) :] = word
            penalties[:, row] = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        counted = tuple(penalties) if sizes.counts else ()
        return cls(history, prompt_lengths, min_tokens, ends, bias_tokens, biases, words, *counted)

    @property
    def sizes(self) -> ProcessorSizes:
        """Returns what the arrays have room for."""
        counts = int(self.repetition is not None)
        masks = int(self.masks is not None)
        _, N, M = self.words.shape
        return ProcessorSizes(counts, self.biases.shape[1], N, M, self.ends.shape[1], masks)

    def take(self, rows_m: jax.Array) -> LogitsProcessors:
        """Returns the processors of these rows."""
        return jax.tree.map(lambda array: jnp.asarray(array)[rows_m], self)

    def seen(self, at_S: jax.Array, V: int) -> Seen:
        """Returns the tokens of each row before index `at` of prompt and completion."""
        history = jnp.asarray(self.history)
        if self.repetition is None:
            return Seen(history, None, None)
        S, H = history.shape
        rows = jnp.arange(S)[:, None]
        columns = jnp.arange(H)
        is_token = (columns < at_S[:, None]) & (history >= 0)
        is_prompt = columns < jnp.asarray(self.prompt_lengths)[:, None]
        completion = jnp.where(is_token & ~is_prompt, history, V)
        prompt = jnp.where(is_token & is_prompt, history, V)
        counts = jnp.zeros((S, V), jnp.int32).at[rows, completion].add(1, mode="drop")
        return Seen(
            history, counts, jnp.zeros((S, V), bool).at[rows, prompt].set(True, mode="drop")
        )

    def process(self, logits_SV: jax.Array, at_S: jax.Array, seen: Seen) -> jax.Array:
        """Returns the logits, float32[S, V], of the tokens at index `at` of prompt and completion,
        -inf for those that may not be drawn. seen: the tokens before them."""
        S, V = logits_SV.shape
        own = self._process(logits_SV, at_S, seen)
        if self.masks is None:
            return own
        bits = jnp.asarray(self.masks)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        allowed = bits.reshape(S, -1)[:, :V] != 0
        own = jnp.where(allowed, own, -jnp.inf)
        nothing = jnp.all(jnp.isneginf(own), axis=-1, keepdims=True)
        return jnp.where(nothing, jnp.where(allowed, logits_SV, -jnp.inf), own)

    def _process(self, logits_SV: jax.Array, at_S: jax.Array, seen: Seen) -> jax.Array:
        """Returns the logits as all steps but constraints leave them."""
        S, V = logits_SV.shape
        drawn_S = at_S - self.prompt_lengths
        rows = jnp.arange(S)[:, None]
        logits = logits_SV
        if self.biases.shape[1]:
            logits = logits.at[rows, _or_dropped(self.bias_tokens, V)].add(self.biases, mode="drop")
        forbidden = self._word_ends(at_S, drawn_S, seen.history)
        ends = jnp.where((drawn_S < self.min_tokens)[:, None], self.ends, NO_TOKEN)
        forbidden = jnp.concatenate([forbidden, ends], axis=1)
        if forbidden.shape[1]:
            logits = logits.at[rows, _or_dropped(forbidden, V)].set(-jnp.inf, mode="drop")
        if seen.counts is None or seen.in_prompt is None:
            return logits
        repetition, frequency, presence = (
            jnp.asarray(row)[:, None] for row in (self.repetition, self.frequency, self.presence)
        )
        in_completion = seen.counts > 0
        scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen.in_prompt | in_completion, scaled, logits)
        return logits - frequency * seen.counts - presence * in_completion

    def _word_ends(self, at_S: jax.Array, drawn_S: jax.Array, history_SH: jax.Array) -> jax.Array:
        """Returns int32[S, N]: the last token of each sequence whose other tokens end the
        completion, else NO_TOKEN."""
        _, N, M = self.words.shape
        if not N:
            return jnp.asarray(self.words).reshape(len(at_S), 0)
        back = jnp.arange(M - 1, 0, -1)
        places = jnp.clip(at_S[:, None] - back, 0, history_SH.shape[1] - 1)
        tail = jnp.take_along_axis(history_SH, places, axis=1)
        tail = jnp.where(
            back <= drawn_S[:, None], tail, NO_TOKEN - 1
        )  # before the completion nothing matches
        before = self.words[..., :-1]
        last = self.words[..., -1]
        matches = (before == NO_TOKEN) | (before == tail[:, None])
        return jnp.where(jnp.all(matches, axis=-1), last, NO_TOKEN)


def masks_of(requests: Sequence[Request | None], rows: int, V: int) -> np.ndarray:
    """Returns uint32[rows, U], the tokens that may come next in each row; all, where a row has no
    request, or one without a constraint."""
    masks = np.full((rows, -(-V // 32)), 0xFFFFFFFF, np.uint32)
    for row, request in enumerate(requests):
        if request is not None and request.matcher is not None and request.finish is None:
            masks[row] = request.matcher.mask(request.params.stop_token_ids)
    return masks


def _no_tokens(*shape: int) -> np.ndarray:
    return np.full(shape, NO_TOKEN, np.int32)


def _or_dropped(tokens: ArrayLike, V: int) -> jax.Array:
    """Returns the token ids with V, which a scatter drops, for NO_TOKEN."""
    return jnp.where(jnp.asarray(tokens) < 0, V, tokens)
