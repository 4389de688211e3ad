"""Updates: one loss, its gradient with respect to the groups of weights that learn, and a step of
the optimizer of each group, in one compiled program.

`Update` is the program; rl/training/updates has its parts: the step of one optimizer, and the loop
over micro-batches. N packed rows, T tokens, M micro-batches of R rows (`micro_rows`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import rl.algorithms
from policy import modes
from policy.cache.media import MediaTable
from policy.execution import row_tables
from policy.execution.encoding import PaddedInputs
from policy.intermediates import Aux, Routing
from policy.layers import batch_split
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.ops.dropout import row_seeds
from policy.ops.host_memory import fetch
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.program_names import ProgramName
from rl.algorithms import PolicyInputs
from rl.config.stage import StageOptions
from rl.training.auxiliary_losses import auxiliary_loss, totals
from rl.training.batch import Batch
from rl.training.diagnostics import activation_metrics
from rl.training.media.towers import TowerGradients
from rl.training.updates.micro_batches import Carry, Outputs, num_filled, scan_first
from rl.training.updates.optimizer_step import OptimizerStep, ParamState, updates_made
from rl.training.weights import Params, WeightGroup, Weights, split


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """The loss of a micro-batch of R rows and T tokens.

    loss: float32 scalar, the share of the micro-batch in the loss of the mini-batch: the update
    sums it over micro-batches. metrics: scalars by name, without a gradient, which
    `rl.algorithms.reduce_metrics` reduces. aux: the outputs of the layers. own_losses: further
    terms, each the loss of one group alone: it has no gradient with respect to other groups, and
    `loss` has none with respect to that group. tokens: arrays [R, T] by name, for the record of a
    run.
    """

    loss: jax.Array
    metrics: dict[str, jax.Array]
    aux: Aux
    own_losses: dict[WeightGroup, jax.Array] = field(default_factory=dict)
    tokens: dict[str, jax.Array] = field(default_factory=dict)


Loss = Callable[[Weights, Batch, PolicyInputs], LossOutput]
"""(weights, micro-batch, its PolicyInputs) -> LossOutput."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpdateArguments:
    """What an update reads and leaves as it is.

    batch: a mini-batch, a multiple of `micro_rows` rows. inputs: its PolicyInputs. frozen: weights
    that do not learn in the update. tower_inputs: the pictures and sounds that the update encodes
    into `frozen.media_table`; None: it trains no tower. number: of the update in its stage, from 0;
    its learning rate follows from it. None: the number of updates that changed the weights.
    """

    batch: Batch
    inputs: PolicyInputs
    frozen: Weights = field(default_factory=Weights)
    tower_inputs: Sequence[PaddedInputs] | None = None
    number: np.int32 | jax.Array | jax.ShapeDtypeStruct | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        inputs: PolicyInputs,
        table: MediaTable | None,
        tower_inputs: Sequence[PaddedInputs] | None = None,
        number: int | None = None,
    ) -> UpdateArguments:
        """Returns the arguments of an update without further weights. table: rows of pictures and
        sounds; None without them."""
        count = None if number is None else np.int32(number)
        return cls(batch, inputs, Weights(media_table=table), tower_inputs, count)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpdateOutput:
    """The results of an update.

    learners: the groups that learn, after it. metrics: scalars on the device. tokens: arrays [N, T]
    of the loss, before the weights changed.
    """

    learners: dict[WeightGroup, ParamState]
    metrics: dict[str, jax.Array]
    tokens: dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Terms:
    """What an update computes besides gradients: of each micro-batch, or reduced to the mini-batch.

    routing, activations: outputs of layers, by path of the layer. The other fields are as in
    LossOutput; `loss` has the auxiliary losses too.
    """

    loss: jax.Array
    own_losses: dict[WeightGroup, jax.Array]
    metrics: dict[str, jax.Array]
    routing: dict[str, Routing]
    activations: dict[str, jax.Array]
    tokens: dict[str, jax.Array]


@dataclass(frozen=True)
class UpdateCall:
    """A call of an update: with arrays, or with their shapes in a plan.

    name: of its program. update: what is called. learners: the groups that learn. arguments: what
    else it reads. micro_rows: rows of a micro-batch.
    """

    name: ProgramName
    update: Update
    learners: dict[WeightGroup, ParamState]
    arguments: UpdateArguments
    micro_rows: int

    def run(self) -> UpdateOutput:
        """Makes the update, which donates the arrays of `learners`."""
        update = self.update
        output = update.executable(*self._read, micro_rows=self.micro_rows)
        return block_on_cpu_mesh(output, update.layout)

    def lower(self) -> jax.stages.Lowered:
        """Traces the program of the update."""
        return self.update.executable.lower(*self._read, micro_rows=self.micro_rows)

    @property
    def _read(self) -> tuple[dict[WeightGroup, ParamState], UpdateArguments]:
        return self.learners, self.arguments


@dataclass(frozen=True)
class LossCall:
    """A call of the loss of an update, without a gradient and without dropout: with arrays, or with
    their shapes in a plan.

    weights: all that the loss reads. batch, inputs, micro_rows: as of an update. The losses of
    routers, indexers and prediction modules are not in it.
    """

    update: Update
    weights: Weights
    batch: Batch
    inputs: PolicyInputs
    micro_rows: int

    def run(self) -> dict[str, jax.Array]:
        """Returns the metrics of the loss, `loss` among them."""
        values = self.update.losses_executable(*self._read, micro_rows=self.micro_rows)
        return block_on_cpu_mesh(values, self.update.layout)

    def lower(self) -> jax.stages.Lowered:
        """Traces the program of the loss."""
        return self.update.losses_executable.lower(*self._read, micro_rows=self.micro_rows)

    @property
    def _read(self) -> tuple[Weights, Batch, PolicyInputs]:
        return self.weights, self.batch, self.inputs


class Update:
    """A compiled update: one loss, and its gradient with respect to the groups that learn.

    The gradients are sums over micro-batches. Each group has an optimizer and a norm of its own.
    """

    def __init__(
        self,
        loss: Loss,
        main: WeightGroup,
        steps: Mapping[WeightGroup, OptimizerStep],
        stage: StageOptions,
        seed: int,
    ):
        """Defines the update; it compiles at the first call of each shape.

        Args:
          loss: of a micro-batch.
          main: the group of the model whose forward pass the loss runs: its layers have auxiliary
            losses, and it counts the updates for dropout.
          steps: of the groups that learn, `main` among them.
          stage: settings of the stage.
          seed: seed of the run, for dropout.
        """
        self._loss = loss
        self.optimizer_steps = dict(steps)
        self.main = main
        self.main_step = self.optimizer_steps[self.main]
        self._stage = stage
        self._seed = seed if stage.dropout else None
        self._diagnostics = stage.diagnostics and self.main is WeightGroup.POLICY
        self._graph = self.main_step.model.trunk
        self.layout = self._graph.layout

    def with_steps(self, steps: Mapping[WeightGroup, OptimizerStep], stage: StageOptions) -> Update:
        """Returns the update with the steps of other learning rates, whose program is a new one.
        All other settings must be the same."""
        other = copy.copy(self)
        other.__dict__.pop("executable", None)
        other.optimizer_steps = {group: steps[group] for group in self.optimizer_steps}
        other.main_step = other.optimizer_steps[self.main]
        other._stage = stage
        return other

    @cached_property
    def executable(self) -> CompiledCache:
        """Returns the program (learners, UpdateArguments) -> UpdateOutput, which reuses the memory
        of the learners."""
        shardings = {group: step.shardings for group, step in self.optimizer_steps.items()}
        update = jax.jit(
            self._update,
            donate_argnums=0,
            out_shardings=UpdateOutput(shardings, cast(Any, None), cast(Any, None)),
            static_argnames="micro_rows",
            compiler_options=batch_split.compiler_options(self._graph.runtime),
        )
        return CompiledCache(update, self.layout.platform)

    def _update(
        self,
        learners: dict[WeightGroup, ParamState],
        arguments: UpdateArguments,
        *,
        micro_rows: int,
    ) -> UpdateOutput:
        batch = arguments.batch
        if self._seed is not None:
            made = updates_made(learners[self.main])
            batch = batch.replace(dropout=row_seeds(self._seed, made, batch.tokens.shape[0]))
        params = {group: learner.params for group, learner in learners.items()}
        trained, without_gradient = self._by_gradient(params, arguments.frozen)
        towers = TowerGradients(self._graph, trained, without_gradient, arguments.tower_inputs)
        grads, terms = self._gradients(
            towers.trained, towers.without_gradient, batch, arguments.inputs, micro_rows
        )
        grads = towers.gradients(grads)
        new = {}
        metrics = terms.metrics
        # In a jitted function the number of the update is an array.
        number = cast(jax.Array | None, arguments.number)
        for group, step in self.optimizer_steps.items():
            routing = terms.routing if group is self.main else {}
            loss = terms.own_losses.get(group, terms.loss)
            new[group], more = step.apply(learners[group], grads[group], loss, routing, number)
            # The loss reports that of a critic; projections have the loss of the policy.
            if group.prefix:
                more = {f"{group.prefix}{k}": v for k, v in more.items() if k != "loss"}
            metrics = metrics | more
        return UpdateOutput(new, metrics, terms.tokens)

    def _by_gradient(
        self, params: Mapping[WeightGroup, Params], frozen: Weights
    ) -> tuple[Weights, Weights]:
        """Returns (weights with a gradient, all other weights)."""
        trained = Weights()
        without_gradient = frozen
        for group, step in self.optimizer_steps.items():
            with_gradient, others = step.split(params[group])
            trained = trained.with_group(group, with_gradient)
            without_gradient = without_gradient | Weights().with_group(group, others)
        return trained, without_gradient

    @cached_property
    def losses_executable(self) -> CompiledCache:
        """Returns the program (weights, mini-batch, PolicyInputs) -> metrics of the loss."""
        return CompiledCache(
            jax.jit(self._losses, static_argnames="micro_rows"), self.layout.platform
        )

    def _losses(
        self, weights: Weights, batch: Batch, inputs: PolicyInputs, *, micro_rows: int
    ) -> dict[str, jax.Array]:
        trained, without_gradient = self._by_gradient(
            {group: weights[group] for group in self.optimizer_steps}, weights
        )
        micros = self._micro_batches((batch, inputs), micro_rows)
        for_products = self._for_products(self._dense(trained))

        def micro_step(_, xs):
            _, looked_up = self._looked_up(trained | without_gradient, xs[0])
            output = self._loss(without_gradient | for_products | looked_up, *xs)
            return (), (output.loss, output.metrics)

        loss, metrics = self._scan(micro_step, (), micros)[1]
        return rl.algorithms.reduce_metrics(metrics) | {"loss": loss.sum()}

    def _dense(self, trained: Weights) -> Weights:
        """Returns the weights that are no tables in host memory."""
        dense = split(trained[self.main], self.main_step.host_tables)[1]
        return trained.with_group(self.main, dense)

    def _for_products(self, weights: Weights) -> Weights:
        """Returns the weights in the dtype of the products that read them."""
        return weights.with_group(self.main, self._graph.cast_for_products(weights[self.main]))

    def _micro_batches(
        self, tree: tuple[Batch, PolicyInputs], micro_rows: int
    ) -> tuple[Batch, PolicyInputs]:
        """Reshapes [N, ...] to [M, R, ...], each micro-batch sharded by rows; scalars (totals) are
        repeated."""
        R = micro_rows
        M = tree[0].tokens.shape[0] // R

        def stacked(a):
            if not jnp.ndim(a):
                return jnp.broadcast_to(a, (M,))
            return constrain(
                a.reshape(M, R, *a.shape[1:]), (None, "batch", *[None] * (a.ndim - 1)), self.layout
            )

        return jax.tree.map(stacked, tree)

    def _scan(
        self,
        micro_step: Callable[[Carry, tuple[Batch, PolicyInputs]], tuple[Carry, Outputs]],
        carry: Carry,
        micros: tuple[Batch, PolicyInputs],
    ) -> tuple[Carry, Outputs]:
        """Runs `micro_step(carry, micro-batch)` as `jax.lax.scan` does, over the micro-batches with
        tokens.

        With tables in host memory it runs over all: their gradients stay there, and there only a
        scan can stack arrays.
        """
        if self.main_step.host_tables:
            return jax.lax.scan(micro_step, carry, micros)
        return scan_first(micro_step, carry, micros, num_filled(micros[0].filled))

    def _looked_up(self, weights: Weights, micro: Batch) -> tuple[dict, Weights]:
        """Returns what `row_tables.read_rows` reads for a micro-batch from tables in host memory;
        ({}, no weights) without such tables."""
        if not self.main_step.host_tables:
            return {}, Weights()
        step = replace(
            modes.make_step(micro.tokens, segments=micro.segments, tree=micro.tree),
            tokens=micro.tokens,
        )
        rows, values = row_tables.read_rows(
            self._graph, weights[self.main], step, self.main_step.host_tables
        )
        return rows, Weights().with_group(self.main, values)

    def _gradients(
        self,
        trained: Weights,
        without_gradient: Weights,
        batch: Batch,
        inputs: PolicyInputs,
        micro_rows: int,
    ) -> tuple[Weights, _Terms]:
        """Returns (float32 gradients, further terms of the mini-batch). Both are sums over
        micro-batches, but for metrics, which reduce as their names say, and arrays [N, T] of
        tokens."""
        N = batch.tokens.shape[0]
        R = micro_rows
        M = N // R
        micros = self._micro_batches((batch, inputs), R)
        batch_totals = totals(batch)
        if self._stage.router.balance == "batch" and M > 1:
            # An extra forward pass, of which XLA drops the head: the balance loss of every
            # micro-batch needs the token count of each expert in the mini-batch.
            def count(_, xs):
                aux = self._loss(trained | without_gradient, *xs).aux
                routing = cast(dict[str, Routing], aux.by_layer("routing"))
                return None, {path: each.counts for path, each in routing.items()}

            counts = jax.tree.map(lambda a: a.sum(axis=0), jax.lax.scan(count, None, micros)[1])
            batch_totals = replace(batch_totals, counts=counts)
        prefix = self.main.prefix

        def objective(weights: Weights, micro: Batch, inputs: PolicyInputs):
            output = self._loss(without_gradient | weights, micro, inputs)
            aux = output.aux
            auxiliary, auxiliary_metrics = auxiliary_loss(self._stage, aux, micro, batch_totals)
            loss = output.loss + auxiliary
            terms = _Terms(
                loss=loss,
                own_losses=output.own_losses,
                metrics=output.metrics
                | {f"{prefix}{name}": value for name, value in auxiliary_metrics.items()},
                routing=cast(dict[str, Routing], aux.by_layer("routing")),
                activations=aux.by_layer("activations") if self._diagnostics else {},
                tokens=output.tokens,
            )
            return sum(output.own_losses.values(), loss), terms

        dense = self._dense(trained)
        for_products = self._for_products(dense)

        def micro_step(total, xs):
            rows, looked_up = self._looked_up(trained | without_gradient, xs[0])
            grads, terms = jax.grad(objective, has_aux=True)(for_products | looked_up, *xs)
            row_grads, dense_grads = split(grads[self.main], looked_up[self.main])
            table_grads = row_tables.gradients(self._graph, rows, row_grads)
            grads = self._shard_as_moments(fetch(grads.with_group(self.main, dense_grads)))
            return _accumulated(total, grads), (table_grads, terms)

        zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), dense)
        grads, (table_grads, stacked) = self._scan(
            micro_step, self._shard_as_moments(zeros), micros
        )
        metrics = rl.algorithms.reduce_metrics(stacked.metrics)
        if self._diagnostics:
            metrics |= activation_metrics(
                stacked.activations, batch.filled.reshape(M, R, -1), self._graph.config
            )
        loss, own_losses, routing = jax.tree.map(
            lambda a: a.sum(axis=0), (stacked.loss, stacked.own_losses, stacked.routing)
        )
        terms = replace(
            stacked,
            loss=loss,
            own_losses=own_losses,
            metrics=metrics,
            routing=routing,
            tokens={name: array.reshape(N, -1) for name, array in stacked.tokens.items()},
        )
        return grads.with_group(self.main, cast(Params, grads[self.main] | table_grads)), terms

    def _shard_as_moments(self, grads: Weights) -> Weights:
        for group, step in self.optimizer_steps.items():
            grads = grads.with_group(group, step.shard_as_moments(grads[group]))
        return grads


def _accumulated(total: Weights, grads: Weights) -> Weights:
    return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
