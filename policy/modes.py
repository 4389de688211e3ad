"""The ways to use one forward pass: train, prefill, autoregressive, verify. B rows, T tokens, E hidden, V vocabulary."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from policy.attention.sequence_shards import Rows
from policy.cache.step import Step
from policy.config import Runtime
from policy.decoder import Decoder
from policy.heads import head
from policy.heads.multi_token_prediction import predictions
from policy.mesh.sharding import constrain


def make_step(tokens_BT, positions=None, segments=None) -> Step:
    """Where tokens sit when little is said: one full segment a row, and positions that count from 0 inside each segment, which is
    one run of tokens."""
    whole = positions is None
    segments = jnp.ones(tokens_BT.shape, jnp.int32) if segments is None else jnp.asarray(segments, jnp.int32)
    if positions is None:
        index = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        start = jnp.where(first_of_segment(segments), index, 0)
        positions = index - jax.lax.cummax(start, axis=1)
    return Step(jnp.asarray(positions, jnp.int32), segments, whole=whole)


# A linear value head on the final states, float32[E], where weights hold one.
VALUE_HEAD = "value_head"


def first_of_segment(segments_BT: jax.Array) -> jax.Array:
    """bool[B, T]: tokens before which there is no token of the same segment."""
    before = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return segments_BT != before


def train(decoder: Decoder, tokens_BT, step: Step, temperature, runtime: Runtime):
    """(logp [B, T], entropy [B, T], Aux). logp[t] is about token t given the tokens before it, at logits /
    temperature; both are 0 at the first token of a segment and on padding."""
    hidden, _, aux = decoder(tokens_BT, step, None, runtime)
    if runtime.mtp is not None:
        aux = predictions(decoder, tokens_BT, step, hidden, aux, temperature, runtime)
    found = score(decoder, before(hidden), tokens_BT, temperature, runtime)
    scored = (step.segments != 0) & ~first_of_segment(step.segments)
    return *(jnp.where(scored, a, 0.0) for a in found), replace(aux, mtp_input=None, states=hidden)


def before(hidden_BTE: jax.Array) -> jax.Array:
    """At each token what stands at the one before it; 0 at the first."""
    return jnp.pad(hidden_BTE[:, :-1], ((0, 0), (1, 0), (0, 0)))


def score(decoder: Decoder, before_BTE: jax.Array, tokens_BT: jax.Array, temperature, runtime: Runtime):
    """(logp, entropy) [B, T] of tokens that are predicted from these states."""
    rows = Rows(runtime.layout, *tokens_BT.shape)
    hidden, targets, tiling = (
        rows.flat(before_BTE),
        rows.flat(tokens_BT),
        head.Tiling(runtime.num_vocab_tiling, rows.layout),
    )
    found = head.logprobs(hidden, decoder.head_weight, targets, temperature, decoder.config.logit_softcap, tiling)
    return tuple(rows.back(a) for a in found)


def prefill(decoder: Decoder, tokens_BT, step: Step, cache: tuple, runtime: Runtime) -> tuple:
    """The cache with these tokens added, row b to slot b. No logits: decoding starts from the last token of the prompt."""
    return decoder(tokens_BT, step, cache, runtime)[1]


def autoregressive(decoder: Decoder, tokens_B, lengths_B, active_B, cache: tuple, runtime: Runtime, pages_BM=None):
    """One token for every slot: (logits float32[B, V] of the next token, cache), of what `feed` takes."""
    hidden, cache = feed(decoder, tokens_B, lengths_B, active_B, cache, runtime, pages_BM)
    return logits(decoder, hidden, runtime), cache


def feed(decoder: Decoder, tokens_B, lengths_B, active_B, cache: tuple, runtime: Runtime, pages_BM=None):
    """One token for every slot: (final states [B, E] after it, cache). `lengths` are the tokens already cached, and so the position
    of `tokens`; slots that are not active leave the cache as it is. `pages`: of each row, over a paged cache."""
    step = Step(lengths_B[:, None], active_B[:, None].astype(jnp.int32), pages=pages_BM)
    hidden, cache, _ = decoder(tokens_B[:, None], step, cache, runtime)
    return hidden[:, 0], cache


def verify(decoder: Decoder, tokens_BT, step: Step, cache: tuple, runtime: Runtime):
    """Several tokens for every slot, of which some may be taken back: (logits float32[B, T, V] of the token after each, cache,
    Aux). `policy.cache.cache.commit` makes of both the cache in which only the first ones are."""
    hidden, cache, aux = decoder(tokens_BT, step, cache, replace(runtime, tentative=True))
    return logits(decoder, hidden, runtime), cache, aux


def logits(decoder: Decoder, hidden: jax.Array, runtime: Runtime) -> jax.Array:
    """float32[B, ..., V] of the tokens after these states, each row on the device that draws from it."""
    found, layout = head.logits(hidden, decoder.head_weight, decoder.config.logit_softcap), runtime.layout
    if layout is None or not layout.rows_move:
        return found
    for rows in ("batch", "cache_batch"):  # in one step the partitioner would gather the weight, not the logits
        found = constrain(found, (rows, *[None] * (found.ndim - 2), "vocab"), layout)
    return found
