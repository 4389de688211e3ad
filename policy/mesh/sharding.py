"""Layouts: a mesh, the rules that map logical axes to its axes, and helpers that constrain
activations.

B rows, T tokens, V vocabulary, E hidden, H heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from policy.mesh.axes import AXES, DEFAULT_RULES, HIDDEN_SPLIT_RULES, UNUSED
from policy.mesh.explicit import in_explicit_mode

T = TypeVar("T")


class _Step(Protocol):
    """The part of `policy.cache.step.Step` that `decoded` reads."""

    @property
    def anywhere(self) -> bool: ...


@dataclass(frozen=True)
class Layout:
    """A mesh and its rules (pairs, so that a layout can be hashed).

    moments_over_data: optimizers cut their states over the axis `data` too, along which weights are
    replicated (ZeRO
        stage 1, arXiv 1910.02054).
    decodes: the rules are those of rollouts.
    explicit: a decoder has its shardings in its types (policy/mesh/explicit.py); never on one
    device.
    """

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    moments_over_data: bool = False
    decodes: bool = False
    explicit: bool = False

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the mesh axes of each dimension of an array with these logical axes."""
        rules = dict(self.rules)
        used = set()
        dims = []
        for name, size in zip(axes, shape, strict=True):
            chosen = []
            for axis in rules.get(name, ()) if name else ():
                parts = math.prod(self.mesh.shape[a] for a in (*chosen, axis))
                if self.mesh.shape[axis] > 1 and axis not in used and size % parts == 0:
                    chosen.append(axis)
                    used.add(axis)
            dims.append(tuple(chosen) or None)
        return PartitionSpec(*dims)

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of an array with these logical axes."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def used(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of a weight in products: replicated along the axes that cut rows or
        tokens.

        spec: of the stored weight.
        """
        rules = dict(self.rules)
        tokens = {*rules["batch"], *rules["length"]}

        def kept(dim):
            return tuple(axis for axis in axes_of(dim) if axis not in tokens) or None

        return PartitionSpec(*(kept(dim) for dim in spec))

    def moment_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the mesh axes of an optimizer's state for a weight.

        They are the axes of the weight. With `moments_over_data`, `data` is added on the first
        dimension that is not cut, or else on the first that can be cut further. The dimension of
        layers is never cut.
        """
        spec = self.spec(axes, shape)
        data = self.mesh.shape["data"]
        if not self.moments_over_data or data == 1:
            return spec
        local = NamedSharding(self.mesh, spec).shard_shape(shape)
        open_dims = [
            dim for dim, name in enumerate(axes) if name != "layers" and local[dim] % data == 0
        ]
        for dim in sorted(open_dims, key=lambda dim: (spec[dim] is not None, dim))[:1]:
            spec = PartitionSpec(*spec[:dim], (*axes_of(spec[dim]), "data"), *spec[dim + 1 :])
        return spec

    def rows_over(self, axis: str) -> Layout:
        """Returns the layout whose rows, of activations and of caches, are also cut over `axis`;
        sequences are not cut."""
        rules = dict(self.rules)
        cut = {
            name: (*rules[name], axis)
            for name in ("batch", "cache_batch")
            if axis not in rules[name]
        }
        return replace(self, rules=tuple(sorted((rules | cut | {"length": ()}).items())))

    def for_rollouts(self, rules: Mapping[str, Sequence[str]], scheme: str) -> Layout:
        """Returns the layout with its rules overridden by `rules`. Raises ValueError for an unknown
        mesh axis.

        In the scheme `hidden` of policy/experts/expert_parallel.py the width of experts stays cut
        over `expert` first, and their number is not cut.
        """
        overrides = {name: _known(f"generator.rules.{name}", axes) for name, axes in rules.items()}
        if scheme == "hidden" and "mlp_moe" in overrides:
            width = tuple(axis for axis in overrides["mlp_moe"] if axis != "expert")
            overrides = {"exp": ()} | overrides | {"mlp_moe": ("expert", *width)}
        return replace(
            self, rules=tuple(sorted((dict(self.rules) | overrides).items())), decodes=True
        )

    @property
    def num_row_shards(self) -> int:
        """Returns the number of shards into which the mesh splits the rows of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in dict(self.rules)["batch"])

    @property
    def processes(self) -> int:
        """Returns the number of processes that the devices of the mesh belong to; 1 for an abstract
        mesh."""
        if not isinstance(self.mesh, Mesh):
            return 1
        return len({device.process_index for device in self.mesh.devices.flat})

    @property
    def cache_rows_differ(self) -> bool:
        """Tells whether rollouts shard the rows of a cache differently from rows of activations.

        Queries and new entries are then sent to the cache, and the results of attention are sent
        back.
        """
        rules = dict(self.rules)
        return self.decodes and rules["batch"] != rules["cache_batch"]

    def for_experts(self, scheme: str) -> Layout:
        """Returns the layout with default rules replaced by those of an expert scheme.

        Rules that were set do not change.
        """
        rules = dict(self.rules)
        if scheme == "hidden":
            rules |= {
                name: axes
                for name, axes in HIDDEN_SPLIT_RULES.items()
                if rules[name] == DEFAULT_RULES[name]
            }
        return replace(self, rules=tuple(sorted(rules.items())))

    @property
    def platform(self) -> str:
        """Returns the platform of the mesh: cpu, gpu or tpu.

        This machine may have another one when it compiles ahead of time.
        """
        return self.mesh.devices.flat[0].platform

    @property
    def replicated(self) -> NamedSharding:
        """Returns the sharding of an array that every device has in full."""
        return NamedSharding(self.mesh, PartitionSpec())


def layout(
    degrees: dict[str, int] | None = None,
    rules: dict[str, list[str]] | None = None,
    devices: Sequence | None = None,
    *,
    dcn: dict[str, int] | None = None,
    moments_over_data: bool = False,
    explicit: bool = False,
) -> Layout:
    """Makes a layout over `devices` (default: all).

    degrees: the size of each axis inside a slice (devices joined by a fast network). dcn: the
    factor of each axis over slices, which a slow network joins. One size of each may be -1 and
    takes all remaining devices. Devices without a slice number are divided into blocks of
    neighbours. `Layout` explains the other arguments.

    Raises ValueError when the degrees do not multiply to the number of devices, or a rule names an
    unknown axis.
    """
    devices = jax.devices() if devices is None else devices
    across = _sizes("mesh.dcn", dcn or {}, None)
    slices = _slices(devices, across)
    if -1 in across.values():
        across = _sizes("mesh.dcn", dcn or {}, len(slices))
    inside = _sizes("mesh", degrees or {"fsdp": -1}, len(slices[0]))
    merged = DEFAULT_RULES | {
        name: _known(f"mesh.rules.{name}", axes) for name, axes in (rules or {}).items()
    }
    mesh = Mesh(
        _arranged(slices, [inside[axis] for axis in AXES], [across[axis] for axis in AXES]), AXES
    )
    return Layout(
        mesh, tuple(sorted(merged.items())), moments_over_data, explicit=explicit and mesh.size > 1
    )


def _sizes(where: str, degrees: dict[str, int], number: int | None) -> dict[str, int]:
    """Returns the size of every axis, for so many devices or slices. None: -1 is not resolved."""
    if unknown := set(degrees) - set(AXES) - set(UNUSED):
        raise ValueError(
            f"{where}: unknown axis {', '.join(sorted(unknown))}; axes are {', '.join(AXES)}"
        )
    if used := [axis for axis in UNUSED if degrees.get(axis, 1) != 1]:
        raise ValueError(
            f"{where}.{used[0]}: {degrees[used[0]]} devices, but only 1 is possible: "
            f"{UNUSED[used[0]]}"
        )
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    if wrong := {axis: n for axis, n in sizes.items() if n != -1 and n < 1}:
        raise ValueError(f"{where}: {wrong} must be at least 1, or -1 for all that are left")
    open_axes = [axis for axis, n in sizes.items() if n == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{where}: only one axis may be -1, got {', '.join(open_axes)}")
    if number is None:
        return sizes
    if open_axes:
        sizes[open_axes[0]] = max(1, number // -math.prod(sizes.values()))
    if math.prod(sizes.values()) != number:
        what = "slices" if where.endswith("dcn") else "devices"
        raise ValueError(
            f"{where}: {sizes} needs {math.prod(sizes.values())} {what}, there are {number}"
        )
    return sizes


def _slices(devices: Sequence, across: dict[str, int]) -> list[list]:
    """Returns the devices of each slice.

    Slices are taken from the devices' slice numbers; else from their processes, if there are as
    many processes as requested slices; else they are blocks of neighbours. Without a requested
    number, devices without a slice number form one slice.
    """
    requested = math.prod(across.values())
    present = {
        getattr(device, "slice_index", None) for device in devices if device.platform == "tpu"
    } - {None}
    if len(present) > 1 and requested > 0 and requested != len(present):
        raise ValueError(
            f"mesh.dcn: {requested} slice{'s' * (requested > 1)} by its sizes, but the TPUs are "
            f"in {len(present)}, which a slow network joins; say which axis goes over them, as "
            f"`dcn: {{data: {len(present)}}}`, or {{data: -1}} for as many as there are"
        )
    if requested == 1:
        return [list(devices)]
    for name in ("slice_index", "process_index"):
        numbers = sorted({getattr(device, name, 0) for device in devices})
        if len(numbers) == requested or (requested < 0 and len(numbers) > 1):
            slices = [
                [device for device in devices if getattr(device, name) == number]
                for number in numbers
            ]
            break
    else:
        blocks = max(1, requested)
        if len(devices) % blocks:
            raise ValueError(
                f"mesh.dcn: {across} needs {blocks} slices, which do not divide the "
                f"{len(devices)} devices"
            )
        slices = [list(block) for block in np.asarray(devices).reshape(blocks, -1)]
    if len({len(each) for each in slices}) > 1:
        raise ValueError(
            f"mesh.dcn: the slices have {[len(each) for each in slices]} devices; they must be "
            "equal"
        )
    return slices


def _arranged(slices: list[list], inside: list[int], across: list[int]) -> np.ndarray:
    """Arranges the devices of a mesh: in network order inside a slice, and slices one after another
    along each axis."""
    meshes = [
        mesh_utils.create_device_mesh(inside, each, allow_split_physical_axes=True)
        for each in slices
    ]
    blocks = np.stack(meshes).reshape(*across, *inside)
    n = len(inside)
    return blocks.transpose([dim for axis in range(n) for dim in (axis, n + axis)]).reshape(
        np.multiply(across, inside)
    )


def axes_of(dim: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes of one dimension of a PartitionSpec."""
    return (dim,) if isinstance(dim, str) else dim or ()


def _known(where: str, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of a rule that exist. Raises ValueError for an unknown axis; `where` names
    the rule."""
    if unknown := set(axes) - set(AXES) - set(UNUSED):
        raise ValueError(f"{where}: unknown axis {sorted(unknown)}; axes are {', '.join(AXES)}")
    return tuple(axis for axis in axes if axis in AXES)


def constrain(x: jax.Array, axes: tuple[str | None, ...], layout: Layout | None) -> jax.Array:
    """Constrains the sharding of x by its logical axes. Returns x unchanged without a layout or on
    one device.

    This is a hint to the partitioner, or a reshard in explicit mode.
    """
    if layout is None or layout.mesh.size == 1:
        return x
    if in_explicit_mode():
        return jax.reshard(x, layout.spec(axes, x.shape))
    return jax.lax.with_sharding_constraint(x, layout.sharding(axes, x.shape))


def row_major(x: jax.Array, layout: Layout | None) -> jax.Array:
    """Pins, on TPU, the order of x in memory: its last dimension lies in the 128 lanes of a tile.

    Left to itself the compiler may choose another one, as 4 rows of logits in the lanes, which it
    pads to 128.
    """
    if layout is None or layout.platform != "tpu":
        return x
    return with_layout_constraint(x, MemoryLayout(major_to_minor=tuple(range(x.ndim))))


def to_cache(x: jax.Array, layout: Layout | None) -> jax.Array:
    """Sends queries or new entries [B, H, ...] to the devices that have the rows and heads of the
    cache."""
    if layout is None or not layout.cache_rows_differ:
        return x
    return constrain(x, ("cache_batch", "cache_heads", *[None] * (x.ndim - 2)), layout)


def from_cache(x: jax.Array, layout: Layout | None) -> jax.Array:
    """Sends results of attention [B, H, ...] to the devices that have the rows of activations."""
    if layout is None or not layout.cache_rows_differ:
        return x
    return constrain(x, ("batch", "heads", *[None] * (x.ndim - 2)), layout)


def decoded(
    x: jax.Array, step: _Step, layout: Layout | None, heads: str | None = None
) -> jax.Array:
    """Constrains x [B, T, ...] of a decoding step, or [B, H, T, D] with the logical axis of its
    heads, to the activations' rows.

    Positions and the results of attention are sharded by the rows of the cache. Left to itself the
    partitioner would shard tables of rotations and residuals the same way, and each layer would
    first gather the inputs of its products, or their weights. Prompts are left to the partitioner:
    with many tokens, a norm on too few devices costs more than an exchange.
    """
    if layout is None or not layout.cache_rows_differ or step.anywhere:
        return x
    return constrain(x, ("batch", heads, *[None] * (x.ndim - 2)), layout)


def sharded_lookup(table_VE: jax.Array, tokens_BT: jax.Array, layout: Layout) -> jax.Array:
    """Returns table[tokens] where the mesh cuts the table along V.

    Each device reads its own rows, and zeros for others, and the devices sum. The partitioner would
    gather the table instead.
    """
    axes, rows = (
        axes_of(layout.spec((name,), sizes[:1])[0])
        for name, sizes in (("vocab", table_VE.shape), ("batch", tokens_BT.shape))
    )
    tokens = PartitionSpec(tuple(axis for axis in rows if axis not in axes) or None, None)

    def local(table, ids):
        own = ids - jax.lax.axis_index(axes) * table.shape[0]
        here = (own >= 0) & (own < table.shape[0])
        return jax.lax.psum(jnp.where(here[..., None], table[jnp.where(here, own, 0)], 0), axes)

    specs = (PartitionSpec(axes, None), tokens)
    read = jax.shard_map(
        local, mesh=layout.mesh, in_specs=specs, out_specs=PartitionSpec(*tokens, None)
    )(table_VE, tokens_BT)
    return constrain(read, ("batch", "length", None), layout)


def annotate(x: jax.Array, axes: tuple[str | None, ...], layout: Layout) -> jax.Array:
    """Constrains x in explicit mode only, as arrays without a sharding of their own need it (zeros,
    for example)."""
    return constrain(x, axes, layout) if in_explicit_mode() else x


def block_on_cpu_mesh(result: T, layout: Layout) -> T:
    """Waits for `result` on a CPU mesh, where collectives of overlapping programs deadlock. Returns
    it."""
    if layout.mesh.size > 1 and layout.platform == "cpu":
        jax.block_until_ready(result)
    return result
