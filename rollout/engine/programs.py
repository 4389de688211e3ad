"""The functions that the generator compiles: an empty cache, prefill, copies between rows, and
multi-step decoding.

The words are those of engine.py: a decode is a loop of decoding steps.

s rows of one call, P rows of one prefill call, C tokens that it computes of each row, K decoding
steps of a decode, N tokens of a row that a decode can sample (K, or K (1 + drafts) with drafts), M
pages of a row, Z stop tokens, I ids that filters left, V vocabulary. Letters after an underscore
are the axes: tokens_PC is [P, C].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import compatibility, modes
from policy.cache import cache as caches
from policy.cache.media import Media, of_call
from policy.cache.pages import Pages
from policy.cache.sliding_window import WithSlidingWindows
from policy.cache.step import Step
from policy.execution.decoding import prepare_for_decoding
from policy.model import Graph
from rollout.engine.sampling import Drawn, Draws, choose
from rollout.logits_processors import LogitsProcessors, Seen
from rollout.request import Request
from rollout.types import GeneratorOptions, SamplingParams

# With more layers than this, decoding scans them on CPU and on one GPU too: unrolled layers run two
# to several times faster, but compile longer.
UNROLLED_LAYERS = 32
# The sampling parameters of a row without a request.
IDLE = SamplingParams(temperature=0)


class PrefillInputs(NamedTuple):
    """What the engine gives to a prefill call of P rows and C tokens, and where the call ends for
    each request.

    tokens: int32[P, C + lookahead_tokens]. The prediction modules read `lookahead_tokens` tokens
    after the chunk (rollout/engine/speculative.py); the call makes no entries for these. starts,
    lengths: int32[P], the entries before the call, and the entries that the prompt has at most
    after it. media: None for text.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    ends: list[int]
    media: Media | None

    @classmethod
    def of(
        cls, requests: Sequence[Request], P: int, C: int, lookahead_tokens: int
    ) -> PrefillInputs:
        """Builds the inputs, row i for request i. All requests have the same table of pictures, or
        none."""
        tokens = np.zeros((P, C + lookahead_tokens), np.int32)
        starts = np.zeros(P, np.int32)
        lengths = np.zeros(P, np.int32)
        ends = []
        for row, request in enumerate(requests):
            span = request.span(request.cached, request.cached + C + lookahead_tokens)
            tokens[row, : len(span)] = span
            end = request.call_end(C)
            ends.append(end)
            starts[row] = request.cached
            lengths[row] = request.needed if request.media is None else end
        prompts = [request.media for request in requests if request.media is not None]
        media = of_call(prompts, starts.tolist()[: len(requests)], (P, C)) if prompts else None
        return cls(tokens, starts, lengths, ends, media)


class Decoded(NamedTuple):
    """What a decode computes: the cache, the state of its rows after it, and its output."""

    cache: tuple
    state: DecodeState
    output: DecodeOutput


class _Loop(NamedTuple):
    """A decode between two decoding steps, of s rows.

    step: the number of steps that have run. token: int32[s], the last token of each row, which is
    not cached. cached: int32[s], the tokens in the cache. left: int32[s], how many tokens a row may
    still sample. active: bool[s]. outputs: (Drawn [K, s], values [K, s] or None), one row for each
    step. seen: for the logits processors; None: no row has any.
    """

    step: jax.Array | int
    cache: tuple
    token: jax.Array
    cached: jax.Array
    left: jax.Array
    active: jax.Array
    outputs: tuple[Drawn, jax.Array | None]
    seen: Seen | None


class DecodeOutput(NamedTuple):
    """The result of a decode, [N, s], or [N] for one row. A request has a list with the name of
    each field.

    tokens: the tokens of a row come first, then -1. starts_step: true for the first token of a
    decoding step; false for the further tokens that the step gains from accepted drafts, and where
    there is no token. values: where they are recorded, the critic's value of the hidden state that
    each token was drawn from. filtered_logprobs, kept, kept_counts, raw_logprobs, top_ids,
    top_logprobs: where they are recorded, as in rollout/engine/sampling.py:Drawn; kept is
    [N, s, I], top_ids and top_logprobs are [N, s, k].
    """

    tokens: Any
    logprobs: Any
    starts_step: Any
    values: Any = None
    filtered_logprobs: Any = None
    kept: Any = None
    kept_counts: Any = None
    raw_logprobs: Any = None
    top_ids: Any = None
    top_logprobs: Any = None

    def row(self, row: int) -> DecodeOutput:
        return DecodeOutput(*(None if array is None else array[:, row] for array in self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of the rows between two decodes, numpy or jax arrays.

    token, cached, left, prompt_id, sample, active: int32[s]: the token to feed next, the number of
    cached tokens, the number of tokens still to sample, the ids of the random draw, and 1 where the
    row is in use.
    stops: int32[s, Z], the tokens that end a completion, -1 for none.
    draws: how tokens are drawn.
    deltas: int32[s], `Media.delta` of each row where one is not 0; None: rotary positions
    are positions. recent: int32[s, DecoderPrograms.recent], the last tokens of each row up to the
    one to feed, if the programs need them.
    rows, pages: over a paged cache int32[s], the slots (past the end: padding), and int32[s, M],
    their pages. processors: the logits processors of the rows; None: no row has any. tops: how
    many of the likeliest tokens are recorded with raw log-probabilities, a constant of the program;
    None: none, nor raw log-probabilities.
    """

    token: Any
    cached: Any
    left: Any
    prompt_id: Any
    sample: Any
    active: Any
    stops: Any
    draws: Draws
    deltas: Any = None
    recent: Any = None
    rows: Any = None
    pages: Any = None
    processors: LogitsProcessors | None = None
    tops: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(
        cls, requests: Sequence[Request | None], size: int, width: int, seed: int, recent: int
    ) -> DecodeState:
        """Builds the state of `size` rows on the host, row i for request i, without logits
        processors. None and rows past the requests are idle.

        width: columns of `stops`. recent: columns of `recent`.
        """
        columns = np.zeros((6, size), np.int32)
        sampling = [IDLE] * size
        stops = np.full((size, width), -1, np.int32)
        tails = np.zeros((size, recent), np.int32)
        for row, request in enumerate(requests):
            if request is None:
                continue
            columns[:, row] = (
                request.last,
                request.cached,
                request.left,
                request.prompt_id,
                request.sample,
                1,
            )
            sampling[row] = request.params
            stops[row, : len(request.params.stop_token_ids)] = request.params.stop_token_ids
            if recent:
                last = (*request.prompt[-recent:], *request.tokens[-recent:])[-recent:]
                tails[row, recent - len(last) :] = last
        names = ("token", "cached", "left", "prompt_id", "sample", "active")
        numbers: dict[str, Any] = dict(zip(names, columns, strict=True))
        media = [None if request is None else request.media for request in requests]
        deltas = np.zeros(size, np.int32)
        deltas[: len(media)] = [0 if each is None else each.delta for each in media]
        return cls(
            **numbers,
            stops=stops,
            draws=Draws.of(sampling, seed),
            deltas=deltas if deltas.any() else None,
            recent=tails if recent else None,
        )

    def seen(self, V: int) -> Seen | None:
        """Returns the tokens that each row has, for its logits processors; None: no row has any."""
        return None if self.processors is None else self.processors.seen(self.cached + 1, V)

    def processed(
        self, logits_sV: jax.Array, at_s: jax.Array, seen: Seen | None
    ) -> jax.Array | None:
        """Returns the logits after the logits processors; None: no row has any. at: places of the
        tokens to draw."""
        if self.processors is None or seen is None:
            return None
        return self.processors.process(logits_sV, at_s, seen)

    def with_history(self, seen: Seen | None) -> DecodeState:
        """Returns the state with the tokens that its rows have after a decode."""
        if self.processors is None or seen is None:
            return self
        return replace(self, processors=replace(self.processors, history=seen.history))


class DecoderPrograms:
    """The functions that are compiled for decoding with one token per decoding step.

    lookahead_tokens: how many tokens a prefill call reads after the C that it computes. The call
    makes no entries for them; tokens_PC is [P, C + lookahead_tokens]. 0 without drafts.
    recent: how many trailing tokens of each row a decode needs.
    drafts: how many drafted tokens a decoding step may write after the token that it feeds.
    records_routes: whether the cache keeps the routes: the experts that computed each token.
    scan: whether decoding scans the layers.
    reads_copies: whether decoding reads the weights as DecodingWeights returns them.
    on_one_cpu: whether one CPU device computes. transposes_keys: whether contiguous keys are stored
    as TransposedKeys.
    chunk: the most tokens of a prompt in one prefill call.
    decode_steps: the most decoding steps of a decode.
    max_kept: the most ids that filters leave which a decode records of each token; 0: none. `exact`
    records them when it verifies a completion.
    """

    lookahead_tokens = recent = drafts = 0

    def __init__(self, graph: Graph, options: GeneratorOptions, slots: int, max_length: int):
        graph = graph.for_inference(options.rules)
        self.records_routes = options.record_routes
        self.paged = options.cache == "paged"
        if self.records_routes:
            graph = graph.with_runtime(record=(*graph.runtime.record, "routes"))
        self.graph = graph
        self.options = options
        self.slots = slots
        self.max_length = max_length
        self.decode_steps = options.tokens_per_dispatch
        self.max_kept = 0 if options.exact else min(options.record_kept, graph.config.vocab_size)
        self.chunk = min(options.prefill_chunk, max_length)
        on_cpu = graph.layout.platform == "cpu"
        one_device = graph.layout.mesh.size == 1
        unrolled = on_cpu or (graph.layout.platform == "gpu" and one_device)
        self.scan = not unrolled or len(graph.config.layers) > UNROLLED_LAYERS
        self.reads_copies = not self.scan and one_device
        self.on_one_cpu = on_cpu and one_device
        # Pages and sliding windows take their entries from contiguous caches of prefill calls, whose
        # keys must lie as theirs do.
        has_other_form = self.paged or options.sliding_window_cache or options.kv_cache is not None
        is_float32 = graph.runtime.dtype == "float32"
        self.transposes_keys = self.reads_copies and on_cpu and is_float32 and not has_other_form

    def media_refusal(self, media: Media) -> str | None:
        """Returns why a prompt cannot have these pictures and sounds, as the end of a sentence;
        None: it can."""
        if self.drafts:
            return (
                f"has {compatibility.MEDIA}; they do not go with generator.speculative: a "
                "module embeds the next token"
            )
        dtype = jnp.dtype(media.table.dtype)
        own = jnp.dtype(self.graph.runtime.dtype)
        if dtype != own:
            return f"has a table of {dtype} rows; this model computes in {own}"
        config = self.graph.config
        for name, array, is_read in (
            ("turns", media.turns, config.has_sections),
            ("until", media.until, config.looks_ahead),
        ):
            if is_read and array is None:
                return f"has media without {name}, which this model needs"
            if array is not None and not is_read:
                return f"has media with {name}, which this model does not read; leave it out"
        if (block := media.longest_block) > self.chunk:
            return (
                f"has a picture of {block} tokens that see each other, longer than a call of "
                f"{self.chunk} tokens; set prefill_chunk to at least {block}"
            )
        return next(compatibility.conflicts(config, self.graph.runtime, media=True), None)

    @property
    def supports_truncation(self) -> bool:
        """Whether a row can be used up to any of its tokens: all its entries are by position, and
        none is overwritten."""
        return not self.options.sliding_window_cache and all(
            caches.supports_truncation(spec, self.graph.config) for spec in self.graph.config.layers
        )

    def constrained(self, cache: tuple) -> Any:
        """Constrains the result of a program to the shardings of the cache."""
        return caches.constrained(cache, self.graph.layout)

    def empty(self, length: int | Pages) -> Any:
        """Returns an empty cache of all slots.

        Sliding-window caches have entries for the most tokens of a call, and for those that may be
        rejected.
        """
        call_tokens = max(self.chunk, 1 + self.drafts) + self.drafts
        return self._empty_rows(
            self.slots,
            WithSlidingWindows(length, call_tokens)
            if self.options.sliding_window_cache
            else length,
        )

    def _empty_rows(self, rows: int, length: int | Pages | WithSlidingWindows) -> Any:
        dtype = self.graph.runtime.dtype
        kind = self.options.kv_cache
        return caches.create(
            self.graph.config,
            rows,
            length,
            dtype,
            scan=self.scan,
            quantization=kind,
            routes=self.records_routes,
            transposes_keys=self.transposes_keys,
        )

    def prefill(self, params, cache, rows, tokens_PC, starts, lengths, pages_PM, media=None):
        """Returns the cache after the first chunk of P prompts.

        Every start is 0, and earlier entries of the rows are ignored.
        """
        P = tokens_PC.shape[0]
        C = tokens_PC.shape[1] - self.lookahead_tokens
        step = replace(self._step(starts, lengths, C, pages_PM), media=media)
        prompt_cache = self._fill(
            params,
            self._empty_rows(P, C),
            tokens_PC,
            replace(step, pages=None, contiguous=True),
            lengths,
        )
        return self.constrained(caches.insert(cache, prompt_cache, rows, step))

    def extend(self, params, cache, rows, tokens_PC, starts, lengths, pages_PM, media=None):
        """Returns the cache after a later chunk of P prompts."""
        C = tokens_PC.shape[1] - self.lookahead_tokens
        step = replace(self._step(starts, lengths, C, pages_PM), media=media)
        row_cache = self._fill(params, caches.rows_of(cache, rows), tokens_PC, step, lengths)
        return self.constrained(caches.with_rows(cache, row_cache, rows))

    def _step(self, starts, lengths, C: int, pages_PM) -> Step:
        """Returns the positions of C tokens of each prompt. Tokens past the end of a prompt are
        padding."""
        positions = starts[:, None] + jnp.arange(C)
        segments = (positions < lengths[:, None]).astype(jnp.int32)  # one segment per row
        # The rows of a prefill call are prompts in any order, so their pages may lie in any shard
        # of a mesh.
        return Step(positions=positions, segments=segments, pages=pages_PM, anywhere=True)

    def _fill(self, params, cache, tokens_PC, step: Step, lengths):
        """Returns the cache of P rows after the forward pass of their tokens."""
        with self.graph.precision():
            decoder = self.graph.decoder(params)
            after = modes.prefill(
                decoder, tokens_PC, step, self.to_prefill(cache), self.graph.runtime
            )
            return self.to_decode(after)

    def to_prefill(self, cache: tuple) -> tuple:
        """Returns the decoder's cache of some rows in the form of prefill calls. They scan the
        layers on CPU too: the program compiles in half the time and runs as fast, since products of
        many tokens take longer than copies of weights. Pools of pages are not copied for it."""
        return cache if self.scan or caches.has_pools(cache) else caches.scanned(cache)

    def to_decode(self, cache: tuple) -> tuple:
        """Returns the decoder's cache of some rows in the form of a decode; undoes `to_prefill`."""
        return (
            cache
            if self.scan or caches.has_pools(cache)
            else caches.unrolled(cache, self.graph.config)
        )

    def copy_rows(self, cache, pairs, count):
        """Returns the cache after copying row pairs[i, 0] to row pairs[i, 1] for the first `count`
        pairs in order."""

        def copy_row(i, arrays):
            # An array of one index lets a mesh that shards the slots send one row. A number would
            # gather all rows.
            return caches.with_rows(arrays, caches.rows_of(arrays, pairs[i, :1]), pairs[i, 1:])

        return self._row_by_row(cache, count, copy_row)

    def _row_by_row(self, cache, count, write_row):
        """Returns the cache after `write_row(i, arrays)`, which returns the arrays by slot with one
        row written, for i = 0 .. `count` - 1. XLA on CPU writes a row as one slice, in place, but a
        scatter of several rows number by number."""
        arrays = jax.lax.fori_loop(0, count, write_row, caches.without_pools(cache))
        return self.constrained(caches.with_arrays(cache, arrays))

    def gather(self, cache, rows):
        """Returns a cache of these rows alone, without pools of pages."""
        return self.constrained(caches.without_pools(caches.rows_of(cache, rows)))

    def scatter(self, cache, batch_cache, rows):
        """Returns the cache with these rows replaced by the rows of `batch_cache`."""
        if not self.on_one_cpu:
            return self.constrained(caches.with_rows(cache, batch_cache, rows))

        def put_row(i, arrays):
            row = jax.lax.dynamic_slice(rows, (i,), (1,))
            return caches.with_rows(arrays, caches.rows_of(batch_cache, i[None]), row)

        return self._row_by_row(cache, len(rows), put_row)

    def routes(self, cache, row, pages_M):
        """Returns the experts of all entries of a row, on every device."""
        return jax.lax.with_sharding_constraint(
            caches.routes(cache, row, pages_M), self.graph.layout.replicated
        )

    def decode(self, params, cache, state: DecodeState, limits) -> Decoded:
        """Returns what a decode computes.

        Decodes up to limits[0] steps, as long as more than limits[1] rows are active.
        """
        row_cache = caches.rows_of(cache, state.rows) if self.paged else cache
        row_cache, *results = self._decode_rows(params, row_cache, state, limits)
        cache = caches.with_rows(cache, row_cache, state.rows) if self.paged else row_cache
        # Replicated: the host of every process reads all of the output.
        results = jax.lax.with_sharding_constraint(results, self.graph.layout.replicated)
        return Decoded(self.constrained(cache), *results)

    def _without_tops(self, drawn: Drawn, tops: int, shape: tuple[int, ...] = ()) -> Drawn:
        """Returns it with empty raw log-probabilities and likeliest tokens of so many places."""
        k = min(tops, self.graph.config.vocab_size)
        return drawn._replace(
            raw_logprobs=np.zeros(shape, np.float32),
            top_ids=np.full((*shape, k), -1, np.int32),
            top_logprobs=np.zeros((*shape, k), np.float32),
        )

    def _decode_rows(self, params, cache, state: DecodeState, limits) -> Decoded:
        """Decodes on a cache of s rows."""
        s = state.token.shape[0]
        K = self.decode_steps
        head = params.get(modes.VALUE_HEAD)
        prepare = Graph.with_dora_scales if self.scan else prepare_for_decoding
        params = prepare(self.graph, params)
        # The token, value and what was recorded in the output for a row that produced none.
        no_value = None if head is None else np.float32(0)
        no_token = Drawn(np.int32(-1), np.float32(0))
        if self.max_kept:
            no_kept = np.full(self.max_kept, -1, np.int32)
            no_token = no_token._replace(
                filtered_logprobs=np.float32(0), kept=no_kept, kept_counts=np.int32(0)
            )
        if state.tops is not None:
            no_token = self._without_tops(no_token, state.tops)
        no_output = no_token, no_value

        def go_on(loop: _Loop):
            return (loop.step < limits[0]) & (jnp.sum(loop.active) > limits[1])

        def decode_step(loop: _Loop) -> _Loop:
            i, cache, token, cached, left, active, outputs, seen = loop
            decoder = self.graph.decoder(params)
            runtime = self.graph.runtime
            step = modes.next_token_step(cached, active, state.pages, state.deltas)
            states, cache = modes.next_token_states(decoder, token, step, cache, runtime)
            logits = modes.logits(decoder, states, runtime)
            draw_ids = state.prompt_id, state.sample, cached + 1
            processed = state.processed(logits, cached + 1, seen)
            how = runtime.layout, processed, self.max_kept, state.tops
            drawn = choose(logits, draw_ids, state.draws, *how)
            results = drawn, None if head is None else states.astype(jnp.float32) @ head

            def written(each, row, none):
                return each.at[i].set(
                    jnp.where(active if row.ndim == 1 else active[:, None], row, none)
                )

            outputs = jax.tree.map(written, outputs, results, no_output)
            new = drawn.tokens
            left = left - active
            still_active = active & (left > 0) & ~jnp.any(new[:, None] == state.stops, axis=1)
            seen = None if seen is None else seen.with_token(cached + 1, new, active)
            return _Loop(
                step=i + 1,
                cache=cache,
                token=jnp.where(active, new, token),
                cached=cached + active,
                left=left,
                active=still_active,
                outputs=outputs,
                seen=seen,
            )

        with self.graph.precision():
            blank = jax.tree.map(
                lambda none: jnp.broadcast_to(jnp.asarray(none), (K, s, *none.shape)), no_output
            )
            seen = state.seen(self.graph.config.vocab_size)
            start = _Loop(
                step=0,
                cache=cache,
                token=state.token,
                cached=state.cached,
                left=state.left,
                active=state.active != 0,
                outputs=blank,
                seen=seen,
            )
            end = jax.lax.while_loop(go_on, decode_step, start)
        after = replace(
            state,
            token=end.token,
            cached=end.cached,
            left=end.left,
            active=end.active.astype(jnp.int32),
        )
        after = after.with_history(end.seen)
        drawn, values = end.outputs
        output = DecodeOutput(drawn.tokens, drawn.logprobs, drawn.tokens >= 0, values, *drawn[2:])
        return Decoded(end.cache, after, output)
