"""Lossless speculative decoding: the policy's own prediction modules draft, the decoder checks, nothing changes but the speed.

A step drafts d tokens and runs the decoder once over the last token and the drafts. At each of these d + 1 places a token is drawn
from the decoder's distribution, by the very number that plain decoding would use there: a draw is a function of (seed, prompt id,
sample, position), see rollout/engine/sampling.py. Drafts are accepted as long as they equal the token drawn; the first that does not is
replaced by it. So the completion is that of plain decoding, token for token, up to rounding: every token has the decoder's
distribution exactly, with top-k, top-p and min-p as they are, and log-probabilities are the decoder's.

The modules draw their drafts by the same numbers, through their own distribution q. With one number u for both, a draft is accepted
when u falls into the same token's part of [0, 1) under the decoder's cumulative distribution P and the module's Q, which has
probability sum_x max(0, min(P(x), Q(x)) - max(P(x - 1), Q(x - 1))). No rule accepts more often than sum_x min(p(x), q(x));
benchmarks/speculative.py prints both. Greedy drafts are the likeliest tokens.

S slots, d drafts, D modules in use, W = d + D entries that modules see again at each step, N tokens of a dispatch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from policy import modes
from policy.cache import cache as caches
from policy.cache.cache import Drafts
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import DecoderConfig
from policy.heads.multi_token_prediction import predict
from rollout.engine.programs import Made, Programs, Slots
from rollout.engine.sampling import choose

if TYPE_CHECKING:
    from rollout.types import GeneratorOptions


def check(config: DecoderConfig) -> None:
    """Raises ValueError where the model cannot draft."""
    part = config.multi_token_prediction
    if part is None:
        raise ValueError(
            "speculative: this model has no prediction modules to draft with; see model.multi_token_prediction"
        )
    if not caches.supports_truncation(part.layer, config):
        kind = type(part.layer.mixer).__name__
        raise ValueError(
            f"speculative: the layer of the prediction modules keeps a state of fixed size ({kind}): it cannot draft"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """Of a dispatch, between two steps. `cache` (decoder's, Drafts); `recent` int32[S, W + 1], the last tokens, the very last not
    cached; `cached`, `left` int32[S]; `active` bool[S]; `made` int32[S], tokens of this dispatch in the rows of `tokens`,
    `logprobs`, `opens` [S, N]."""

    step: jax.Array
    cache: tuple
    recent: jax.Array
    cached: jax.Array
    left: jax.Array
    active: jax.Array
    made: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    opens: jax.Array


class SpeculativePrograms(Programs):
    """Up to d + 1 tokens a step. The cache is a pair: the decoder's, and the `Drafts` of policy/cache/cache.py.

    Module k holds an entry for position i made of the decoder's state there and the tokens up to i + k. The entries that a step
    makes of drafted tokens are made again by the next one, of the tokens that stayed; drafts past the last module apply it again,
    to its own states, at the positions that follow.
    """

    rewinds = False  # the decoder's last states are of fixed size

    def __init__(self, graph, options: GeneratorOptions, slots: int, max_length: int, left: float | None = None):
        check(graph.config)
        drafts = options.speculative
        self.drafts, self.ahead = drafts, min(drafts, graph.config.multi_token_prediction.depth)
        self._window = drafts + self.ahead
        self.recent = self._window + 1
        super().__init__(graph, options, slots, max_length, left)

    def _empty(self, rows: int, length):
        config, kind = self.graph.config, (length, self.graph.runtime.dtype, self._options.kv_cache)
        main = super()._empty(rows, length)
        return main, caches.create_drafts(config, rows, kind, modules=self.ahead, window=self._window)

    def _fill(self, params, cache, tokens_PC, step: Step, lengths_P):
        """`tokens` are those of the call and `ahead` more: module k takes the token k places on."""
        C, runtime, (main, drafts) = tokens_PC.shape[1] - self.ahead, self.graph.runtime, cache
        layers = []
        with self.graph.precision():
            decoder = self.graph.decoder(params)
            _, main, aux = decoder(tokens_PC[:, :C], step, main, runtime)
            read = aux.mtp_input
            for k in range(1, self.ahead + 1):
                known = (step.positions <= lengths_P[:, None] - k).astype(jnp.int32)
                seat = replace(step, segments=step.segments * known, tokens=tokens_PC[:, k : k + C])
                view = LayerCache.of(drafts.layers[k - 1], 0, seat, runtime.layout)
                read, _, view, _ = predict(decoder, k, read, seat, view, runtime)
                layers.append(view.arrays)
            hidden = _slide(drafts.hidden[0, :, 0], aux.mtp_input, step.segments.sum(axis=1))
        return main, Drafts(tuple(layers), hidden[None, :, None])

    def _routes_program(self, cache, row, pages_M):
        return super()._routes_program(cache[0], row, pages_M)

    def _steps(self, params, cache, slots: Slots, limits):
        S, N = slots.token.shape[0], self.dispatch * (self.drafts + 1)

        def go_on(state):
            return (state.step < limits[0]) & (jnp.sum(state.active) > limits[1])

        def one(state):
            decoder = self.graph.decoder(params)
            drafted, state = self._draft(decoder, state, slots)
            return self._verify(decoder, state, drafted, slots)

        with self.graph.precision():
            state = _State(
                step=jnp.int32(0),
                cache=cache,
                recent=jnp.asarray(slots.recent),
                cached=jnp.asarray(slots.cached),
                left=jnp.asarray(slots.left),
                active=slots.active != 0,
                made=jnp.zeros(S, jnp.int32),
                tokens=jnp.full((S, N), -1, jnp.int32),
                logprobs=jnp.zeros((S, N), jnp.float32),
                opens=jnp.zeros((S, N), bool),
            )
            state = jax.lax.while_loop(go_on, one, state)
        now = {
            "cached": state.cached,
            "left": state.left,
            "active": state.active.astype(jnp.int32),
            "recent": state.recent,
        }
        after = replace(slots, token=state.recent[:, -1], **now)
        return state.cache, after, Made(state.tokens.T, state.logprobs.T, state.opens.T)

    def _draft(self, decoder, state: _State, slots: Slots) -> tuple[jax.Array, _State]:
        """(drafts int32[S, d], the state with the modules' caches as the drafts left them)."""
        main, drafts = state.cache
        runtime, active = self.graph.runtime, state.active[:, None]
        at = state.cached[:, None] + jnp.arange(-self._window, 0)
        tokens, read, layers, drafted = state.recent[:, 1:], drafts.hidden[0, :, 0], list(drafts.layers), []
        for k in range(1, self.drafts + 1):
            module = min(k, self.ahead)
            if k > module:  # the last module again, on its own last state and the last draft
                at, tokens, read = at[:, -1:] + 1, tokens[:, -1:], read[:, -1:]
            step = Step(jnp.maximum(at, 0), (active & (at >= 0)).astype(jnp.int32), tokens=tokens, pages=slots.pages)
            view = LayerCache.of(layers[module - 1], 0, step, runtime.layout)
            read, normed, view, _ = predict(decoder, module, read, step, view, runtime)
            layers[module - 1] = view.arrays
            logits = modes.logits(decoder, normed[:, -1], runtime)
            new, _ = choose(logits, (slots.prompt_id, slots.sample, state.cached + k), slots.draws)
            drafted.append(new)
            tokens = jnp.concatenate([tokens[:, 1:], new[:, None]], axis=1)
        cache = main, drafts._replace(layers=tuple(layers))
        return jnp.stack(drafted, axis=1), replace(state, cache=cache)

    def _verify(self, decoder, state: _State, drafted, slots: Slots) -> _State:
        """The state after a step: the decoder's tokens up to the first that was not drafted."""
        (main, drafts), T = state.cache, self.drafts + 1
        S, place = drafted.shape[0], jnp.arange(T)
        fed = jnp.concatenate([state.recent[:, -1:], drafted], axis=1)
        fits = state.active[:, None] & (place < state.left[:, None])
        step = Step(state.cached[:, None] + place, fits.astype(jnp.int32), pages=slots.pages)
        logits, main, aux = modes.verify(decoder, fed, step, main, self.graph.runtime)
        each = jnp.repeat(slots.prompt_id, T), jnp.repeat(slots.sample, T), (step.positions + 1).reshape(-1)
        new, logp = (a.reshape(S, T) for a in choose(logits.reshape(S * T, -1), each, slots.draws.repeat(T)))

        right = jnp.cumprod(drafted == new[:, :-1], axis=1)
        ends = jnp.any(new[..., None] == slots.stops[:, None], axis=-1)
        kept = (
            fits
            & jnp.pad(right, ((0, 0), (1, 0)), constant_values=1).astype(bool)
            & (jnp.cumsum(ends, axis=1) - ends == 0)
        )
        count = kept.sum(axis=1, dtype=jnp.int32)
        row, column = (
            jnp.arange(S)[:, None],
            jnp.where(kept, state.made[:, None] + place, state.tokens.shape[1] + place),
        )
        write = {"mode": "drop", "unique_indices": True}
        return _State(
            step=state.step + 1,
            cache=(caches.commit(main, aux, count), drafts._replace(hidden=self._seen(drafts, aux, count))),
            recent=_slide(state.recent[..., None], new[..., None], count)[..., 0],
            cached=state.cached + count,
            left=state.left - count,
            active=state.active & (state.left > count) & ~jnp.any(kept & ends, axis=1),
            made=state.made + count,
            tokens=state.tokens.at[row, column].set(new, **write),
            logprobs=state.logprobs.at[row, column].set(logp, **write),
            opens=state.opens.at[row, column].set(jnp.broadcast_to(place == 0, (S, T)), **write),
        )

    def _seen(self, drafts: Drafts, aux, count_S) -> jax.Array:
        return _slide(drafts.hidden[0, :, 0], aux.mtp_input, count_S)[None, :, None]


def _slide(last_SWX: jax.Array, new_STX: jax.Array, count_S: jax.Array) -> jax.Array:
    """[S, W, X]: the last W of the rows `last` followed by the first count[s] of `new`."""
    rows = jnp.concatenate([last_SWX, new_STX.astype(last_SWX.dtype)], axis=1)
    at = count_S[:, None] + jnp.arange(last_SWX.shape[1])
    return jnp.take_along_axis(rows, at[..., None], axis=1)
