"""The modes of the one forward pass: logprobs, prefill, decode one token (next_token_states),
verify drafts.

B rows, T tokens, E hidden, D hidden of a teacher, V vocabulary, K targets per token, I ids that a
filter names per token, M pages of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from policy.attention.sequence_shards import FlatRows
from policy.cache.media import Media
from policy.cache.paths import Tree, before, scored
from policy.cache.step import Step
from policy.config import Runtime
from policy.decoder import Decoder
from policy.heads import head, kept
from policy.heads.divergence import Divergence, DivergenceOutputs, divergence
from policy.heads.multi_token_prediction import predictions
from policy.heads.vocab_tiles import TopTokens
from policy.intermediates import Aux
from policy.mesh.sharding import constrain


def make_step(
    tokens_BT: jax.Array,
    positions: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    media: Media | None = None,
    tree: Tree | None = None,
) -> Step:
    """Returns the `Step` (positions, segments: the metadata of a forward pass) of tokens without a
    cache.

    Without `segments` each row is one full segment; without `positions` they count from 0 inside
    each segment, which must be contiguous.

    `media`: the pictures and sounds of the tokens. `tree`: takes the place of positions and
    segments.
    """
    if tree is not None:
        return Step(tree.position, tree.node, media=media, tree=tree, contiguous=True)
    contiguous = positions is None
    segments = (
        jnp.ones(tokens_BT.shape, jnp.int32)
        if segments is None
        else jnp.asarray(segments, jnp.int32)
    )
    if positions is None:
        index = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        start = jnp.where(before(segments) != segments, index, 0)
        positions = index - jax.lax.cummax(start, axis=1)
    return Step(
        positions=jnp.asarray(positions, jnp.int32),
        segments=segments,
        media=media,
        contiguous=contiguous,
    )


# Key of the optional value head (float32[E]) among the weights.
VALUE_HEAD = "value_head"


class TokenLogprobs(NamedTuple):
    """The log-probability of each token and the entropy of the distribution that it is drawn from,
    float32[B, T], and the other outputs of the decoder."""

    logp: jax.Array
    entropy: jax.Array
    aux: Aux


class Verified(NamedTuple):
    """What the decoder says of tokens that were fed tentatively: the logits of the token after
    each, float32[B, T, V]. `policy.cache.cache.commit` turns `cache` and `aux` into the cache that
    holds the first tokens only."""

    logits: jax.Array
    cache: tuple
    aux: Aux


def logprobs(
    decoder: Decoder,
    tokens_BT: jax.Array,
    step: Step,
    temperature: ArrayLike,
    runtime: Runtime,
    kept_BTI: jax.Array | None = None,
) -> TokenLogprobs:
    """Returns the log-probabilities of tokens and the entropies of their distributions.

    logp[t] is the log-probability of token t given the tokens before it, at logits / temperature;
    entropy[t] is the entropy of that distribution. Both are 0 at the first token of a sequence and
    on padding. kept_BTI: the ids that the distribution of each token is over, as in
    policy/heads/kept.py; None: all.
    """
    hidden, _, aux = decoder(tokens_BT, step, None, runtime)
    tokens_BT = tokens_BT if step.media is None else step.media.text_tokens(tokens_BT)
    if runtime.mtp is not None:
        aux = predictions(decoder, tokens_BT, step, hidden, aux, temperature, runtime)
    states = before(hidden, step.tree)
    logp, entropy = logprobs_of_states(decoder, states, tokens_BT, temperature, runtime, kept_BTI)
    predicted = scored(step.segments, step.tree)
    aux = replace(aux, mtp_input=None, states=hidden)
    logp = jnp.where(predicted, logp, 0.0)
    entropy = jnp.where(predicted, entropy, 0.0)
    return TokenLogprobs(logp, entropy, aux)


def logprobs_of_states(
    decoder: Decoder,
    states_BTE: jax.Array,
    tokens_BT: jax.Array,
    temperature: ArrayLike,
    runtime: Runtime,
    kept_BTI: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp, entropy), float32[B, T], of tokens that are predicted from `states`, the
    states one token earlier. For tokens [B, T, K], several in one place, logp has their shape.
    kept_BTI: as in `logprobs`, for tokens [B, T]."""
    rows = FlatRows(runtime.layout, *tokens_BT.shape[:2])
    hidden = rows.flat(states_BTE)
    targets = rows.flat(tokens_BT)
    tiling = head.Tiling(runtime.num_vocab_tiling, rows.layout, runtime.kept_logits_mib)
    scaling = decoder.config.logit_scaling
    how = temperature, scaling, tiling
    if kept_BTI is None:
        logp, entropy = head.logprobs(hidden, decoder.head_weight, targets, *how)
    else:
        logp, entropy = kept.logprobs(
            hidden, decoder.head_weight, targets, rows.flat(kept_BTI), *how
        )
    return rows.back(logp), rows.back(entropy)


def top_logprobs_of_states(
    decoder: Decoder, states_BTE: jax.Array, tokens_BT: jax.Array, k: int, runtime: Runtime
) -> TopTokens:
    """Returns the k likeliest tokens in each place, float32 and int32[B, T, k], and the
    log-probabilities of the tokens, `target`, float32[B, T], at temperature 1. States: those one
    token earlier."""
    rows = FlatRows(runtime.layout, *tokens_BT.shape[:2])
    top = head.top_and_rest(
        rows.flat(states_BTE),
        decoder.head_weight,
        k,
        1.0,
        decoder.config.logit_scaling,
        head.Tiling(runtime.num_vocab_tiling, rows.layout),
        targets_M=rows.flat(tokens_BT),
    )
    return jax.tree.map(rows.back, top)


def compare(
    student: Decoder,
    states_BTE: jax.Array,
    teacher: Decoder,
    teacher_states_BTD: jax.Array,
    spec: Divergence,
    temperature: ArrayLike,
    runtime: Runtime,
) -> DivergenceOutputs:
    """Returns the divergence of the student's distribution of each token from the teacher's, with
    its metrics, float32[B, T]. Both states are those one token earlier. `runtime` is the student's.
    """
    rows = FlatRows(runtime.layout, *states_BTE.shape[:2])
    outputs = divergence(
        rows.flat(states_BTE),
        student.head_weight,
        rows.flat(teacher_states_BTD),
        teacher.head_weight,
        spec,
        temperature,
        (student.config.logit_scaling, teacher.config.logit_scaling),
        head.Tiling(runtime.num_vocab_tiling, rows.layout, runtime.kept_logits_mib),
    )
    return jax.tree.map(rows.back, outputs)


def prefill(
    decoder: Decoder, tokens_BT: jax.Array, step: Step, cache: tuple, runtime: Runtime
) -> tuple:
    """Returns the cache with these tokens of row b added to slot b. It computes no logits: decoding
    starts from the last token of the prompt."""
    return cast(tuple, decoder(tokens_BT, step, cache, runtime).cache)


def next_token_step(
    lengths_B: jax.Array,
    active_B: jax.Array,
    pages_BM: jax.Array | None = None,
    deltas_B: jax.Array | None = None,
) -> Step:
    """Returns the `Step` of one token for every row.

    `lengths` counts the tokens in the cache, so it is the position of the new token. A row that is
    not active leaves the cache unchanged. `pages` int32[B, M]: the page table of each row of a
    paged cache.

    `deltas`: the rotary position of each row's next token, less its position, after prompts with
    pictures; None: there are none.
    """
    segments = active_B[:, None].astype(
        jnp.int32
    )  # one segment per row, 0 (padding) where the row is not active
    step = Step(positions=lengths_B[:, None], segments=segments, pages=pages_BM)
    if deltas_B is None:
        return step
    turns_B13 = jnp.broadcast_to((lengths_B + deltas_B)[:, None, None], (len(lengths_B), 1, 3))
    return replace(step, media=Media(turns=turns_B13))


def next_token_states(
    decoder: Decoder, tokens_B: jax.Array, step: Step, cache: tuple, runtime: Runtime
) -> tuple[jax.Array, tuple]:
    """Feeds one token to every row, with the step of `next_token_step`. Returns (final states [B,
    E], cache).

    `logits` turns the states into the logits of the token after it.
    """
    hidden, updated, _ = decoder(tokens_B[:, None], step, cache, runtime)
    return hidden[:, 0], cast(tuple, updated)


def verify(
    decoder: Decoder, tokens_BT: jax.Array, step: Step, cache: tuple, runtime: Runtime
) -> Verified:
    """Feeds several tokens to every row, tentatively."""
    hidden, updated, aux = decoder(tokens_BT, step, cache, replace(runtime, tentative=True))
    return Verified(logits(decoder, hidden, runtime), cast(tuple, updated), aux)


def logits(decoder: Decoder, hidden: jax.Array, runtime: Runtime) -> jax.Array:
    """Returns float32[B, ..., V], the logits of the tokens after these states, each row on the
    device that samples from it."""
    out = head.logits(hidden, decoder.head_weight, decoder.config.logit_scaling)
    layout = runtime.layout
    if layout is None or not layout.cache_rows_differ:
        return out
    for rows in (
        "batch",
        "cache_batch",
    ):  # in one step the partitioner would gather the weight, not the logits
        out = constrain(out, (rows, *[None] * (out.ndim - 2), "vocab"), layout)
    return out
