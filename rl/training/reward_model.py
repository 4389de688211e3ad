"""Trains, exports and runs reward models.

N sequences, T tokens, R rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.media import MediaTable
from policy.cache.paths import Tree
from policy.config import Runtime
from policy.huggingface import classification, sources
from policy.mesh import processes
from policy.mesh.sharding import Layout, block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.modes import VALUE_HEAD
from policy.programs.compiled_cache import CompiledCache
from rl.algorithms import PolicyInputs
from rl.config.stage import StageOptions
from rl.training.batch import Batch, padded_batch
from rl.training.batch_updates import (
    CPU_TOKENS,
    HELD_OUT,
    LOSS_TOKENS,
    BatchUpdates,
    by_micro_batch,
    shard_rows,
    step_of,
)
from rl.training.critic import Critic
from rl.training.media import towers
from rl.training.packing.packing import plan_packing
from rl.training.packing.trees import Sharing, plan_trees
from rl.training.updater import LossOutput, OptimizerStep, ParamState

# Tokens that one device scores at a time, unless it is a CPU.
SCORED_TOKENS = 16384


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RewardModelState:
    """Every array of a stage that trains a reward model. `policy` has no optimizer and stays as it
    is."""

    policy: ParamState
    reward_model: ParamState


class RewardModelTrainer(BatchUpdates):
    """Updates of a reward model: a copy of the policy's trunk with a score head."""

    def __init__(self, graph: Graph, stage: StageOptions, algorithm: Any, seed: int = 0):
        """Defines the program of the update. `seed`: the seed of the run, for dropout."""
        super().__init__(graph, stage, algorithm)
        self.model = Critic(self._scoring_graph)
        self.reward_model = OptimizerStep(
            self.model, self._score_loss, stage.optimizer, stage, seed
        )

    def set_rates(self, stage: StageOptions) -> None:
        """Does what `Trainer.set_rates` does."""
        self.stage = stage
        self.reward_model = self.reward_model.with_rates(stage.optimizer, stage)

    @property
    def executables(self) -> dict[str, CompiledCache]:
        """Returns the compiled functions of a step, by the names of their programs in a plan."""
        executables = {"update of the reward model": self.reward_model.executable}
        return executables | (
            {HELD_OUT: self.reward_model.losses_executable} if self.stage.held_out else {}
        )

    def start(self, params: dict[str, jax.Array], seed: int) -> RewardModelState:
        """Returns the state at the beginning of the stage: `params`, and a copy of them with a new
        score head."""
        learner = self.reward_model.start(
            self.model.init(params, self.algorithm.score_init_std, seed)
        )
        return block_on_cpu_mesh(
            RewardModelState(ParamState(params, None), learner), self.graph.layout
        )

    def abstract(self) -> RewardModelState:
        """Returns the shapes and shardings of the state, for a checkpoint to be read into."""
        shapes = jax.eval_shape(partial(self.start, seed=0), self.graph.shapes)
        shardings = RewardModelState(
            ParamState(cast(Any, self.graph.shardings), None), self.reward_model.shardings
        )
        return jax.tree.map(
            lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, shardings
        )

    def update(
        self,
        state: RewardModelState,
        batch: Batch,
        *,
        adaptive_coefs: dict[str, float] | None = None,
        table: MediaTable | None = None,
        tower_inputs: None = None,
        number: int | None = None,
    ) -> tuple[RewardModelState, dict]:
        """Makes one optimiser update of the reward model from `batch`, one pair per row.

        `adaptive_coefs` is ignored. table: that of a batch with media, as the towers of the policy
        encode them; no update of a reward model trains a tower. number: of the update in its stage, from 0, as in
        `OptimizerStep`.
        """
        packing, R = self.packing_of(batch)
        self.add_flops(self.model.flops, packing, passes=3)
        batch = shard_rows(packing.batch(batch), self.graph.layout)
        inputs = self.loss_inputs(batch)
        rows = towers.as_params(table)
        output = self.reward_model(state.reward_model, batch, inputs, R, rows, number=number)
        metrics = output.metrics | {LOSS_TOKENS: inputs.num_tokens}
        metrics |= packing.metrics(R, self.sharing is not None)
        return RewardModelState(state.policy, output.learner), metrics

    def held_out_loss(
        self, state: RewardModelState, batch: Batch, counts: Mapping[str, float], **options: Any
    ) -> dict[str, float]:
        """Returns the metrics of the loss of the reward model; arguments as in `losses`."""
        return self.losses(self.reward_model, state.reward_model.params, batch, counts, **options)

    def _score_loss(self, params, micro: Batch, inputs: PolicyInputs) -> LossOutput:
        scores, aux = self.model.scores(params, micro.tokens, self.step_of(params, micro))
        loss, metrics = self.algorithm.loss(replace(inputs, scores=scores))
        return LossOutput(loss=loss, metrics=metrics, aux=aux)

    def export(self, state: RewardModelState, pad_id: int | None, directory: Path) -> None:
        """Writes the reward model as transformers stores a sequence classification model, without a
        tokenizer."""
        params = dict(state.reward_model.params)
        score = params.pop(VALUE_HEAD)
        trunk = self.model.trunk
        graph = Graph(sources.trunk(self.graph.config), trunk.runtime, trunk.layout)
        classification.write(directory, graph, params, score, pad_id)


def rows_at_a_time(layout: Layout, T: int) -> int:
    """Returns how many rows of T tokens a model that is not trained reads at a time."""
    tokens = CPU_TOKENS if layout.platform == "cpu" else SCORED_TOKENS
    return layout.num_row_shards * max(1, tokens // T)


class RewardModelScorer:
    """A reward model on the devices of the run, which scores sequences of token ids."""

    def __init__(
        self,
        graph: Graph,
        params: dict[str, jax.Array] | None,
        limit: int,
        sharing: Sharing | None = None,
    ):
        """Defines the scoring program.

        graph: the model of the trunk. params: the weights of the trunk and VALUE_HEAD; None: the
        scorer cannot score. limit: tokens of the longest sequence. sharing: how the sequences of
        the stage share beginnings; None: each is scored alone.
        """
        self.graph = graph.with_runtime(skip_blocks=True)
        self._params = params
        self._limit = limit
        self.sharing = sharing and sharing.of_scores(graph.config)
        self._critic = Critic(self.graph)
        self._layout = graph.layout
        self.executable = CompiledCache(jax.jit(self._scores), self._layout.platform)

    @classmethod
    def read(
        cls,
        directory: Path,
        runtime: Runtime,
        mesh: Layout,
        limit: int,
        sharing: Sharing | None = None,
    ) -> RewardModelScorer:
        """Reads the scorer of a directory. Raises what `policy.huggingface.classification.read`
        raises."""
        graph, params, score = classification.read(directory, runtime, mesh)
        params |= {VALUE_HEAD: processes.device_put_global(score, graph.layout.replicated)}
        return cls(graph, params, limit, sharing)

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and shardings of the weights."""
        shapes = self.graph.shapes | {
            VALUE_HEAD: jax.ShapeDtypeStruct(self._critic.sizes[VALUE_HEAD], jnp.float32)
        }
        shardings = self._critic.shardings
        return {
            path: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings[path])
            for path, s in shapes.items()
        }

    def rows(self, T: int) -> int:
        """Returns how many packed rows are scored at a time, for sequences of T tokens."""
        return rows_at_a_time(self._layout, self.packed_length(T))

    def packed_length(self, T: int) -> int:
        """Returns the tokens of a packed row, for sequences of T tokens."""
        return T if self.sharing is None else self.sharing.packed_length(T)

    def __call__(
        self,
        sequences: Sequence[Sequence[int]],
        add_media: Callable[[Batch], Batch] = lambda batch: batch,
        table: MediaTable | None = None,
        samples: int = 1,
    ) -> list[float]:
        """Returns the score at the last token of each sequence. Sequences are packed.

        add_media: returns the batch of the sequences, one per row, with its media in `table`.
        samples: the number of consecutive sequences that complete one prompt.
        """
        batch = add_media(padded_batch([(ids, [0] * len(ids)) for ids in sequences], self._limit))
        N, T = batch.tokens.shape
        R = self.rows(T)
        if self.sharing is None:
            packing = plan_packing(batch.segments, [-(-N // R) * R])
        else:
            counts = [-(-self.sharing.most_rows(N) // R) * R]
            packing = plan_trees(
                batch.replace(prompt=np.arange(N) // samples), counts, self.sharing
            )
        params = cast(dict, self._params) | towers.as_params(table)
        (scores,) = by_micro_batch(
            partial(self.executable, params), batch, packing, R, self._layout
        )
        return [float(scores[row, len(ids) - 1]) for row, ids in enumerate(sequences)]

    def lowered(self, T: int) -> tuple[tuple[int, int], Callable[[], Any]]:
        """Returns (shape of a full batch in rows of T tokens, the function that traces its
        program)."""
        shape = self.rows(T), self.packed_length(T)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        tree = None if self.sharing is None else Tree.of_shapes(tokens)
        batch = Batch(tokens=tokens, segments=tokens, mask=None, prompt=None, tree=tree)
        return shape, lambda: self.executable.lower(self.abstract, batch)

    def _scores(self, params, micro: Batch):
        tokens = constrain(micro.tokens, ("batch", None), self._layout)
        return self._critic.scores(params, tokens, step_of(params, micro))[:1]
