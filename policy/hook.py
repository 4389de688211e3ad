"""The engine hook: the decoder for an engine that owns the pages of the cache and schedules tokens
itself.

A call takes N rows of one token each, from any requests: prompts and decoding mixed, several tokens
of one request among them. Every layer first writes the entries of all N rows, then each row reads
the pages of its request. The mask by position makes the rows of one prompt causal. docs/hook.md has
an example that runs.

N rows, Q requests, M pages of a request, P tokens of a page, K key-value heads, D head dimension, E
hidden, V vocabulary, k experts per token.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from policy import compatibility, modes
from policy.attention.sequence_shards import AXIS
from policy.cache import cache as cache_of_stacks
from policy.cache.layer_cache import CacheArray
from policy.cache.media import Media
from policy.cache.pages import Pages
from policy.cache.step import Step
from policy.config import DecoderConfig, StoredType
from policy.execution.decoding import prepare_for_decoding
from policy.intermediates import ActivationStatistics, LayerAux
from policy.model import Graph, Model
from policy.runtime import Recorded

# The entries of one layer: pools of pages by name, such as "k" and "v", or "latent"
# (policy/cache/entries.py).
LayerEntries = dict[str, CacheArray]

# Features whose layers need the tokens of a request in order, or all tokens of a call at once.
REFUSED = {
    compatibility.RECURRENT: "its state passes through the tokens of a request in order, and a "
    "row is one token",
    compatibility.ENGRAM: "its n-grams and its convolution read the tokens before, and a row is "
    "one token",
    compatibility.LOOKS_AHEAD: "the tokens of a picture see each other, and a row is one token",
    compatibility.CAPACITY: "which choices of experts are dropped would depend on the rows of "
    "other requests",
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """N tokens of R requests, in any order.

    tokens, positions: int32[N], each token and its position in its request. Two rows of one request
    have different
        positions; a call overwrites the entries of a position that was fed before.
    request: int32[N], the row of `pages` that the token belongs to; -1: the row is idle and writes
    nothing, and its
        results mean nothing.
    pages: int32[Q, M], the pages of each request in the order of its tokens: position p is entry p
    % P of page
        pages[q, p // P]. Page 0 may pad a request's row. Requests may share pages that no row of
        the call writes.
    turns: int32[N, 3], the positions by time, height and width that rotary embeddings with sections
    turn by
        (`Step.turns`); None: `positions`.
    media: the rows of pictures and sounds that stand in the place of token embeddings, with `index`
    int32[N]; None: the
        call has none. A request whose prompt had pictures needs `turns` in its later calls too, and
        `media` only while rows of its pictures are fed.
    """

    tokens: jax.Array
    positions: jax.Array
    request: jax.Array
    pages: jax.Array
    turns: jax.Array | None = None
    media: Media | None = None

    def step(self) -> Step:
        """Returns the step of N rows of one token. Raises ValueError for arrays of other shapes."""
        per_row = {"tokens": self.tokens, "positions": self.positions, "request": self.request}
        per_row |= {} if self.media is None else {"media.index": self.media.index}
        shapes = {name: jnp.shape(array) for name, array in per_row.items()}
        N = (shapes["tokens"] or (0,))[0]
        pages = jnp.shape(self.pages)
        turns = (N, 3) if self.turns is None else jnp.shape(self.turns)
        if len(pages) != 2 or turns != (N, 3) or any(shape != (N,) for shape in shapes.values()):
            raise ValueError(
                "Rows needs tokens, positions and request of one shape [N], media.index of that "
                "shape, turns [N, 3], "
                f"and pages [requests, M]; got {shapes | {'turns': turns, 'pages': pages}}"
            )
        request = jnp.asarray(self.request)
        active = (jnp.asarray(self.request) >= 0).astype(jnp.int32)
        # A row's pages may lie in any shard of a pool: the engine orders the rows as it likes.
        table = jnp.asarray(self.pages)[jnp.maximum(request, 0)]
        positions = jnp.asarray(self.positions)[:, None]
        step = Step(positions=positions, segments=active[:, None], pages=table, anywhere=True)
        if self.media is None and self.turns is None:
            return step
        media = self.media or Media()
        media = dataclasses.replace(
            media,
            index=None if media.index is None else jnp.asarray(media.index)[:, None],
            turns=None if self.turns is None else jnp.asarray(self.turns)[:, None],
        )
        return dataclasses.replace(step, media=media)


class RowsOutput(NamedTuple):
    """What `forward` returns for N tokens.

    hidden: [N, E], the states before the final norm, the streams of hyper-connections reduced;
        `logits` maps them to the logits of the next token.
    caches: the caches with the entries of these tokens.
    recorded: recorded[name][n] is the output of layer n, with N in front ("routes": int32[N, k],
        for layers with experts), except "activations", statistics of all rows together; layers
        without that output are left out.
    """

    hidden: jax.Array
    caches: list[LayerEntries]
    recorded: dict[str, dict[int, jax.Array | ActivationStatistics]]


def create_caches(
    model: Model, pages: int, page_size: int, quantization: StoredType | None = None
) -> list[LayerEntries]:
    """Makes empty caches: for each layer the pools [K, 1, pages, page_size, D] of its entries,
    sharded over the mesh.

    pages: the number of pages, page 0 included, which belongs to no request. quantization: the type
    in which keys, values and latents are stored; None: the dtype of the model's activations.
    `jax.eval_shape` of this function gives shapes and dtypes without memory. Raises Conflict if the
    hook does not serve the model.
    """
    graph = _graph(model)
    config = graph.config
    dtype = graph.runtime.dtype

    def create():
        cache = cache_of_stacks.create(
            config, 1, Pages(pages, page_size), dtype, scan=False, quantization=quantization
        )
        return by_layer(cache_of_stacks.constrained(cache, graph.layout))

    return jax.jit(create)()


def forward(
    model: Model, rows: Rows, caches: Sequence[LayerEntries], record: tuple[str, ...] = ("routes",)
) -> RowsOutput:
    """Feeds N tokens.

    caches: one dict of pools per layer, from `create_caches`. Call the function under `jax.jit`
    with `caches` donated:
        the entries are then written in place.
    record: names of `Runtime.record`; those that the model's own runtime records are added.

    Raises Conflict if the hook does not serve the model, and ValueError for arrays or names that do
    not fit.
    """
    record = tuple(dict.fromkeys((*record, *model.graph.runtime.record)))
    graph = _graph(model, record, media=rows.media is not None)
    step = rows.step()
    with graph.precision():
        decoder = graph.decoder(model.params)
        cache = by_stack(graph.config, caches)
        tokens = jnp.asarray(rows.tokens)[:, None]
        hidden, cache, layers = decoder.before_norm(tokens, step, cache, graph.runtime)
    recorded = {name: _by_number(graph.config, layers, name) for name in record}
    assert cache is not None, "a call with a cache returns it"
    entries = by_layer(cache_of_stacks.constrained(cache, graph.layout))
    return RowsOutput(hidden[:, 0], entries, recorded)


def logits(model: Model, hidden: jax.Array) -> jax.Array:
    """Computes the logits of the tokens after states of `forward`: final norm, head and softcap,
    [..., E] -> float32[..., V]."""
    graph = _graph(model)
    with graph.precision():
        decoder = graph.decoder(model.params)
        return modes.logits(decoder, decoder.norm(hidden), graph.runtime)


def prepare(model: Model, rows: int) -> Model:
    """Returns the model with its weights as the generator's decode programs read them. The form is
    the same for every number of `rows` of a call.

    On CPU these are copies (policy/execution/decoding.py): call the function once in a program of
    several steps, outside the loop of the steps. On other platforms it returns the model itself.
    """
    graph = _graph(model)
    if graph.layout.platform != "cpu":
        return model
    params = prepare_for_decoding(graph, model.params)
    return Model(model.graph, params, model.newly_initialized, model.source)


def by_layer(cache: tuple) -> list[LayerEntries]:
    """Returns the entries of an unrolled cache (policy/cache/cache.py) by number of the layer."""
    return [entries for parts in cache for part in parts for entries in part]


def by_stack(config: DecoderConfig, caches: Sequence[LayerEntries]) -> tuple:
    """Returns the unrolled cache with these entries; undoes `by_layer`. Raises ValueError for
    another number of layers."""
    if len(caches) != len(config.layers):
        raise ValueError(
            f"caches has {len(caches)} layers, and the decoder has {len(config.layers)}"
        )
    remaining = iter(caches)
    return tuple(
        tuple(tuple(next(remaining) for _ in stack.pattern) for _ in range(stack.repeats))
        for stack in config.stacks
    )


def _graph(model: Model, record: tuple[str, ...] = (), *, media: bool = False) -> Graph:
    """Returns the graph that the hook runs. Raises Conflict if the hook does not serve the model,
    or not with pictures or sounds (`media`)."""
    graph = model.graph
    on = compatibility.features(graph.config, graph.runtime, media=media)
    for feature, reason in REFUSED.items():
        if feature in on:
            raise compatibility.Conflict(
                f"the engine hook does not go with {feature}: {reason}; generate with "
                "rollout.Generator"
            )
    if (shards := graph.layout.mesh.shape[AXIS]) > 1:
        raise compatibility.Conflict(
            f"the engine hook does not go with mesh.{AXIS}={shards}: a row is one token, and "
            f"there is no sequence to shard; build the model on a mesh with {AXIS}=1"
        )
    return graph.with_runtime(record=record)


def _by_number(
    config: DecoderConfig, layers: dict[str, LayerAux], name: str
) -> dict[int, jax.Array | ActivationStatistics]:
    """Returns the field `name` by number of the layer, without the dimension of T = 1. Raises
    ValueError if there is no such field."""
    if name not in (names := typing.get_args(Recorded)):
        raise ValueError(f"record names {name!r}, which no layer has; valid: {', '.join(names)}")

    def of_repeat(array, r):
        return array[r, :, 0] if array.ndim > 2 else array[r]  # a statistic of all rows has no rows

    return {
        n: jax.tree.map(lambda array, r=r: of_repeat(array, r), value)
        for path, layer in layers.items()
        if (value := getattr(layer, name)) is not None
        for r, n in enumerate(config.layer_numbers(path))
    }
