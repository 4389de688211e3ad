"""Weights laid out for decoding on CPU: cut out of their stacks, joined where they read the same input, and transposed where that
is read faster. Made once for a dispatch, inside its program, so that the policy's own arrays stay the only ones.

K inputs of a product, N outputs, M rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

# A weight of at least so many numbers (1 MiB: the second-level cache of a core) is stored as [N, K] for two rows or more. As [K, N]
# XLA's CPU product packs all of it at every call; as [N, K], on the left of the product, it is read where it lies. Microseconds of
# 512 x 1536 and back, two cores, [K, N] and [N, K]: 165 and 159 with 1 row, 258 and 208 with 2, 494 and 354 with 8, 648 and 475
# with 16, 1444 and 1137 with 64. Of 128 x 512: 5, 5; 6, 10; 14, 15; and 119, 117 with 64.
LARGE = 1 << 18


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """Outputs [start, start + n) of `matrix`, [K, N] or `transposed` [N, K], which are those of a weight [*inputs, *outputs]: K is
    the product of `inputs`, n that of `outputs`."""

    matrix: jax.Array
    transposed: bool = field(metadata={"static": True})
    start: int = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, at):
        """The whole, at [...]; rows of a table [N, K]: an embedding that is the head as well."""
        return self if at is ... else self.matrix[at]

    def product(self, x_MK: jax.Array) -> jax.Array:
        """x @ weight, [M, n] in x's dtype. Weights of one matrix that are given the same x share one product, which the compiler
        finds to be the same."""
        matrix = self.matrix.astype(x_MK.dtype)
        if self.transposed and x_MK.shape[0] > 1:
            # Without the barriers the transpositions are folded into the product, which then is the slower one again.
            y_MN = _apart(matrix @ _apart(x_MK.T)).T
        else:
            y_MN = jnp.einsum("mk,nk->mn" if self.transposed else "mk,kn->mn", x_MK, matrix)
        return y_MN[:, self.start : self.start + math.prod(self.outputs)]


def _apart(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


def make_projections(weights: list[jax.Array], inputs: int, rows: int) -> list[Projection]:
    """Weights [*inputs, *outputs] as float32 that all read the same input, their first `inputs` dimensions, for products of `rows`
    rows. Joined they save the start of an operation, 1-3 us each, and cost a second copy: small ones are."""
    flat = [w.reshape(math.prod(w.shape[:inputs]), -1).astype(jnp.float32) for w in weights]
    large = sum(w.size for w in flat) >= LARGE
    transposed = large and rows > 1
    if large:
        made = [(_apart(w.T if transposed else w), 0) for w in flat]
    else:
        matrix = _apart(jnp.concatenate(flat, axis=1))
        made = [(matrix, sum(w.shape[1] for w in flat[:i])) for i in range(len(flat))]
    return [
        Projection(matrix, transposed, start, w.shape[:inputs], w.shape[inputs:])
        for (matrix, start), w in zip(made, weights, strict=True)
    ]
