"""The compiled programs of a run, from its configuration alone: no weights, no data, and no tokenizer but where the model depends
on it.

Each is what the run itself compiles (rl/training/trainer.py, rl/training/reward_model.py, rollout/engine/programs.py, rollout/engine/exact.py), for the largest
shape that it has: rows as long as `max_length`, all slots, the longest chunk of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

import rl.algorithms
from policy.attention.paged_attention import KERNELS
from policy.experts.expert_parallel import Cut
from policy.heads.scoring import Scorer
from policy.mesh.host_memory import on_a_device
from policy.mesh.sharding import Layout
from policy.model import Graph
from rl.config.run import RunConfig
from rl.plan.changes import needs_rollouts
from rl.reporting.program_memory import GENERATOR, RESHARD, judged
from rl.run import build
from rl.training.batch import Batch, padded_length
from rl.training.reward_model import RewardModelTrainer
from rl.training.trainer import Trainer
from rollout.engine.exact import CHECKS, Verifier
from rollout.engine.programs import Programs, stop_width
from rollout.engine.speculative import SpeculativePrograms
from rollout.engine.weights import RolloutWeights


@dataclass(frozen=True)
class Planned:
    """One program of a stage.

    shape: of the arrays that it computes on. resident: bytes per device that the run keeps all the time; non_argument: the
    part of these that is not an argument of the program. times: runs per step. trip_count: of its outermost loop, whose
    length the device computes (micro-batches that hold anything). dispatch: most steps of one run of a multi-step decode;
    `times` and counts are per step. kernels and occupancy: as in rl/plan/hlo.py.
    """

    stage: str
    kind: str
    shape: tuple[int, ...]
    lower: Callable[[], jax.stages.Lowered]
    resident: int
    non_argument: int
    times: float
    trip_count: int = 1
    dispatch: int = 1
    kernels: Mapping[str, int] = field(default_factory=dict)
    occupancy: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.stage}: {self.kind}"


def programs(config: RunConfig, mesh: Layout, memory: float | None) -> Iterator[Planned]:
    """All programs of the run, stage by stage. `memory`: bytes of a device, None where it is not known.

    Raises what rl.run.build does for a model or mesh that cannot be.
    """
    for stage, sampling in stages(config, mesh, memory):
        cache = sampling.bytes if sampling else 0
        for each in stage.programs(cache, sampling.routes if sampling and stage.options.router_replay else None):
            yield replace(each, occupancy=_occupancy(stage.trainer.graph, each))
        for each in stage.scores(sampling.rolling if sampling else 0):
            yield replace(each, occupancy=_occupancy(stage.judges[each.kind].graph, each))
        if sampling and sampling.used_by(stage):
            for each in sampling.programs(stage):
                graph = stage.trainer.graph if each.kind in CHECKS else sampling.decoding
                yield replace(each, occupancy=_occupancy(graph, each))


def stages(config: RunConfig, mesh: Layout, memory: float | None) -> Iterator[tuple[Stage, Sampling | None]]:
    """Each stage, and the generator, which lies beside it from the first stage on that samples or evaluates."""
    graph, sampling = build.graph(config, mesh), None
    for name, options in zip(config.stage_names, config.stages, strict=True):
        algorithm = rl.algorithms.get(options.algorithm.name, **options.algorithm.model_extra)
        kind = RewardModelTrainer if algorithm.needs_scores else Trainer
        stage = Stage(config, name, kind(graph, options, algorithm, config.seed))
        if sampling is None and (algorithm.needs_rollouts or (config.evaluation and not algorithm.needs_scores)):
            sampling = Sampling(config, stage, memory)
        yield stage, sampling


def _occupancy(graph: Graph, planned: Planned) -> float:
    """Share of the rows of its grouped products that hold a token in the mean."""
    moe = next((layer.moe for layer in graph.config.layers if layer.moe), None)
    if moe is None or len(planned.shape) < 2:
        return 1.0
    length = 1 if planned.kind == GENERATOR["decode"] else planned.shape[1]
    return Cut(
        moe, graph.runtime, (planned.shape[0] // planned.trip_count, length, graph.config.hidden_size)
    ).usually.filled


class Stage:
    """The trainer of a stage on a batch as full as one can be, and the reward models that lie beside it, by what their programs are
    called."""

    def __init__(self, config: RunConfig, name: str, trainer: Trainer):
        self.config, self.name, self.options, self.trainer = config, name, trainer.stage, trainer
        self.state = trainer.abstract()
        self.samples = needs_rollouts(trainer.stage)
        asked = self.samples or (config.evaluation and not trainer.algorithm.needs_scores)
        found = build.planned_reward_model_scorers(config, trainer.stage, trainer.graph) if asked else {}
        self.judges = {judged(source): judge for source, judge in found.items()}
        self.bytes = on_a_device(self.state) + sum(on_a_device(judge.abstract) for judge in found.values())

    def programs(self, cache: int, routes: dict | None) -> Iterator[Planned]:
        """`cache`: bytes of the generator's, which lies beside. `routes`: Batch.routes of one token, abstract."""
        trainer, options, algorithm = self.trainer, self.options, self.trainer.algorithm
        params, updates = self.state.policy.params, options.updates_per_step
        (rows, T), R = self._rows(updates)
        batch, turns = self._batch((rows, T), routes), rows // R
        controls = {name: jax.ShapeDtypeStruct((), np.float32) for name in getattr(algorithm, "controls", {})}
        inputs = jax.eval_shape(trainer._totals, batch, controls or None)

        def planned(kind: str, *given, resident, times: float, turns: int = 1, **static) -> Planned:
            lower = lambda: trainer.executables[kind].lower(*given, **static)  # noqa: E731
            held, shape = self.bytes + cache, given[1].shape if hasattr(given[1], "shape") else (rows, T)
            return Planned(self.name, kind, shape, lower, held, held - on_a_device(resident), times, turns)

        how = {"times": updates, "turns": turns, "micro_rows": R}
        head = self.state.critic if trainer.policy.head else None
        if self.state.critic is not None and (head is None or algorithm.critic_warmup):
            given = self.state.critic, batch, inputs, trainer._critic.beside(params), None
            often = how if head is None else how | {"times": 0}  # in steps in which the policy stays, and nowhere else
            yield planned("update of the critic", *given, resident=(given[0], given[3]), **often)
        if not algorithm.needs_scores:
            resident = self.state.policy, head
            yield planned("update", self.state.policy, batch, inputs, {}, head, resident=resident, **how)
        # Scores are of all sequences of a step, before it is cut into updates.
        (rows, T), R = self._rows(1)
        micro, passes = self._batch((R, T), routes), rows // R
        given = micro.tokens, micro.segments, micro.routes
        exact = self.config.generator.exact
        scored = trainer.scores_first(exact=exact) + (self.state.reference is not None)
        if scored or (self.samples and algorithm.dynamic_batches and trainer.scores_stale(exact=exact)):
            yield planned("log-probabilities", params, *given, resident=params, times=passes * scored)
        sampled = trainer.values_while_sampling and build.generator_options(self.config).record_values
        if self.state.critic is not None and self.samples and (not sampled or algorithm.bootstrap_truncated):
            both = trainer._critic.beside(params) | self.state.critic.params
            given = *given[:2], micro.routes if trainer._critic.shared else None
            yield planned("values", both, *given, resident=both, times=passes)

    def scores(self, cache: int) -> Iterator[Planned]:
        """Those of reward models, on full rows of all completions of a step; `cache`: bytes of what the generator holds then."""
        T, held = self.config.max_length, self.bytes + cache
        N = (
            self.options.prompts_per_step * self.options.samples_per_prompt * self.samples
        )  # evaluations are no part of a step
        for kind, judge in self.judges.items():
            R, params = judge.rows(T), judge.abstract
            tokens = jax.ShapeDtypeStruct((R, T), jnp.int32)
            lower = lambda judge=judge, given=(params, tokens, tokens, None): judge.program.lower(*given)  # noqa: E731
            yield Planned(self.name, kind, (R, T), lower, held, held - on_a_device(params), -(-N // R))

    def _rows(self, parts: int) -> tuple[tuple[int, int], int]:
        """((packed rows, tokens of each) of one of so many equal parts of a step, rows of a micro-batch)."""
        options, pairs = self.options, self.trainer.algorithm.needs_pairs
        limit = self.config.max_length * (2 if pairs else 1)
        N = options.prompts_per_step // parts * (options.samples_per_prompt if self.samples else 1)
        T = padded_length(limit, limit)
        counts, R = self.trainer.row_counts(N, T)
        rows = min(count for count in counts if count >= N)
        return (rows, T), R or rows

    def _batch(self, shape: tuple[int, int], routes: dict | None) -> Batch:
        """A packed batch, abstract."""
        algorithm = self.trainer.algorithm
        ids, floats = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
        batch = Batch(tokens=ids, segments=ids, mask=floats, prompt=ids)
        if self.samples:
            batch = batch.replace(sampler_logp=floats, advantages=floats)
            exact = self.config.generator.exact
            if self.trainer.scores_first(exact=exact):
                batch = batch.replace(old_logp=floats, entropy=floats)
            batch = batch.replace(old_logp=floats if exact else algorithm.proximal(batch))
        if routes is not None:
            batch = batch.replace(
                routes={path: jax.ShapeDtypeStruct((*shape, *a.shape), a.dtype) for path, a in routes.items()}
            )
        if self.state.reference is not None:
            batch = batch.replace(ref_logp=floats)
        if self.state.critic is not None and self.samples:
            imitated = algorithm.correct(np.zeros(1), np.zeros((1, 1)))
            batch = batch.replace(old_values=floats, returns=floats, correct=None if imitated is None else floats)
        return batch.replace(margin=floats) if algorithm.needs_pairs else batch


class Sampling:
    """The generator's programs over a cache of all slots, and over copies of weights where it has some; and those that check exact
    completions."""

    def __init__(self, config: RunConfig, first: Stage, memory: float | None):
        """`first`: the stage from which on it is there; `memory`: bytes of a device."""
        self.config, self.graph = config, first.trainer.graph
        self._shown_with = None if any(map(needs_rollouts, config.stages)) else first.name
        asked = build.generator_options(config)
        kind = SpeculativePrograms if asked.speculative else Programs
        self._weights = RolloutWeights.wanted(self.graph, asked)
        self._copy = self._weights.abstract if self._weights else {}
        left = None if memory is None else memory - first.bytes - on_a_device(self._copy)
        self._programs = kind(self.graph, asked, config.generator.slots, config.max_length, left)
        self.cache = self._programs.abstract_cache
        self._rereads = asked.rereads
        self._verifier = Verifier(Scorer(self.graph), config.seed, stop_string=None) if asked.exact else None
        self._dropped = bool(self._weights and self._weights.moves)
        # What lies there while rollouts run, and what stays.
        self.rolling = on_a_device((self.cache, self._copy))
        self.bytes = self.rolling - (on_a_device(self._copy) if self._dropped else 0)

    @property
    def decoding(self) -> Graph:
        """The graph that its programs compute."""
        return self._programs.graph

    @property
    def routes(self) -> dict:
        """Of one token, as Batch.routes has them."""
        made = self._programs
        pages = np.zeros(made.table_width, np.int32) if made.paged else None
        found = jax.eval_shape(made._jitted["routes"], self.cache, np.int32(0), pages)
        return {path: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for path, a in found.items()}

    def used_by(self, stage: Stage) -> bool:
        """Whether its programs are shown with a stage: one that samples, or where none does the first that evaluates."""
        return stage.samples or self._shown_with == stage.name

    def programs(self, stage: Stage) -> Iterator[Planned]:
        """The largest of each kind."""
        made, options, held = self._programs, stage.options, stage.bytes + self.rolling
        P, weights = options.prompts_per_step, stage.state.policy.params
        prompts = max(2, self.config.max_length - options.sampling.max_new_tokens)
        if self._copy:
            yield self._copying(stage, held)
        params = weights | self._copy
        stays = held - on_a_device((params, self.cache))
        P *= stage.samples  # evaluations are no part of a step
        steps = options.sampling.max_new_tokens * -(-P * options.samples_per_prompt // made.slots)
        longest = self.config.max_length if self._rereads else prompts
        for (name, *shape), arguments in made.listed(params, longest, [stop_width(1)]):
            dispatch = 1
            if name == "decode" and shape[0] == made.slots:
                times, dispatch = steps, min(made.dispatch, options.sampling.max_new_tokens)
            elif name in ("prefill", "extend") and shape == [
                made.most_prompts,
                made.prefill_lengths(longest)[-1] + made.ahead,
            ]:
                chunks = -(-prompts // made.chunk)
                times = P * (1 if name == "prefill" else chunks - 1) / shape[0]
            else:
                continue
            lower = lambda name=name, arguments=arguments: made.lower(name, arguments)  # noqa: E731
            kernels = self._read_by_kernels() if made.paged else {}
            kind, often = GENERATOR.get(name, name), {"times": times, "dispatch": dispatch}
            yield Planned(stage.name, kind, tuple(shape), lower, held, stays, **often, kernels=kernels)
        if self._verifier:
            yield from self._checks(stage, weights, P * options.samples_per_prompt)

    def _checks(self, stage: Stage, weights: dict, completions: int) -> Iterator[Planned]:
        """The longest programs of the check of so many exact completions as long as they can be, of which no token is replaced."""
        verifier, held = self._verifier, stage.bytes + self.rolling
        L = verifier.scorer.lengths(self.config.max_length)[-1]
        for kind, given in verifier.listed(weights, L).items():
            lower = lambda kind=kind, given=given: verifier.executables[kind].lower(*given)  # noqa: E731
            times = -(-completions // verifier.scorer.rows(L))
            yield Planned(stage.name, kind, given[1].shape, lower, held, held - on_a_device(weights), times)

    def _read_by_kernels(self) -> dict[str, int]:
        """Bytes that a kernel of decoding reads of the pages of one layer, all of them full. Its operand is the pool of all."""
        found: dict[str, int] = {}
        for part in (part for stack in self.cache for layers in stack for part in layers):
            for kernel, names in KERNELS.items():
                pools = [part[name].array for name in names if name in part]
                found[kernel] = max(found.get(kernel, 0), sum(on_a_device(pool) // pool.shape[1] for pool in pools))
        return {kernel: size for kernel, size in found.items() if size}

    def _copying(self, stage: Stage, held: int) -> Planned:
        """The program that makes the copies: in the place of the last ones, or anew at each step where those were dropped."""
        given = {path: stage.state.policy.params[path] for path in self._weights.paths}
        lower = lambda: self._weights.lower(given, again=not self._dropped)  # noqa: E731
        kind, times = (
            (RESHARD, int(stage.samples)) if self._dropped else ("quantised copy", stage.options.updates_per_step)
        )
        return Planned(stage.name, kind, (len(given),), lower, held, held - on_a_device((given, self._copy)), times)
