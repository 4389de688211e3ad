"""The section `mesh` of a run's YAML file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field, model_validator

from policy.mesh.axes import AXES, DEFAULT_RULES, DESCRIPTIONS, REPLICATED, UNUSED
from rl.config.schema import AnySection, Section, TypedField, with_keys
from rl.errors import Fault, Key


def _with_axes(**sizes: int) -> Callable[[type[AnySection]], type[AnySection]]:
    """Class decorator: adds a key for each axis of the mesh. `sizes`: defaults other than 1."""

    def complete(section: type[AnySection]) -> type[AnySection]:
        keys: dict[str, TypedField] = {
            axis: (int, Field(default=sizes.get(axis, 1), description=text))
            for axis, text in DESCRIPTIONS.items()
        }
        return with_keys(section, keys)

    return complete


@_with_axes()
class SliceOptions(Section):
    """How many times as large each axis is over several slices, which a slow network joins; -1
    takes all slices. Choose axes that communicate little: `data`, or `fsdp` where weights do not
    fit otherwise."""


@_with_axes(fsdp=-1)
class MeshOptions(Section):
    """Number of devices along each axis; -1 takes all that remain. See docs/meshes.md. The axes
    diloco, stage, fsdp_transpose, context_usp_ulysses, context_autoregressive, tensor_sequence and
    autoregressive of other frameworks may be set here to 1 device."""

    dcn: SliceOptions | None = Field(
        default=None,
        description="the same over slices, times those above; null: one slice, and TPUs in "
        "several are refused",
    )
    rules: dict[str, list[str]] = Field(
        default={}, description="logical axis: mesh axes, merged over the default rules"
    )
    shard_optimizer_over_data: bool = Field(
        default=False,
        description="moments and sums of gradients are sharded over `data` as well, where weights "
        "are replicated (ZeRO stage 1)",
    )
    shard_mode: Literal["auto", "explicit"] = Field(
        default="auto",
        description="auto: shardings are hints, and the partitioner decides; explicit: the "
        "decoder's shardings are types in training and scoring, where an operation that leaves "
        "its sharding open is an error (docs/meshes.md)",
    )
    sharding_tolerance: float = Field(
        default=0.02,
        ge=0.0,
        le=1.0,
        description="share of the weights that a mesh which shards weights may leave replicated; "
        "more is an error",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, values):
        """Axes that are not there, with one device."""
        if not isinstance(values, dict):
            return values
        for name in values.keys() & UNUSED.keys():
            if values[name] != 1:
                raise ValueError(
                    f"{name}: only 1 device is possible, got {values[name]}: {UNUSED[name]}"
                )
        return {name: value for name, value in values.items() if name not in UNUSED}

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}


def faults(mesh: MeshOptions) -> Iterator[Fault]:
    """Yields the faults of the sizes of axes and of the rules."""
    for where, section in ((("mesh",), mesh), (("mesh", "dcn"), mesh.dcn)):
        sizes = {} if section is None else {axis: getattr(section, axis) for axis in AXES}
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                yield Fault(
                    f"must be at least 1, or -1 for what is left, got {size}", key=(*where, axis)
                )
        if sum(size == -1 for size in sizes.values()) > 1:
            yield Fault(
                "only one axis can be -1"
                + (" (fsdp is, unless it is set)" if section is mesh else ""),
                key=where,
            )
    yield from rule_faults(mesh.rules, ("mesh", "rules"))


def rule_faults(rules: dict[str, list[str]], path: Key) -> Iterator[Fault]:
    """Yields the faults of the rules at `path`."""
    from rewards.suggest import nearest

    for logical, names in rules.items():
        if logical not in DEFAULT_RULES and logical not in REPLICATED:
            known = [*DEFAULT_RULES, *REPLICATED]
            yield Fault(f"no logical axis {logical}{nearest(logical, known)}", key=(*path, logical))
        for name in names:
            if name not in AXES and name not in UNUSED:
                yield Fault(f"no mesh axis {name}{nearest(name, AXES)}", key=(*path, logical))
