"""Sequences that are cut over the mesh axis `context`: filled up so that they divide, and laid out for even loads.

Tokens come in order, T / p neighbours to each of p devices. Of a causal mask the last device then has the most to do. In the
balanced order a row is 2p runs of neighbours, and device i has runs i and 2p - 1 - i: an early and a late one, with as many keys to
look at together on every device. Positions and segments tell masks what the order does not.

B rows, T tokens, p devices, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.cache import LayerCache
from policy.cache.step import UNKNOWN, Step
from policy.config import Runtime
from policy.intermediates import Aux, LayerAux
from policy.mesh.sharding import Layout, constrain

AXIS = "context"


def cuts(layout: Layout | None, T: int) -> bool:
    """Whether this layout cuts T tokens over the axis `context`."""
    return layout is not None and AXIS in (layout.spec(("length",), (T,))[0] or ())


def along_length(x: jax.Array, runtime: Runtime) -> jax.Array:
    """x [B, T, ...], each device with its own tokens, where the layout cuts them."""
    if not cuts(runtime.layout, x.shape[1]):
        return x
    return constrain(x, ("batch", "length", *[None] * (x.ndim - 2)), runtime.layout)


def whole(x: jax.Array, runtime: Runtime) -> jax.Array:
    """x [B, T, ...], each device with all tokens of its rows: for what goes through them one by one."""
    if not cuts(runtime.layout, x.shape[1]):
        return x
    return constrain(x, ("batch", *[None] * (x.ndim - 1)), runtime.layout)


def balanced_places(T: int, p: int) -> np.ndarray:
    """int32[T]: the place in the row of each token in the balanced order."""
    runs = np.arange(T, dtype=np.int32).reshape(2 * p, -1)
    return np.stack([runs[:p], runs[::-1][:p]], axis=1).reshape(-1)


def multiple(runtime: Runtime) -> int:
    """Tokens of a row that divide evenly come in multiples of this. 1: rows stay as long as they are, and are cut if they happen to
    divide; so they do where an expert takes a share of the row."""
    layout = runtime.layout
    if layout is None or runtime.capacity_factor is not None:
        return 1
    if AXIS not in dict(layout.rules)["length"] or layout.mesh.shape[AXIS] == 1:
        return 1
    return layout.mesh.shape[AXIS] * (2 if runtime.context_load_balance else 1)


@dataclass(frozen=True)
class Order:
    """How the tokens of a call are laid out, `length` of them filled up with padding to `filled`."""

    layout: Layout
    length: int
    filled: int
    balanced: bool

    @classmethod
    def of(cls, step: Step, cache: LayerCache | None, runtime: Runtime) -> Order | None:
        """None where tokens stay as they are. Only rows whose order says who looks at whom are balanced."""
        layout, T, parts = runtime.layout, step.segments.shape[1], multiple(runtime)
        if cache is not None or parts == 1:
            return None
        balanced, filled = runtime.context_load_balance and step.whole, -(-T // parts) * parts
        return cls(layout, T, filled, balanced) if balanced or filled > T else None

    @property
    def places(self) -> np.ndarray:
        return balanced_places(self.filled, self.layout.mesh.shape[AXIS])

    def enter(self, tokens_BT: jax.Array, step: Step) -> tuple[jax.Array, Step]:
        """Tokens and step as the layers take them."""

        def laid(a, fill=0):
            a = jnp.pad(a, [(0, 0), (0, self.filled - self.length), *[(0, 0)] * (a.ndim - 2)], constant_values=fill)
            return a[:, self.places] if self.balanced else a

        changes = {"positions": laid(step.positions), "segments": laid(step.segments)}
        if step.routes is not None:
            changes["routes"] = {path: laid(each, UNKNOWN) for path, each in step.routes.items()}
        if self.balanced:
            changes |= {"whole": False, "balanced": True}
        if self.balanced and step.dropout is not None:
            changes["dropout"] = replace(step.dropout, places=jnp.asarray(self.places)[None])
        return laid(tokens_BT), replace(step, **changes)

    def leave(self, x_BTE: jax.Array) -> jax.Array:
        """What the layers made, in order and without what was filled in."""
        return (self._exchanged(x_BTE) if self.balanced else x_BTE)[:, : self.length]

    def leave_aux(self, aux: Aux) -> Aux:
        """The same for what they found for each token."""

        def of_tokens(a):
            a = a if a is None or not self.balanced else jnp.take(a, np.argsort(self.places), axis=2)
            return None if a is None else a[:, :, : self.length]

        def found(layer: LayerAux) -> LayerAux:
            return replace(
                layer, **{name: of_tokens(getattr(layer, name)) for name in ("hidden", "selection", "routes")}
            )

        read = None if aux.mtp_input is None else self.leave(aux.mtp_input)
        return replace(aux, layers={path: found(layer) for path, layer in aux.layers.items()}, mtp_input=read)

    def _exchanged(self, x_BTE: jax.Array) -> jax.Array:
        """From the balanced order to the true one: of its two runs, one even and one odd, a device sends each to where it is in
        order."""
        p = self.layout.mesh.shape[AXIS]
        runs = [(i, 2 * p - 1 - i) for i in range(p)]

        def local(x):
            first_is_even = jax.lax.axis_index(AXIS) % 2 == 0
            early, late = jnp.split(x, 2, axis=1)
            found = []
            for parity in (0, 1):
                run = jnp.where(first_is_even == (parity == 0), early, late)
                to = [(i, next(r for r in both if r % 2 == parity) // 2) for i, both in enumerate(runs)]
                found.append(jax.lax.ppermute(run, AXIS, to))
            return jnp.concatenate(found, axis=1)

        spec = self.layout.spec(("batch", "length", *[None] * (x_BTE.ndim - 2)), x_BTE.shape)
        return jax.shard_map(local, mesh=self.layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x_BTE)


@dataclass(frozen=True)
class Rows:
    """The B T tokens of a call one after the other, in the order in which the devices have them: to flatten [B, T] where T is cut
    would bring all tokens of a row together."""

    given: Layout | None
    B: int
    T: int

    @property
    def layout(self) -> Layout | None:
        """With the rows cut over the axis of the sequences as well."""
        return self.given.rows_over(AXIS) if cuts(self.given, self.T) else self.given

    def flat(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] as [B T, ...]."""
        if not cuts(self.given, self.T):
            return x.reshape(-1, *x.shape[2:])
        blocks = x.reshape(*self._blocks, *x.shape[2:])
        rows = jnp.swapaxes(blocks, 1, 2).reshape(-1, *x.shape[2:])
        return constrain(rows, ("batch", *[None] * (rows.ndim - 1)), self.layout)

    def back(self, rows: jax.Array) -> jax.Array:
        """The inverse."""
        more = rows.shape[1:]
        if not cuts(self.given, self.T):
            return rows.reshape(self.B, self.T, *more)
        F, b, p, t = self._blocks
        return jnp.swapaxes(rows.reshape(F, p, b, t, *more), 1, 2).reshape(self.B, self.T, *more)

    @property
    def _blocks(self) -> tuple[int, int, int, int]:
        """(parts into which the rows of the batch are cut, rows of each, parts of the tokens, tokens of each)."""
        b = self.given.sharding(("batch",), (self.B,)).shard_shape((self.B,))[0]
        p = self.given.mesh.shape[AXIS]
        return self.B // b, b, p, self.T // p
