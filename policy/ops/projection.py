"""Copies of weights for fast decoding on CPU: small ones are joined if they read the same input,
large ones are transposed (policy/execution/decoding.py makes them).

M rows, E inputs of a product, F outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import EllipsisType

import jax
import jax.numpy as jnp

# Weights that read the same input and have so many numbers together (1 MiB: the second-level cache
# of a core) are stored as [F, E], one each; fewer numbers are joined to one [E, F]. For two rows or
# more, XLA on CPU packs an [E, F] matrix again at every call; it reads [F, E] in place if that is
# the left factor, which is 20 to 30% faster (docs/decisions.md). Small weights, and one row, gain
# nothing.
LARGE = 1 << 18


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """A weight [*inputs, *outputs] as n columns of `matrix` [E, F], from `start` on. If
    `transposed`, `matrix` is the weight alone, [F, E], and `start` is 0. E is the product of
    `inputs`, n the product of `outputs`."""

    matrix: jax.Array
    transposed: bool = field(metadata={"static": True})
    start: int = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def __getitem__(self, at: EllipsisType | jax.Array) -> Projection | jax.Array:
        """`[...]` returns the projection itself, as a parameter of nnx returns its array. Other
        indices look up rows of a table [F, E]: an embedding that is the head as well."""
        return self if at is ... else self.matrix[at]

    @property
    def weight(self) -> jax.Array:
        """Returns the weight, [*inputs, *outputs]."""
        matrix_EF = self.matrix.T if self.transposed else self.matrix
        columns = matrix_EF[:, self.start : self.start + math.prod(self.outputs)]
        return columns.reshape(*self.inputs, *self.outputs)

    def product(self, x_ME: jax.Array) -> jax.Array:
        """Computes x @ weight, [M, n] in x's dtype: the product with all of `matrix`, and its
        columns. XLA computes equal products of joined weights once."""
        matrix = self.matrix.astype(x_ME.dtype)
        if self.transposed and x_ME.shape[0] > 1:
            # Without the barriers XLA folds the transpositions into the product, which is then as
            # slow as [E, F].
            y_MF = _barrier(matrix @ _barrier(x_ME.T)).T
        else:
            y_MF = jnp.einsum("me,fe->mf" if self.transposed else "me,ef->mf", x_ME, matrix)
        return y_MF[:, self.start : self.start + math.prod(self.outputs)]


def _barrier(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodingMatrices:
    """Weights [*inputs, *outputs] that read the same input, as float32 matrices.

    matrices: one [F, E] for each weight if they are `transposed`, else one [E, F] of all weights,
    so that one operation is started instead of several.
    paths: the paths of the weights. outputs: the output dimensions of each.
    """

    matrices: tuple[jax.Array, ...]
    transposed: bool = field(metadata={"static": True})
    paths: tuple[str, ...] = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})
    outputs: tuple[tuple[int, ...], ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, weights: dict[str, jax.Array], inputs: int) -> DecodingMatrices:
        """Copies weights, given by path, whose products sum over their first `inputs`
        dimensions."""
        shapes = [weight.shape for weight in weights.values()]
        flat = [
            w.reshape(math.prod(w.shape[:inputs]), -1).astype(jnp.float32) for w in weights.values()
        ]
        transposed = sum(w.size for w in flat) >= LARGE
        matrices = tuple(w.T for w in flat) if transposed else (jnp.concatenate(flat, axis=1),)
        outputs = tuple(shape[inputs:] for shape in shapes)
        return cls(matrices, transposed, tuple(weights), shapes[0][:inputs], outputs)

    def projections(self) -> dict[str, Projection]:
        """Returns the projection of each weight, by path."""
        projections = {}
        start = 0
        for i, (path, outputs) in enumerate(zip(self.paths, self.outputs, strict=True)):
            matrix = self.matrices[i if self.transposed else 0]
            projections[path] = Projection(matrix, self.transposed, start, self.inputs, outputs)
            start += 0 if self.transposed else math.prod(outputs)
        return projections
