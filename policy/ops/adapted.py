"""Weights with a low-rank adapter: the leaf type that policy/ops/linear.py multiplies by.

A decoder, a mixer and a feed-forward read an adapted weight as they read any other: only the
products know of it. Nothing is merged: y = W x + s B (A x), by the letters of the product's own
equation.

G matrices of one weight (experts), E inputs of a product, F outputs, r rank, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from string import ascii_letters
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from policy.ops.host_memory import fetch
from policy.ops.parameter import MatrixDims
from policy.ops.projection import Projection
from policy.ops.quantization import floats

SUM = "adapted"
"""The name of the result of an adapted product for policy/remat.py."""

Product = Callable[[str, jax.Array, jax.Array], jax.Array]
"""(equation, x, weight) -> einsum in the dtype of x."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight [G..., E..., F...] and its adapter.

    base: the weight in any form that `linear` reads. a: [G..., E..., r]. b: [G..., r, F...]. One of
    the two that all experts share has no G. dora_scale: m / |W + s B A| of DoRA, [G..., F...], by
    which the outputs are multiplied; None without DoRA. scale: s. dims: the dimensions E and F of
    `base`; all others are G.
    """

    base: Any
    a: Any
    b: Any
    dora_scale: Any
    scale: float = field(metadata={"static": True})
    dims: MatrixDims = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the weight."""
        return self.base.shape

    def __getitem__(self, at: EllipsisType) -> Adapted:
        """Returns itself for `[...]`, as modules read their weights."""
        assert at is Ellipsis, "an adapted weight is not indexed"
        return self

    def of_groups(self, at_M: jax.Array) -> Adapted:
        """Returns the adapters of the matrices with these numbers, over `base` as it is. There is
        one dimension G in front."""

        def chosen(array: jax.Array | None, ndim: int) -> jax.Array | None:
            return array if array is None or array.ndim < ndim else array[at_M]

        E = len(self.dims.rows)
        F = len(self.dims.columns)
        return replace(
            self,
            a=chosen(self.a, E + 2),
            b=chosen(self.b, F + 2),
            dora_scale=chosen(self.dora_scale, F + 1),
        )

    def with_delta(
        self, equation: str, x: jax.Array, base_product: jax.Array, product: Product
    ) -> jax.Array:
        """Returns the product of `equation` with the adapted weight, from that with `base`.
        product: computes those with A and B."""
        operands, outs = equation.split("->")
        letters, named = operands.split(",")
        rows, columns, groups, of_a, of_b = _letters(named, self.dims, self.a, self.b)
        rank = next(letter for letter in ascii_letters if letter not in letters + named)
        kept = "".join(letter for letter in letters if letter not in rows)
        inner = "".join(letter for letter in of_a if letter not in letters) + kept + rank
        low = product(f"{letters},{of_a}{rows}{rank}->{inner}", x, self.a)
        low = low * jnp.asarray(self.scale, low.dtype)
        y = base_product + product(f"{inner},{of_b}{rank}{columns}->{outs}", low, self.b)
        y = checkpoint_name(y, SUM)
        if self.dora_scale is None:
            return y
        return jnp.einsum(f"{outs},{groups}{columns}->{outs}", y, self.dora_scale.astype(y.dtype))


class _Letters(NamedTuple):
    """Letters of the dimensions of a weight in an equation: inputs E, outputs F and matrices G.
    of_a, of_b: those of G that each factor has; none in a factor that experts share."""

    rows: str
    columns: str
    groups: str
    of_a: str
    of_b: str


def _letters(named: str, dims: MatrixDims, a: jax.Array, b: jax.Array) -> _Letters:
    """Sorts the letters of a weight, one for each of its dimensions."""
    rows = "".join(named[dim] for dim in dims.rows)
    columns = "".join(named[dim] for dim in dims.columns)
    groups = "".join(letter for letter in named if letter not in rows + columns)
    of_a = groups if a.ndim > len(rows) + 1 else ""
    of_b = groups if b.ndim > len(columns) + 1 else ""
    return _Letters(rows, columns, groups, of_a, of_b)


def norms(base: jax.Array, a: jax.Array, b: jax.Array, scale: float, dims: MatrixDims) -> jax.Array:
    """Computes |W + s B A| over the inputs of each output, float32[G..., F...], without the sum:

    |W|^2 + 2 s sum_r B (A W^T) + s^2 B (A A^T) B^T
    """
    letters = ascii_letters[: base.ndim]
    rows, columns, groups, of_a, of_b = _letters(letters, dims, a, b)
    base, a, b = (each.astype(jnp.float32) for each in (base, a, b))
    out = groups + columns
    squares = jnp.einsum(f"{letters},{letters}->{out}", base, base)
    crossed = jnp.einsum(f"{of_a}{rows}Y,{letters}->{groups}Y{columns}", a, base)
    mixed = jnp.einsum(f"{groups}Y{columns},{of_b}Y{columns}->{out}", crossed, b)
    gram = jnp.einsum(f"{of_a}{rows}Y,{of_a}{rows}Z->{of_a}YZ", a, a)
    adapted = jnp.einsum(
        f"{of_a}YZ,{of_b}Y{columns},{of_b}Z{columns}->{out if of_a or of_b else columns}",
        gram,
        b,
        b,
    )
    return jnp.sqrt(squares + 2 * scale * mixed + scale**2 * adapted)


class DoraParts(NamedTuple):
    """What the scale of DoRA follows from: a weight, its adapter, and m [G..., F...]."""

    base: Any
    a: jax.Array
    b: jax.Array
    magnitude: jax.Array


def dora_scale(parts: DoraParts, scale: float, dims: MatrixDims) -> jax.Array:
    """Computes m / |W + s B A| of DoRA, float32[G..., F...]. The norm is a constant for gradients,
    as in the paper (section 4.3)."""
    norm = norms(_floats(fetch(parts.base)), parts.a, parts.b, scale, dims)
    return parts.magnitude.astype(jnp.float32) / jax.lax.stop_gradient(norm)


def dora_scales(parts: DoraParts, scale: float, dims: MatrixDims) -> jax.Array:
    """Computes `dora_scale` of the layers of a stack, one after the other, so that one weight at a
    time is dequantised. All arrays have the layers in front; `dims` are those of one layer."""
    return jax.lax.map(lambda layer: dora_scale(layer, scale, dims), parts)


def _floats(base: Any) -> jax.Array:
    """Returns the numbers of a weight in any of its forms, without an adapter."""
    return base.weight if isinstance(base, Projection) else floats(base)
