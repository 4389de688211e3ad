"""Gradients of tables in host memory from which a call reads a few rows (policy/ops/parameter.py,
RowTable): n-gram tables, which are stacked as the layers are, and the table of the embeddings for
each layer, of which there is one.

The rows are read before the loss is computed and replace their table, so that the loss has a
gradient with respect to these rows; only the host sums it into the table's shape. XLA passes the
result of one host computation to another through the device. So each host computation that needs
the gradient sums it again, and no array as large as a table is on the device.

G calls of a program, R repeats of a stack, B rows of tokens, T tokens, H heads, D numbers in a row
of a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from policy.cache.step import Step
from policy.layers import layer_embeddings
from policy.layers.engram import look_up, ngram_rows
from policy.mesh.sharding import constrain
from policy.model import Graph
from policy.ops.host_memory import to_host


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowGradient:
    """The gradient of a table of `shape` [R, rows, D], or [rows, D] with R = 1, with respect to the
    rows that G calls read.

    rows: int32[G, R, B, T, H]. row_grads: [G, R, B, T, H, D], the gradient of each row read. A
    single call has no axis G.
    A row that was read several times occurs several times.
    """

    rows: jax.Array
    row_grads: jax.Array
    shape: tuple[int, ...] = field(metadata={"static": True})

    def summed(self) -> jax.Array:
        """Sums the gradients of each row: float32 of `shape`."""
        zeros = to_host(jnp.zeros(self.shape[-2:], jnp.float32))
        row_grads = self.row_grads.astype(jnp.float32)
        each = [zeros.at[self.rows[:, r]].add(row_grads[:, r]) for r in range(self.rows.shape[1])]
        return jnp.stack(each) if len(self.shape) == 3 else each[0]


def summed(grads: dict[str, jax.Array | RowGradient]) -> dict[str, jax.Array]:
    """Returns gradients by path, with each RowGradient summed. Runs in a host computation if there
    is one."""
    return {
        path: grad.summed() if isinstance(grad, RowGradient) else grad
        for path, grad in grads.items()
    }


def read_rows(
    graph: Graph, params: dict[str, jax.Array], step: Step, paths: Iterable[str]
) -> tuple[dict, dict]:
    """Returns (rows, values) by the path of each of these tables in host memory.

    step: of the tokens, which it holds. rows: the rows that they look up, int32[R, B, T, H].
    values: the contents of these rows on the device, [R, B, T, H, D], or [B, T, H, D] of a table
    that is not stacked. They replace the table in a forward pass over the tokens.
    """
    rows = {}
    values = {}
    for path in paths:
        if path == layer_embeddings.TABLE:
            row_numbers = layer_embeddings.table_rows(step)
            values[path] = look_up(params[path], row_numbers, graph.runtime.dtype, graph.runtime)
            rows[path] = row_numbers[None]
            continue
        layer = path.removesuffix(".lookup.table")
        repeats = range(graph.shapes[path].shape[0])
        spec = graph.config.layers[graph.config.layer_numbers(layer)[0]].engram
        classes = f"{layer}.lookup.classes"
        assert spec is not None, "a table belongs to a layer with n-gram tables"
        row_numbers = [
            ngram_rows(spec, params[classes][r] if classes in params else None, step)
            for r in repeats
        ]
        rows[path] = jnp.stack(row_numbers)
        values[path] = jnp.stack(
            [
                look_up(params[path][r], row_numbers[r], graph.runtime.dtype, graph.runtime)
                for r in repeats
            ]
        )
    return rows, values


def gradients(
    graph: Graph, rows: dict[str, jax.Array], row_grads: dict[str, jax.Array]
) -> dict[str, RowGradient]:
    """Returns the gradients of one call, in host memory. Each piece of a table gets the row numbers
    of all tokens."""

    def gradient(path):
        row_numbers = constrain(rows[path], (None,) * 4, graph.layout)
        shape = graph.shapes[path].shape
        grads = row_grads[path] if len(shape) == 3 else row_grads[path][None]
        return RowGradient(
            row_numbers, constrain(grads, (*(None,) * 4, "engram_row"), graph.layout), shape
        )

    return to_host({path: gradient(path) for path in rows})
