"""How the tokens and experts of one call are cut over a mesh, and how many rows a device has room
for.

B rows, T tokens, N tokens of one device, k choices per token, X experts, E hidden, p devices along
the axis `expert`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.config import Moe, Runtime
from policy.experts import experts
from policy.experts.experts import Weights
from policy.experts.grouped import Block, block_rows
from policy.mesh.sharding import Layout, axes_of

AXIS = "expert"

# Bytes of the rows that a device stores at once. Where the worst case needs more, its tokens are
# computed in parts: 64 devices of DeepSeek-V3 hold 4 experts each, and all tokens may choose the
# experts of one device.
ROOM = 1 << 30
# Rows of the expected room of a device: EXPECTED times the mean, plus SPARE, for cases with few
# tokens.
EXPECTED = 2
SPARE = 64


@dataclass(frozen=True)
class ExpertShards:
    """The cut of one call over the mesh: the tokens and experts of each device.

    shape: of x [B, T, E]. worst_case: whether a device has room for the case that all tokens choose
    its experts.
    """

    spec: Moe
    runtime: Runtime
    shape: tuple[int, ...]
    worst_case: bool = True

    @property
    def layout(self) -> Layout:
        """Returns the layout of the runtime, which must have one."""
        assert self.runtime.layout is not None
        return self.runtime.layout

    @cached_property
    def tokens(self) -> PartitionSpec:
        """Returns the mesh axes of the dimensions of x [B, T, E]."""
        return self.layout.spec(("batch", "length", None), self.shape)

    @cached_property
    def token_axes(self) -> frozenset[str]:
        """Returns the mesh axes along which devices have different tokens."""
        return all_axes(self.tokens)

    @cached_property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes over which experts stay cut in the products, by logical axis.

        They are `expert`, `tensor` and the axes that cut the stored width, in that order, if all
        devices along them have the same tokens.
        """
        mesh = self.layout.mesh.shape
        kept: dict[str, tuple[str, ...]] = {"exp": (), "mlp_moe": ()}
        hidden = self.runtime.expert_parallel == "hidden"
        sizes = {"exp": self.spec.router.experts, "mlp_moe": self.spec.width}
        width = [
            axis
            for axis in dict.fromkeys((*dict(self.layout.rules)["mlp_moe"], "tensor"))
            if axis != AXIS
        ]
        for name, axis in (
            ("mlp_moe" if hidden else "exp", AXIS),
            *(("mlp_moe", axis) for axis in width),
        ):
            parts = math.prod(mesh[a] for a in kept[name]) * mesh[axis]
            if (
                mesh[axis] > 1
                and sizes[name] % parts == 0
                and (axis == AXIS or axis not in self.token_axes)
            ):
                kept[name] = (*kept[name], axis)
        return kept

    @cached_property
    def kept_axes(self) -> frozenset[str]:
        """Returns the mesh axes over which experts stay cut in the products."""
        return frozenset(chain(*self.kept.values()))

    @property
    def gathers(self) -> bool:
        """Tells whether tokens travel along `expert`.

        They do not if all its devices have the same tokens, as with few rows.
        """
        return AXIS in self.kept_axes and AXIS in self.token_axes

    @property
    def exchanges(self) -> bool:
        """Tells whether rows are exchanged by the scheme all_to_all."""
        return self.gathers and self.runtime.expert_parallel == "all_to_all"

    @property
    def summed(self) -> tuple[str, ...]:
        """Returns the axes along which devices have the same tokens and each a part of their
        result."""
        return tuple(sorted(self.kept_axes - self.token_axes))

    @property
    def live(self) -> frozenset[str]:
        """Returns the axes along which devices compute different values."""
        return self.token_axes | self.kept_axes

    @property
    def own_experts(self) -> int:
        """Counts the experts of a device."""
        return self.spec.router.experts // math.prod(
            self.layout.mesh.shape[axis] for axis in self.kept["exp"]
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Returns the shape of x on a device."""
        mesh = self.layout.mesh.shape
        return tuple(
            n // math.prod(mesh[axis] for axis in axes)
            for n, axes in zip(self.shape, axes_of_dims(self.tokens), strict=True)
        )

    def room(self, N: int) -> int:
        """Counts the rows that a device has room for when each device that it exchanges tokens with
        has N tokens."""
        k = self.spec.router.experts_per_token
        limit = self.runtime.ragged_buffer_factor
        most = self.met * N * (min(k, self.own_experts) if self.exchanges else k)
        if self.exchanges and limit is not None:
            return min(most, math.ceil(N * k * limit))
        return most if self.worst_case else min(most, EXPECTED * math.ceil(self._mean(N)) + SPARE)

    @property
    def met(self) -> int:
        """Counts the devices whose tokens come together."""
        return self.layout.mesh.shape[AXIS] if self.gathers else 1

    def _mean(self, N: int) -> float:
        """Returns the mean number of rows of a device, for N tokens of each device that it
        exchanges tokens with."""
        return (
            self.met
            * N
            * self.spec.router.experts_per_token
            * self.own_experts
            / self.spec.router.experts
        )

    @cached_property
    def expected(self) -> ExpertShards:
        """Returns these shards with room for the expected rows, if that is at most half of the
        worst case; else itself."""
        smaller = replace(self, worst_case=False)
        N = math.prod(self.local_shape[:2])
        return smaller if 2 * smaller.room(N) <= self.room(N) and not self.every else self

    @property
    def filled(self) -> float:
        """Returns the mean share of its rows that a device computes.

        The other rows belong to other devices, or are reserved for the case that more tokens choose
        its experts.
        """
        N = math.prod(self.local_shape[:2]) // self.chunks
        return self._mean(N) / self.room(N)

    @cached_property
    def chunks(self) -> int:
        """Counts the equal parts in which a device computes its tokens: the fewest that have room
        each."""
        N = math.prod(self.local_shape[:2])
        E = self.shape[-1]
        size = self.room(N) * E * jnp.dtype(self.runtime.dtype).itemsize
        return next((n for n in range(max(1, -(-size // ROOM)), N + 1) if N % n == 0), N)

    @property
    def block(self) -> Block:
        """Returns the rows of a block of the grouped products. The mean rows per expert do not
        depend on the scheme."""
        router = self.spec.router
        return block_rows(
            self._tokens, router.experts_per_token, router.experts, self.layout.platform
        )

    @property
    def every(self) -> bool:
        """Tells whether tokens go through every expert of a device.

        Exchanged rows hold one choice each, so they do not.
        """
        return not self.exchanges and experts.small_batch(self._tokens, self.layout.platform)

    @property
    def _tokens(self) -> int:
        """Counts the tokens that come together from all devices, in one part."""
        mesh = self.layout.mesh.shape
        parts = (
            math.prod(mesh[axis] for axis in self.token_axes - ({AXIS} if self.gathers else set()))
            * self.chunks
        )
        return math.prod(self.shape[:2]) // parts

    def places(self, weights: Weights) -> dict[str, PartitionSpec]:
        """Returns the sharding of the expert weights when a device starts, by name.

        They are cut as the products use them, and also as they are stored over axes along which
        tokens differ.
        """
        return {
            name: self._partition_spec(name, cast(jax.Array, array).shape)
            for name, array in weights.items()
        }

    def _partition_spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        names = experts.axes_of(name, len(shape))
        dims = []
        for logical, stored, size in zip(
            names, axes_of_dims(self.layout.spec(names, shape)), shape, strict=True
        ):
            kept = () if logical is None else self.kept.get(logical, ())
            extra = tuple(axis for axis in stored if axis in self.token_axes - self.kept_axes)
            if size % math.prod(self.layout.mesh.shape[axis] for axis in kept + extra):
                extra = ()
            dims.append(kept + extra or None)
        return PartitionSpec(*dims)


def axes_of_dims(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each dimension."""
    return tuple(map(axes_of, spec))


def all_axes(spec: PartitionSpec) -> frozenset[str]:
    """Returns the mesh axes of all dimensions."""
    return frozenset(chain.from_iterable(axes_of_dims(spec)))
