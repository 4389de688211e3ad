"""Sampling of the next token.

S slots, V vocabulary, N blocks of L tokens of it, I ids of a token that are recorded, where filters
leave that many, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy.mesh.sharding import Layout, row_major
from rollout.types import SamplingParams

# Tokens of a block of `draw_by_weight` on one CPU: about the square root of a vocabulary.
DRAW_BLOCK = 128


def uniforms(
    seed: jax.Array, prompt_ids_S: jax.Array, samples_S: jax.Array, positions_S: jax.Array
) -> jax.Array:
    """Returns one number in [0, 1) for each slot, a function of (seed, prompt id, sample index,
    position) only."""

    def uniform(prompt_id, sample, position):
        key = jax.random.key(seed)
        for number in (prompt_id, sample, position):
            key = jax.random.fold_in(key, number)
        return jax.random.uniform(key)

    return jax.vmap(uniform)(prompt_ids_S, samples_S, positions_S)


def filter_mask(
    logits_SV: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    layout: Layout | None = None,
) -> jax.Array:
    """Returns bool[S, V]: the tokens that pass top-k, top-p and min-p ([S, 1] each). Tokens as
    likely as the least likely one that passes pass too."""
    V = logits_SV.shape[-1]
    ranked = row_major(-jnp.sort(-logits_SV, axis=-1), layout)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    threshold = jnp.take_along_axis(ranked, k - 1, axis=-1)
    probs = jax.nn.softmax(jnp.where(ranked >= threshold, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The sum over a large vocabulary may pass 1 before its end, which must not cut anything off at
    # top_p 1.
    likely = (before < top_p) | (top_p >= 1)
    threshold = jnp.min(
        jnp.where(likely & (ranked >= threshold), ranked, jnp.inf), axis=-1, keepdims=True
    )
    return (logits_SV >= threshold) & (logits_SV >= ranked[:, :1] + jnp.log(min_p))


class Exponentials(NamedTuple):
    """exp(logits - top) of rows of logits, which give log-probabilities and weights to draw from.

    top: float32[S, 1], the largest logit. values: float32[S, V]. total: float32[S], their sum.
    """

    top: jax.Array
    values: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, logits_SV: jax.Array) -> Exponentials:
        top_S1 = jnp.max(logits_SV, axis=-1, keepdims=True)
        values_SV = jnp.exp(logits_SV - top_S1)
        return cls(top_S1, values_SV, jnp.sum(values_SV, axis=-1))

    def most_likely(self, logits_SV: jax.Array) -> jax.Array:
        """Returns int32[S], the first of the largest logits. XLA's argmax is not vectorised on
        CPU."""
        last = logits_SV.shape[-1] - 1
        tokens = jnp.arange(last + 1, dtype=jnp.int32)
        return jnp.min(jnp.where(logits_SV == self.top, tokens, last), axis=-1)

    def logprobs(self, logits_SV: jax.Array, tokens_S: jax.Array) -> jax.Array:
        """Returns float32[S], the log-probability of one token of each row."""
        logits_S1 = jnp.take_along_axis(logits_SV, tokens_S[:, None], axis=-1)
        return (logits_S1 - self.top)[:, 0] - jnp.log(self.total)


def draw(logits_SV: jax.Array, uniforms_S: jax.Array, layout: Layout | None = None) -> jax.Array:
    """Returns int32[S]: the token where the cumulative probability passes `uniforms`."""
    return draw_by_weight(Exponentials.of(logits_SV).values, uniforms_S, layout)


def draw_by_weight(
    weights_SV: jax.Array, uniforms_S: jax.Array, layout: Layout | None = None
) -> jax.Array:
    """Returns int32[S]: the token where the cumulative weight passes `uniforms` times the total.
    weights: float32[S, V], probabilities times any number. A token of weight 0 is never drawn.

    One random number per row and a cumulative sum cost less than one Gumbel number per token.
    On one CPU only the sums of blocks of tokens are accumulated, then the block that passes.
    """
    if layout is None or (layout.platform == "cpu" and layout.mesh.size == 1):
        return _draw_in_blocks(weights_SV, uniforms_S)
    # XLA sums in blocks, whose rounding may raise the sum at a token of weight 0: such tokens are
    # skipped.
    cumulative = jnp.where(weights_SV > 0, jnp.cumsum(weights_SV, axis=-1), 0.0)
    candidates = cumulative > uniforms_S[:, None] * jnp.max(cumulative, axis=-1, keepdims=True)
    last = weights_SV.shape[-1] - 1
    return jnp.min(jnp.where(candidates, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def _draw_in_blocks(weights_SV: jax.Array, uniforms_S: jax.Array) -> jax.Array:
    """Computes `draw_by_weight` block by block."""
    S, V = weights_SV.shape
    L = DRAW_BLOCK
    blocks_SNL = jnp.pad(weights_SV, ((0, 0), (0, -V % L))).reshape(S, -1, L)
    sums_SN = jnp.sum(blocks_SNL, axis=-1)
    running_SN = jnp.cumsum(sums_SN, axis=-1)
    reached_SN = jnp.where(sums_SN > 0, running_SN, 0.0)
    goals_S1 = uniforms_S[:, None] * jnp.max(reached_SN, axis=-1, keepdims=True)
    block_S1 = jnp.argmax(reached_SN > goals_S1, axis=-1, keepdims=True).astype(jnp.int32)
    before_S1 = jnp.take_along_axis(running_SN, jnp.maximum(block_S1 - 1, 0), axis=-1)
    before_S1 = jnp.where(block_S1 > 0, before_S1, 0.0)
    block_SL = jnp.take_along_axis(blocks_SNL, block_S1[:, :, None], axis=1)[:, 0]
    has_weight = block_SL > 0
    places = jnp.arange(L, dtype=jnp.int32)
    # The sum inside the block may round to less than the sum of the block: then the last token.
    last_S1 = jnp.max(jnp.where(has_weight, places, 0), axis=-1, keepdims=True)
    passes = has_weight & (before_S1 + jnp.cumsum(block_SL, axis=-1) > goals_S1)
    return block_S1[:, 0] * L + jnp.min(jnp.where(passes, places, last_S1), axis=-1)


class Drawn(NamedTuple):
    """Drawn tokens. `filtered_logprobs`, `kept` and `kept_counts` are None where no filters are
    recorded, the three fields after them where no row asks for them.

    tokens: int[S]. logprobs: float32[S], before any filter. filtered_logprobs: float32[S], of the
    distribution that the filters leave. kept: int32[S, I], the ids that they leave, in ascending
    order, padded with -1. kept_counts: int32[S], how many they leave; of more than I only the first
    I are in `kept`. With logits processors, a row with more than I ids of which at most I are left
    out has those in `kept`, id i as -2 - i. A row without a filter and without a forbidden token
    has 0 ids, and the same log-probability twice.
    raw_logprobs: float32[S], at temperature 1, before logits processors and filters. top_ids:
    int32[S, k], the likeliest tokens then, likeliest first, lowest id first among equals.
    top_logprobs: float32[S, k], theirs; the drawn token has the same float here and in
    raw_logprobs.
    """

    tokens: Any
    logprobs: Any
    filtered_logprobs: Any = None
    kept: Any = None
    kept_counts: Any = None
    raw_logprobs: Any = None
    top_ids: Any = None
    top_logprobs: Any = None


class FilterRecord(NamedTuple):
    """The last three fields of `Drawn`."""

    filtered_logprobs: jax.Array
    kept: jax.Array
    kept_counts: jax.Array


def kept_ids(mask_SV: jax.Array, I: int) -> tuple[jax.Array, jax.Array]:
    """Returns (the first I ids of each row's mask int32[S, I], padded with -1; how many it has
    int32[S])."""
    running_SV = jnp.cumsum(mask_SV, axis=-1, dtype=jnp.int32)
    numbers = jnp.arange(1, I + 1, dtype=jnp.int32)
    places = jax.vmap(jnp.searchsorted, (0, None))(running_SV, numbers)
    count_S = running_SV[:, -1]
    return jnp.where(numbers <= count_S[:, None], places.astype(jnp.int32), -1), count_S


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """Parameters of the draws: one seed, and for each row [S] its temperature (0: the most likely
    token) and filters.

    The fields are numpy or jax arrays.
    """

    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seed: int) -> Draws:
        """Builds one row for each of `params`, on the host."""
        rows = (
            np.asarray([(p.temperature, p.top_p, p.min_p) for p in params], np.float32)
            .reshape(-1, 3)
            .T
        )
        return cls(
            np.uint32(seed),
            rows[0],
            np.asarray([p.top_k for p in params], np.int32),
            rows[1],
            rows[2],
        )

    def repeat(self, times: int) -> Draws:
        """Returns settings for rows that each stand `times` times, one after the other."""
        rows = (self.temperature, self.top_k, self.top_p, self.min_p)
        return Draws(self.seed, *(jnp.repeat(row, times) for row in rows))

    def filtered(self, logits_SV: jax.Array, layout: Layout | None = None) -> jax.Array:
        """Sorts the logits, and sets those of filtered tokens to -inf."""
        logits_SV = row_major(logits_SV, layout)
        filters = (row[:, None] for row in (self.top_k, self.top_p, self.min_p))
        mask = filter_mask(logits_SV, *filters, layout=layout)
        return row_major(jnp.where(mask, logits_SV, -jnp.inf), layout)

    @property
    def has_filter(self) -> jax.Array:
        """Returns bool[S]: whether filters may leave out tokens of a row."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))


def choose(
    logits_SV: jax.Array,
    draw_ids: tuple,
    draws: Draws,
    layout: Layout | None = None,
    processed_SV: jax.Array | None = None,
    max_kept: int = 0,
    tops: int | None = None,
) -> Drawn:
    """Draws a token from each row of logits. draw_ids: int[S] each, the prompt id, sample index and
    position of the token; its draw is a function of the seed and these.

    layout: of the program's devices. On TPU arrays [S, V] are kept with V in the lanes: a step has
    few rows. processed_SV: the logits to draw from, after the logits processors
    (rollout/logits_processors.py), -inf for tokens that may not be drawn; None: `logits_SV`. The
    log-probabilities before filters are those of `logits_SV` in either case. A row whose tokens are
    all forbidden is drawn from `logits_SV`, as if it had no processors.
    max_kept: the most ids of a row that `Drawn.kept` holds; 0: no filters are recorded. tops: k of
    `Drawn.top_ids`; None: no raw log-probabilities are computed.
    """
    own_logits_SV = logits_SV
    is_sampled = draws.temperature > 0
    temperature_S1 = jnp.where(is_sampled, draws.temperature, 1.0)[:, None]
    if processed_SV is not None:
        processed_SV = jnp.where(
            jnp.all(jnp.isneginf(processed_SV), axis=-1, keepdims=True), logits_SV, processed_SV
        )
    logits_SV = row_major(logits_SV / temperature_S1, layout)
    drawn_SV = (
        logits_SV if processed_SV is None else row_major(processed_SV / temperature_S1, layout)
    )
    exponentials = Exponentials.of(logits_SV)
    drawn_exponentials = exponentials if processed_SV is None else Exponentials.of(drawn_SV)
    best = drawn_exponentials.most_likely(drawn_SV)
    forbids_S = None
    if max_kept and processed_SV is not None:
        forbids_S = is_sampled & jnp.any(jnp.isneginf(processed_SV), axis=-1)

    def recorded_with(drawn_S: jax.Array, filtered_SV: jax.Array):
        new = jnp.where(is_sampled, drawn_S, best)
        if not max_kept:
            return new, None
        return new, _recorded(filtered_SV, new, draws, max_kept, forbids_S)

    def drawn():
        uniforms_S = uniforms(draws.seed, *draw_ids)

        def filtered():
            filtered_SV = draws.filtered(drawn_SV, layout)
            return recorded_with(draw(filtered_SV, uniforms_S, layout), filtered_SV)

        def unfiltered():
            tokens_S = draw_by_weight(drawn_exponentials.values, uniforms_S, layout)
            return recorded_with(tokens_S, drawn_SV)

        return jax.lax.cond(jnp.any(draws.has_filter), filtered, unfiltered)

    def greedy():
        return (best, _unrecorded(len(best), max_kept)) if max_kept else (best, None)

    new, recorded = jax.lax.cond(jnp.any(is_sampled), drawn, greedy)
    result = Drawn(new, exponentials.logprobs(logits_SV, new))
    if recorded is not None:
        filtered = recorded.filtered_logprobs
        result = result._replace(
            filtered_logprobs=jnp.where(_is_cut(draws, forbids_S), filtered, result.logprobs),
            kept=recorded.kept,
            kept_counts=recorded.kept_counts,
        )
    if tops is not None:
        result = _with_raw_logprobs(result, row_major(own_logits_SV, layout), tops)
    return result


def _with_raw_logprobs(drawn: Drawn, logits_SV: jax.Array, k: int) -> Drawn:
    """Returns it with the log-probabilities of softmax(logits): of the drawn tokens and of the k
    likeliest, from one expression, so that equal tokens have equal floats."""
    exponentials = Exponentials.of(logits_SV)
    k = min(k, logits_SV.shape[-1])
    own_S1 = jnp.take_along_axis(logits_SV, drawn.tokens[:, None], axis=-1)
    largest_Sk, ids_Sk = jax.lax.top_k(logits_SV, k)
    named = jnp.concatenate([own_S1, largest_Sk], axis=-1)
    logp = named - exponentials.top - jnp.log(exponentials.total)[:, None]
    return drawn._replace(
        raw_logprobs=logp[:, 0], top_ids=ids_Sk.astype(jnp.int32), top_logprobs=logp[:, 1:]
    )


def _recorded(
    filtered_SV: jax.Array, tokens_S: jax.Array, draws: Draws, I: int, forbids_S: jax.Array | None
) -> FilterRecord:
    """Returns what the filters leave of each row's distribution. forbids_S: whether logits
    processors forbid tokens of a row; None: there are none. With them, a row of which more than I
    ids are kept and at most I left out has those."""

    def record():
        kept, counts = kept_ids(filtered_SV > -jnp.inf, I)
        if forbids_S is not None:
            out, number = kept_ids(jnp.isneginf(filtered_SV), I)
            named = jnp.where(out >= 0, -2 - out, -1)
            kept = jnp.where(((counts > I) & (number <= I))[:, None], named, kept)
        is_cut = _is_cut(draws, forbids_S)
        return FilterRecord(
            Exponentials.of(filtered_SV).logprobs(filtered_SV, tokens_S),
            jnp.where(is_cut[:, None], kept, -1),
            jnp.where(is_cut, counts, 0),
        )

    return jax.lax.cond(
        jnp.any(_is_cut(draws, forbids_S)), record, lambda: _unrecorded(len(tokens_S), I)
    )


def _is_cut(draws: Draws, forbids_S: jax.Array | None) -> jax.Array:
    """Returns bool[S]: whether tokens of a row may be left out."""
    return draws.has_filter if forbids_S is None else draws.has_filter | forbids_S


def _unrecorded(S: int, I: int) -> FilterRecord:
    return FilterRecord(
        filtered_logprobs=jnp.zeros(S, jnp.float32),
        kept=jnp.full((S, I), -1, jnp.int32),
        kept_counts=jnp.zeros(S, jnp.int32),
    )
