"""Where arrays live: the mesh, the table from logical axis names to mesh axes, and the one helper that constrains
activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor", "expert", "context")

# Logical axis of a weight or activation -> mesh axes, first ones first; an axis already used or that does not divide is
# dropped.
DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "embed": ("fsdp", "context", "expert"),
    "embed_vocab": ("fsdp", "context", "expert"),
    "embed_moe": ("fsdp", "context"),
    "q_lora": ("fsdp", "context", "expert"),
    "kv_lora": ("fsdp", "context", "expert"),
    "mlp": ("tensor",),
    "mlp_moe": ("tensor",),
    "heads": ("tensor",),
    "q_heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
    "exp": ("expert",),
    "engram_dim": ("tensor",),
    "engram_row": ("fsdp", "context", "expert", "tensor"),
    "cache_batch": ("data", "fsdp", "expert"),
    "cache_heads": ("tensor",),
}

# Instead, where every device holds a slice of the width of all experts (`expert_parallel: hidden`).
HIDDEN_SPLIT_RULES: dict[str, tuple[str, ...]] = {"exp": ("fsdp", "context"), "mlp_moe": ("expert", "tensor")}


@dataclass(frozen=True)
class Layout:
    """A mesh and its rules (pairs, so that it can be hashed)."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The mesh axes of each dimension of an array with these logical axes."""
        rules, used, dims = dict(self.rules), set(), []
        for name, size in zip(axes, shape, strict=True):
            chosen = []
            for axis in rules.get(name, ()) if name else ():
                degree = self.mesh.shape[axis]
                if degree > 1 and axis not in used and size % (degree * int(np.prod([self.mesh.shape[a] for a in chosen]))) == 0:
                    chosen.append(axis)
                    used.add(axis)
            dims.append(tuple(chosen) or None)
        return PartitionSpec(*dims)

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def for_experts(self, scheme: str) -> Layout:
        """With the rules of a scheme of policy/layers/expert_parallel.py in place of default ones; rules that were set stay."""
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


def layout(degrees: dict[str, int] | None = None, rules: dict[str, list[str]] | None = None, devices=None) -> Layout:
    """A layout over `devices` (default: all). `degrees` gives the size of each axis; one may be -1 and takes what is
    left.

    Raises ValueError when the degrees do not multiply to the number of devices, or a rule names an unknown axis.
    """
    devices = jax.devices() if devices is None else devices
    if unknown := set(degrees or ()) - set(AXES):
        raise ValueError(f"mesh: unknown axis {', '.join(sorted(unknown))}; axes are {', '.join(AXES)}")
    sizes = dict.fromkeys(AXES, 1) | (degrees or {"fsdp": -1})
    if wrong := {axis: n for axis, n in sizes.items() if n != -1 and n < 1}:
        raise ValueError(f"mesh: {wrong} must be at least 1, or -1 for what is left")
    known = int(np.prod([n for n in sizes.values() if n != -1]))
    open_axes = [axis for axis, n in sizes.items() if n == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh: only one axis may be -1, got {', '.join(open_axes)}")
    if open_axes:
        sizes[open_axes[0]] = max(1, len(devices) // known)
    if int(np.prod(list(sizes.values()))) != len(devices):
        raise ValueError(f"mesh: {sizes} needs {int(np.prod(list(sizes.values())))} devices, there are {len(devices)}")
    merged = DEFAULT_RULES | {name: tuple(axes) for name, axes in (rules or {}).items()}
    for name, axes in merged.items():
        if unknown := set(axes) - set(AXES):
            raise ValueError(f"mesh.rules.{name}: unknown axis {sorted(unknown)}; axes are {', '.join(AXES)}")
    mesh = Mesh(np.asarray(devices).reshape([sizes[axis] for axis in AXES]), AXES)
    return Layout(mesh, tuple(sorted(merged.items())))


def constrain(x: jax.Array, axes: tuple[str | None, ...], layout: Layout | None) -> jax.Array:
    """x, laid out by its logical axes; unchanged without a layout or on one device."""
    if layout is None or layout.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(axes, x.shape))


def settle(result, layout: Layout):
    """`result`, waited for where programs must not overlap: on CPU with several devices overlapping collectives deadlock."""
    if layout.mesh.size > 1 and layout.platform == "cpu":
        jax.block_until_ready(result)
    return result
