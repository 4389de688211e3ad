"""The compiled programs of a generator: an empty cache, prefill, insertion into slots, and decoding.

S slots, P prompts of one prefill, C tokens of one prefill call, K decoding steps of one dispatch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import cache as caches
from policy import modes
from policy.cache import Step
from policy.decoding import laid_out
from policy.sharding import settle
from rollout.sampling import Draws, SamplingParams, choose

if TYPE_CHECKING:
    from rollout.generator import GeneratorOptions

# Above this many layers decoding is scanned on CPU too: unrolled it runs several times faster, but compiles longer.
UNROLLED_LAYERS = 32


class Made(NamedTuple):
    """What a dispatch made, [N, S], or [N] of one slot: tokens (-1: none), log-probabilities, and whether a token is the first
    of its decoding step."""

    tokens: np.ndarray
    logprobs: np.ndarray
    opens: np.ndarray

    def of(self, slot: int) -> Made:
        return Made(*(array[:, slot] for array in self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """int32[S] each: token to feed next, tokens already cached, tokens still to make, ids of the draw, and 1 where in use. `recent`
    int32[S, Programs.recent]: the last tokens of each slot, the one to feed among them, where decoding wants them."""

    token: np.ndarray
    cached: np.ndarray
    left: np.ndarray
    prompt_id: np.ndarray
    sample: np.ndarray
    active: np.ndarray
    recent: np.ndarray | None = None


class Programs:
    """One token a step. Caches are donated to the programs.

    `ahead`: tokens past those of a prefill call that it wants to see; `recent`: last tokens of each slot that decoding does.
    """

    ahead = recent = 0

    def __init__(self, graph, options: GeneratorOptions):
        self.graph, self._dispatch, self._kv_cache = graph, options.tokens_per_dispatch, options.kv_cache
        self._scan = jax.default_backend() != "cpu" or len(graph.config.layers) > UNROLLED_LAYERS
        self._empty = jax.jit(self._empty_program, static_argnums=(0, 1))
        self._prefill = jax.jit(self._prefill_program, donate_argnums=1)
        self._insert = jax.jit(self._insert_program, donate_argnums=0)
        self._decode = jax.jit(self._decode_program, donate_argnums=1)

    def empty(self, rows: int, length: int):
        return settle(self._empty(rows, length), self.graph.layout)

    def prefill(self, params, cache, tokens_PC, start: int, lengths_P):
        return settle(self._prefill(params, cache, tokens_PC, np.int32(start), lengths_P), self.graph.layout)

    def insert(self, cache, prefix, slots, rows):
        return settle(self._insert(cache, prefix, slots, rows), self.graph.layout)

    def decode(self, params, cache, slots: Slots, sampling: SamplingParams, seed: int) -> tuple:
        """(cache, Made on the host)."""
        stops = np.asarray(sampling.stop_token_ids or (-1,), np.int32)
        cache, *made = self._decode(params, cache, slots, stops, Draws.of(sampling, seed))
        settle(cache, self.graph.layout)
        return cache, Made(*map(np.asarray, made))

    def _pinned(self, cache):
        """The cache where it belongs: left to itself the compiler may lay out a result otherwise than the cache that was given
        up for it, which is a copy now and another compilation at the next call."""
        layout = self.graph.layout
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, layout.sharding(caches.AXES, a.shape)), cache)

    def _empty_program(self, rows: int, length: int):
        dtype, kind = self.graph.runtime.dtype, self._kv_cache
        return self._pinned(caches.create(self.graph.config, rows, length, dtype, scan=self._scan, quantization=kind))

    def _insert_program(self, cache, prefix, slots, rows):
        return self._pinned(caches.insert(cache, prefix, slots, rows))

    def _prefill_program(self, params, cache, tokens_PC, start, lengths_P):
        positions = start + jnp.broadcast_to(jnp.arange(tokens_PC.shape[1]), tokens_PC.shape)
        step = Step(positions, (positions < lengths_P[:, None]).astype(jnp.int32))
        with self.graph.precision():
            return self._pinned(modes.prefill(self.graph.decoder(params), tokens_PC, step, cache, self.graph.runtime))

    def _decode_program(self, params, cache, slots: Slots, stops, draws: Draws | None):
        S = slots.token.shape[0]
        params = params if self._scan else laid_out(self.graph, params, S)

        def go_on(carry):
            return (carry[0] < self._dispatch) & jnp.any(carry[5])

        def one(carry):
            i, cache, token, cached, left, active, tokens, logps = carry
            decoder = self.graph.decoder(params)
            logits, cache = modes.autoregressive(decoder, token, cached, active, cache, self.graph.runtime)
            new, logp = choose(logits, (slots.prompt_id, slots.sample, cached + 1), draws)
            tokens = tokens.at[i].set(jnp.where(active, new, -1))
            logps = logps.at[i].set(jnp.where(active, logp, 0.0))
            left = left - 1
            going = active & (left > 0) & ~jnp.isin(new, stops)
            return i + 1, cache, jnp.where(active, new, token), cached + active, left, going, tokens, logps

        with self.graph.precision():
            K = self._dispatch
            blank = jnp.full((K, S), -1, jnp.int32), jnp.zeros((K, S), jnp.float32)
            start = (0, cache, slots.token, slots.cached, slots.left, slots.active != 0, *blank)
            _, cache, _, _, _, _, tokens, logps = jax.lax.while_loop(go_on, one, start)
        return self._pinned(cache), tokens, logps, tokens >= 0
