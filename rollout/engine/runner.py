"""The model runner: calls the compiled functions of a generator.

A cache of all slots has S rows, one per slot. In a contiguous cache a row holds all entries of its
slot. In a paged cache it holds only the states of fixed size (scheduler.py), and the entries are in
pages. A decode runs on s = 1, 4, 8, ... S rows (CacheGeometry.batch_sizes). To decode on fewer
than S rows of a contiguous cache, ActiveBatch first gathers them into a batch cache. It scatters
them back before it decodes other rows. On a paged cache, the decode program takes the page tables
of its s rows and gathers their states itself.

Arrays `rows` are slots, one for each row of the call. A number >= S marks padding: nothing is
written for it.

S slots, s rows of one call, P rows of one prefill call, C tokens that it computes of each row, M
pages of a row. Letters after an underscore are the axes: pages_PM is [P, M].
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.cache import cache as caches
from policy.cache.media import Media
from policy.execution.decoding import DecodingWeights, Params
from policy.mesh import processes
from policy.mesh.sharding import Layout, block_on_cpu_mesh
from policy.model import Graph
from policy.programs.compiled_cache import CompiledCache, Memory
from rollout.engine import prefix_index
from rollout.engine.cache_manager import (
    CacheGeometry,
    CacheManager,
    ContiguousCacheManager,
    PagedCacheManager,
)
from rollout.engine.page_allocator import PageAllocator, PageCopy
from rollout.engine.page_budget import PageBudget, choose_page_budget
from rollout.engine.programs import DecodeOutput, DecoderPrograms, DecodeState, PrefillInputs
from rollout.engine.scheduler import PREFILL_ROWS, SchedulerLimits, prefill_lengths, prefill_rows
from rollout.engine.speculative import SpeculativePrograms
from rollout.logits_processors import MOST_OF_A_ROW, LogitsProcessors, ProcessorSizes, masks_of
from rollout.request import Request
from rollout.types import MOST_TOP_LOGPROBS, GeneratorOptions

_LOG = logging.getLogger("duet.generator")
# A program that a call needs waits for the programs that these threads have begun, so they are few.
BACKGROUND_THREADS = 4
# Follows the shape of a decode whose rotary positions differ from positions (DecodeState.deltas).
DELTAS = 1
# Follows the number of likeliest tokens in the shape of a decode that records them
# (DecodeState.tops).
TOPS = 2
# The numbers of likeliest tokens that decodes record. One and twenty cost the same, so there are no
# programs between them.
TOP_SIZES = (0, MOST_TOP_LOGPROBS)


class Widths(NamedTuple):
    """The widths of the arrays of a decode, besides its number of rows.

    stops: columns of DecodeState.stops. processors: sizes of the logits processors; None: no row
    has any. tops: DecodeState.tops.
    """

    stops: int = 4
    processors: ProcessorSizes | None = None
    tops: int | None = None

    @classmethod
    def of(cls, requests: Collection[Request]) -> Widths:
        """Returns the widths for these requests."""
        stops = max(len(request.params.stop_token_ids) for request in requests)
        few = 1 << (stops - 1).bit_length() if stops else 0  # few widths, few programs
        asked = [
            request.params.top_logprobs
            for request in requests
            if request.params.top_logprobs is not None
        ]
        tops = min(size for size in TOP_SIZES if size >= max(asked)) if asked else None
        return cls(max(cls().stops, few), ProcessorSizes.of(requests), tops)

    def has_room_for(self, other: Widths) -> bool:
        """Whether a decode of these widths can run requests that need those."""
        tops = -1 if self.tops is None else self.tops
        needed = -1 if other.tops is None else other.tops
        sizes = self.processors or (0,) * len(other.processors or ())
        rooms = zip(sizes, other.processors or (), strict=False)
        return self.stops >= other.stops and tops >= needed and all(a >= b for a, b in rooms)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the numbers that the shape of a decode has after its rows."""
        tops = () if self.tops is None else (self.tops, TOPS)
        return (self.stops, *(self.processors or ()), *tops)


MOST_STOPS = 32
"""Tokens that end a completion in the widest decode of a generator for clients."""


def widths_for_clients(usual: Widths) -> list[Widths]:
    """Returns the widths of the decodes of a generator whose clients choose the parameters: those
    of usual requests, those with log-probabilities, and those of all others."""
    most = Widths(max(MOST_STOPS, usual.stops), MOST_OF_A_ROW, TOP_SIZES[-1])
    return [usual, usual._replace(tops=TOP_SIZES[-1]), most]


class LateCompilation(RuntimeError):
    """A program is needed that was not compiled ahead."""


class ModelRunner:
    """Runs the generator's functions over a cache that the caller holds. Caches are donated.
    (Reward functions are run by another class, rewards/runner.py:Runner.)

    functions: the Python functions that are compiled (rollout/engine/programs.py).
    executables: their compiled forms by name, one for each shape.
    chunk: the most tokens of a prompt in one prefill call.
    lookahead_tokens: how many tokens a prefill call reads after the C that it computes, for the
    modules that draft. records_routes: whether the cache keeps the routes: the experts that
    computed each token.
    decode_steps: the most decoding steps of a decode.
    decoding_weights: the copies of the weights that decodes read; None: they read the weights
    themselves. max_prefill_rows: the most rows of one prefill call.
    value_head: float32[E], the head of the values that are recorded.
    reserved_bytes: memory per device that other arrays will take after the number of pages is
    chosen. fixed_widths: the widths of decodes, the narrowest first; none: each decode has those
    that its requests need. compiled_ahead: whether the programs are known, compiled or not, so that
    another one is a warning or an error.
    """

    def __init__(
        self,
        graph: Graph,
        options: GeneratorOptions,
        slots: int,
        max_length: int,
        available_memory: float | None = None,
    ):
        """available_memory: bytes per device that a paged cache may share with an update; None: as
        the devices report."""
        kind = SpeculativePrograms if options.speculative else DecoderPrograms
        self.functions = functions = kind(graph, options, slots, max_length)
        self.graph = functions.graph
        self.options = options
        self._available_memory = available_memory
        self.max_length = max_length
        self.vocab_size = graph.config.vocab_size
        self.chunk = functions.chunk
        self.lookahead_tokens = functions.lookahead_tokens
        self.records_routes = functions.records_routes
        self.decode_steps = functions.decode_steps
        self.max_prefill_rows = prefill_rows(slots)
        table_width = (
            -(-(max_length + functions.drafts) // options.page_size) if functions.paged else None
        )
        layout = self.graph.layout
        num_shards = slots // layout.sharding(("cache_batch",), (slots,)).shard_shape((slots,))[0]
        sizes = None if options.batch_sizes is None else tuple(options.batch_sizes)
        self.geometry = CacheGeometry(
            slots,
            num_shards,
            functions.supports_truncation,
            table_width,
            sizes,
            functions.on_one_cpu,
        )
        self.decoding_weights = DecodingWeights(self.graph) if functions.reads_copies else None
        self.value_head: jax.Array | None = None
        self.reserved_bytes = 0
        self.fixed_widths: Sequence[Widths] = ()
        self.compiled_ahead = False
        self._strict = False
        jitted = {
            "empty": jax.jit(self._empty_cache),
            "prefill": jax.jit(functions.prefill, donate_argnums=1),
            "extend": jax.jit(functions.extend, donate_argnums=1),
            "copy": jax.jit(functions.copy_rows, donate_argnums=0),
            "copy_pages": jax.jit(caches.copy_pages, donate_argnums=0),
            "gather": jax.jit(functions.gather),
            "scatter": jax.jit(functions.scatter, donate_argnums=0),
            "decode": jax.jit(functions.decode, donate_argnums=1),
            "routes": jax.jit(functions.routes),
        }
        self.executables = {
            name: CompiledCache(function, layout.platform) for name, function in jitted.items()
        }

    @property
    def limits(self) -> SchedulerLimits:
        """Returns the properties of the programs that decide how far the scheduler may plan."""
        geometry = self.geometry
        return SchedulerLimits(
            self.decode_steps,
            self.functions.drafts,
            geometry.copies_rows,
            pins_prefixes=geometry.pins_prefixes,
        )

    @cached_property
    def page_budget(self) -> PageBudget | None:
        """Returns the pages of the cache, chosen at the first use from the memory that is available
        then.

        None: the cache is contiguous.
        """
        geometry = self.geometry
        options = self.options
        if geometry.table_width is None:
            return None
        shape = geometry.slots, geometry.table_width, geometry.num_shards
        pages = options.pages, options.page_size
        return choose_page_budget(
            self.functions.empty,
            self.graph.layout,
            shape,
            pages,
            self._available_memory,
            self.reserved_bytes,
        )

    def cache_manager(self) -> CacheManager:
        """Returns the cache manager of an empty cache."""
        slots = self.geometry.slots
        num_shards = self.geometry.num_shards
        truncation = self.geometry.supports_truncation
        budget = self.page_budget
        if budget is None:
            return ContiguousCacheManager(slots, supports_truncation=truncation)
        number, size = budget.pages
        allocators = [
            PageAllocator(number // num_shards, size, n * number // num_shards)
            for n in range(num_shards)
        ]
        return PagedCacheManager(
            slots, allocators, supports_truncation=truncation, full_capacity=number >= budget.full
        )

    def _empty_cache(self):
        budget = self.page_budget
        return self.functions.constrained(
            self.functions.empty(self.max_length if budget is None else budget.pages)
        )

    def empty(self) -> Any:
        """Returns an empty cache of all slots."""
        return self._run("empty", ())

    def refusal(self, request: Request) -> str | None:
        """Returns why the prompt of a request cannot be computed, as the end of a sentence; None:
        it can."""
        refusal = request.refusal(self.vocab_size, self.max_length)
        return refusal or (
            None if request.media is None else self.functions.media_refusal(request.media)
        )

    def prefill_inputs(self, requests: Sequence[Request], P: int, C: int) -> PrefillInputs:
        """Returns the inputs of a prefill call of P rows that computes C tokens of these
        requests."""
        return PrefillInputs.of(requests, P, C, self.lookahead_tokens)

    def prefill(
        self, params, cache, places: tuple, inputs: PrefillInputs, *, first_chunk: bool
    ) -> Any:
        """Prefills one chunk of each prompt, the entries start .. min(start + C, length) - 1.
        Returns the cache.

        places: (rows int32[P], pages int32[P, M]); a row index >= S marks padding, and pages are
        None if the cache is contiguous. first_chunk: every start is 0, and earlier entries of the
        rows are ignored.
        """
        rows, pages_PM = places
        tokens_PC, starts, lengths, _, media = inputs
        arguments = params, cache, rows, tokens_PC, starts, lengths, pages_PM
        name = "prefill" if first_chunk else "extend"
        shape = tokens_PC.shape
        if media is None:
            return self._run(name, shape, *arguments)
        return self._run(name, (*shape, len(media.table)), *arguments, media)

    def copy_rows(self, cache, pairs: Sequence[tuple[int, int]]) -> Any:
        """Returns the cache after copying the row of slot a to slot b for each pair (a, b), one
        after the other."""
        slots = self.geometry.slots
        for start in range(0, len(pairs), slots):
            group = pairs[start : start + slots]
            array = np.zeros((slots, 2), np.int32)
            array[: len(group)] = group
            cache = self._run("copy", (), cache, array, np.int32(len(group)))
        return cache

    def copy_pages(self, cache, copies: Sequence[PageCopy]) -> Any:
        """Returns the cache after copying pages. No page is the target of two copies."""
        slots = self.geometry.slots
        budget = self.page_budget
        assert budget is not None, "a contiguous cache has no pages"
        for start in range(0, len(copies), slots):
            group = copies[start : start + slots]
            # The program copies as many pages as there are slots. It drops the padding: targets
            # past the last page.
            source = np.zeros(slots, np.int32)
            target = budget.pages.number + np.arange(slots, dtype=np.int32)
            source[: len(group)], target[: len(group)] = zip(
                *((copy.source, copy.target) for copy in group), strict=True
            )
            cache = self._run("copy_pages", (), cache, source, target)
        return cache

    def gather(self, cache, rows: np.ndarray) -> Any:
        """Returns a cache of these rows alone, without pools of pages."""
        return self._run("gather", rows.shape, cache, rows)

    def scatter(self, cache, batch_cache, rows: np.ndarray) -> Any:
        """Returns the cache with these rows replaced by the rows of `batch_cache`."""
        return self._run("scatter", rows.shape, cache, batch_cache, rows)

    def routes(
        self, cache, rows: int, row: int, pages_M: np.ndarray | None
    ) -> dict[str, jax.Array]:
        """Returns the experts of all entries of a row (policy.cache.cache.routes) of a cache with
        so many rows.

        The transfer to the host is started. pages_M: the pages of the row; None if the cache is
        contiguous.
        """
        routes = self._run("routes", (rows,), cache, np.int32(row), pages_M)
        for array in routes.values():
            array.copy_to_host_async()
        return routes

    def decode(
        self, params, cache, state: DecodeState, limits: tuple[int, int]
    ) -> tuple[Any, DecodeState, DecodeOutput]:
        """Returns (cache, state, output) after decoding. The arrays are on the device.

        limits: (the most decoding steps, the number of active rows at which the decode ends early).
        """
        head = {modes.VALUE_HEAD: self.value_head} if self.options.record_values else {}
        sizes = () if state.processors is None else state.processors.sizes
        tops = () if state.tops is None else (state.tops, TOPS)
        deltas = () if state.deltas is None else (DELTAS,)
        shape = (*state.stops.shape, *sizes, *tops, *deltas)
        weights = self.decoding_weights.prepare(params) if self.decoding_weights else params
        return self._run(
            "decode", shape, weights | head, cache, state, np.asarray(limits, np.int32)
        )

    def widths(self, requests: Collection[Request]) -> Widths:
        """Returns the widths of a decode of these requests. Under `exact` it records no likeliest
        tokens: the completion is scored when it is verified."""
        widths = Widths.of(requests)
        widths = widths._replace(tops=None) if self.options.exact else widths
        return next((each for each in self.fixed_widths if each.has_room_for(widths)), widths)

    def fix_widths(self, widths: Sequence[Widths]) -> None:
        """Makes decodes have these widths alone, the narrowest first."""
        if self.options.exact:
            widths = [each._replace(tops=None) for each in widths]
        self.fixed_widths = tuple(dict.fromkeys(widths))

    def params_refusal(self, request: Request) -> str | None:
        """Returns why no decode has room for the parameters of a request; None: one has."""
        if not self.fixed_widths or self.widths([request]) in self.fixed_widths:
            return None
        longest = max(map(len, request.bad_words), default=0)
        most = self.fixed_widths[-1].processors or MOST_OF_A_ROW
        if longest > most.longest:
            return f"bad_words has a word of {longest} tokens; at most {most.longest}"
        return (
            f"{len(request.params.stop_token_ids)} stop_token_ids, "
            f"{len(request.params.logit_bias or ())} tokens of logit_bias or "
            f"{len(request.bad_words)} forms of bad_words are too many"
        )

    def decode_state(self, requests: Sequence[Request | None], size: int, seed: int) -> DecodeState:
        """Returns the state of `size` rows, row i for request i."""
        widths = self.widths([request for request in requests if request is not None])
        state = self.host_state(requests, size, widths, seed)
        layout = self.graph.layout
        return (
            state
            if layout.mesh.size == 1
            else processes.device_put_global(state, layout.replicated)
        )

    def host_state(
        self, requests: Sequence[Request | None], size: int, widths: Widths, seed: int
    ) -> DecodeState:
        """Returns the state of `size` rows on the host, in arrays of these widths."""
        state = DecodeState.of(requests, size, widths.stops, seed, self.functions.recent)
        state = replace(state, tops=widths.tops)
        if widths.processors is None:
            return state
        length = self.max_length + self.functions.drafts
        processors = LogitsProcessors.of(requests, size, length, widths.processors)
        if widths.processors.masks:
            processors = replace(processors, masks=masks_of((), size, self.vocab_size))
        return replace(state, processors=processors)

    def with_masks(self, state: DecodeState, requests: Sequence[Request | None]) -> DecodeState:
        """Returns the state of these rows with the tokens that may come next under their
        constraints."""
        assert state.processors is not None, "a constraint is a logits processor"
        masks: Any = masks_of(requests, len(requests), self.vocab_size)
        layout = self.graph.layout
        if layout.mesh.size > 1:
            masks = processes.device_put_global(masks, layout.replicated)
        return replace(state, processors=replace(state.processors, masks=masks))

    def with_pages(self, state: DecodeState, rows: np.ndarray, pages_sM: np.ndarray) -> DecodeState:
        """Returns the state of rows over a paged cache: which slots they are, and their pages."""
        layout = self.graph.layout
        if layout.mesh.size > 1:
            rows, pages_sM = processes.device_put_global((rows, pages_sM), layout.replicated)
        return replace(state, rows=rows, pages=pages_sM)

    # Compilation.

    def _run(self, name: str, shape: tuple[int, ...], *arguments):
        executable = self.executables[name]
        if self.compiled_ahead and shape not in executable.shapes:
            self._report_late(name, shape)
        return block_on_cpu_mesh(executable.run(shape, *arguments), self.graph.layout)

    def expect_decode(self, params: Params, rows: int, requests: Collection[Request]) -> None:
        """Starts to compile the decode of so many rows for these requests, while the program before
        it is compiled and runs."""
        widths = self.widths(requests)
        decode = self.executables["decode"]
        shape = (rows, *widths.shape)
        if not self.compiled_ahead and shape not in decode.shapes:
            arguments = decode_inputs(self, _shapes(params), rows, widths)
            decode.compile_in_background(self._pool, shape, arguments, trace_here=True)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Returns the threads that compile in the background: few, and one core is left to the
        caller's thread."""
        threads = min(BACKGROUND_THREADS, (os.cpu_count() or 1) - 1)
        return ThreadPoolExecutor(max(1, threads), thread_name_prefix="compilation")

    def _report_late(self, name: str, shape: tuple[int, ...]) -> None:
        subject = " x ".join(map(str, shape)) or "its cache"
        message = f"the generator's program {name} for {subject} was not compiled ahead"
        if self._strict:
            raise LateCompilation(f"{message}; strict_shapes forbids compiling it now")
        _LOG.warning("%s; it is compiled now, and the run waits", message)

    @property
    def memory(self) -> dict[tuple, Memory | None]:
        """Returns the memory of each compiled program, by (name, *shape). Every compiled program
        has a key, also one whose memory the compiler does not report (None)."""
        programs = self.executables.items()  # a thread may add to them
        return {
            (name, *shape): m for name, each in programs for shape, m in list(each.memory.items())
        }

    def compile_ahead(
        self,
        params: Params,
        longest: int,
        widths: Iterable[Widths],
        media_rows: Sequence[int] = (),
        *,
        strict: bool,
    ) -> int:
        """Compiles all programs that prompts of up to `longest` tokens need, in parallel threads,
        unless they are compiled. Returns how many programs are compiled now. From here on another
        program is a warning, or LateCompilation if `strict`.

        widths: those of the requests. media_rows: numbers of rows of the tables of pictures and
        sounds. One thread traces the programs, because tracing is Python.
        """
        compiled = self.memory.keys()
        inputs = program_inputs(self, params, longest, widths, media_rows)
        missing = [each for each in inputs if each[0] not in compiled]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            lowered = (
                (key, inputs, self.executables[key[0]].lower(*inputs)) for key, inputs in missing
            )
            list(
                pool.map(
                    lambda each: self.executables[each[0][0]].compile_shape(each[0][1:], *each[1:]),
                    lowered,
                )
            )
        self.compiled_ahead = True
        self._strict = strict
        return len(self.memory)

    def compile_in_background(
        self,
        params: Params,
        longest: int,
        widths: Iterable[Widths],
        media_rows: Sequence[int] = (),
    ) -> int:
        """Starts to compile the programs that `compile_ahead` compiles, those of the first dispatch
        first. Returns their number. A call waits for its own program, and never takes another.

        Several threads trace, but only one at a time (CompiledCache). The graph sets what tracing
        depends on, such as the precision of products, so that no setting of the caller's thread is
        needed.
        """
        programs = dict(program_inputs(self, _shapes(params), longest, widths, media_rows))
        for name, *shape in sorted(programs, key=self._compilation_order):
            arguments = programs[(name, *shape)]
            self.executables[name].compile_in_background(
                self._pool, tuple(shape), arguments, trace_here=False
            )
        self.compiled_ahead = True
        return len(programs)

    def _compilation_order(self, program: tuple) -> int:
        """Returns the place of a program (name, *shape) in the order of compilation: 0 for the
        decode of all slots, which takes longest, 1 for what prefills prompts, 2 for the rest."""
        name, *shape = program
        if name == "decode":
            return 0 if shape[0] == self.geometry.slots else 2
        return 1 if name in ("empty", "prefill", "copy", "copy_pages") else 2

    @property
    def programs_left(self) -> int:
        """How many programs are still to be compiled in the background."""
        return sum(each.left for each in self.executables.values())

    def stop_compiling(self) -> None:
        """Gives up the programs that no thread has begun to compile."""
        for each in self.executables.values():
            each.cancel()

    def forget_programs(self) -> None:
        """Gives up all programs, for weights with other paths: those of a policy that got an
        adapter."""
        for each in self.executables.values():
            each.forget()
        self.compiled_ahead = False

    @cached_property
    def abstract_cache(self) -> Any:
        """Returns the shapes and shardings of the cache."""
        return _abstract(jax.eval_shape(self.executables["empty"].jitted), self.graph.layout)


def _shapes(params: Params) -> dict[str, Any]:
    """Returns the shapes and shardings of weights: a thread that compiles keeps no weights
    alive."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), params
    )


def _abstract(cache: Any, layout: Layout) -> Any:
    """Returns the shapes of a cache with the shardings that its programs give it."""

    def abstract(axes, array):
        return jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=layout.sharding(axes, array.shape)
        )

    return caches.by_axes(abstract, cache)


def program_inputs(
    runner: ModelRunner,
    params: Params,
    longest: int,
    widths: Iterable[Widths],
    media_rows: Sequence[int] = (),
) -> Iterator[tuple[tuple, tuple]]:
    """Yields ((name, *shape), abstract arguments) of every program that prompts of up to `longest`
    tokens need, the slowest to compile first. `params`: the weights, abstract or not. `media_rows`:
    as in ModelRunner.compile_ahead.
    """
    cache = runner.abstract_cache
    geometry = runner.geometry
    slots = geometry.slots
    width = geometry.table_width
    page_size = runner.options.page_size
    for s in geometry.batch_sizes:
        for each in widths:
            weights, decoded, state, limits = decode_inputs(runner, params, s, each)
            yield ("decode", s, *each.shape), (weights, decoded, state, limits)
            if media_rows and runner.graph.config.has_sections:
                yield (
                    ("decode", s, *each.shape, DELTAS),
                    (weights, decoded, replace(state, deltas=state.token), limits),
                )
    entries = longest - 1  # the last token of a prompt is not prefilled: decoding feeds it
    # "extend" computes what follows a first chunk or a shared prefix, which have at least so many
    # entries.
    shortest_start = min(
        prefix_index.MIN_SHARED_TOKENS, runner.chunk, *(() if width is None else (page_size,))
    )
    calls = [("prefill", C) for C in prefill_lengths(entries, runner.chunk)]
    calls += [("extend", runner.chunk)] if entries > shortest_start else []
    for P in (rows for rows in PREFILL_ROWS if rows <= runner.max_prefill_rows):
        pages = None if width is None else _int32(P, width)
        for name, C in calls:
            shape = P, C + runner.lookahead_tokens
            inputs = params, cache, _int32(P), _int32(*shape), _int32(P), _int32(P), pages
            yield (name, *shape), inputs
            for M in media_rows:
                yield (name, *shape, M), (*inputs, _media(runner, P, C, M))
    batches = geometry.batch_sizes[:-1] if geometry.copies_batch else ()
    for s in sorted({*batches, *(() if geometry.supports_truncation else (1,))}):
        yield ("gather", s), (cache, _int32(s))
        yield ("scatter", s), (cache, _batch_cache(runner, s), _int32(s))
    if geometry.copies_rows:
        yield ("copy",), (cache, _int32(slots, 2), _int32())
    if width is not None:
        yield ("copy_pages",), (cache, _int32(slots), _int32(slots))
    if runner.records_routes:
        for s in geometry.batch_sizes if geometry.copies_batch else (slots,):
            yield (
                ("routes", s),
                (_decoded_cache(runner, s), _int32(), None if width is None else _int32(width)),
            )
    yield ("empty",), ()


def decode_inputs(runner: ModelRunner, params: Params, rows: int, widths: Widths) -> tuple:
    """Returns the abstract arguments of a decode of so many rows."""
    weights = runner.decoding_weights.abstract(params) if runner.decoding_weights else params
    return (
        weights | _value_head(runner),
        _decoded_cache(runner, rows),
        _state(runner, rows, widths),
        _int32(2),
    )


def _decoded_cache(runner: ModelRunner, rows: int) -> Any:
    """Returns the abstract cache of a decode: that of all slots, or of a batch that was copied from
    it."""
    geometry = runner.geometry
    own = rows == geometry.slots or not geometry.copies_batch
    return runner.abstract_cache if own else _batch_cache(runner, rows)


def _batch_cache(runner: ModelRunner, rows: int) -> Any:
    gather = runner.executables["gather"].jitted
    return _abstract(
        jax.eval_shape(gather, runner.abstract_cache, _int32(rows)), runner.graph.layout
    )


def _media(runner: ModelRunner, P: int, C: int, M: int) -> Media:
    """Returns the abstract pictures and sounds of a prefill call with a table of M rows."""
    config = runner.graph.config
    dtype = jnp.dtype(runner.graph.runtime.dtype)
    table = (M, config.hidden_size)
    features = sum(spec.deepstack for spec in config.layers)
    deep = jax.ShapeDtypeStruct((features, *table), dtype) if features else None
    return Media(
        _int32(P, C),
        jax.ShapeDtypeStruct(table, dtype),
        deep,
        _int32(P, C, 3) if config.has_sections else None,
        _int32(P, C) if config.looks_ahead else None,
    )


def _value_head(runner: ModelRunner) -> dict[str, jax.ShapeDtypeStruct]:
    if not runner.options.record_values:
        return {}
    shape = (runner.graph.config.hidden_size,)
    sharding = runner.graph.layout.replicated
    return {modes.VALUE_HEAD: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}


def _state(runner: ModelRunner, rows: int, widths: Widths) -> DecodeState:
    """Returns the abstract state of a decode."""
    state = runner.host_state([], rows, widths, 0)
    layout = runner.graph.layout
    if (width := runner.geometry.table_width) is not None:
        state = replace(
            state, rows=np.zeros(rows, np.int32), pages=np.zeros((rows, width), np.int32)
        )
    sharding = layout.replicated if layout.mesh.size > 1 else None
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), state)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
