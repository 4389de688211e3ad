"""The compiled programs of a generator: an empty cache, prefill, copies between rows, and decoding.

A contiguous cache has S rows, one for each slot. Decoding runs on s = 1, 2, 4, ... S of them: fewer than S are gathered into a
cache of their own first (`enter`) and written back when the engine goes on with others (`leave`). Over a paged cache a call of s
rows is given their pages, and gathers only their states of fixed size.

s rows of one call, P prompts of one prefill, C tokens of one prefill call, K decoding steps of one dispatch, M pages of a row.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.cache import cache as caches
from policy.cache.pages import Pages
from policy.cache.sliding_window import WithRings
from policy.cache.step import Step
from policy.execution.compiled_cache import Memory, callable_form
from policy.execution.decoding import laid_out
from policy.mesh import processes
from policy.mesh.sharding import block_on_cpu_mesh
from rollout.engine.pages import Copy, PagedRows, PageTable
from rollout.engine.pool import PoolSize, choose_pool
from rollout.engine.sampling import Draws, SamplingParams, choose
from rollout.engine.scheduler import WORTH_A_COPY, Rows

if TYPE_CHECKING:
    from rollout.types import GeneratorOptions

_LOG = logging.getLogger("duet.generator")

# Above this many layers decoding is scanned on CPU too: unrolled it runs several times faster, but compiles longer.
UNROLLED_LAYERS = 32
PREFILL_ROWS = (1, 4, 16)
SHORTEST_PREFILL = 16
IDLE = SamplingParams(temperature=0)


class LateCompilation(RuntimeError):
    """A program was needed that is not one of those compiled ahead."""


class Made(NamedTuple):
    """What a dispatch made, [N, s], or [N] of one row: tokens (-1: none), log-probabilities, whether a token is the first of its
    decoding step and, where they are recorded, values of the states that the tokens were drawn in."""

    tokens: np.ndarray
    logprobs: np.ndarray
    opens: np.ndarray
    values: np.ndarray | None = None

    def of(self, row: int) -> Made:
        return jax.tree.map(lambda array: array[:, row], self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What decoding knows of its rows. int32[s] each: token to feed next, tokens already cached, tokens still to make, ids of the
    draw, and 1 where in use. `stops` int32[s, W]: tokens that end a completion, -1 for none. `draws`: how tokens are drawn.
    `recent` int32[s, Programs.recent]: the last tokens of each row, the one to feed among them, where decoding wants them. Over a
    paged cache `rows` int32[s] are the slots (past the end: padding), and `pages` int32[s, M] their pages."""

    token: jax.Array
    cached: jax.Array
    left: jax.Array
    prompt_id: jax.Array
    sample: jax.Array
    active: jax.Array
    stops: jax.Array
    draws: Draws
    recent: jax.Array | None = None
    rows: jax.Array | None = None
    pages: jax.Array | None = None


class Programs:
    """One token a step. Caches are donated to the programs.

    `ahead`: tokens past those of a prefill call that it wants to see; `recent`: last tokens of each row that decoding does;
    `drafts`: tokens past a request's last that it may write.
    `records`: whether the cache keeps the experts of each token. `value_head`: float32[E], where values are recorded. `beside`:
    bytes of each device that something will take, besides what lies there when pages are chosen.
    """

    ahead = recent = drafts = 0

    def __init__(self, graph, options: GeneratorOptions, slots: int, max_length: int, left: float | None = None):
        """`left`: bytes of each device that a paged cache may share; None: what the devices say."""
        graph = graph.for_inference(options.rules)
        self._left, self.beside, self.value_head = left, 0, None
        self.records = options.record_routes
        if self.records:
            graph = graph.at(record=(*graph.runtime.record, "routes"))
        self.graph, self.dispatch, self._options = graph, options.tokens_per_dispatch, options
        self.slots, self.max_length, self.vocab_size = slots, max_length, graph.config.vocab_size
        self.chunk = min(options.prefill_chunk, max_length)
        self._scan = graph.layout.platform != "cpu" or len(graph.config.layers) > UNROLLED_LAYERS
        self._jitted = {
            "empty": jax.jit(self._empty_program),
            "prefill": jax.jit(self._prefill_program, donate_argnums=1),
            "extend": jax.jit(self._extend_program, donate_argnums=1),
            "copy": jax.jit(self._copy_program, donate_argnums=0),
            "copy_pages": jax.jit(caches.copy_pages, donate_argnums=0),
            "enter": jax.jit(self._enter_program),
            "leave": jax.jit(self._leave_program, donate_argnums=0),
            "decode": jax.jit(self._decode_program, donate_argnums=1),
            "routes": jax.jit(self._routes_program),
        }
        self._compiled: dict[tuple, Any] = {}
        self.memory: dict[tuple, Memory | None] = {}  # of each, by the same keys
        self.sealed = self._strict = False
        self._lock = threading.Lock()

    # What the engine calls.

    @property
    def supports_truncation(self) -> bool:
        """Whether a row can be used up to any of its tokens: it keeps entries by position only, and all of them."""
        return not self._options.rings and all(
            caches.supports_truncation(spec, self.graph.config) for spec in self.graph.config.layers
        )

    @property
    def paged(self) -> bool:
        return self._options.cache == "paged"

    @property
    def copies_views(self) -> bool:
        """Whether decoding on fewer rows than all has a cache of its own."""
        return not self.paged

    @property
    def copies_rows(self) -> bool:
        """Whether a slot that begins as another needs more than its pages."""
        return not (self.paged and self.supports_truncation)

    @property
    def shelves(self) -> bool:
        """Whether a slot that goes on leaves nothing to the next sample of its prompt: its states have moved on, or its last page
        is not known by what it holds."""
        return self.paged or not self.supports_truncation

    @property
    def table_width(self) -> int | None:
        """M; None where the cache is contiguous."""
        return -(-(self.max_length + self.drafts) // self._options.page_size) if self.paged else None

    @cached_property
    def pool(self) -> PoolSize | None:
        """The pages of the cache, chosen from the memory that is left when they are first asked for; None: it is contiguous."""
        if not self.paged:
            return None
        shape, options = (self.slots, self.table_width, self._ways), self._options
        return choose_pool(
            self._whole, self.graph.layout, shape, (options.pages, options.page_size), self._left, self.beside
        )

    def rows(self) -> Rows | PagedRows:
        """What the engine knows of the slots of an empty cache."""
        if not self.paged:
            return Rows(self.slots, rewinds=self.supports_truncation)
        number, parts = self.pool.pages.number, self._ways
        tables = [PageTable(number // parts, self.pool.pages.size, n * number // parts) for n in range(parts)]
        return PagedRows(self.slots, tables, rewinds=self.supports_truncation, ample=number >= self.pool.wanted)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that there is a decoding program for: `batch_sizes`, or else powers of two, that the mesh can split as it
        splits the slots, and all slots."""
        ways, listed = self._ways, self._options.batch_sizes
        if listed is None:
            listed = [1 << n for n in range(self.slots.bit_length())]
        return (*(size for size in sorted(set(listed)) if size < self.slots and size % ways == 0), self.slots)

    @property
    def most_prompts(self) -> int:
        """P of the largest prefill call."""
        return prefill_rows(self.slots)

    @property
    def _ways(self) -> int:
        """Into how many parts the mesh cuts the slots."""
        shape = (self.slots,)
        return self.slots // self.graph.layout.sharding(("cache_batch",), shape).shard_shape(shape)[0]

    def empty(self):
        return self._run("empty", (), ())

    def prefill(self, params, cache, rows, tokens_PC, starts, lengths, pages_PM, *, fresh: bool):
        """The cache with a chunk of prompts in these rows (past the end: nothing is written): tokens start .. start + C - 1 of
        each, as far as its length goes. `fresh`: every start is 0, and what the rows held is of no matter. `pages`: those of the
        rows, None where the cache is contiguous."""
        given = rows, tokens_PC, starts, lengths, pages_PM
        return self._run("prefill" if fresh else "extend", tokens_PC.shape, (params, cache, *given))

    def copy(self, cache, pairs: Sequence[tuple[int, int]]):
        """The cache after copying row a to row b for each pair (a, b), one after the other."""
        for start in range(0, len(pairs), self.slots):
            some = pairs[start : start + self.slots]
            array = np.zeros((self.slots, 2), np.int32)
            array[: len(some)] = some
            cache = self._run("copy", (), (cache, array, np.int32(len(some))))
        return cache

    def copy_pages(self, cache, copies: Sequence[Copy]):
        """The cache after copying pages. No page is the target of two."""
        for start in range(0, len(copies), self.slots):
            some = copies[start : start + self.slots]
            source, target = (
                np.zeros(self.slots, np.int32),
                self.pool.pages.number + np.arange(self.slots, dtype=np.int32),
            )
            source[: len(some)], target[: len(some)] = zip(*((copy.source, copy.target) for copy in some), strict=True)
            cache = self._run("copy_pages", (), (cache, source, target))
        return cache

    def enter(self, cache, rows: np.ndarray):
        """A cache of the rows alone, without what lies in pages. Those past the end are padding."""
        return self._run("enter", rows.shape, (cache, rows))

    def leave(self, cache, part, rows: np.ndarray):
        """The cache with its rows as they are in `part`."""
        return self._run("leave", rows.shape, (cache, part, rows))

    def routes(self, cache, rows: int, row: int, pages_M: np.ndarray | None) -> dict[str, jax.Array]:
        """The experts of all entries of a row (policy.cache.cache.routes) of a cache of so many rows, on their way to the host. `pages`:
        those of the row, None where the cache is contiguous."""
        found = self._run("routes", (rows,), (cache, np.int32(row), pages_M))
        for array in found.values():
            array.copy_to_host_async()
        return found

    def decode(self, params, cache, slots: Slots, limits: tuple[int, int]) -> tuple:
        """(cache, Slots, Made): up to `limits[0]` steps, as long as more than `limits[1]` rows go on. Arrays on the device."""
        head = {modes.VALUE_HEAD: self.value_head} if self._options.record_values else {}
        return self._run("decode", slots.stops.shape, (params | head, cache, slots, np.asarray(limits, np.int32)))

    # Compilation.

    def _run(self, name: str, shape: tuple, arguments: tuple):
        key = (name, *shape)
        compiled = self._compiled.get(key)
        if compiled is None:
            if self.sealed:
                self._late(key)
            compiled = self._compile(key, arguments, self.lower(name, arguments))
        return block_on_cpu_mesh(compiled(*arguments), self.graph.layout)

    def _compile(self, key: tuple, arguments: tuple, lowered: jax.stages.Lowered):
        compiled = lowered.compile()
        self.memory[key] = Memory.of(compiled, self.graph.layout.platform)
        with self._lock:
            return self._compiled.setdefault(key, callable_form(compiled, self._jitted[key[0]], arguments))

    def _late(self, key: tuple) -> None:
        name, *shape = key
        message = (
            f"the generator's program {name} for {' x '.join(map(str, shape)) or 'its cache'} was not compiled ahead"
        )
        if self._strict:
            raise LateCompilation(f"{message}; strict_shapes forbids to compile it now")
        _LOG.warning("%s; it is now, and the run waits", message)

    @property
    def compiled(self) -> tuple[tuple, ...]:
        """(name, *shape) of every program that is there."""
        return tuple(sorted(self._compiled, key=str))

    def compile_ahead(self, params, longest: int, stops: Iterable[int], *, strict: bool) -> int:
        """Compiles all that prompts of up to `longest` tokens need, in parallel threads; `stops` are widths of Slots.stops. From
        here on a program that is missing is a warning, or LateCompilation if `strict`. Returns the number of programs.

        Programs are traced by one thread meanwhile: that is Python, of which only one thread runs at a time."""
        every = list(self.listed(params, longest, stops))
        wanted = [(key, arguments) for key, arguments in every if key not in self._compiled]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            traced = ((key, arguments, self.lower(key[0], arguments)) for key, arguments in wanted)
            list(pool.map(lambda each: self._compile(*each), traced))
        self.sealed, self._strict = True, strict
        return len(self._compiled)

    def lower(self, name: str, arguments: tuple) -> jax.stages.Lowered:
        return self._jitted[name].lower(*arguments)

    @cached_property
    def abstract_cache(self):
        """Shapes and places of the cache."""
        return self._placed(jax.eval_shape(self._jitted["empty"]))

    def listed(self, params, longest: int, stops: Iterable[int]) -> Iterator[tuple[tuple, tuple]]:
        """(key, abstract arguments) of every program; those that compile longest come first."""
        cache, head = self.abstract_cache, {}
        if self._options.record_values:
            shape, place = (self.graph.config.hidden_size,), self.graph.layout.replicated
            head[modes.VALUE_HEAD] = jax.ShapeDtypeStruct(shape, np.float32, sharding=place)
        for s in self.sizes:
            part = self._part(cache, s)
            for width in stops:
                slots = self._on_host([], s, width, 0)
                if self.paged:
                    slots = replace(slots, rows=np.zeros(s, np.int32), pages=np.zeros((s, self.table_width), np.int32))
                yield ("decode", s, width), (params | head, part, jax.tree.map(self._everywhere, slots), _int((2,)))
        lengths = self.prefill_lengths(longest)
        for P in (rows for rows in PREFILL_ROWS if rows <= self.most_prompts):
            for C in lengths:
                shape = (P, C + self.ahead)
                pages = _int((P, self.table_width)) if self.paged else None
                given = (params, cache, _int((P,)), _int(shape), _int((P,)), _int((P,)), pages)
                yield ("prefill", *shape), given
                if lengths[-1] == C and longest - 1 > min(WORTH_A_COPY, self.chunk):
                    yield ("extend", *shape), given
        for s in sorted({*(self.sizes[:-1] if self.copies_views else ()), *(() if self.supports_truncation else (1,))}):
            yield ("enter", s), (cache, _int((s,)))
            yield ("leave", s), (cache, self._rows_alone(cache, s), _int((s,)))
        if self.copies_rows:
            yield ("copy",), (cache, _int((self.slots, 2)), _int(()))
        if self.paged:
            yield ("copy_pages",), (cache, _int((self.slots,)), _int((self.slots,)))
        if self.records:
            pages = _int((self.table_width,)) if self.paged else None
            for s in self.sizes if self.copies_views else (self.slots,):
                yield ("routes", s), (self._part(cache, s), _int(()), pages)
        yield ("empty",), ()

    def _part(self, cache, rows: int):
        """What decoding on so many rows is given."""
        return cache if rows == self.slots or not self.copies_views else self._rows_alone(cache, rows)

    def _rows_alone(self, cache, rows: int):
        return self._placed(jax.eval_shape(self._jitted["enter"], cache, _int((rows,))))

    def prefill_lengths(self, longest: int) -> list[int]:
        """Tokens of the prefill calls that a prompt of `longest` tokens, and shorter ones, can need."""
        found = [min(SHORTEST_PREFILL, self.chunk)]
        while found[-1] < min(longest - 1, self.chunk):
            found.append(min(2 * found[-1], self.chunk))
        return found

    def _placed(self, cache):
        layout = self.graph.layout

        def placed(axes, array):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout.sharding(axes, array.shape))

        return caches.by_axes(placed, cache)

    # What is compiled.

    def _pinned(self, cache):
        return caches.constrained(cache, self.graph.layout)

    def _empty_program(self):
        return self._pinned(self._whole(self.pool.pages if self.paged else self.max_length))

    def _whole(self, length: int | Pages):
        """An empty cache of all slots. Rings have room for the most tokens of a call, and for those that may be taken back."""
        room = max(self.chunk, 1 + self.drafts) + self.drafts
        return self._empty(self.slots, WithRings(length, room) if self._options.rings else length)

    def _empty(self, rows: int, length: int | Pages | WithRings):
        dtype, kind = self.graph.runtime.dtype, self._options.kv_cache
        return caches.create(
            self.graph.config, rows, length, dtype, scan=self._scan, quantization=kind, routes=self.records
        )

    def _prefill_program(self, params, cache, rows, tokens_PC, starts, lengths, pages_PM):
        P, C = tokens_PC.shape[0], tokens_PC.shape[1] - self.ahead
        step = self._places(starts, lengths, C, pages_PM)
        part = self._fill(params, self._empty(P, C), tokens_PC, replace(step, pages=None, whole=True), lengths)
        return self._pinned(caches.insert(cache, part, rows, step))

    def _extend_program(self, params, cache, rows, tokens_PC, starts, lengths, pages_PM):
        step = self._places(starts, lengths, tokens_PC.shape[1] - self.ahead, pages_PM)
        part = self._fill(params, caches.rows_of(cache, rows), tokens_PC, step, lengths)
        return self._pinned(caches.with_rows(cache, part, rows))

    def _places(self, starts, lengths, C: int, pages_PM) -> Step:
        """Where C tokens of each prompt sit."""
        positions = starts[:, None] + jnp.arange(C)
        return Step(positions, (positions < lengths[:, None]).astype(jnp.int32), pages=pages_PM, anywhere=True)

    def _fill(self, params, cache, tokens_PC, step: Step, lengths):
        """The cache of P rows with their tokens in it, which sit at `step`."""
        with self.graph.precision():
            return modes.prefill(self.graph.decoder(params), tokens_PC, step, cache, self.graph.runtime)

    def _copy_program(self, cache, pairs, count):
        def one(i, arrays):
            # By an array of one slot: a mesh that cuts the slots then sends that row. By a number it would gather all rows.
            return caches.with_rows(arrays, caches.rows_of(arrays, pairs[i, :1]), pairs[i, 1:])

        arrays = jax.lax.fori_loop(0, count, one, caches.without_pools(cache))
        return self._pinned(caches.with_arrays(cache, arrays))

    def _enter_program(self, cache, rows):
        return self._pinned(caches.without_pools(caches.rows_of(cache, rows)))

    def _leave_program(self, cache, part, rows):
        return self._pinned(caches.with_rows(cache, part, rows))

    def _routes_program(self, cache, row, pages_M):
        return jax.lax.with_sharding_constraint(caches.routes(cache, row, pages_M), self.graph.layout.replicated)

    def _everywhere(self, array) -> jax.ShapeDtypeStruct:
        """An array of the host on every device of a mesh."""
        layout = self.graph.layout
        return jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=layout.replicated if layout.mesh.size > 1 else None
        )

    def slots_of(self, requests: Sequence, size: int, width: int, seed: int) -> Slots:
        """The Slots of `size` rows, row i for request i; None and rows past the requests are idle. `width` is that of the stops."""
        slots, layout = self._on_host(requests, size, width, seed), self.graph.layout
        return slots if layout.mesh.size == 1 else processes.device_put_global(slots, layout.replicated)

    def _on_host(self, requests: Sequence, size: int, width: int, seed: int) -> Slots:
        columns, drawn = np.zeros((6, size), np.int32), [IDLE] * size
        stops, recent = np.full((size, width), -1, np.int32), np.zeros((size, self.recent), np.int32)
        for row, request in enumerate(requests):
            if request is None:
                continue
            columns[:, row] = request.last, request.cached, request.left, request.prompt_id, request.sample, 1
            drawn[row] = request.params
            stops[row, : len(request.params.stop_token_ids)] = request.params.stop_token_ids
            if self.recent:
                last = (*request.prompt[-self.recent :], *request.tokens[-self.recent :])[-self.recent :]
                recent[row, self.recent - len(last) :] = last
        return Slots(*columns, stops, Draws.of(drawn, seed), recent if self.recent else None)

    def seated(self, slots: Slots, rows: np.ndarray, pages_sM: np.ndarray) -> Slots:
        """The rows over a paged cache."""
        layout = self.graph.layout
        if layout.mesh.size > 1:
            rows, pages_sM = processes.device_put_global((rows, pages_sM), layout.replicated)
        return replace(slots, rows=rows, pages=pages_sM)

    def _decode_program(self, params, cache, slots: Slots, limits):
        part = caches.rows_of(cache, slots.rows) if self.paged else cache
        part, after, made = self._steps(params, part, slots, limits)
        cache = caches.with_rows(cache, part, slots.rows) if self.paged else part
        # The host reads what was made, and every process has to know all of it.
        return self._pinned(cache), *jax.lax.with_sharding_constraint((after, made), self.graph.layout.replicated)

    def _steps(self, params, cache, slots: Slots, limits):
        """(cache, Slots, Made) after decoding on a cache of s rows."""
        s, K, head = slots.token.shape[0], self.dispatch, params.get(modes.VALUE_HEAD)
        params = params if self._scan else laid_out(self.graph, params, s)

        idle = (
            np.int32(-1),
            np.float32(0),
            None if head is None else np.float32(0),
        )  # what stands where nothing was made

        def go_on(carry):
            return (carry[0] < limits[0]) & (jnp.sum(carry[5]) > limits[1])

        def one(carry):
            i, cache, token, cached, left, active, made = carry
            decoder, runtime = self.graph.decoder(params), self.graph.runtime
            states, cache = modes.feed(decoder, token, cached, active, cache, runtime, slots.pages)
            logits = modes.logits(decoder, states, runtime)
            new, logp = choose(logits, (slots.prompt_id, slots.sample, cached + 1), slots.draws)
            found = new, logp, None if head is None else states.astype(jnp.float32) @ head
            made = jax.tree.map(lambda each, row, none: each.at[i].set(jnp.where(active, row, none)), made, found, idle)
            left = left - active
            going = active & (left > 0) & ~jnp.any(new[:, None] == slots.stops, axis=1)
            return i + 1, cache, jnp.where(active, new, token), cached + active, left, going, made

        with self.graph.precision():
            blank = jax.tree.map(lambda none: jnp.full((K, s), none), idle)
            start = (0, cache, slots.token, slots.cached, slots.left, slots.active != 0, blank)
            _, cache, token, cached, left, active, (tokens, logps, values) = jax.lax.while_loop(go_on, one, start)
        after = replace(slots, token=token, cached=cached, left=left, active=active.astype(jnp.int32))
        return cache, after, Made(tokens, logps, tokens >= 0, values)


def prefill_rows(prompts: int) -> int:
    """Rows of the next prefill call where so many prompts can go on. Three in a call of four rows cost less than three calls."""
    return max(rows for rows in PREFILL_ROWS if rows == 1 or prompts >= rows - rows // 4)


def stop_width(tokens: int) -> int:
    """Columns of Slots.stops for so many tokens: few widths, few programs."""
    return max(4, 1 << (tokens - 1).bit_length()) if tokens else 4


def _int(shape: tuple) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)
