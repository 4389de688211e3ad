"""Gradients of tables in host memory, of which a call reads a few rows (policy/layers/parameter.py, RowTable).

The rows are read before the loss is computed and stand in the place of their table, so that the gradient is one of these rows. The
host adds it up: no array as large as a table is on the device.

R repeats of a stack, B rows of tokens, T tokens, H heads, D numbers in a row of a table.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from policy import modes
from policy.layers.engram import look_up, ngram_rows
from policy.memory import on_host, to_host
from policy.model import Graph
from policy.sharding import constrain

_TABLE = "table"


def rows(graph: Graph, params: dict[str, jax.Array], tokens_BT: jax.Array, segments_BT: jax.Array) -> dict[str, jax.Array]:
    """By the path of each table in host memory, int32[R, B, T, H]: the rows of it that these tokens look up. Of `params` only the
    classes of tokens are needed."""
    step, found = replace(modes.sit(tokens_BT, segments=segments_BT), tokens=tokens_BT), {}
    for path in graph.tables:
        layer = path.removesuffix(f".memory.{_TABLE}")
        spec = graph.config.layers[graph.config.numbers(layer)[0]].memory
        found[path] = jnp.stack([ngram_rows(spec, classes, step) for classes in params[f"{layer}.memory.classes"]])
    return found


def read(graph: Graph, params: dict[str, jax.Array], rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """By path, [R, B, T, H, D] on the device: what the tables among `params` hold in `rows`. Stands in the place of the tables in
    a forward pass over the same tokens."""

    def each(table, rows_RBTH):
        return jnp.stack([look_up(table[r], rows_RBTH[r], graph.runtime.dtype, graph.runtime) for r in range(len(rows_RBTH))])

    return {path: each(params[path], rows[path]) for path in rows}


def on_its_way(graph: Graph, slopes: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradient [R, B, T, H, D] of what was read, by path, in host memory: cut as the tables are, for all tokens on each."""
    axes = (None, None, None, None, "engram_row")
    return to_host({path: constrain(slope, axes, graph.layout) for path, slope in slopes.items()})


def summed(graph: Graph, rows: dict[str, jax.Array], slopes: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradients of the tables by path, float32 in host memory, where the host adds them up: `slopes` [M, R, B, T, H, D] of M
    calls for what they read, at `rows` [M, R, B, T, H]."""

    def add(rows, slopes):
        def each(shape, at, slope):
            repeats = (jnp.zeros(shape[1:], jnp.float32).at[at[:, r]].add(slope[:, r].astype(jnp.float32)) for r in range(shape[0]))
            return jnp.stack(list(repeats))

        return {path: each(graph.shapes[path].shape, rows[path], slope) for path, slope in slopes.items()}

    return on_host(add, rows, slopes) if slopes else {}
