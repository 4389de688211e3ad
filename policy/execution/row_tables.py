"""Gradients of tables in host memory, of which a call reads a few rows (policy/ops/parameter.py, RowTable).

The rows are read before the loss is computed and stand in the place of their table, so that the gradient is one of these rows; only
the host adds it up. XLA takes what one computation of the host hands to another through the device, so each that needs the gradient
adds it up for itself, and no array as large as a table is on the device.

M calls, R repeats of a stack, B rows of tokens, T tokens, H heads, D numbers in a row of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from policy import modes
from policy.layers.engram import look_up, ngram_rows
from policy.mesh.host_memory import to_host
from policy.mesh.sharding import constrain
from policy.model import Graph


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowGradient:
    """The gradient of a table of `shape` [R, rows, D] by what M calls read: `slopes` [M, R, B, T, H, D] at `rows` int32[M, R, B, T,
    H]; of one call both are without M. A row that was read several times is there several times."""

    rows: jax.Array
    slopes: jax.Array
    shape: tuple[int, ...] = field(metadata={"static": True})

    def summed(self) -> jax.Array:
        """float32[R, rows, D]."""
        zeros, slopes = to_host(jnp.zeros(self.shape[1:], jnp.float32)), self.slopes.astype(jnp.float32)
        return jnp.stack([zeros.at[self.rows[:, r]].add(slopes[:, r]) for r in range(self.shape[0])])


def summed(grads: dict[str, jax.Array | RowGradient]) -> dict[str, jax.Array]:
    """Gradients by path, those of tables as arrays; to be called in a computation of the host where there are some."""
    return {path: grad.summed() if isinstance(grad, RowGradient) else grad for path, grad in grads.items()}


def read_rows(
    graph: Graph, params: dict[str, jax.Array], tokens_BT: jax.Array, segments_BT: jax.Array
) -> tuple[dict, dict]:
    """(rows, found) by the path of each table in host memory: int32[R, B, T, H], which rows of it these tokens look up, and
    [R, B, T, H, D] on the device, what it holds there. Found stands in the place of the table in a forward pass over the tokens."""
    step, rows, found = replace(modes.make_step(tokens_BT, segments=segments_BT), tokens=tokens_BT), {}, {}
    for path in graph.tables:
        layer, repeats = path.removesuffix(".lookup.table"), range(graph.shapes[path].shape[0])
        spec, classes = graph.config.layers[graph.config.numbers(layer)[0]].engram, params[f"{layer}.lookup.classes"]
        at = [ngram_rows(spec, classes[r], step) for r in repeats]
        rows[path] = jnp.stack(at)
        found[path] = jnp.stack([look_up(params[path][r], at[r], graph.runtime.dtype, graph.runtime) for r in repeats])
    return rows, found


def gradients(graph: Graph, rows: dict[str, jax.Array], slopes: dict[str, jax.Array]) -> dict[str, RowGradient]:
    """Those of one call, in host memory; the numbers of all tokens beside each piece of a table."""

    def each(path):
        at = constrain(rows[path], (None,) * 4, graph.layout)
        return RowGradient(
            at, constrain(slopes[path], (*(None,) * 4, "engram_row"), graph.layout), graph.shapes[path].shape
        )

    return to_host({path: each(path) for path in rows})
