"""The compiled programs of a run, from its configuration alone: no weights, no data, and no tokenizer but where the model depends
on it.

Each is what the run itself compiles (rl/trainer.py, rollout/programs.py), for the largest shape that it has: rows as long as
`max_length`, all slots, the longest chunk of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import rl.algorithms
from policy.model import Graph
from policy.sharding import Layout
from rl import build
from rl.batch import Batch, padded_length
from rl.config import RunConfig, StageOptions
from rl.rewardmodel import RewardModelTrainer
from rl.trainer import Trainer
from rollout.generator import GeneratorOptions
from rollout.programs import Programs, stop_width
from rollout.speculative import SpeculativePrograms


@dataclass(frozen=True)
class Planned:
    """One program. `holds`: parts of the run's memory that are among its arguments; `stays`: bytes on each device of those that lie
    beside it while it runs. `times`: how often it runs in a step. `turns`: of its outermost loop, whose number the device finds:
    micro-batches that hold anything, tokens of a dispatch."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    holds: frozenset[str]
    stays: int
    times: float
    turns: int = 1


def programs(config: RunConfig, mesh: Layout, memory: float | None) -> Iterator[Planned]:
    """All programs of the run, stage by stage. `memory`: bytes of a device, None where it is not known.

    Raises what rl.build does for a model or mesh that cannot be.
    """
    graph, sampled = build.graph(config, mesh), None
    for name, options in zip(config.stage_names, config.stages, strict=True):
        algorithm = rl.algorithms.get(options.algorithm.name, **options.algorithm.model_extra)
        kind = RewardModelTrainer if algorithm.needs_scores else Trainer
        stage = _Stage(config, name, options, kind(graph, options, algorithm, config.seed))
        if algorithm.needs_rollouts and sampled is None:
            sampled = _Sampling(config, graph, options, None if memory is None else memory - stage.bytes)
        cache = sampled.bytes if sampled else 0
        yield from stage.programs(cache)
        if algorithm.needs_rollouts:
            yield from sampled.programs(name, options, stage.resident)


def on_a_device(tree) -> int:
    """Bytes of abstract arrays in the memory of each device; those in host memory count nothing."""

    def size(array) -> int:
        place = array.sharding
        if place is not None and getattr(place, "memory_kind", None) == "pinned_host":
            return 0
        shape = array.shape if place is None else place.shard_shape(array.shape)
        return math.prod(shape) * array.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


class _Stage:
    """The trainer of a stage on a batch as full as one can be."""

    def __init__(self, config: RunConfig, name: str, options: StageOptions, trainer: Trainer):
        self.config, self.name, self.options, self.trainer = config, name, options, trainer
        self.state = trainer.abstract()
        parts = {"policy": self.state.policy, "reference": self.state.reference, "critic": self.state.critic}
        self.resident = {part: on_a_device(arrays) for part, arrays in parts.items()}
        self.bytes = sum(self.resident.values())

    def programs(self, cache: int) -> Iterator[Planned]:
        """`cache`: bytes of the generator's, which lies beside."""
        trainer, options, algorithm = self.trainer, self.options, self.trainer.algorithm
        batch, R = self._batch()
        turns = batch.tokens.shape[0] // R
        params, updates = self.state.policy.params, options.updates_per_step
        inputs = jax.eval_shape(trainer._totals, batch, None)
        if self.state.critic is not None:
            beside = trainer._critic.beside(params)
            given = self.state.critic, batch, inputs, beside
            lower = lambda: trainer.critic.program.lower(*given, micro_rows=R)  # noqa: E731
            yield self._planned("update of the critic", lower, {"critic"}, cache, updates, turns)
        if not algorithm.needs_scores:
            lower = lambda: trainer.policy.program.lower(self.state.policy, batch, inputs, {}, micro_rows=R)  # noqa: E731
            yield self._planned("update", lower, {"policy"}, cache, updates, turns)
        passes = turns * updates
        micro = jax.tree.map(lambda a: jax.ShapeDtypeStruct((R, *a.shape[1:]), a.dtype), batch)
        given = micro.tokens, micro.segments, micro.routes
        scored = [part for part, needed in self._scored() if needed]
        if scored:
            lower = lambda: trainer._logprobs.lower(params, *given)  # noqa: E731
            yield self._planned("log-probabilities", lower, {"weights"}, cache, passes * len(scored))
        if self.state.critic is not None and algorithm.needs_rollouts:
            both = trainer._critic.beside(params) | self.state.critic.params
            lower = lambda: trainer._values.lower(both, *given)  # noqa: E731
            yield self._planned("values", lower, {"critic weights"}, cache, passes)

    def _scored(self):
        """(whose log-probabilities, whether they are computed before the updates)."""
        algorithm, rollouts = self.trainer.algorithm, self.trainer.algorithm.needs_rollouts
        old = rollouts and algorithm.needs_old_logp(self.options.updates_per_step)
        yield "policy", old and (algorithm.needs_entropy or not self.config.generator.exact)
        yield "reference", self.state.reference is not None

    def _planned(self, name: str, lower, holds: set[str], cache: int, times: float, turns: int = 1) -> Planned:
        sizes = self.resident | {"weights": on_a_device(self.state.policy.params)}
        if self.state.critic is not None:
            sizes["critic weights"] = on_a_device(self.state.critic.params)
        held = sum(sizes[part] for part in holds)
        return Planned(f"{self.name}: {name}", lower, frozenset(holds), self.bytes + cache - held, times, turns)

    def _batch(self) -> tuple[Batch, int]:
        """(a packed batch of one update, abstract; rows of a micro-batch)."""
        options, algorithm = self.options, self.trainer.algorithm
        limit = self.config.max_length * (2 if algorithm.needs_pairs else 1)
        N = options.prompts_per_step // options.updates_per_step
        N *= options.samples_per_prompt if algorithm.needs_rollouts else 1
        T = padded_length(limit, limit)
        place, R = self.trainer.layout(np.ones((N, T), np.int32))
        shape = place.shape

        def floats():
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        def ids():
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        found = {"tokens": ids(), "segments": ids(), "mask": floats(), "prompt": ids()}
        if algorithm.needs_rollouts:
            found |= {"sampler_logp": floats(), "advantages": floats()}
            if algorithm.needs_old_logp(options.updates_per_step) or self.config.generator.exact:
                found["old_logp"] = floats()
            if algorithm.needs_entropy:
                found["entropy"] = floats()
        if self.state.reference is not None:
            found["ref_logp"] = floats()
        if self.state.critic is not None and algorithm.needs_rollouts:
            found |= {"old_values": floats(), "returns": floats(), "correct": floats()}
        if algorithm.needs_pairs:
            found["margin"] = floats()
        return Batch(**found), R


class _Sampling:
    """The generator's programs over a cache of all slots."""

    def __init__(self, config: RunConfig, graph: Graph, options: StageOptions, left: float | None):
        """`left`: bytes of a device that weights and optimizer leave."""
        self.config, self.graph = config, graph
        wanted = config.generator.model_dump(exclude={"slots", "strict_shapes"})
        replay = any(stage.router_replay for stage in config.stages)
        asked = GeneratorOptions(**wanted, record_routes=replay)
        kind = SpeculativePrograms if asked.speculative else Programs
        self._programs = kind(graph, asked, config.generator.slots, config.max_length, left)
        self.cache = self._programs.abstract_cache
        self.bytes = on_a_device(self.cache)

    def programs(self, stage: str, options: StageOptions, resident: dict[str, int]) -> Iterator[Planned]:
        """The largest of each kind. `resident`: bytes of what the trainer keeps."""
        made, P = self._programs, options.prompts_per_step
        prompts = max(2, self.config.max_length - options.sampling.max_new_tokens)
        places = self.graph.shardings
        params = {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=places[path]) for path, a in self.graph.shapes.items()}
        weights = on_a_device(params)
        steps = options.sampling.max_new_tokens * -(-P * options.samples_per_prompt // made.slots)
        for key, arguments in made.listed(params, prompts, [stop_width(1)]):
            name = key[0]
            if name not in ("decode", "prefill", "extend") or (name == "decode" and key[1] != made.slots):
                continue
            if name != "decode" and key[1:] != (made.most_prompts, made.prefill_lengths(prompts)[-1] + made.ahead):
                continue
            times = steps if name == "decode" else P * -(-prompts // made.chunk) / key[1]
            label = {"decode": "decode a token", "prefill": "prefill", "extend": "prefill, further chunk"}[name]
            lower = lambda name=name, arguments=arguments: made.lower(name, arguments)  # noqa: E731
            yield Planned(f"{stage}: {label}", lower, frozenset({"weights", "cache"}), sum(resident.values()) - weights, times)
