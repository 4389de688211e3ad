"""Lossless speculative decoding: the policy's own prediction modules draft, the decoder checks,
nothing changes but the speed.

A decoding step drafts d tokens and runs the decoder once over the last token and the drafts. At
each of these d + 1 positions a token is drawn from the decoder's distribution, by the same random
number that decoding without drafts would use there: a draw is a function of (seed, prompt id,
sample, position), see rollout/engine/sampling.py. Drafts are accepted as long as they equal the
token drawn, which replaces the first that differs. So the completion equals the one without drafts,
token for token, up to rounding: every token has the decoder's distribution exactly, with top-k,
top-p and min-p as they are, and log-probabilities are the decoder's.

The modules draw their drafts by the same random numbers, from their own distribution q. With one
number u for both, a draft is accepted when u falls into the same token's part of [0, 1) under the
decoder's cumulative distribution F and the module's G, which has probability sum_x max(0, min(F(x),
G(x)) - max(F(x - 1), G(x - 1))). No rule accepts more often than sum_x min(p(x), q(x));
benchmarks/speculative.py prints both. Greedy drafts are the likeliest tokens.

S slots, P rows of one prefill call, C tokens that it computes of each row, M pages of a row, d
drafts, D modules in use, W = d + D entries that modules see again at each decoding step, Q tokens
of a step, N tokens of a row that a decode can sample, V vocabulary, X any size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from policy import modes
from policy.cache import cache as caches
from policy.cache.cache import Drafts
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import DecoderConfig, MultiTokenPrediction
from policy.heads.multi_token_prediction import predict
from policy.model import Graph
from rollout.engine.programs import Decoded, DecodeOutput, DecoderPrograms, DecodeState
from rollout.engine.sampling import Drawn, choose
from rollout.logits_processors import Seen
from rollout.types import GeneratorOptions


def check(config: DecoderConfig) -> MultiTokenPrediction:
    """Returns the prediction modules of a model. Raises ValueError if it cannot draft with them."""
    modules = config.multi_token_prediction
    if modules is None:
        raise ValueError(
            "speculative: this model has no prediction modules to draft with; see "
            "model.multi_token_prediction"
        )
    if not caches.supports_truncation(modules.layer, config):
        kind = type(modules.layer.mixer).__name__
        raise ValueError(
            "speculative: the layer of the prediction modules keeps a state of fixed size "
            f"({kind}): it cannot draft"
        )
    return modules


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The state of a decode between two decoding steps.

    cache: (the decoder's, Drafts). recent: int32[S, W + 1], the last tokens; the very last is not
    cached. cached, left: int32[S].
    active: bool[S]. count: int32[S], how many tokens this decode has written to the rows of `drawn`
    and `starts_step`, [S, N]. seen: for the logits processors; None: no row has any.
    """

    step: jax.Array
    cache: tuple
    recent: jax.Array
    cached: jax.Array
    left: jax.Array
    active: jax.Array
    count: jax.Array
    drawn: Drawn
    starts_step: jax.Array
    seen: Seen | None


class SpeculativePrograms(DecoderPrograms):
    """Decoding of up to d + 1 tokens per decoding step. The cache is a pair: the decoder's, and the
    `Drafts` of policy/cache/cache.py.

    The entry of module k for position i is computed from the decoder's hidden state there and the
    tokens up to i + k. A decoding step computes entries of drafted tokens, and the next one
    computes them again from the tokens that were accepted. Drafts past the last module apply it
    again, to its own hidden states, at the positions that follow.
    """

    @property
    def supports_truncation(self) -> bool:
        """Returns False: `Drafts.hidden` holds hidden states of the last tokens only."""
        return False

    def __init__(self, graph: Graph, options: GeneratorOptions, slots: int, max_length: int):
        modules = check(graph.config).depth
        self.drafts = options.speculative
        self.lookahead_tokens = min(options.speculative, modules)
        self._window = self.drafts + self.lookahead_tokens
        self.recent = self._window + 1
        super().__init__(graph, options, slots, max_length)
        self.reads_copies = False

    def _empty_rows(self, rows: int, length) -> tuple:
        config = self.graph.config
        storage = (length, self.graph.runtime.dtype, self.options.kv_cache)
        main = super()._empty_rows(rows, length)
        return main, caches.create_drafts(
            config, rows, storage, modules=self.lookahead_tokens, window=self._window
        )

    def _fill(self, params, cache, tokens_PC, step: Step, lengths_P):
        """Returns the cache of P rows after the forward pass of C tokens.

        tokens_PC has `lookahead_tokens` more tokens: module k reads the token k positions later.
        """
        C = tokens_PC.shape[1] - self.lookahead_tokens
        runtime = self.graph.runtime
        main, drafts = cache
        layers = []
        with self.graph.precision():
            decoder = self.graph.decoder(params)
            _, main, aux = decoder(tokens_PC[:, :C], step, self.to_prefill(main), runtime)
            assert main is not None, "a call with a cache returns it"
            assert aux.mtp_input is not None, (
                "the decoder of a model with prediction modules returns their input"
            )
            read = aux.mtp_input
            for k in range(1, self.lookahead_tokens + 1):
                known = (step.positions <= lengths_P[:, None] - k).astype(jnp.int32)
                shifted = replace(
                    step, segments=step.segments * known, tokens=tokens_PC[:, k : k + C]
                )
                layer = LayerCache.of(drafts.layers[k - 1], 0, shifted, runtime.layout)
                output = predict(decoder, k, read, shifted, layer, runtime)
                read = output.states
                assert output.cache is not None, "a module that has a cache returns it"
                layers.append(output.cache.arrays)
            hidden = _slide(drafts.hidden[0, :, 0], aux.mtp_input, step.segments.sum(axis=1))
        return self.to_decode(main), Drafts(tuple(layers), hidden[None, :, None])

    def routes(self, cache, row, pages_M):
        return super().routes(cache[0], row, pages_M)

    def _decode_rows(self, params, cache, state: DecodeState, limits) -> Decoded:
        S = state.token.shape[0]
        N = self.decode_steps * (self.drafts + 1)

        def go_on(loop):
            return (loop.step < limits[0]) & (jnp.sum(loop.active) > limits[1])

        def draft_and_verify(loop):
            decoder = self.graph.decoder(params)
            drafted, loop = self._draft(decoder, loop, state)
            return self._verify(decoder, loop, drafted, state)

        with self.graph.precision():
            loop = _State(
                step=jnp.int32(0),
                cache=cache,
                recent=jnp.asarray(state.recent),
                cached=jnp.asarray(state.cached),
                left=jnp.asarray(state.left),
                active=state.active != 0,
                count=jnp.zeros(S, jnp.int32),
                drawn=self._no_tokens(S, N, state.tops),
                starts_step=jnp.zeros((S, N), bool),
                seen=state.seen(self.graph.config.vocab_size),
            )
            loop = jax.lax.while_loop(go_on, draft_and_verify, loop)
        after = replace(
            state,
            token=loop.recent[:, -1],
            cached=loop.cached,
            left=loop.left,
            active=loop.active.astype(jnp.int32),
            recent=loop.recent,
        ).with_history(loop.seen)
        tokens, logprobs, *recorded = (
            None if a is None else jnp.swapaxes(a, 0, 1) for a in loop.drawn
        )
        output = DecodeOutput(tokens, logprobs, loop.starts_step.T, None, *recorded)
        return Decoded(loop.cache, after, output)

    def _no_tokens(self, S: int, N: int, tops: int | None) -> Drawn:
        """Returns the output of a decode before its first token, [S, N]."""
        drawn = Drawn(jnp.full((S, N), -1, jnp.int32), jnp.zeros((S, N), jnp.float32))
        if tops is not None:
            drawn = jax.tree.map(jnp.asarray, self._without_tops(drawn, tops, (S, N)))
        zeros = jnp.zeros((S, N))
        if not self.max_kept:
            return drawn
        kept = jnp.full((S, N, self.max_kept), -1, jnp.int32)
        counts = jnp.zeros((S, N), jnp.int32)
        return drawn._replace(filtered_logprobs=zeros, kept=kept, kept_counts=counts)

    def _draft(self, decoder, loop: _State, state: DecodeState) -> tuple[jax.Array, _State]:
        """Returns (drafts int32[S, d], the loop's state with the modules' caches after the
        drafts)."""
        main, drafts = loop.cache
        runtime = self.graph.runtime
        active = loop.active[:, None]
        at = loop.cached[:, None] + jnp.arange(-self._window, 0)
        tokens = loop.recent[:, 1:]
        read = drafts.hidden[0, :, 0]
        layers = list(drafts.layers)
        drafted = []
        seen = loop.seen
        for k in range(1, self.drafts + 1):
            module = min(k, self.lookahead_tokens)
            if k > module:  # the last module again, on its own last hidden state and the last draft
                at = at[:, -1:] + 1
                tokens = tokens[:, -1:]
                read = read[:, -1:]
            segments = (active & (at >= 0)).astype(jnp.int32)
            step = Step(
                positions=jnp.maximum(at, 0), segments=segments, tokens=tokens, pages=state.pages
            )
            layer = LayerCache.of(layers[module - 1], 0, step, runtime.layout)
            output = predict(decoder, module, read, step, layer, runtime)
            read = output.states
            assert output.cache is not None, "a module that has a cache returns it"
            layers[module - 1] = output.cache.arrays
            logits = modes.logits(decoder, output.head_input[:, -1], runtime)
            place = loop.cached + k
            draw_ids = state.prompt_id, state.sample, place
            processed = state.processed(logits, place, seen)
            new = choose(logits, draw_ids, state.draws, runtime.layout, processed).tokens
            drafted.append(new)
            seen = None if seen is None else seen.with_token(place, new, loop.active)
            tokens = jnp.concatenate([tokens[:, 1:], new[:, None]], axis=1)
        cache = main, drafts._replace(layers=tuple(layers))
        return jnp.stack(drafted, axis=1), replace(loop, cache=cache)

    def _verify(self, decoder, loop: _State, drafted, state: DecodeState) -> _State:
        """Returns the loop's state after a decoding step: the decoder's tokens up to the first that
        was not drafted."""
        main, drafts = loop.cache
        Q = self.drafts + 1
        S = drafted.shape[0]
        offset = jnp.arange(Q)
        fed = jnp.concatenate([loop.recent[:, -1:], drafted], axis=1)
        fits = loop.active[:, None] & (offset < loop.left[:, None])
        positions = loop.cached[:, None] + offset
        segments = fits.astype(jnp.int32)
        step = Step(positions=positions, segments=segments, pages=state.pages)
        logits, main, aux = modes.verify(decoder, fed, step, main, self.graph.runtime)
        each = (
            jnp.repeat(state.prompt_id, Q),
            jnp.repeat(state.sample, Q),
            (step.positions + 1).reshape(-1),
        )
        logits = logits.reshape(S * Q, -1)
        processed = None
        if state.processors is not None and loop.seen is not None:
            processors = state.processors.take(jnp.repeat(jnp.arange(S), Q))
            processed = processors.process(
                logits, each[-1], loop.seen.with_each_draft(loop.cached + 1, drafted)
            )
        how = self.graph.layout, processed, self.max_kept, state.tops
        flat = choose(logits, each, state.draws.repeat(Q), *how)
        drawn = jax.tree.map(lambda a: a.reshape(S, Q, *a.shape[1:]), flat)
        new = drawn.tokens

        accepted = jnp.cumprod(drafted == new[:, :-1], axis=1)
        ends = jnp.any(new[..., None] == state.stops[:, None], axis=-1)
        kept = (
            fits
            & jnp.pad(accepted, ((0, 0), (1, 0)), constant_values=1).astype(bool)
            & (jnp.cumsum(ends, axis=1) - ends == 0)
        )
        count = kept.sum(axis=1, dtype=jnp.int32)
        seen = loop.seen
        if seen is not None:
            for i in range(Q):
                seen = seen.with_token(loop.cached + 1 + i, new[:, i], kept[:, i])
        row = jnp.arange(S)[:, None]
        column = jnp.where(kept, loop.count[:, None] + offset, loop.starts_step.shape[1] + offset)
        write = {"mode": "drop", "unique_indices": True}
        return _State(
            step=loop.step + 1,
            cache=(
                caches.commit(main, aux, count),
                drafts._replace(hidden=self._last_states(drafts, aux, count)),
            ),
            recent=_slide(loop.recent[..., None], new[..., None], count)[..., 0],
            cached=loop.cached + count,
            left=loop.left - count,
            active=loop.active & (loop.left > count) & ~jnp.any(kept & ends, axis=1),
            count=loop.count + count,
            drawn=jax.tree.map(
                lambda all, new: all.at[row, column].set(new, **write), loop.drawn, drawn
            ),
            starts_step=loop.starts_step.at[row, column].set(
                jnp.broadcast_to(offset == 0, (S, Q)), **write
            ),
            seen=seen,
        )

    def _last_states(self, drafts: Drafts, aux, count_S) -> jax.Array:
        return _slide(drafts.hidden[0, :, 0], aux.mtp_input, count_S)[None, :, None]


def _slide(last_SWX: jax.Array, new_SQX: jax.Array, count_S: jax.Array) -> jax.Array:
    """Returns [S, W, X]: for each slot the last W of the vectors `last` followed by the first
    count[s] of `new`."""
    rows = jnp.concatenate([last_SWX, new_SQX.astype(last_SWX.dtype)], axis=1)
    at = count_S[:, None] + jnp.arange(last_SWX.shape[1])
    return jnp.take_along_axis(rows, at[..., None], axis=1)
