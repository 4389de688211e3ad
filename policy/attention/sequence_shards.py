"""Sequences that are cut over the mesh axis `context`: padded so that they divide, and ordered for
even loads.

In the plain order each of p devices has T / p neighbouring tokens. Under a causal mask the last
device then has the most work. In the balanced order a row is 2p runs of neighbours, and device i
has runs i and 2p - 1 - i, an early and a late one: every device then sees the same number of keys.
Positions and segments tell masks what the order does not.

B rows, T tokens, p devices, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.layer_cache import LayerCache
from policy.cache.paths import Tree
from policy.cache.step import UNKNOWN, Step
from policy.config import Runtime
from policy.intermediates import Aux, LayerAux
from policy.mesh.sharding import Layout, constrain

AXIS = "context"


def cuts(layout: Layout | None, T: int) -> bool:
    """Tells whether this layout cuts T tokens over the axis `context`."""
    return layout is not None and AXIS in (layout.spec(("length",), (T,))[0] or ())


def along_length(x: jax.Array, runtime: Runtime) -> jax.Array:
    """Shards x [B, T, ...] so that each device has its own tokens, where the layout cuts them."""
    if not cuts(runtime.layout, x.shape[1]):
        return x
    return constrain(x, ("batch", "length", *[None] * (x.ndim - 2)), runtime.layout)


def replicate_length(x: jax.Array, runtime: Runtime) -> jax.Array:
    """Shards x [B, T, ...] so that each device has all tokens of its rows, as recurrent layers need
    them."""
    if not cuts(runtime.layout, x.shape[1]):
        return x
    return constrain(x, ("batch", *[None] * (x.ndim - 1)), runtime.layout)


def balanced_places(T: int, p: int) -> np.ndarray:
    """Returns the place in the row of each token in the balanced order, int32[T]."""
    runs = np.arange(T, dtype=np.int32).reshape(2 * p, -1)
    return np.stack([runs[:p], runs[::-1][:p]], axis=1).reshape(-1)


def multiple(runtime: Runtime) -> int:
    """Returns the number whose multiples are the row lengths that divide evenly over the mesh.

    1: rows are not padded, and are cut only if their length happens to divide. That holds also
    where an expert's capacity is a share of the row.
    """
    layout = runtime.layout
    if layout is None or runtime.capacity_factor is not None:
        return 1
    if AXIS not in dict(layout.rules)["length"] or layout.mesh.shape[AXIS] == 1:
        return 1
    return layout.mesh.shape[AXIS] * (2 if runtime.context_load_balance else 1)


@dataclass(frozen=True)
class Order:
    """The order of the tokens of a call, `length` of them padded to `filled`."""

    layout: Layout
    length: int
    filled: int
    balanced: bool

    @classmethod
    def of(cls, step: Step, cache: LayerCache | None, runtime: Runtime) -> Order | None:
        """Returns None where the tokens keep their order. Only contiguous rows are balanced."""
        layout = runtime.layout
        T = step.segments.shape[1]
        parts = multiple(runtime)
        if cache is not None or parts == 1 or layout is None:
            return None
        balanced = runtime.context_load_balance and step.contiguous
        filled = -(-T // parts) * parts
        return cls(layout, T, filled, balanced) if balanced or filled > T else None

    @property
    def places(self) -> np.ndarray:
        """Returns the place in the row of each token, int32[filled]."""
        return balanced_places(self.filled, self.layout.mesh.shape[AXIS])

    def enter(self, tokens_BT: jax.Array, step: Step) -> tuple[jax.Array, Step]:
        """Returns tokens and step in the order that the layers compute in."""

        def reorder(a, fill=0):
            a = jnp.pad(
                a,
                [(0, 0), (0, self.filled - self.length), *[(0, 0)] * (a.ndim - 2)],
                constant_values=fill,
            )
            return a[:, self.places] if self.balanced else a

        changes: dict[str, Any] = {
            "positions": reorder(step.positions),
            "segments": reorder(step.segments),
        }
        if step.routes is not None:
            changes["routes"] = {path: reorder(each, UNKNOWN) for path, each in step.routes.items()}
        if step.media is not None:
            changes["media"] = replace(
                step.media,
                **{
                    name: reorder(array, fill)
                    for name, fill in (("index", -1), ("turns", 0), ("until", 0))
                    if (array := getattr(step.media, name)) is not None
                },
            )
        if step.tree is not None:
            changes["tree"] = Tree(
                **{name: reorder(getattr(step.tree, name), Tree.FILLS[name]) for name in Tree.FILLS}
            )
        if self.balanced:
            changes |= {"contiguous": False, "balanced": True}
        if self.balanced and step.dropout is not None:
            changes["dropout"] = replace(step.dropout, places=jnp.asarray(self.places)[None])
        return reorder(tokens_BT), replace(step, **changes)

    def leave(self, x_BTE: jax.Array) -> jax.Array:
        """Returns the layers' result in the original order, without padding."""
        return (self._exchanged(x_BTE) if self.balanced else x_BTE)[:, : self.length]

    def leave_aux(self, aux: Aux) -> Aux:
        """Returns `aux` with its arrays per token in the original order, without padding."""

        def of_tokens(a):
            a = (
                a
                if a is None or not self.balanced
                else jnp.take(a, np.argsort(self.places), axis=2)
            )
            return None if a is None else a[:, :, : self.length]

        def of_layer(layer: LayerAux) -> LayerAux:
            names = ("hidden", "mixed", "selection", "routes")
            return replace(layer, **{name: of_tokens(getattr(layer, name)) for name in names})

        read = None if aux.mtp_input is None else self.leave(aux.mtp_input)
        return replace(
            aux,
            layers={path: of_layer(layer) for path, layer in aux.layers.items()},
            mtp_input=read,
        )

    def _exchanged(self, x_BTE: jax.Array) -> jax.Array:
        """Brings tokens from the balanced to the original order. A device sends each of its two
        runs, one even and one odd, to the device that has the run in the original order."""
        p = self.layout.mesh.shape[AXIS]
        runs = [(i, 2 * p - 1 - i) for i in range(p)]

        def local(x):
            first_is_even = jax.lax.axis_index(AXIS) % 2 == 0
            early, late = jnp.split(x, 2, axis=1)
            received = []
            for parity in (0, 1):
                run = jnp.where(first_is_even == (parity == 0), early, late)
                to = [
                    (i, next(r for r in both if r % 2 == parity) // 2)
                    for i, both in enumerate(runs)
                ]
                received.append(jax.lax.ppermute(run, AXIS, to))
            return jnp.concatenate(received, axis=1)

        spec = self.layout.spec(("batch", "length", *[None] * (x_BTE.ndim - 2)), x_BTE.shape)
        return jax.shard_map(
            local, mesh=self.layout.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(x_BTE)


class ShardSizes(NamedTuple):
    """How tokens [B, T] are cut: into how many parts of rows, of how many rows each, and into how
    many parts of tokens, of how many tokens each."""

    row_parts: int
    rows_each: int
    token_parts: int
    tokens_each: int


@dataclass(frozen=True)
class FlatRows:
    """The B T tokens of a call one after the other, in the order in which the devices have them.

    Flattening [B, T] in row order where T is cut would bring all tokens of a row to one device.
    """

    base: Layout | None
    B: int
    T: int

    @property
    def _is_cut(self) -> bool:
        return cuts(self.base, self.T)

    @property
    def layout(self) -> Layout | None:
        """Returns the layout of flat rows, which are cut over the axis of the sequences as well."""
        return self.base.rows_over(AXIS) if self.base is not None and self._is_cut else self.base

    def flat(self, x: jax.Array) -> jax.Array:
        """Flattens [B, T, ...] to [B T, ...]."""
        if not self._is_cut:
            return x.reshape(-1, *x.shape[2:])
        blocks = x.reshape(*self._blocks, *x.shape[2:])
        rows = jnp.swapaxes(blocks, 1, 2).reshape(-1, *x.shape[2:])
        return constrain(rows, ("batch", *[None] * (rows.ndim - 1)), self.layout)

    def back(self, rows: jax.Array) -> jax.Array:
        """Returns rows [B T, ...] of `flat` as [B, T, ...]."""
        more = rows.shape[1:]
        if not self._is_cut:
            return rows.reshape(self.B, self.T, *more)
        row_parts, rows_each, token_parts, tokens_each = self._blocks
        blocks = rows.reshape(row_parts, token_parts, rows_each, tokens_each, *more)
        return jnp.swapaxes(blocks, 1, 2).reshape(self.B, self.T, *more)

    @property
    def _blocks(self) -> ShardSizes:
        assert self.base is not None
        b = self.base.sharding(("batch",), (self.B,)).shard_shape((self.B,))[0]
        p = self.base.mesh.shape[AXIS]
        return ShardSizes(self.B // b, b, p, self.T // p)
