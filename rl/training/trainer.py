"""Compiles the functions of a stage. The trainer computes the arrays that an algorithm asks for and
minimises its loss.

N rows, T tokens, R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.media import MediaTable
from policy.execution.encoding import PaddedInputs
from policy.mesh import processes
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.modes import VALUE_HEAD
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.flops import Operations
from rl.algorithms import PolicyInputs
from rl.config.stage import StageOptions
from rl.training.batch import Batch
from rl.training.batch_updates import (
    HELD_OUT,
    LOSS_TOKENS,
    BatchUpdates,
    by_micro_batch,
    shard_rows,
    step_of,
)
from rl.training.critic import Critic
from rl.training.host_memory import copied, mixed
from rl.training.media import towers
from rl.training.packing.packing import Packing
from rl.training.teacher import Student, Teacher
from rl.training.updater import LossOutput, OptimizerStep, ParamState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunState:
    """All arrays of a stage of a run. An absent part is None.

    policy: the trained weights and their optimizer state. reference: the policy at the start of the
    stage, mixed with later policies at each renewal. critic, projections: other trained weights
    (FeatureProjections), as of the policy.
    """

    policy: ParamState
    reference: dict[str, jax.Array] | None
    critic: ParamState | None
    projections: ParamState | None = None


@dataclass(frozen=True)
class TokenOutputs:
    """What an update computed of each token before it changed the weights.

    arrays: packed rows on the devices. logp, entropy: float32 under the current policy. flags:
    uint8, which tokens the loss cuts off (rl/algorithms/_token_flags.py); absent for a loss that
    cuts off none.
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


class Trainer(BatchUpdates):
    """Compiles the functions of one stage: updates of policy and critic, log-probabilities and
    values of a batch."""

    def __init__(
        self,
        graph: Graph,
        stage: StageOptions,
        algorithm: Any,
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
          each token. teacher: the model, or its numbers in the batch, that an update compares the
          policy with.
        """
        super().__init__(graph, stage, algorithm)
        self.teacher = teacher
        projections = None
        if teacher is not None:
            self._update_graph, projections = (
                teacher.recorded(self._update_graph),
                teacher.projections(graph),
            )
        self.temperature = np.float32(temperature)
        self._returns_tokens = returns_tokens
        self._has_reference = "reference" in state
        loss = (
            self._auxiliary_only_loss
            if stage.indexer.training == "dense_warmup"
            else self._policy_loss
        )
        self.critic = self.projections = self.companion = self._value_model = None
        if "critic" in state:
            self._value_model = Critic(
                self._scoring_graph, shared=algorithm.critic_trunk == "policy"
            )
            self.critic = OptimizerStep(
                self._value_model, self._critic_loss, stage.critic, stage, seed
            )
            self.companion = "critic" if self._value_model.shared else None
        if projections is not None:
            if self.companion:
                raise ValueError(
                    "the update of a policy trains a value head or projections of features, not "
                    "both"
                )
            self.projections = OptimizerStep(projections, loss, stage.optimizer, stage, seed)
            self.companion = "projections"
        companion = self.companion and getattr(self, self.companion)
        self.policy = OptimizerStep(
            self._update_graph, loss, stage.optimizer, stage, seed, companion
        )

    def set_rates(self, stage: StageOptions) -> None:
        """Takes the learning rates and the number of steps of `stage`, whose other settings are the
        same. Updates compile again."""
        self.stage = stage
        self.critic = self.critic and self.critic.with_rates(stage.critic, stage)
        self.projections = self.projections and self.projections.with_rates(stage.optimizer, stage)
        companion = getattr(self, self.companion) if self.companion else None
        self.policy = self.policy.with_rates(stage.optimizer, stage, companion)

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
    def executables(self) -> dict[str, CompiledCache]:
        """Returns the compiled functions of a step, by the names of their programs in a plan."""
        executables = {"update": self.policy.executable, "log-probabilities": self._logprobs}
        if self.stage.held_out:
            executables |= {HELD_OUT: self.policy.losses_executable}
        if self.critic:
            executables |= {"update of the critic": self.critic.executable, "values": self._values}
        return executables

    def start(self, params: dict[str, jax.Array], seed: int) -> RunState:
        """Returns the state at the beginning of the stage. Owns `params`; reference and critic are
        copies."""
        reference = None
        if self._has_reference:
            copies = partial(copied, tables=self.graph.tables)
            reference = jax.jit(copies, out_shardings=self.graph.shardings)(params)
        critic = self.critic and self.critic.start(
            self.value_model.init(params, self.algorithm.value_init_std, seed)
        )
        projections = self.projections and self.projections.start(
            cast(Any, self.projections.model).init(seed)
        )
        return block_on_cpu_mesh(
            RunState(self.policy.start(params), reference, critic, projections), self.graph.layout
        )

    def renew_reference(self, state: RunState, mix: float) -> RunState:
        """Returns the state with the reference model mix * policy + (1 - mix) * reference."""
        reference = self._renewed(state.reference, state.policy.params, np.float32(mix))
        return replace(state, reference=block_on_cpu_mesh(reference, self.graph.layout))

    @cached_property
    def _renewed(self):
        mixture = partial(mixed, tables=self.graph.tables)
        return jax.jit(mixture, donate_argnums=0, out_shardings=self.graph.shardings)

    def abstract(self) -> RunState:
        """Returns the shapes and shardings of the state, for a checkpoint to be read into."""
        shapes = jax.eval_shape(partial(self.start, seed=0), self.graph.shapes)
        shardings = RunState(
            self.policy.shardings,
            cast(Any, self.graph.shardings) if shapes.reference is not None else None,
            self.critic.shardings if self.critic else None,
            self.projections and self.projections.shardings,
        )
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
        """Makes one optimiser update of the policy, and of the critic if there is one.

        batch: the mini-batch on the host. critic_only: skips the policy. adaptive_coefs: values for
        `PolicyInputs`. on_tokens: gets the policy's outputs for each token. table: that of a
        batch with media, by the weights before the step. tower_inputs: the inputs of its items, if
        the stage trains towers. number: of the update in its stage, from 0, as in
        `OptimizerStep`.

        Returns (state, metrics). Raises ValueError if the stage replays routes and the batch has
        none.
        """
        if self.stage.router_replay and batch.routes is None:
            raise ValueError(
                "router_replay: this batch has no routes; take it from rollouts.to_batch(..., "
                "replay=True)"
            )
        # A value head learns in the update of the policy, which computes its input states.
        separate_critic = state.critic is not None and (critic_only or not self.value_model.shared)
        packing, R = self.packing_of(batch)
        if not critic_only:
            self.add_flops(self.flops, packing, passes=3)
            if self.teacher is not None:
                ends, starts = (self.teacher.operations(self.graph, each) for each in packing.runs)
                self.total_flops += ends - starts
        if separate_critic:
            self.add_flops(
                self.value_model.flops, packing, passes=1 if self.value_model.shared else 3
            )
        batch = shard_rows(packing.batch(batch), self.graph.layout)
        metrics: dict[str, Any] = packing.metrics(R, self.sharing is not None)
        coefs = {name: np.float32(value) for name, value in (adaptive_coefs or {}).items()}
        inputs = self.loss_inputs(batch, coefs or None)
        rows = towers.as_params(table)
        assert inputs.num_tokens is not None  # `loss_inputs` counts them
        metrics |= {LOSS_TOKENS: inputs.num_tokens}
        if separate_critic:
            assert self.critic is not None and state.critic is not None  # the state has a critic
            trunk = self.value_model.extra_params(state.policy.params) | rows
            output = self.critic(state.critic, batch, inputs, R, trunk, number=number)
            state = replace(state, critic=output.learner)
            result = dict(output.metrics)
            del result[
                "loss"
            ]  # the sum of value/loss and value/moe/balance, which are both reported
            metrics |= {k if k.startswith("value/") else f"value/{k}": v for k, v in result.items()}
        if not critic_only:
            frozen = rows if self.teacher is None else self.teacher.params | rows
            own = {} if (name := self.companion) is None else {name: getattr(state, name)}
            companions = next(iter(own.values()), None), tower_inputs
            output = self.policy(state.policy, batch, inputs, R, frozen, *companions, number)
            state = replace(state, policy=output.learner, **dict.fromkeys(own, output.companion))
            metrics |= output.metrics
            if on_tokens is not None and output.tokens:
                on_tokens(TokenOutputs(output.tokens, packing))
        return state, metrics

    def held_out_loss(
        self, state: RunState, batch: Batch, counts: Mapping[str, float], **options: Any
    ) -> dict[str, float]:
        """Returns the metrics of the loss of the policy; arguments as in `losses`."""
        return self.losses(self.policy, state.policy.params, batch, counts, **options)

    def _auxiliary_only_loss(self, params, micro: Batch, inputs: PolicyInputs) -> LossOutput:
        """Returns a policy loss of 0 and the Aux of the layers: only auxiliary losses train.
        Computes no logits."""
        aux = self._update_graph.aux(params, micro.tokens, self.step_of(params, micro))
        return LossOutput(loss=jnp.float32(0.0), metrics={}, aux=aux)

    def _policy_loss(self, params, micro: Batch, inputs: PolicyInputs) -> LossOutput:
        params, frozen = (params, {}) if self.teacher is None else self.teacher.split(params)
        step = self.step_of(params, micro)
        logp, entropy, aux = self._update_graph.logprobs(
            params, micro.tokens, step, self.temperature, micro.kept
        )
        inputs = replace(inputs, logp=logp, entropy=entropy)
        if self.teacher is not None:
            inputs = self.teacher.compare(
                Student(self._update_graph, params, aux), micro, inputs, frozen
            )
        loss, metrics = self.algorithm.loss(inputs)
        head_gradient = None
        if VALUE_HEAD in params:
            head_gradient, head_metrics = self._value_head_gradient(
                params[VALUE_HEAD], aux.states, micro, inputs
            )
            metrics |= head_metrics
        return LossOutput(
            loss=loss,
            metrics=metrics,
            aux=aux,
            tokens=self._token_outputs(inputs, logp, entropy),
            head_gradient=head_gradient,
        )

    def _token_outputs(
        self, inputs: PolicyInputs, logp: jax.Array, entropy: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns arrays [R, T] for the record of a run, by the names of TokenOutputs."""
        if not self._returns_tokens:
            return {}
        logp, entropy = jax.lax.stop_gradient((logp, entropy))
        flags = self.algorithm.token_flags(replace(inputs, logp=logp, entropy=entropy))
        return {"logp": logp, "entropy": entropy} | ({} if flags is None else {"flags": flags})

    def _value_head_gradient(
        self, head_E, states_BTE, micro: Batch, inputs: PolicyInputs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (gradient of the loss of a value head on these states, metrics)."""

        def loss(head_E):
            values = self.value_model.values_of(
                states_BTE, head_E, step_of({}, micro.replace(media=None))
            )
            return self.algorithm.value_loss(values, micro.old_values, micro.returns, inputs)

        return jax.grad(loss, has_aux=True)(jax.lax.stop_gradient(head_E))

    def _critic_loss(self, params, micro: Batch, inputs: PolicyInputs) -> LossOutput:
        routed = micro if self.value_model.shared else micro.replace(routes=None)
        values, _, aux = self.value_model.values(params, micro.tokens, step_of(params, routed))
        loss, metrics = self.algorithm.value_loss(values, micro.old_values, micro.returns, inputs)
        return LossOutput(loss=loss, metrics=metrics, aux=aux)

    def logprobs(
        self, params: dict[str, jax.Array], batch: Batch, table: MediaTable | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes (logp, entropy), float32[N, T] on the host, micro-batch by micro-batch, with the
        graph that skips blocks of attention as updates do and drops no tokens.

        Tokens follow the routes of the batch, if it has routes. table: that of a batch with media.
        """
        logp, entropy = self._by_micro_batch(
            self._logprobs, params | towers.as_params(table), batch, self.flops
        )
        return logp, entropy

    def values(
        self, state: RunState, batch: Batch, table: MediaTable | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the values of the states before and after each token, float32[N, T] on the host.
        table: that of a batch with media."""
        model = self.value_model
        assert state.critic is not None
        params = (
            model.extra_params(state.policy.params) | state.critic.params | towers.as_params(table)
        )
        # A critic with its own trunk is another model, whose routers make their own choices.
        batch = batch.replace(kept=None, routes=batch.routes if model.shared else None)
        before, after = self._by_micro_batch(self._values, params, batch, model.flops)
        return before, after

    def _by_micro_batch(
        self, program, params, batch: Batch, operations: Operations
    ) -> tuple[np.ndarray, ...]:
        packing, R = self.packing_of(batch)
        self.add_flops(operations, packing, passes=1)
        return by_micro_batch(partial(program, params), batch, packing, R, self.graph.layout)

    @cached_property
    def _logprobs(self):
        def run(params, micro: Batch):
            tokens = constrain(micro.tokens, ("batch", None), self.graph.layout)
            arguments = tokens, step_of(params, micro), self.temperature, micro.kept
            return self._scoring_graph.logprobs(params, *arguments)[:2]

        return CompiledCache(jax.jit(run), self.graph.layout.platform)

    @cached_property
    def _values(self):
        def run(params, micro: Batch):
            tokens = constrain(micro.tokens, ("batch", None), self.graph.layout)
            return self.value_model.values(params, tokens, step_of(params, micro))[:2]

        return CompiledCache(jax.jit(run), self.graph.layout.platform)
