"""Lists the compiled programs of a run from its configuration alone.

No weights and no data are read, and a tokenizer only if the model depends on it. The programs are
those that the run compiles (rl/training/trainer.py, rl/training/reward_model.py,
rollout/engine/runner.py, rollout/engine/exact.py), at their largest shape: rows of `max_length`
tokens, all slots, the longest chunk of a prompt. A pool of pages is [K, R, N, P, D]: K heads, R
repeats of a stack, N pages, P tokens of a page, D head dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

import rl.stages
from policy.adapters.learning import Adapters
from policy.attention import window_kernel
from policy.attention.paged_attention import KERNELS
from policy.cache import pages
from policy.cache.pages import Pool
from policy.config import LayerSpec
from policy.execution.encoding import MediaEncoder, tower_params
from policy.experts.expert_shards import ExpertShards
from policy.media import Kind
from policy.mesh.sharding import Layout
from policy.model import Graph
from policy.ops.host_memory import on_a_device
from policy.programs.scoring import Scorer
from rl.accounting.program_names import GENERATOR, ProgramName
from rl.config.run import RunConfig
from rl.config.stage import StageOptions
from rl.run import build
from rl.stages import scorers
from rl.stages.sharing import full_rows
from rl.stages.stage import Program, StageKind
from rl.training.media.tables import planned_rows
from rollout.engine.exact import CHECKS, Verifier
from rollout.engine.runner import ModelRunner, Widths, program_inputs
from rollout.engine.scheduler import prefill_lengths
from rollout.engine.weights import RolloutWeights


@dataclass(frozen=True)
class Planned:
    """One program of a stage.

    shape: shape of its input arrays. resident: bytes per device that the run always keeps.
    non_argument: resident bytes that are not arguments of the program. times: runs per step.
    trip_count: iterations of the outermost loop, whose length the device computes (micro-batches
    that hold tokens), each with `micro_rows` rows; None: all. dispatch: most steps of one run of a
    multi-step decode; `times` and counts are per step. kernels and occupancy: as in rl/plan/hlo.py.
    graph: the model that it computes. teacher: a further model, whose forward pass it contains.
    adapters, gradient, stepped, optimizer_operations, notes: as in Program (rl/stages/stage.py).
    """

    stage: str
    kind: str
    shape: tuple[int, ...]
    lower: Callable[[], jax.stages.Lowered]
    resident: int
    non_argument: int
    times: float
    trip_count: int = 1
    micro_rows: int | None = None
    dispatch: int = 1
    kernels: Mapping[str, int] = field(default_factory=dict)
    occupancy: float = 1.0
    graph: Graph | None = None
    teacher: Graph | None = None
    adapters: Adapters | None = None
    gradient: int = 0
    stepped: int = 0
    optimizer_operations: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def rows_at_once(self) -> int:
        """Returns the rows of one iteration."""
        return self.micro_rows or self.shape[0]

    @property
    def name(self) -> str:
        """Returns the name of the program in a plan."""
        return f"{self.stage}: {self.kind}"


def programs(config: RunConfig, mesh: Layout, memory: float | None) -> Iterator[Planned]:
    """Yields all programs of the run, stage by stage. `memory`: bytes of a device, None if unknown.

    Raises what rl.run.build raises for an impossible model or mesh.
    """
    for stage, sampling in stages(config, mesh, memory):
        yield from planned(stage, sampling)
        if sampling and sampling.used_by(stage):
            for each in sampling.programs(stage):
                graph = stage.graph if each.kind in CHECKS else sampling.decoding
                yield replace(each, graph=graph, occupancy=_occupancy(graph, each))


def stages(
    config: RunConfig, mesh: Layout, memory: float | None
) -> Iterator[tuple[PlannedStage, Sampling | None]]:
    """Yields each stage, and the generator, which exists from the first stage on that samples or
    evaluates."""
    graph = build.graph(config, mesh)
    sampling = None
    for stage in rl.stages.create(config):
        stage.bind(graph)
        if M := planned_rows(config):
            stage.table_shapes = MediaEncoder(graph).abstract(M)
        stage.scorers = scorers.abstract_scorers(
            config, stage.rewards, graph, stage.trainer.sharing
        )
        planned_stage = PlannedStage(stage, graph)
        if sampling is None and (
            stage.calls_generator or (config.evaluation and stage.trains_policy)
        ):
            sampling = Sampling(config, planned_stage, memory)
        yield planned_stage, sampling


def planned(own: PlannedStage, sampling: Sampling | None) -> Iterator[Planned]:
    """Yields the programs of a step other than the generator's, with the bytes that the run keeps
    meanwhile."""
    stage = own.stage
    routes = sampling.routes if sampling and stage.options.router_replay else None
    for each in (
        *_encoding(stage),
        *stage.programs(routes, build.generator_options(own.stage.config).record_values),
        *_reward_models(stage),
    ):
        resident = own.bytes
        if sampling:
            resident += sampling.rollout_bytes if each.rollout_memory else sampling.bytes
        other = resident - on_a_device(each.resident)
        loop = {"trip_count": each.trip_count, "micro_rows": each.micro_rows}
        models = {"graph": each.graph, "teacher": each.teacher, "notes": each.notes}
        made = Planned(
            own.name,
            each.kind,
            each.shape,
            each.lower,
            resident,
            other,
            each.times,
            **loop,
            **models,
            adapters=each.adapters,
            gradient=each.gradient,
            stepped=each.stepped,
            optimizer_operations=each.optimizer_operations,
        )
        yield replace(made, occupancy=_occupancy(each.graph, made))


def _encoding(stage: StageKind) -> Iterator[Program]:
    """Yields the program that encodes pictures, or sounds, each with as many rows as one row of
    data may have."""
    if (table := stage.table_shapes) is None:
        return
    encoder = MediaEncoder(stage.trainer.graph)
    most = stage.config.model.media_rows
    kind: Kind = "audio" if encoder.graph.config.image is None else "image"
    assert most is not None  # without it a plan has no table
    N = encoder.spec(kind).largest_inputs(most)
    R = encoder.items_per_call(N)
    params = tower_params(stage.trainer.policy_params(stage.abstract()))

    def lower() -> jax.stages.Lowered:
        return encoder.lower(params, table, kind, N)

    times = -(-stage.options.prompts_per_step // R)
    yield Program(
        ProgramName.ENCODING, (R, N), lower, encoder.graph, (params, stage.table_shapes), times
    )


def _reward_models(stage: StageKind) -> Iterator[Program]:
    """Yields the programs of reward models, on full rows of all completions of a step."""
    completions = (
        stage.options.prompts_per_step * stage.options.samples_per_prompt * stage.calls_generator
    )
    for source, scorer in stage.scorers.items():
        shape, lower = scorer.lowered(stage.config.max_length)
        times = -(-full_rows(stage, scorer.sharing, completions) // shape[0])
        yield Program(
            scorers.program_name(source),
            shape,
            lower,
            scorer.graph,
            scorer.abstract,
            times,
            rollout_memory=True,
        )


def _occupancy(graph: Graph, planned: Planned) -> float:
    """Returns the mean share of the rows of grouped products that hold a token."""
    moe = next((layer.moe for layer in graph.config.layers if layer.moe), None)
    if moe is None or len(planned.shape) < 2:
        return 1.0
    length = 1 if planned.kind == ProgramName.DECODE else planned.shape[1]
    return ExpertShards(
        moe, graph.runtime, (planned.rows_at_once, length, graph.config.hidden_size)
    ).expected.filled


@dataclass
class PlannedStage:
    """A stage with a full batch. `bytes`: of its state, its reward models and its teacher, per
    device."""

    stage: StageKind
    graph: Graph

    def __post_init__(self):
        self.state = self.stage.abstract()
        self.bytes = on_a_device(self.state) + on_a_device(self.stage.frozen())

    @property
    def name(self) -> str:
        """The name of the stage in the run."""
        return self.stage.name

    @property
    def calls_generator(self) -> bool:
        """Whether a step calls the generator."""
        return self.stage.calls_generator

    @property
    def options(self) -> StageOptions:
        return self.stage.options

    def with_options(self, options: StageOptions) -> PlannedStage:
        """Returns the stage with other rows of a micro-batch; the state is the same."""
        other = copy.copy(self)
        other.stage = self.stage.with_options(options)
        return other


class Sampling:
    """The programs of the generator, with a cache of all slots and copies of weights, and of the
    exact check."""

    def __init__(self, config: RunConfig, first: PlannedStage, memory: float | None):
        """Builds the runner. `first`: the stage from which on the generator exists. `memory`: bytes
        of a device."""
        self.config = config
        self.graph = first.graph
        self._listed_with = (
            None
            if any(rl.stages.kind_of(each).trains_on_rollouts for each in config.stages)
            else first.name
        )
        asked = build.generator_options(config)
        self._weights = RolloutWeights.from_options(self.graph, asked)
        self._copy = self._weights.abstract if self._weights else {}
        left = None if memory is None else memory - first.bytes - on_a_device(self._copy)
        self._runner = ModelRunner(
            self.graph, asked, build.slots(config, self.graph.layout), config.max_length, left
        )
        self.cache = self._runner.abstract_cache
        read = self._runner.decoding_weights
        copied = read.abstract(self.graph.abstract | self._copy) if read else {}
        self._decoded = {
            path: weight for path, weight in copied.items() if isinstance(weight, tuple)
        }
        self._prefills_completions = asked.prefills_completions
        self._verifier = None
        if asked.exact:
            scorer = Scorer(self.graph)
            kept = asked.record_kept
            self._verifier = Verifier(scorer, config.seed, stop_string=None, max_kept=kept)
        self._drops_copy = bool(self._weights and self._weights.reshards)
        # Bytes per device while rollouts run, and bytes that stay.
        self.rollout_bytes = on_a_device((self.cache, self._copy, self._decoded))
        self.bytes = self.rollout_bytes - on_a_device(
            (self._copy if self._drops_copy else {}, self._decoded)
        )

    @property
    def decoding(self) -> Graph:
        """Returns the graph that the programs of the generator compute."""
        return self._runner.graph

    @property
    def routes(self) -> dict:
        """Returns the shapes of the routes of one token, as in Batch.routes."""
        runner = self._runner
        width = runner.geometry.table_width
        pages = None if width is None else np.zeros(width, np.int32)
        shapes = jax.eval_shape(runner.executables["routes"].jitted, self.cache, np.int32(0), pages)
        return {path: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for path, a in shapes.items()}

    def used_by(self, stage: PlannedStage) -> bool:
        """Whether `stage` lists the programs: a stage that samples, or the first that evaluates if
        none samples."""
        return stage.calls_generator or self._listed_with == stage.name

    def programs(self, stage: PlannedStage) -> Iterator[Planned]:
        """Yields the largest program of each kind."""
        runner = self._runner
        options = stage.options
        held = stage.bytes + self.rollout_bytes
        slots = runner.geometry.slots
        P = options.prompts_per_step
        weights = stage.stage.trainer.policy_params(stage.state)
        prompts = max(2, self.config.max_length - options.sampling.max_new_tokens)
        if self._weights and self._copy:
            yield self._copying(self._weights, stage, held)
        params = weights | self._copy
        P *= stage.calls_generator  # a step excludes evaluations
        steps = options.sampling.max_new_tokens * -(-P * options.samples_per_prompt // slots)
        longest = self.config.max_length if self._prefills_completions else prompts
        lengths = {
            "prefill": prefill_lengths(longest - 1, runner.chunk)[-1],
            "extend": runner.chunk,
        }
        media = () if stage.stage.table_shapes is None else (len(stage.stage.table_shapes.rows),)
        turned = bool(media) and self.graph.config.has_sections
        for (name, *shape), arguments in program_inputs(runner, params, longest, [Widths()], media):
            dispatch = 1
            if name == "decode" and shape[0] == slots and (len(shape) == 3) == turned:
                times = steps
                dispatch = min(runner.decode_steps, options.sampling.max_new_tokens)
            elif name in lengths and shape == [
                runner.max_prefill_rows,
                lengths[name] + runner.lookahead_tokens,
                *media,
            ]:
                chunks = -(-prompts // runner.chunk)
                times = P * (1 if name == "prefill" else chunks - 1) / shape[0]
            else:
                continue
            lower = partial(runner.executables[name].lower, *arguments)
            kernels = self._read_by_kernels() if runner.geometry.paged else {}
            kind = GENERATOR.get(name, name)
            often = {"times": times, "dispatch": dispatch}
            stays = held - on_a_device(arguments[:2])  # weights and cache
            yield Planned(
                stage.name, kind, tuple(shape), lower, held, stays, **often, kernels=kernels
            )
        if self._verifier:
            yield from self._checks(self._verifier, stage, weights, P * options.samples_per_prompt)

    def _checks(
        self, verifier: Verifier, stage: PlannedStage, weights: dict, completions: int
    ) -> Iterator[Planned]:
        """Yields the longest programs that check so many exact completions of full length, without
        a replaced token."""
        held = stage.bytes + self.rollout_bytes
        L = verifier.scorer.lengths(self.config.max_length)[-1]
        for kind, arguments in verifier.program_inputs(weights, L).items():
            lower = partial(verifier.executables[kind].lower, *arguments)
            times = -(-completions // verifier.scorer.rows(L))
            yield Planned(
                stage.name,
                kind,
                arguments[1].shape,
                lower,
                held,
                held - on_a_device(weights),
                times,
            )

    def _read_by_kernels(self) -> dict[str, int]:
        """Returns the bytes that each decode kernel reads of one layer with full pages: of all
        pages, or of those of the largest window. Its operand is the pool."""
        sizes: dict[str, int] = {}
        for stack, parts in zip(self.graph.config.stacks, self.cache, strict=True):
            for spec, arrays in (
                pair for part in parts for pair in zip(stack.pattern, part, strict=True)
            ):
                for kernel, names in KERNELS.items():
                    pools = [
                        arrays[name].array for name in names if isinstance(arrays.get(name), Pool)
                    ]
                    layers = [on_a_device(pool) // pool.shape[1] for pool in pools]
                    if kernel == window_kernel.NAME:
                        layers = [
                            int(size * self._seen(spec, pool))
                            for size, pool in zip(layers, pools, strict=True)
                        ]
                    sizes[kernel] = max(sizes.get(kernel, 0), sum(layers))
        return {kernel: size for kernel, size in sizes.items() if size}

    def _seen(self, layer: LayerSpec, pool_KRNPD: jax.ShapeDtypeStruct) -> float:
        """Returns the share of a layer's pages that the tokens of all slots see; 0 for a layer
        without a window."""
        geometry, (_, _, N, P, _) = self._runner.geometry, pool_KRNPD.shape
        lookback = None if layer.attention is None else layer.attention.lookback
        if lookback is None or geometry.table_width is None:
            return 0.0
        return geometry.slots * min(pages.visible_columns(lookback, 1, P), geometry.table_width) / N

    def _copying(self, copies: RolloutWeights, stage: PlannedStage, held: int) -> Planned:
        """Returns the program that makes the copies: in place, or new at each step if they were
        released."""
        weights = stage.stage.trainer.policy_params(stage.state)
        params = {path: weights[path] for path in copies.paths}
        lower = lambda: copies.lower(params, again=not self._drops_copy)  # noqa: E731
        kind, times = (
            (ProgramName.RESHARD, int(stage.calls_generator))
            if self._drops_copy
            else (ProgramName.QUANTISED_COPY, stage.options.updates_per_step)
        )
        return Planned(
            stage.name,
            kind,
            (len(params),),
            lower,
            held,
            held - on_a_device((params, self._copy)),
            times,
        )
