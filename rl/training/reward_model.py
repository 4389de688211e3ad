"""Reward models: training one on a copy of the policy, its files, and scoring completions with one.

N sequences, T tokens, R rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from policy import modes
from policy.config import Runtime
from policy.execution.compiled_cache import CompiledCache
from policy.huggingface import classification, sources
from policy.mesh import processes
from policy.mesh.sharding import Layout, block_on_cpu_mesh, constrain
from policy.model import Graph
from rl.algorithms import PolicyInputs
from rl.config.run import StageOptions
from rl.training.batch import Batch, pack
from rl.training.critic import VALUE_HEAD, Critic
from rl.training.packing import packing
from rl.training.trainer import CPU_TOKENS, RunState, Trainer, by_micro_batch, by_rows, num_row_shards
from rl.training.updater import OptimizerStep, ParamState

# Tokens that are scored at a time on one device, where it is no CPU.
SCORED_TOKENS = 16384


class RewardModelTrainer(Trainer):
    """Updates of a stage that trains a reward model. The learner is `RunState.critic`; the policy has no optimizer and stays."""

    def __init__(self, graph: Graph, stage: StageOptions, algorithm, seed: int = 0):
        super().__init__(graph, stage, algorithm, seed)
        self._critic = Critic(graph)
        self.critic = OptimizerStep(self._critic, self._score_loss, stage.optimizer, stage, seed)

    def start(self, params: dict[str, jax.Array], seed: int) -> RunState:
        """The state at the beginning of the stage: `params`, and a copy of them with a fresh head."""
        learner = self.critic.start(self._critic.init(params, self.algorithm.score_init_std, seed))
        return block_on_cpu_mesh(RunState(ParamState(params, None), None, learner), self.graph.layout)

    def abstract(self) -> RunState:
        shapes = jax.eval_shape(partial(self.start, seed=0), self.graph.shapes)
        places = RunState(ParamState(self.graph.shardings, None), None, self.critic.shardings)
        return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)

    def update(
        self, state: RunState, batch: Batch, *, critic_only: bool = True, controls=None
    ) -> tuple[RunState, dict]:
        """One optimiser update of the reward model from the pairs of `batch`, one a row."""
        self._did(self._critic.operations, batch, passes=3)
        place, R = self.layout(batch.segments)
        batch = by_rows(place.batch(batch), self.graph.layout)
        learner, _, metrics = self.critic(state.critic, batch, self._totals(batch), R)
        return RunState(state.policy, None, learner), metrics | {"perf/packed_share": place.share(R)}

    def _learner(self, state: RunState) -> ParamState:
        return state.critic

    def _score_loss(self, params, micro: Batch, inputs: PolicyInputs):
        scores, aux = self._critic.scores(params, micro.tokens, self._step(micro))
        loss, metrics = self.algorithm.loss(replace(inputs, scores=scores))
        return loss, metrics, aux

    def export(self, state: RunState, tokenizer, directory: Path) -> None:
        """The reward model as transformers stores a sequence classification model, with its tokenizer."""
        params = dict(state.critic.params)
        score, trunk = params.pop(VALUE_HEAD), self._critic.trunk
        graph = Graph(sources.trunk(self.graph.config), trunk.runtime, trunk.layout)
        classification.write(directory, graph, params, score, tokenizer.pad_token_id)
        if processes.first():
            tokenizer.save_pretrained(directory)


class RewardModelScorer:
    """A reward model on the devices of the run, which scores sequences of token ids."""

    def __init__(self, graph: Graph, params: dict[str, jax.Array] | None, limit: int):
        """`graph` and `params`: of its trunk, and its VALUE_HEAD; None: it has a program and cannot score. `limit`: the longest
        sequence, tokens."""
        self.graph, self._params, self._limit = graph, params, limit
        self._critic, self._layout = Critic(graph), graph.layout
        self.program = CompiledCache(jax.jit(self._scores), self._layout.platform)

    @classmethod
    def read(cls, directory, runtime: Runtime, mesh: Layout, limit: int) -> RewardModelScorer:
        """That of a directory. Raises what `policy.huggingface.classification.read` raises."""
        graph, params, score = classification.read(directory, runtime, mesh)
        return cls(graph, params | {VALUE_HEAD: processes.device_put_global(score, graph.layout.replicated)}, limit)

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and places of its weights."""
        shapes = self.graph.shapes | {VALUE_HEAD: jax.ShapeDtypeStruct(self._critic.sizes[VALUE_HEAD], jnp.float32)}
        places = self._critic.shardings
        return {path: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=places[path]) for path, s in shapes.items()}

    def rows(self, T: int) -> int:
        """Rows of T tokens that are scored at a time: as many as are quick."""
        tokens = CPU_TOKENS if self._layout.platform == "cpu" else SCORED_TOKENS
        return num_row_shards(self._layout) * max(1, tokens // T)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score at the last token of each sequence. They are packed."""
        batch = pack([(ids, [1] * len(ids)) for ids in sequences], self._limit)
        N, T = batch.tokens.shape
        R = self.rows(T)
        place = packing(batch.segments, [-(-N // R) * R])
        (scores,) = by_micro_batch(partial(self.program, self._params), batch, place, R, self._layout)
        return [float(scores[row, len(ids) - 1]) for row, ids in enumerate(sequences)]

    def _scores(self, params, tokens, segments, _):
        tokens = constrain(tokens, ("batch", None), self._layout)
        return self._critic.scores(params, tokens, modes.make_step(tokens, segments=segments))[:1]
