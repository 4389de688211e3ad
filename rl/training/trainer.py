"""Compiles the functions of a stage. The trainer computes the arrays that an algorithm asks for and
minimises its loss.

N rows of a batch, T tokens, R packed rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.media import MediaTable
from policy.execution.encoding import PaddedInputs
from policy.intermediates import Aux
from policy.mesh import processes
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.modes import VALUE_HEAD
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.flops import Operations
from rl.accounting.program_names import ProgramName
from rl.algorithms import PolicyInputs
from rl.algorithms._protocols import CriticLoss, TokenFlags, TrainedLoss
from rl.config.stage import OptimizerOptions, StageOptions
from rl.training.batch import Batch
from rl.training.batch_updates import (
    LOSS_TOKENS,
    BatchUpdates,
    by_micro_batch,
    shard_rows,
    step_of,
)
from rl.training.critic import Critic
from rl.training.host_memory import copied, mixed, reusable
from rl.training.packing.packing import Packing
from rl.training.teachers.teacher import Student, Teacher
from rl.training.updater import LossCall, LossOutput, Update, UpdateArguments, UpdateCall
from rl.training.updates.optimizer_step import OptimizerStep, ParamState
from rl.training.weights import LearningModel, WeightGroup, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunState:
    """The arrays of a stage that a checkpoint holds. An absent part is None.

    policy, critic, projections: groups that learn, each with the state of its optimizer.
    reference: the policy at the start of the stage, mixed with later policies at each renewal.
    """

    policy: ParamState
    reference: dict[str, jax.Array] | None
    critic: ParamState | None
    projections: ParamState | None = None

    def learners(self, groups: Iterable[WeightGroup]) -> dict[WeightGroup, ParamState]:
        """Returns these groups, which learn, with the states of their optimizers."""
        return {group: getattr(self, group) for group in groups}

    def with_learners(self, learners: Mapping[WeightGroup, ParamState]) -> RunState:
        """Returns the state with these groups in the place of its own."""
        return replace(self, **{group.value: learner for group, learner in learners.items()})


@dataclass(frozen=True)
class TokenOutputs:
    """What an update computed of each token before it changed the weights.

    arrays: packed rows on the devices. logp, entropy: float32 under the current policy. flags:
    uint8, the bits of rl/algorithms/_token_flags.py: tokens beyond the clip range, and those that
    correction or rejection drops, but not those that delta, dual_clip, off_policy_delta or
    top_entropy cuts off; absent for a loss that is no policy gradient.
    """

    arrays: dict[str, jax.Array]
    packing: Packing

    def on_host(self) -> dict[str, np.ndarray]:
        """Waits for the update. Returns the arrays [N, T] in the rows of the batch, 0 on
        padding."""
        return {
            name: self.packing.unpack(processes.on_host(array))
            for name, array in self.arrays.items()
        }


def _optimizer_options(group: WeightGroup, stage: StageOptions) -> OptimizerOptions:
    """Returns the settings of the optimizer of a group."""
    return stage.critic if group is WeightGroup.CRITIC else stage.optimizer


class Trainer(BatchUpdates):
    """Compiles the functions of one stage: updates of policy and critic, log-probabilities and
    values of a batch."""

    def __init__(
        self,
        graph: Graph,
        stage: StageOptions,
        algorithm: TrainedLoss,
        seed: int = 0,
        *,
        state: Collection[str] = (),
        temperature: float = 1.0,
        returns_tokens: bool = False,
        teacher: Teacher | None = None,
    ):
        """Defines the functions; nothing compiles yet.

        Args:
          graph: the model.
          stage: settings of the stage.
          algorithm: the loss.
          seed: seed of the run, for dropout.
          state: parts of a RunState besides the policy: "reference", "critic".
          temperature: logits are divided by it before log-probabilities are taken.
          returns_tokens: whether an update of the policy can report log-probability and entropy of
            each token.
          teacher: the model, or its numbers in the batch, that an update compares the policy with.
        """
        super().__init__(graph, stage, algorithm)
        self.temperature = np.float32(temperature)
        self._returns_tokens = returns_tokens
        self._has_reference = "reference" in state
        self._value_model = None
        if "critic" in state:
            shared = self._critic_algorithm.critic_trunk == "policy"
            self._value_model = Critic(self._graph_of_copies, shared=shared)
        self.teacher = teacher
        self._projections = None
        if teacher is not None:
            self._update_graph = teacher.with_recorded_outputs(self._update_graph)
            self._projections = teacher.projections(graph)
        models = {
            WeightGroup.POLICY: self.adapters or self._update_graph,
            WeightGroup.CRITIC: self._value_model,
            WeightGroup.PROJECTIONS: self._projections,
        }
        self.optimizer_steps = {
            group: OptimizerStep(group, model, _optimizer_options(group, stage), stage)
            for group, model in models.items()
            if model is not None
        }
        # A dense warmup trains the indexers alone, whose losses are auxiliary.
        dense_warmup = stage.indexer.training == "dense_warmup"
        loss = self._auxiliary_only_loss if dense_warmup else self._policy_loss
        self.policy_update = Update(
            loss, WeightGroup.POLICY, self._learning_with_policy, stage, seed
        )
        self.critic_update = None
        if self._value_model is not None:
            own = {WeightGroup.CRITIC: self.optimizer_steps[WeightGroup.CRITIC]}
            self.critic_update = Update(self._critic_loss, WeightGroup.CRITIC, own, stage, seed)

    @property
    def _learning_with_policy(self) -> dict[WeightGroup, OptimizerStep]:
        """Returns the steps of the groups that learn in the update of the policy: all but a critic
        with a trunk of its own."""
        own_trunk = self._value_model is not None and not self._value_model.shared
        return {
            group: step
            for group, step in self.optimizer_steps.items()
            if not (own_trunk and group is WeightGroup.CRITIC)
        }

    def set_rates(self, stage: StageOptions) -> None:
        """Takes the learning rates and the number of steps of `stage`, whose other settings are the
        same. Updates compile again."""
        self.stage = stage
        self.optimizer_steps = {
            group: step.with_rates(_optimizer_options(group, stage), stage)
            for group, step in self.optimizer_steps.items()
        }
        self.policy_update = self.policy_update.with_steps(self.optimizer_steps, stage)
        self.critic_update = self.critic_update and self.critic_update.with_steps(
            self.optimizer_steps, stage
        )

    @property
    def _critic_algorithm(self) -> CriticLoss:
        return cast(CriticLoss, self.algorithm)  # of a stage with a critic

    @property
    def value_model(self) -> Critic:
        """Returns the model of the critic. Raises ValueError if the stage has none."""
        if self._value_model is None:
            raise ValueError(
                f"this trainer has no critic, so it computes no values: {self.algorithm.name} "
                f"names no input `values`, or Trainer was made without state={{'critic'}}"
            )
        return self._value_model

    @property
    def executables(self) -> dict[ProgramName, CompiledCache]:
        """Returns the compiled functions of a step, by the names of their programs in a plan."""
        executables = {
            ProgramName.UPDATE: self.policy_update.executable,
            ProgramName.LOGPROBS: self._logprobs,
        }
        if self.stage.held_out:
            executables[ProgramName.HELD_OUT] = self.policy_update.losses_executable
        if self.critic_update:
            executables[ProgramName.CRITIC_UPDATE] = self.critic_update.executable
            executables[ProgramName.VALUES] = self._values
        return executables

    def start(self, params: dict[str, jax.Array], seed: int) -> RunState:
        """Returns the state at the beginning of the stage. Owns what learns of `params`; reference
        and critic are copies."""
        self.set_base(params)
        return self._started(params, seed)

    def _started(self, params: dict[str, jax.Array], seed: int) -> RunState:
        """Returns the state that `start` does, of arrays or their shapes."""
        learning = self._learning(params)
        params = {**params, **learning}  # of arrays that `reusable` copied, the copies
        reference = None
        if self._has_reference:
            copies = partial(copied, tables=self._policy.host_tables)
            reference = jax.jit(copies, out_shardings=self._policy.shardings)(learning)
        critic = projections = None
        if self._value_model is not None:
            created = self._value_model.init(params, self._critic_algorithm.value_init_std, seed)
            critic = self.optimizer_steps[WeightGroup.CRITIC].start(created)
        if self._projections is not None:
            projections = self.optimizer_steps[WeightGroup.PROJECTIONS].start(
                self._projections.init(seed)
            )
        policy = self.optimizer_steps[WeightGroup.POLICY].start(learning)
        return block_on_cpu_mesh(
            RunState(policy, reference, critic, projections), self.graph.layout
        )

    @property
    def _policy(self) -> LearningModel:
        """Returns what of the policy learns."""
        return self.optimizer_steps[WeightGroup.POLICY].model

    def _learning(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the arrays of `params` that learn."""
        return reusable(self.of_state(params), self.graph.layout)

    def reference_params(self, state: RunState) -> dict[str, jax.Array]:
        """Returns the weights of the reference model."""
        assert state.reference is not None  # the stage has one
        return {**self.base, **state.reference}

    def renew_reference(self, state: RunState, mix: float) -> RunState:
        """Returns the state with the reference model mix * policy + (1 - mix) * reference."""
        reference = self._renewed(state.reference, state.policy.params, np.float32(mix))
        return replace(state, reference=block_on_cpu_mesh(reference, self.graph.layout))

    @cached_property
    def _renewed(self):
        mixture = partial(mixed, tables=self._policy.host_tables)
        return jax.jit(mixture, donate_argnums=0, out_shardings=self._policy.shardings)

    def abstract(self) -> RunState:
        """Returns the shapes and shardings of the state, for a checkpoint to be read into."""
        shapes = jax.eval_shape(partial(self._started, seed=0), self.policy_shapes)
        reference = cast(Any, self._policy.shardings) if shapes.reference is not None else None
        shardings = RunState(
            self.optimizer_steps[WeightGroup.POLICY].shardings, reference, None
        ).with_learners({group: step.shardings for group, step in self.optimizer_steps.items()})
        return jax.tree.map(
            lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, shardings
        )

    def update(
        self,
        state: RunState,
        batch: Batch,
        *,
        critic_only: bool = False,
        adaptive_coefs: dict[str, float] | None = None,
        on_tokens: Callable[[TokenOutputs], None] | None = None,
        table: MediaTable | None = None,
        tower_inputs: Sequence[PaddedInputs] | None = None,
        number: int | None = None,
    ) -> tuple[RunState, dict]:
        """Makes one optimizer update of the policy, and of the critic if there is one.

        batch: the mini-batch on the host. critic_only: skips the policy. adaptive_coefs: values for
        `PolicyInputs`. on_tokens: gets the policy's outputs for each token. table: rows of
        pictures and sounds, by the weights before the step; None without them. tower_inputs: the
        pictures and sounds themselves, if the stage trains towers. number: of the update in its
        stage, from 0, as in UpdateArguments.

        Returns (state, metrics). Raises ValueError if the stage replays routes and the batch has
        none.
        """
        if self.stage.router_replay and batch.routes is None:
            raise ValueError(
                "router_replay: this batch has no routes; take it from to_batch(..., replay=True)"
            )
        packing, R = self.packing_of_update(batch)
        if not critic_only:
            self.add_update_flops(self.flops, packing)
            self._add_teacher_flops(packing)
        if self._updates_critic_alone(critic_only):
            model = self.value_model
            add = self.add_forward_flops if model.shared else self.add_update_flops
            add(model.flops, packing)
        batch = shard_rows(packing.batch(batch), self.graph.layout)
        metrics: dict[str, Any] = packing.metrics(R, self.sharing is not None)
        coefs = {name: np.float32(value) for name, value in (adaptive_coefs or {}).items()}
        inputs = self.loss_inputs(batch, coefs or None)
        assert inputs.num_tokens is not None  # `loss_inputs` counts them
        metrics |= {LOSS_TOKENS: inputs.num_tokens}
        arguments = UpdateArguments.of(batch, inputs, table, tower_inputs, number)
        for call in self.update_calls(state, arguments, R, critic_only=critic_only):
            output = call.run()
            state = state.with_learners(output.learners)
            metrics |= output.metrics
            if on_tokens is not None and output.tokens:
                on_tokens(TokenOutputs(output.tokens, packing))
        return state, metrics

    def _add_teacher_flops(self, packing: Packing) -> None:
        """Adds the forward pass of the teacher over packed rows to `total_flops`."""
        if self.teacher is None:
            return
        ends, starts = (self.teacher.operations(self.graph, each) for each in packing.runs)
        self.total_flops += ends - starts

    def _updates_critic_alone(self, critic_only: bool) -> bool:
        """Whether the critic has a program of its own. A value head learns in the update of the
        policy, which computes its input states, unless the policy stays as it is."""
        return self._value_model is not None and (critic_only or not self._value_model.shared)

    def update_calls(
        self,
        state: RunState,
        arguments: UpdateArguments,
        micro_rows: int,
        *,
        critic_only: bool = False,
    ) -> list[UpdateCall]:
        """Returns the calls of the programs of an update, of arrays or their shapes: of a critic
        that learns alone, and of the policy with the groups that learn with it.

        arguments: what both programs read. Of `frozen` it has the `media_table` alone; each call
        adds the other weights that its program reads. micro_rows: packed rows of a micro-batch.
        """
        calls = []
        if self._updates_critic_alone(critic_only):
            assert self.critic_update is not None
            trunk = self.value_model.extra_params(self.policy_params(state))
            frozen = replace(arguments.frozen, policy=trunk)
            calls.append(
                UpdateCall(
                    ProgramName.CRITIC_UPDATE,
                    self.critic_update,
                    state.learners(self.critic_update.optimizer_steps),
                    replace(arguments, frozen=frozen, tower_inputs=None),
                    micro_rows,
                )
            )
        if not critic_only:
            teacher = {} if self.teacher is None else dict(self.teacher.weights)
            frozen = replace(arguments.frozen, policy=dict(self.base), teacher=teacher)
            calls.append(
                UpdateCall(
                    ProgramName.UPDATE,
                    self.policy_update,
                    state.learners(self.policy_update.optimizer_steps),
                    replace(arguments, frozen=frozen),
                    micro_rows,
                )
            )
        return calls

    def held_out_call(
        self,
        state: RunState,
        batch: Batch,
        inputs: PolicyInputs,
        table: MediaTable | None,
        micro_rows: int,
    ) -> LossCall:
        weights = Weights(policy=self.policy_params(state), media_table=table)
        return LossCall(self.policy_update, weights, batch, inputs, micro_rows)

    def _auxiliary_only_loss(
        self, weights: Weights, micro: Batch, inputs: PolicyInputs
    ) -> LossOutput:
        """Returns a policy loss of 0 and the further outputs of the layers (Aux), which auxiliary
        losses are computed from. Computes no logits."""
        step = step_of(weights.media_table, micro, self.stage.dropout)
        aux = self._update_graph.aux(weights.policy, micro.tokens, step)
        return LossOutput(loss=jnp.float32(0.0), metrics={}, aux=aux)

    def _policy_loss(self, weights: Weights, micro: Batch, inputs: PolicyInputs) -> LossOutput:
        step = step_of(weights.media_table, micro, self.stage.dropout)
        logp, entropy, aux = self._update_graph.logprobs(
            weights.policy, micro.tokens, step, self.temperature, micro.kept
        )
        inputs = replace(inputs, logp=logp, entropy=entropy)
        if self.teacher is not None:
            student = Student(self._update_graph, weights.policy, aux, self.temperature)
            inputs = self.teacher.compare(student, micro, inputs, weights)
        loss, metrics = self.algorithm.loss(inputs)
        own_losses = {}
        if weights.critic:
            value_loss, value_metrics = self._value_head_loss(weights, aux, micro, inputs)
            own_losses[WeightGroup.CRITIC] = value_loss
            metrics |= value_metrics
        return LossOutput(
            loss=loss,
            metrics=metrics,
            aux=aux,
            own_losses=own_losses,
            tokens=self._token_outputs(inputs, logp, entropy),
        )

    def _value_head_loss(
        self, weights: Weights, aux: Aux, micro: Batch, inputs: PolicyInputs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of a value head, metrics). It has a gradient for the head alone: the final
        states of the policy are constants."""
        assert aux.states is not None  # log-probabilities were computed from them
        step = step_of(None, micro.replace(media=None))
        values = self.value_model.values_of(aux.states, weights.critic[VALUE_HEAD], step)
        return self._value_loss(values, micro, inputs)

    def _value_loss(
        self, values: jax.Array, micro: Batch, inputs: PolicyInputs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert micro.old_values is not None and micro.returns is not None  # the stage adds them
        return self._critic_algorithm.value_loss(values, micro.old_values, micro.returns, inputs)

    def _token_outputs(
        self, inputs: PolicyInputs, logp: jax.Array, entropy: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns arrays [R, T] for the record of a run, by the names of TokenOutputs."""
        if not self._returns_tokens:
            return {}
        logp, entropy = jax.lax.stop_gradient((logp, entropy))
        flags = cast(TokenFlags, self.algorithm).token_flags(
            replace(inputs, logp=logp, entropy=entropy)
        )
        return {"logp": logp, "entropy": entropy} | ({} if flags is None else {"flags": flags})

    def _with_routes_of_critic(self, batch: Batch) -> Batch:
        """Returns the batch as the critic reads it. A critic with its own trunk is another model,
        whose routers make their own choices."""
        return batch if self.value_model.shared else batch.replace(routes=None)

    def _critic_loss(self, weights: Weights, micro: Batch, inputs: PolicyInputs) -> LossOutput:
        step = step_of(weights.media_table, self._with_routes_of_critic(micro))
        values, _, aux = self.value_model.values(
            weights.policy | weights.critic, micro.tokens, step
        )
        loss, metrics = self._value_loss(values, micro, inputs)
        return LossOutput(loss=loss, metrics=metrics, aux=aux)

    def logprobs(
        self, params: dict[str, jax.Array], batch: Batch, table: MediaTable | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes (logp, entropy), float32[N, T] on the host, micro-batch by micro-batch.

        As in updates, attention skips blocks of pairs that no token sees. Unlike there, no expert
        has a capacity beyond which it drops tokens.

        Tokens follow the routes of the batch, if it has routes. table: rows of pictures and sounds;
        None without them.
        """
        weights = Weights(policy=params, media_table=table)
        logp, entropy = self._counted_pass(self._logprobs, weights, batch, self.flops)
        return logp, entropy

    def values(
        self, state: RunState, batch: Batch, table: MediaTable | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the values of the states before and after each token, float32[N, T] on the host.
        table: rows of pictures and sounds; None without them."""
        model = self.value_model
        weights = self.value_weights(state, table)
        batch = self._with_routes_of_critic(batch).replace(kept=None)
        before, after = self._counted_pass(self._values, weights, batch, model.flops)
        return before, after

    def value_weights(self, state: RunState, table: MediaTable | None) -> Weights:
        """Returns what the program of `values` reads."""
        assert state.critic is not None  # the stage has a critic
        trunk = self.value_model.extra_params(self.policy_params(state))
        return Weights(policy=trunk, critic=state.critic.params, media_table=table)

    def _counted_pass(
        self, program: CompiledCache, weights: Weights, batch: Batch, operations: Operations
    ) -> tuple[np.ndarray, ...]:
        packing, R = self.packing_of(batch, self.row_history)
        self.add_forward_flops(operations, packing)
        return by_micro_batch(partial(program, weights), batch, packing, R, self.graph.layout)

    @cached_property
    def _logprobs(self):
        def run(weights: Weights, micro: Batch):
            tokens = constrain(micro.tokens, ("batch", None), self.graph.layout)
            arguments = tokens, step_of(weights.media_table, micro), self.temperature, micro.kept
            return self._scoring_graph.logprobs(weights.policy, *arguments)[:2]

        return CompiledCache(jax.jit(run), self.graph.layout.platform)

    @cached_property
    def _values(self):
        def run(weights: Weights, micro: Batch):
            tokens = constrain(micro.tokens, ("batch", None), self.graph.layout)
            params = weights.policy | weights.critic
            return self.value_model.values(params, tokens, step_of(weights.media_table, micro))[:2]

        return CompiledCache(jax.jit(run), self.graph.layout.platform)
