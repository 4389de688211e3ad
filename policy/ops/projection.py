"""Copies of weights for fast decoding on CPU: taken out of their stacks, joined if they read the same input, and
transposed if that is faster to read. A decode program makes them once, at its start, so that no second copy of the
policy stays resident.

K inputs of a product, N outputs, M rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

# A weight of at least so many numbers (1 MiB: the second-level cache of a core) is stored as [N, K] for two rows or
# more. XLA's CPU product packs all of a [K, N] matrix at every call and reads [N, K], on the left of the product, in
# place: 20 to 30% faster (docs/decisions.md). Small weights gain nothing.
LARGE = 1 << 18


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """A weight [*inputs, *outputs], stored as the outputs [start, start + n) of `matrix`, [K, N] or `transposed` [N,
    K]. K is the product of `inputs`, n the product of `outputs`."""

    matrix: jax.Array
    transposed: bool = field(metadata={"static": True})
    start: int = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, at: Any) -> Any:
        """Returns the projection itself for [...], else rows of a table [N, K]: an embedding that is the head as
        well."""
        return self if at is ... else self.matrix[at]

    def product(self, x_MK: jax.Array) -> jax.Array:
        """Computes x @ weight, [M, n] in x's dtype. Weights of one matrix that multiply the same x share one product,
        which the compiler computes once."""
        matrix = self.matrix.astype(x_MK.dtype)
        if self.transposed and x_MK.shape[0] > 1:
            # Without the barriers XLA folds the transpositions into the product, which is then as slow as [K, N].
            y_MN = _barrier(matrix @ _barrier(x_MK.T)).T
        else:
            y_MN = jnp.einsum("mk,nk->mn" if self.transposed else "mk,kn->mn", x_MK, matrix)
        return y_MN[:, self.start : self.start + math.prod(self.outputs)]


def _barrier(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


def make_projections(weights: list[jax.Array], inputs: int, rows: int) -> list[Projection]:
    """Creates the float32 projections of weights [*inputs, *outputs] that read the same input, their first `inputs`
    dimensions, for products of `rows` rows. Small weights are joined, which saves the start of an operation each and
    costs a second copy."""
    flat = [w.reshape(math.prod(w.shape[:inputs]), -1).astype(jnp.float32) for w in weights]
    large = sum(w.size for w in flat) >= LARGE
    transposed = large and rows > 1
    if large:
        stored = [(_barrier(w.T if transposed else w), 0) for w in flat]
    else:
        matrix = _barrier(jnp.concatenate(flat, axis=1))
        stored = [(matrix, sum(w.shape[1] for w in flat[:i])) for i in range(len(flat))]
    return [
        Projection(matrix, transposed, start, w.shape[:inputs], w.shape[inputs:])
        for (matrix, start), w in zip(stored, weights, strict=True)
    ]
