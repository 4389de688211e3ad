"""Trains, exports and runs reward models.

N rows, T tokens, R rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from policy.huggingface.peft.merge import merged_trunk
from policy.mesh import processes
from policy.mesh.sharding import Layout, block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.modes import VALUE_HEAD
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.program_names import ProgramName
from rl.algorithms import PolicyInputs
from rl.algorithms._protocols import ScoreLoss
from rl.config.stage import StageOptions
from rl.training.batch import Batch, padded_batch
from rl.training.batch_updates import (
    CPU_TOKENS,
    LOSS_TOKENS,
    BatchUpdates,
    by_micro_batch,
    shard_rows,
    step_of,
)
from rl.training.critic import Critic
from rl.training.packing.packing import plan_packing
from rl.training.packing.trees import Sharing, plan_trees
from rl.training.updater import LossCall, LossOutput, Update, UpdateArguments, UpdateCall
from rl.training.updates.optimizer_step import OptimizerStep, ParamState
from rl.training.weights import WeightGroup, Weights

# Tokens that one device scores at a time, unless it is a CPU.
SCORED_TOKENS = 16384


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RewardModelState:
    """The arrays of a stage that trains a reward model. `policy` has no optimizer and stays as it
    is."""

    policy: ParamState
    reward_model: ParamState


class RewardModelTrainer(BatchUpdates):
    """Updates of a reward model: a copy of the policy's trunk with a score head, or of its adapter
    over the weights of the policy."""

    algorithm: ScoreLoss

    def __init__(self, graph: Graph, stage: StageOptions, algorithm: ScoreLoss, seed: int = 0):
        """Defines the program of the update. `seed`: the seed of the run, for dropout."""
        super().__init__(graph, stage, algorithm)
        self.model = Critic(self._graph_of_copies)
        self._step = OptimizerStep(WeightGroup.REWARD_MODEL, self.model, stage.optimizer, stage)
        main = WeightGroup.REWARD_MODEL
        self.reward_model_update = Update(self._score_loss, main, {main: self._step}, stage, seed)

    def set_rates(self, stage: StageOptions) -> None:
        """Takes the learning rate and the number of steps of `stage`, whose other settings are the
        same. Updates compile again."""
        self.stage = stage
        self._step = self._step.with_rates(stage.optimizer, stage)
        self.reward_model_update = self.reward_model_update.with_steps(
            {WeightGroup.REWARD_MODEL: self._step}, stage
        )

    @property
    def executables(self) -> dict[ProgramName, CompiledCache]:
        """Returns the compiled functions of a step, by the names of their programs in a plan."""
        executables = {ProgramName.REWARD_MODEL_UPDATE: self.reward_model_update.executable}
        if self.stage.held_out:
            executables |= {ProgramName.HELD_OUT: self.reward_model_update.losses_executable}
        return executables

    def start(self, params: dict[str, jax.Array], seed: int) -> RewardModelState:
        """Returns the state at the beginning of the stage: `params`, or the adapter among them, and
        a copy of either with a new score head."""
        self.set_base(params)
        return self._started(params, seed)

    def _started(self, params: dict[str, jax.Array], seed: int) -> RewardModelState:
        """Returns the state that `start` does, of arrays or their shapes."""
        learner = self._step.start(self.model.init(params, self.algorithm.score_init_std, seed))
        policy = ParamState(self.of_state(params), None)
        return block_on_cpu_mesh(RewardModelState(policy, learner), self.graph.layout)

    def abstract(self) -> RewardModelState:
        """Returns the shapes and shardings of the state, for a checkpoint to be read into."""
        shapes = jax.eval_shape(partial(self._started, seed=0), self.policy_shapes)
        policy = self.graph if self.adapters is None else self.adapters
        shardings = RewardModelState(
            ParamState(cast(Any, policy.shardings), None), self._step.shardings
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

        `adaptive_coefs` is ignored. table: rows of pictures and sounds, as the towers of the policy
        encode them, which learn in no update of a reward model; None without them. number: of the
        update in its stage, from 0, as in UpdateArguments.
        """
        packing, R = self.packing_of_update(batch)
        self.add_update_flops(self.model.flops, packing)
        batch = shard_rows(packing.batch(batch), self.graph.layout)
        inputs = self.loss_inputs(batch)
        arguments = UpdateArguments.of(batch, inputs, table, number=number)
        (call,) = self.update_calls(state, arguments, R)
        output = call.run()
        metrics = output.metrics | {LOSS_TOKENS: inputs.num_tokens}
        metrics |= packing.metrics(R, self.sharing is not None)
        return RewardModelState(state.policy, output.learners[WeightGroup.REWARD_MODEL]), metrics

    def update_calls(
        self, state: RewardModelState, arguments: UpdateArguments, micro_rows: int
    ) -> list[UpdateCall]:
        """Returns the call of the program of an update, of arrays or their shapes."""
        learners = {WeightGroup.REWARD_MODEL: state.reward_model}
        name = ProgramName.REWARD_MODEL_UPDATE
        frozen = replace(arguments.frozen, policy=self._base_of_model(state))
        arguments = replace(arguments, frozen=frozen)
        return [UpdateCall(name, self.reward_model_update, learners, arguments, micro_rows)]

    def held_out_call(
        self,
        state: RewardModelState,
        batch: Batch,
        inputs: PolicyInputs,
        table: MediaTable | None,
        micro_rows: int,
    ) -> LossCall:
        weights = Weights(
            policy=self._base_of_model(state),
            reward_model=state.reward_model.params,
            media_table=table,
        )
        return LossCall(self.reward_model_update, weights, batch, inputs, micro_rows)

    def _base_of_model(self, state: RewardModelState) -> dict[str, jax.Array]:
        """Returns the weights of the policy that the adapter of the reward model is over."""
        return self.model.extra_params(self.policy_params(state))

    def _score_loss(self, weights: Weights, micro: Batch, inputs: PolicyInputs) -> LossOutput:
        step = step_of(weights.media_table, micro, self.stage.dropout)
        params = weights.policy | weights.reward_model
        scores, aux = self.model.scores(params, micro.tokens, step)
        loss, metrics = self.algorithm.loss(replace(inputs, scores=scores))
        return LossOutput(loss=loss, metrics=metrics, aux=aux)

    def export(
        self, state: RewardModelState, pad_id: int | None, directory: Path
    ) -> classification.Classifier:
        """Writes the reward model as transformers stores a sequence classification model, without a
        tokenizer. An adapter is merged into its weights. Returns what was written."""
        params = self._base_of_model(state) | state.reward_model.params
        score = params.pop(VALUE_HEAD)
        trunk = self.model.trunk
        if (adapter := trunk.runtime.adapter) is not None:
            params = merged_trunk(trunk, adapter, params).params
        runtime = replace(trunk.runtime, adapter=None)
        graph = Graph(sources.trunk(self.graph.config), runtime, trunk.layout)
        classification.write(directory, graph, params, score, pad_id)
        return classification.Classifier(graph, params, processes.on_host(score))


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
            packing = plan_packing(batch.segments, -(-N // R) * R)
        else:
            rows = -(-self.sharing.most_rows(N) // R) * R
            packing = plan_trees(batch.replace(prompt=np.arange(N) // samples), rows, self.sharing)
        assert self._params is not None  # a scorer of a plan has none
        weights = Weights(reward_model=self._params, media_table=table)
        (scores,) = by_micro_batch(
            partial(self.executable, weights), batch, packing, R, self._layout
        )
        return [float(scores[row, len(ids) - 1]) for row, ids in enumerate(sequences)]

    def lowered(self, T: int) -> tuple[tuple[int, int], Callable[[], Any]]:
        """Returns (shape of a full batch in rows of T tokens, the function that traces its
        program)."""
        shape = self.rows(T), self.packed_length(T)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        tree = None if self.sharing is None else Tree.of_shapes(tokens)
        batch = Batch(tokens=tokens, segments=tokens, mask=None, prompt=None, tree=tree)
        return shape, lambda: self.executable.lower(
            Weights(reward_model=cast(Any, self.abstract)), batch
        )

    def _scores(self, weights: Weights, micro: Batch) -> tuple[jax.Array]:
        tokens = constrain(micro.tokens, ("batch", None), self._layout)
        step = step_of(weights.media_table, micro)
        return self._critic.scores(weights.reward_model, tokens, step)[:1]
