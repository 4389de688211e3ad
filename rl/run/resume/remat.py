"""Chooses, from the memory of a device, the policy of `model.remat: auto` and how many logits are
kept (`model.kept_logits_mib`). Nothing is compiled.

Resident bytes (weights, moments, references, the generator's cache) follow from shapes and
sharding. Activations of a micro-batch are estimated by rl/accounting/activations.py. The first
policy of ORDER with which all updates fit is chosen.

A run chooses when it first starts and keeps its choice, also on devices with other memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax

import rl.stages
from policy.attention.block_attention import SHORTEST_FLAT
from policy.heads.head import kept_logits_mib
from policy.mesh import processes
from policy.mesh.device_memory import GIB, total_memory
from policy.mesh.sharding import Layout
from policy.model import Graph
from policy.ops.host_memory import on_a_device, shard_bytes
from rl.accounting.activations import Activations, kept_logits
from rl.config.model import ModelOptions
from rl.config.run import RunConfig
from rl.run import build
from rl.run.resume.continued import AUTO, unchosen, with_model_keys
from rl.stages.shapes import abstract_rows
from rl.stages.stage import StageKind
from rollout.engine.runner import ModelRunner
from rollout.engine.weights import RolloutWeights

if TYPE_CHECKING:
    from rl.stages.stage import StageState

# From the one that computes least again to the one that keeps least (docs/memory.md).
ORDER = ("none", "minimal_flash", "save_dot_with_context_except_mlp", "full")
# The share of a device's memory that the estimate may fill, by platform. jax takes three quarters
# of a GPU; a CPU has the data, the workers of rewards and other programs in its memory as well.
SHARES = {"tpu": 0.8, "gpu": 0.6, "cpu": 0.5}


class UpdateMemory(NamedTuple):
    """Bytes per device during the updates of a stage. fixed: everything but the values that are
    kept for the backward pass. kept: those, by policy."""

    fixed: float
    kept: Mapping[str, float]

    def needs(self, policy: str) -> float:
        return self.fixed + self.kept[policy]


@dataclass(frozen=True)
class RematChoice:
    """A policy, the bytes per device that it keeps and that the run then needs, and the bytes of a
    device. An unknown number of bytes is None."""

    policy: str
    kept: float
    needs: float
    memory: float | None

    def __str__(self) -> str:
        what = (
            f"{self.kept / GIB:.2f} GiB of activations, {self.needs / GIB:.2f} GiB with all else "
            "that an update needs"
        )
        of = "unknown memory" if self.memory is None else f"{self.memory / GIB:.2f} GiB"
        return (
            f"model.remat: auto takes `{self.policy}`: by the estimate {what}, of {of} per device"
        )


def choose(updates: Sequence[UpdateMemory], available: float | None, platform: str) -> RematChoice:
    """Returns the first policy with which all updates fit, else the last one, as for unknown
    memory. available: bytes of a device."""
    allowed = 0.0 if available is None else SHARES.get(platform, SHARES["gpu"]) * available
    policies = [name for name in ORDER if all(name in each.kept for each in updates)]
    fitting = (name for name in policies if all(each.needs(name) <= allowed for each in updates))
    policy = next(fitting, policies[-1])
    largest = max(updates, key=lambda each: each.needs(policy))
    return RematChoice(policy, largest.kept[policy], largest.needs(policy), available)


def chosen(config: RunConfig, mesh: Layout, available: float | None = None) -> RematChoice:
    """Returns the choice for the devices of a mesh. available: bytes of a device; None: as its kind
    or this machine says.

    Raises what `rl.run.build.graph` raises for an impossible model or mesh.
    """
    graph = build.graph(config, mesh)
    if available is None:
        available = memory_of(mesh)
    return choose(updates(config, graph, available), available, mesh.platform)


def memory_of(mesh: Layout) -> float | None:
    """Returns the least memory of a device of the mesh, in bytes; None: unknown."""
    own = total_memory(mesh.mesh.devices.flat)
    known = [size for size in processes.all_gather_object(own) if size is not None]
    return min(known, default=None)


def with_kept_logits(config: RunConfig, available: float | None) -> RunConfig:
    """Returns the configuration with `model.kept_logits_mib`: if it is not set, what the head would
    choose on a device with so many bytes of memory."""
    if config.model.kept_logits_mib is not None:
        return config
    most = 0 if config.model.num_vocab_tiling is not None else kept_logits_mib(available)
    return with_model_keys(config, kept_logits_mib=most)


def updates(config: RunConfig, graph: Graph, available: float | None) -> list[UpdateMemory]:
    """Estimates the memory of the updates of each stage. available: bytes of a device."""
    result = []
    cache = None
    for stage in rl.stages.create(config):
        stage.bind(graph)
        state = stage.abstract()
        resident = on_a_device(state) + on_a_device(stage.frozen())
        if cache is None and (stage.calls_generator or (config.evaluation and stage.trains_policy)):
            cache = _generator_bytes(config, graph, available, resident)
        result.append(_update(stage, state, resident + (cache or 0), config.model.host_parameters))
    return result


def _generator_bytes(
    config: RunConfig, graph: Graph, available: float | None, resident: int
) -> int:
    """Returns the bytes of the generator's cache and of its copies of weights."""
    options = build.generator_options(config)
    weights = RolloutWeights.from_options(graph, options)
    copied = on_a_device(weights.abstract if weights else {})
    left = None if available is None else max(0.0, available - resident - copied)
    slots = build.slots(config, graph.layout)
    runner = ModelRunner(graph, options, slots, config.max_length, left or 0.0)
    return copied + on_a_device(runner.abstract_cache)


def _update(stage: StageKind, state: StageState, resident: int, hosted: bool) -> UpdateMemory:
    graph = stage.trainer.graph
    tokens, length = _micro_batch(stage)
    tokens /= graph.layout.num_row_shards
    sizes = Activations(graph)
    # The sum over micro-batches, and the gradient of one.
    gradients = 2 * sum(4 * shard_bytes(a) // a.dtype.itemsize for a in _trained(state))
    # Logits are kept until the gradient of the head; that of the layers comes after it.
    logits = kept_logits(graph, tokens)
    if "teacher" in stage.inputs and stage.trainer.teacher.compares_vocabulary:
        logits += kept_logits(graph, tokens, sides=2)
    largest = max(tokens * sizes.working(length), logits)
    fixed = resident + gradients + largest + sizes.head(tokens)
    policies = ORDER[1:] if hosted else ORDER  # `none` would keep the fetched weights
    return UpdateMemory(fixed, {name: tokens * sizes.kept(name, length) for name in policies})


def _micro_batch(stage: StageKind) -> tuple[float, int]:
    """Returns (the most tokens of a micro-batch, the length of its rows that keeps most)."""
    updates = stage.options.updates_per_step
    rows = abstract_rows(stage, updates)
    bounds = stage.trainer.row_bounds(
        stage.rows_per_update, stage.row_length, stage.trainer.sharing
    )
    tokens = max(rows.micro_rows * rows.shape[1], bounds.micro_tokens or 0, bounds.stretched)
    # Of rows that keep the scores of attention the longest keep most.
    return tokens, max(bounds.limit, min(bounds.longest, SHORTEST_FLAT - 1))


def _trained(state: StageState) -> list[jax.Array]:
    """Returns the weights of all groups that learn."""
    groups = (getattr(state, name, None) for name in ("policy", "critic", "projections"))
    return [array for group in groups if group is not None for array in group.params.values()]


def resolved(config: RunConfig, asked: ModelOptions) -> tuple[RunConfig, list[str]]:
    """Returns (the configuration with all that the run chooses on its devices, notes on it).

    asked: the section `model` before a continued run took what it chose when it began. It keeps
    that, also where it would choose otherwise now.
    """
    if not (keys := unchosen(asked)):
        return config, []
    mesh = build.on_mesh(config)
    available = memory_of(mesh)
    notes = []
    if "kept_logits_mib" in keys:
        config, note = _kept_logits(config, available)
        notes += note
    if "remat" in keys:
        config, note = _remat(config, mesh, available)
        notes += note
    return config, notes


def _kept_logits(config: RunConfig, available: float | None) -> tuple[RunConfig, list[str]]:
    """Returns (the configuration with the MiB of logits that are kept, notes on it)."""
    own = config.model.kept_logits_mib
    if config.model.num_vocab_tiling is not None or available is None:
        return with_kept_logits(config, available), []
    most = kept_logits_mib(available)
    share = f"a sixteenth of the {int(available // GIB)} full GiB of a device"
    if own is None:
        return with_kept_logits(config, available), [f"model.kept_logits_mib is {most}, {share}"]
    if own == most:
        return config, []
    return config, [
        f"the run keeps `model.kept_logits_mib: {own}` of its start; it would be {most} now, "
        f"{share}"
    ]


def _remat(config: RunConfig, mesh: Layout, available: float | None) -> tuple[RunConfig, list[str]]:
    """Returns (the configuration with the policy that `auto` takes, notes on it)."""
    choice = chosen(config, mesh, available)
    if config.model.remat == AUTO:
        return with_model_keys(config, remat=choice.policy), [str(choice)]
    if config.model.remat == choice.policy:
        return config, []
    return config, [f"the run keeps `model.remat: {config.model.remat}` of its start. {choice}"]
