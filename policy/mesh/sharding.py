"""Where arrays live: the mesh, what its axes cut by a table from logical axis names to them, and the one helper that constrains
activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from policy.mesh.axes import AXES, DEFAULT_RULES, HIDDEN_SPLIT_RULES, UNUSED
from policy.mesh.explicit import in_explicit_mode


@dataclass(frozen=True)
class Layout:
    """A mesh and its rules (pairs, so that it can be hashed). `moments_over_data`: optimizers cut their states over the axis `data`
    as well, along which weights are copies (ZeRO stage 1, arXiv 1910.02054). `decodes`: the rules are those of rollouts.
    `explicit`: a decoder states in types how its arrays are cut (policy/mesh/explicit.py); never on one device."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    moments_over_data: bool = False
    decodes: bool = False
    explicit: bool = False

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The mesh axes of each dimension of an array with these logical axes."""
        rules, used, dims = dict(self.rules), set(), []
        for name, size in zip(axes, shape, strict=True):
            chosen = []
            for axis in rules.get(name, ()) if name else ():
                degree = self.mesh.shape[axis]
                if (
                    degree > 1
                    and axis not in used
                    and size % (degree * int(np.prod([self.mesh.shape[a] for a in chosen]))) == 0
                ):
                    chosen.append(axis)
                    used.add(axis)
            dims.append(tuple(chosen) or None)
        return PartitionSpec(*dims)

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def used(self, spec: PartitionSpec) -> PartitionSpec:
        """Where a weight that is stored so lies while it is multiplied: whole along axes over which rows or tokens are cut."""
        rules = dict(self.rules)
        tokens = {*rules["batch"], *rules["length"]}

        def kept(dim):
            return tuple(axis for axis in axes_of(dim) if axis not in tokens) or None

        return PartitionSpec(*(kept(dim) for dim in spec))

    def moment_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The mesh axes of the state that an optimizer keeps of a weight: those of the weight, and `data`, if it is to be cut
        there, on the first dimension that is whole, or else on the first that can be cut further. Layers stay together."""
        spec, data = self.spec(axes, shape), self.mesh.shape["data"]
        if not self.moments_over_data or data == 1:
            return spec
        local = NamedSharding(self.mesh, spec).shard_shape(shape)
        open_dims = [dim for dim, name in enumerate(axes) if name != "layers" and local[dim] % data == 0]
        for dim in sorted(open_dims, key=lambda dim: (spec[dim] is not None, dim))[:1]:
            spec = PartitionSpec(*spec[:dim], (*axes_of(spec[dim]), "data"), *spec[dim + 1 :])
        return spec

    def rows_over(self, axis: str) -> Layout:
        """With rows cut over this axis too, those of a cache as well, and nothing else of activations."""
        rules = dict(self.rules)
        cut = {name: (*rules[name], axis) for name in ("batch", "cache_batch") if axis not in rules[name]}
        return replace(self, rules=tuple(sorted((rules | cut | {"length": ()}).items())))

    def for_rollouts(self, rules: Mapping[str, Sequence[str]], scheme: str) -> Layout:
        """With these rules laid over its own. In the scheme `hidden` of policy/experts/expert_parallel.py the width of experts stays
        cut over `expert` first, and their number is whole. Raises ValueError for an unknown mesh axis."""
        given = {name: _known(f"generator.rules.{name}", axes) for name, axes in rules.items()}
        if scheme == "hidden" and "mlp_moe" in given:
            width = tuple(axis for axis in given["mlp_moe"] if axis != "expert")
            given = {"exp": ()} | given | {"mlp_moe": ("expert", *width)}
        return replace(self, rules=tuple(sorted((dict(self.rules) | given).items())), decodes=True)

    @property
    def rows_move(self) -> bool:
        """Whether rollouts lay the rows of a cache out otherwise than those of activations: queries and new entries then go to the
        cache, and what they found comes back."""
        rules = dict(self.rules)
        return self.decodes and rules["batch"] != rules["cache_batch"]

    def for_experts(self, scheme: str) -> Layout:
        """With the rules of a scheme of policy/experts/expert_parallel.py in place of default ones; rules that were set stay."""
        rules = dict(self.rules)
        if scheme == "hidden":
            rules |= {name: axes for name, axes in HIDDEN_SPLIT_RULES.items() if rules[name] == DEFAULT_RULES[name]}
        return replace(self, rules=tuple(sorted(rules.items())))

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu: that of the mesh, which ahead-of-time compilation may not have at hand."""
        return self.mesh.devices.flat[0].platform

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def layout(
    degrees: dict[str, int] | None = None,
    rules: dict[str, list[str]] | None = None,
    devices=None,
    *,
    dcn: dict[str, int] | None = None,
    moments_over_data: bool = False,
    explicit: bool = False,
) -> Layout:
    """A layout over `devices` (default: all). `degrees` gives the size of each axis inside a slice (devices joined by a fast
    network), `dcn` how many times as large it is over the slices, which a slow one joins. One of each may be -1 and takes what is
    left; devices that know of no slices are taken in blocks of neighbours. `moments_over_data` and `explicit` are those of Layout.

    Raises ValueError when the degrees do not multiply to the number of devices, or a rule names an unknown axis.
    """
    devices = jax.devices() if devices is None else devices
    across = _sizes("mesh.dcn", dcn or {}, None)
    slices = _slices(devices, across)
    if -1 in across.values():
        across = _sizes("mesh.dcn", dcn, len(slices))
    inside = _sizes("mesh", degrees or {"fsdp": -1}, len(slices[0]))
    merged = DEFAULT_RULES | {name: _known(f"mesh.rules.{name}", axes) for name, axes in (rules or {}).items()}
    mesh = Mesh(_arranged(slices, [inside[axis] for axis in AXES], [across[axis] for axis in AXES]), AXES)
    return Layout(mesh, tuple(sorted(merged.items())), moments_over_data, explicit=explicit and mesh.size > 1)


def _sizes(where: str, degrees: dict[str, int], number: int | None) -> dict[str, int]:
    """The size of every axis, for so many devices or slices; None: as they were given."""
    if unknown := set(degrees) - set(AXES) - set(UNUSED):
        raise ValueError(f"{where}: unknown axis {', '.join(sorted(unknown))}; axes are {', '.join(AXES)}")
    if used := [axis for axis in UNUSED if degrees.get(axis, 1) != 1]:
        raise ValueError(f"{where}.{used[0]}: {degrees[used[0]]} devices, but only 1 is possible: {UNUSED[used[0]]}")
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    if wrong := {axis: n for axis, n in sizes.items() if n != -1 and n < 1}:
        raise ValueError(f"{where}: {wrong} must be at least 1, or -1 for what is left")
    open_axes = [axis for axis, n in sizes.items() if n == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{where}: only one axis may be -1, got {', '.join(open_axes)}")
    if number is None:
        return sizes
    if open_axes:
        sizes[open_axes[0]] = max(1, number // -math.prod(sizes.values()))
    if math.prod(sizes.values()) != number:
        what = "slices" if where.endswith("dcn") else "devices"
        raise ValueError(f"{where}: {sizes} needs {math.prod(sizes.values())} {what}, there are {number}")
    return sizes


def _slices(devices: Sequence, across: dict[str, int]) -> list[list]:
    """The devices of each slice: by what they say of themselves, or else by process, where there are as many processes as slices
    are wanted, or in as many blocks of neighbours. Without a number of slices those that do not know are one."""
    wanted = math.prod(across.values())
    there = {getattr(device, "slice_index", None) for device in devices if device.platform == "tpu"} - {None}
    if len(there) > 1 and wanted > 0 and wanted != len(there):
        raise ValueError(
            f"mesh.dcn: {wanted} slice{'s' * (wanted > 1)} by its sizes, but the TPUs are in {len(there)}, which a slow network "
            f"joins; say which axis goes over them, as `dcn: {{data: {len(there)}}}`, or {{data: -1}} for as many as there are"
        )
    if wanted == 1:
        return [list(devices)]
    for name in ("slice_index", "process_index"):
        numbers = sorted({getattr(device, name, 0) for device in devices})
        if len(numbers) == wanted or (wanted < 0 and len(numbers) > 1):
            found = [[device for device in devices if getattr(device, name) == number] for number in numbers]
            break
    else:
        blocks = max(1, wanted)
        if len(devices) % blocks:
            raise ValueError(
                f"mesh.dcn: {across} needs {blocks} slices, which do not divide the {len(devices)} devices"
            )
        found = [list(block) for block in np.asarray(devices).reshape(blocks, -1)]
    if len({len(each) for each in found}) > 1:
        raise ValueError(f"mesh.dcn: the slices have {[len(each) for each in found]} devices; they must be equal")
    return found


def _arranged(slices: list[list], inside: list[int], across: list[int]) -> np.ndarray:
    """The devices of a mesh: inside a slice in the order of its network, slices side by side along each axis."""
    meshes = [mesh_utils.create_device_mesh(inside, each, allow_split_physical_axes=True) for each in slices]
    blocks = np.stack(meshes).reshape(*across, *inside)
    n = len(inside)
    return blocks.transpose([dim for axis in range(n) for dim in (axis, n + axis)]).reshape(np.multiply(across, inside))


def axes_of(dim: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one dimension of a PartitionSpec."""
    return (dim,) if isinstance(dim, str) else dim or ()


def _known(where: str, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes of a rule, without those that have one device only."""
    if unknown := set(axes) - set(AXES) - set(UNUSED):
        raise ValueError(f"{where}: unknown axis {sorted(unknown)}; axes are {', '.join(AXES)}")
    return tuple(axis for axis in axes if axis in AXES)


def constrain(x: jax.Array, axes: tuple[str | None, ...], layout: Layout | None) -> jax.Array:
    """x, laid out by its logical axes; unchanged without a layout or on one device. A hint to the partitioner, or the type of the
    result where shardings are stated."""
    if layout is None or layout.mesh.size == 1:
        return x
    if in_explicit_mode():
        return jax.reshard(x, layout.spec(axes, x.shape))
    return jax.lax.with_sharding_constraint(x, layout.sharding(axes, x.shape))


def to_cache(x: jax.Array, layout: Layout | None) -> jax.Array:
    """Queries or new entries [B, H, ...], where the rows and heads of a cache are."""
    if layout is None or not layout.rows_move:
        return x
    return constrain(x, ("cache_batch", "cache_heads", *[None] * (x.ndim - 2)), layout)


def from_cache(x: jax.Array, layout: Layout | None) -> jax.Array:
    """What queries found there, [B, H, ...], where the next product wants it."""
    if layout is None or not layout.rows_move:
        return x
    return constrain(x, ("batch", "heads", *[None] * (x.ndim - 2)), layout)


def decoded(x: jax.Array, step, layout: Layout | None, heads: str | None = None) -> jax.Array:
    """x [B, T, ...] of a decoding step, or [B, H, T, D] with the logical axis of its heads, where rows of activations are.
    Positions and what attention finds are where the rows of the cache are: left to the partitioner, so are tables of rotations and
    residuals, and products of each layer first gather what they read, or their weights. Prompts are left to it: of their many
    tokens a norm costs more than an exchange."""
    if layout is None or not layout.rows_move or step.anywhere:
        return x
    return constrain(x, ("batch", heads, *[None] * (x.ndim - 2)), layout)


def own_rows(table_VE: jax.Array, tokens_BT: jax.Array, layout: Layout) -> jax.Array:
    """table[tokens] where the mesh cuts the table along V: each device reads the rows that it has, and zeros for others, and the
    devices sum. The partitioner gathers the table instead, 1 GiB for each token of llama3.1-8b."""
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
    read = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=PartitionSpec(*tokens, None))(
        table_VE, tokens_BT
    )
    return constrain(read, ("batch", "length", None), layout)


def declare(x: jax.Array, axes: tuple[str | None, ...], layout: Layout) -> jax.Array:
    """x as `constrain` lays it out where shardings are stated, else as it is: for what has no sharding of its own, as zeros."""
    return constrain(x, axes, layout) if in_explicit_mode() else x


def block_on_cpu_mesh(result, layout: Layout):
    """`result`, waited for where programs must not overlap: on CPU with several devices overlapping collectives deadlock."""
    if layout.mesh.size > 1 and layout.platform == "cpu":
        jax.block_until_ready(result)
    return result
