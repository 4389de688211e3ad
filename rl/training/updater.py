"""Updates: one loss, its gradient with respect to the groups of weights that learn, and a step of
the optimizer of each group, in one compiled program.

`Update` is the program, `OptimizerStep` what it does with the gradient of one group. N rows, T
tokens, M micro-batches of R rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import rl.algorithms
from policy import modes
from policy.cache.media import MediaTable
from policy.execution import row_tables
from policy.execution.encoding import PaddedInputs
from policy.intermediates import Aux, Routing
from policy.layers import batch_split
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.ops.dropout import row_seeds
from policy.ops.host_memory import belongs_there, fetch, in_host_memory, to_device
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.program_names import ProgramName
from rl.algorithms import PolicyInputs
from rl.config.stage import OptimizerOptions, StageOptions
from rl.training.auxiliary_losses import auxiliary_loss, load_metrics, totals, updated_biases
from rl.training.batch import Batch
from rl.training.diagnostics import activation_metrics, gradient_norms
from rl.training.host_memory import joined, on_each_memory
from rl.training.media.towers import TowerGradients
from rl.training.optimizer import (
    WeightAxes,
    at_once,
    at_update,
    by_layer,
    operations,
    optimizer,
    schedule,
    sharding_of_moment,
    start,
    update_count,
)
from rl.training.optimizer import norm as norm_of
from rl.training.trainable import frozen_weights, trained_paths
from rl.training.weights import LearningModel, Params, Value, WeightGroup, Weights, group_of, split


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ParamState:
    """Trained weights and the state of their optimizer. Every update donates these arrays and
    reuses their memory."""

    params: dict[str, jax.Array]
    optimizer: Any


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


def _first_step(group: WeightGroup, stage: StageOptions) -> int:
    """Returns the steps of a stage before the first update of a group: a policy waits while only
    its critic learns."""
    return 0 if group is WeightGroup.CRITIC else getattr(stage.algorithm, "critic_warmup", 0)


class OptimizerStep:
    """One step of the optimizer of a group, in the jitted function of an update.

    It clips the gradient by its norm, runs the optimizer and updates the selection biases of
    routers. A step that is not finite, or whose gradient is exactly 0, changes nothing.
    """

    def __init__(
        self,
        group: WeightGroup,
        model: LearningModel,
        options: OptimizerOptions,
        stage: StageOptions,
    ):
        """Defines the step.

        Args:
          group: of the weights.
          model: the model of the weights.
          options: settings of the optimizer.
          stage: settings of the stage.
        """
        self.group = group
        self.model = model
        self._options = options
        self._stage = stage
        self._frozen = frozen_weights(model, stage)
        self._trained_paths = trained_paths(model.axes, model.runtime, self._frozen)
        self.host_tables = model.host_tables & self._trained_paths
        self._diagnostics = stage.diagnostics and group is WeightGroup.POLICY
        self._graph = model.trunk
        self.layout = self._graph.layout
        self._set_rates()

    def _set_rates(self) -> None:
        """Defines the learning rate and the optimizer from the options."""
        stage = self._stage
        model = self.model
        first = _first_step(self.group, stage)
        self._first_update = first * stage.updates_per_step
        # A plan does not read the data, which the steps of `epochs` follow from.
        steps = stage.steps or 0
        self.rate = schedule(self._options, max(0, steps - first), stage.updates_per_step)
        self._axes = WeightAxes(model.axes, model.matrices, self.layout)
        transform = optimizer(self._options, self.rate, self._axes, model.runtime.param_dtype)
        self._transform = self._frozen.without_changes(transform)

    def with_rates(self, options: OptimizerOptions, stage: StageOptions) -> OptimizerStep:
        """Returns a copy with the learning rates of other options and numbers of steps. All other
        settings must be the same."""
        other = copy.copy(self)
        other._options = options
        other._stage = stage
        other._set_rates()
        return other

    @property
    def operations(self) -> float:
        """Operations of the products of the optimizer in an update, on all devices."""
        return operations(self._options, self._axes, self.split(self.model.sizes)[0])

    def split(self, params: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
        """Returns (weights with a gradient, other weights). Biases of routers are trained, but
        without a gradient."""
        return split(params, self._trained_paths - self.model.untrained)

    def start(self, params: dict[str, jax.Array]) -> ParamState:
        """Returns the state before the first update, which owns `params`."""
        return ParamState(
            params, block_on_cpu_mesh(self._optimizer_state(self.split(params)[0]), self.layout)
        )

    @property
    def _in_host_memory(self) -> bool:
        return bool(self.model.hosted - self.model.host_tables) or self._options.host_memory

    def _optimizer_state(self, weights: dict[str, jax.Array]):
        if self._in_host_memory:
            return start(self._transform, weights, self.shardings.optimizer)
        return jax.jit(self._transform.init, out_shardings=self.shardings.optimizer)(weights)

    @cached_property
    def shardings(self) -> ParamState:
        """Returns the sharding of each array of a ParamState.

        Moments are sharded as their weights are, or further (`Layout.moment_spec`). Counters are
        replicated. In host memory are the moments of tables in host memory, and with
        `optimizer.host_memory` those of all matrices.
        """
        weights = self.model.shardings

        def sharding(path, entry):
            keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            if not keys:
                return self.layout.replicated
            weight = keys[-1]
            moment = self._moment_shardings.get(
                weight, NamedSharding(self.layout.mesh, weights[weight].spec)
            )
            moment = sharding_of_moment(moment, entry.shape, self.model.sizes[weight])
            hosted = self._options.host_memory and belongs_there(self.model.axes[weight])
            return in_host_memory(moment) if hosted or weight in self.model.host_tables else moment

        trained = {
            path: jax.ShapeDtypeStruct(self.model.sizes[path], jnp.float32)
            for path in self.split(weights)[0]
        }
        return ParamState(
            cast(Any, weights),
            jax.tree_util.tree_map_with_path(
                sharding, jax.eval_shape(self._transform.init, trained)
            ),
        )

    @cached_property
    def _moment_shardings(self) -> dict[str, NamedSharding]:
        """Returns the shardings of moments that are sharded further than their weights, by path."""
        if not self.layout.moments_over_data:
            return {}
        specs = {
            path: self.layout.moment_spec(self.model.axes[path], shape)
            for path, shape in self.model.sizes.items()
        }
        return {
            path: NamedSharding(self.layout.mesh, spec)
            for path, spec in specs.items()
            if path not in self.model.host_tables
        }

    def shard_as_moments(self, arrays: dict) -> dict:
        """Shards weights or gradients as their moments, if moments are sharded further.

        XLA then reduce-scatters the gradients, each device updates its part of the weights, and XLA
        all-gathers them.
        """
        shardings = self._moment_shardings
        return {
            path: jax.lax.with_sharding_constraint(a, shardings[path]) if path in shardings else a
            for path, a in arrays.items()
        }

    def apply(
        self,
        learner: ParamState,
        grads: dict,
        loss: jax.Array,
        routing: dict,
        number: jax.Array | None = None,
    ) -> tuple[ParamState, dict]:
        """Returns (learner after an update by these gradients, metrics), in a jitted function.
        routing: router loads. number: as in UpdateArguments."""
        number = (
            updates_made(learner) if number is None else jnp.maximum(number - self._first_update, 0)
        )
        trained, others = self.split(learner.params)
        grads = self._frozen.filled(grads, 0.0)
        squares = to_device(joined(on_each_memory(_squares, self.host_tables, grads)))
        part_norms = gradient_norms(squares) if self._diagnostics else {}
        detach = self._stage.mtp is not None and self._stage.mtp.detach
        clipping = _clipping(squares, self._options.clip_norm, detach=detach)
        finite = clipping.is_finite(loss)
        # A gradient of 0, as from equal rewards, changes nothing: otherwise the old moments would
        # change the weights.
        good = finite & (sum(squares.values()) > 0)
        arguments = grads, clipping.factors, at_update(learner.optimizer, number), trained, good
        weights, states, change_norms = zip(
            *on_each_memory(self._apply_optimizer, self.host_tables, *arguments), strict=True
        )
        biases = {path: array for path, array in others.items() if path in self._trained_paths}
        new_biases = updated_biases(biases, routing, self._stage.router.bias_rate)
        new_biases = self._frozen.filled(new_biases, biases)
        others = others | jax.tree.map(lambda a, b: jnp.where(good, a, b), new_biases, biases)
        metrics = {
            "loss": loss,
            "optim/lr": self.rate(number),
            "optim/grad_norm": clipping.norm,
            "optim/update_norm": jnp.where(good, norm_of(to_device(change_norms)), 0.0),
            "optim/skipped": 1.0 - finite,
        }
        metrics |= part_norms | clipping.metrics | load_metrics(routing)
        return ParamState(joined(weights) | others, joined(states)), metrics

    def _apply_optimizer(self, grads, factors, state, weights, good):
        """Returns (weights, optimizer state, norm of the change) after an update. Tables in host
        memory stay there."""
        # The host steps tables at once. Other weights in host memory pass through the device, which
        # would not hold all of them.
        of_tables = weights.keys() <= self.host_tables
        step = by_layer if self._in_host_memory and not of_tables else at_once
        grads = jax.tree.map(jnp.multiply, row_tables.summed(grads), factors)
        weights = self.shard_as_moments(weights) if step is at_once else weights
        return step(self._transform, grads, state, weights, good)


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
        self.group = main
        self.step = self.optimizer_steps[self.group]
        self._stage = stage
        self._seed = seed if stage.dropout else None
        self._diagnostics = stage.diagnostics and self.group is WeightGroup.POLICY
        self._graph = self.step.model.trunk
        self.layout = self._graph.layout

    def with_steps(self, steps: Mapping[WeightGroup, OptimizerStep], stage: StageOptions) -> Update:
        """Returns the update with the steps of other learning rates, whose program is a new one.
        All other settings must be the same."""
        other = copy.copy(self)
        other.__dict__.pop("executable", None)
        other.optimizer_steps = {group: steps[group] for group in self.optimizer_steps}
        other.step = other.optimizer_steps[self.group]
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
            made = updates_made(learners[self.group])
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
            routing = terms.routing if group is self.group else {}
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
        dense = split(trained[self.group], self.step.host_tables)[1]
        return trained.with_group(self.group, dense)

    def _for_products(self, weights: Weights) -> Weights:
        """Returns the weights in the dtype of the products that read them."""
        return weights.with_group(self.group, self._graph.cast_for_products(weights[self.group]))

    def _micro_batches(
        self, tree: tuple[Batch, PolicyInputs], R: int
    ) -> tuple[Batch, PolicyInputs]:
        """Reshapes [N, ...] to [M, R, ...], each micro-batch sharded by rows; scalars (totals) are
        repeated."""
        N = tree[0].tokens.shape[0]
        M = N // R

        def stacked(a):
            if not jnp.ndim(a):
                return jnp.broadcast_to(a, (M,))
            return constrain(
                a.reshape(M, R, *a.shape[1:]), (None, "batch", *[None] * (a.ndim - 1)), self.layout
            )

        return jax.tree.map(stacked, tree)

    def _scan(self, micro_step: Callable, carry: Any, micros: tuple[Batch, PolicyInputs]) -> Any:
        """Runs `micro_step(carry, micro-batch)` as `jax.lax.scan` does, over the micro-batches with
        tokens.

        With tables in host memory it runs over all: their gradients stay there, and there only a
        scan can stack arrays.
        """
        if self.step.host_tables:
            return jax.lax.scan(micro_step, carry, micros)
        return _scan_first(micro_step, carry, micros, _num_filled(micros[0].filled))

    def _looked_up(self, weights: Weights, micro: Batch) -> tuple[dict, Weights]:
        """Returns what `row_tables.read_rows` reads for a micro-batch from tables in host memory;
        ({}, no weights) without such tables."""
        if not self.step.host_tables:
            return {}, Weights()
        step = replace(
            modes.make_step(micro.tokens, segments=micro.segments, tree=micro.tree),
            tokens=micro.tokens,
        )
        rows, values = row_tables.read_rows(
            self._graph, weights[self.group], step, self.step.host_tables
        )
        return rows, Weights().with_group(self.group, values)

    def _gradients(
        self,
        trained: Weights,
        without_gradient: Weights,
        batch: Batch,
        inputs: PolicyInputs,
        R: int,
    ) -> tuple[Weights, _Terms]:
        """Returns (float32 gradients, further terms): sums over micro-batches, of tokens arrays
        [N, T]."""
        N = batch.tokens.shape[0]
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
        prefix = self.group.prefix

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
            row_grads, dense_grads = split(grads[self.group], looked_up[self.group])
            table_grads = row_tables.gradients(self._graph, rows, row_grads)
            grads = self._shard_as_moments(fetch(grads.with_group(self.group, dense_grads)))
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
        return grads.with_group(self.group, cast(Params, grads[self.group] | table_grads)), terms

    def _shard_as_moments(self, grads: Weights) -> Weights:
        for group, step in self.optimizer_steps.items():
            grads = grads.with_group(group, step.shard_as_moments(grads[group]))
        return grads


class _Clipping(NamedTuple):
    """How gradients are clipped.

    factors: of each gradient, by path. norm: of the gradients before, without those of prediction
    modules that are clipped by their own norm. modules_norm: of the gradients of prediction
    modules; None: there are none.
    """

    factors: dict[str, jax.Array | float]
    norm: jax.Array
    modules_norm: jax.Array | None

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """The norm of prediction modules, where there are some."""
        return {} if self.modules_norm is None else {"mtp/grad_norm": self.modules_norm}

    def is_finite(self, loss: jax.Array) -> jax.Array:
        """Returns whether the loss and the norms are finite."""
        finite = jnp.isfinite(loss) & jnp.isfinite(self.norm)
        return finite if self.modules_norm is None else finite & jnp.isfinite(self.modules_norm)


def _clipping(squares: dict[str, jax.Array], limit: float | None, *, detach: bool) -> _Clipping:
    """Returns how gradients are clipped, from the sums of squares by path.

    With `detach`, prediction modules are clipped by their own norm, so that their gradients do not
    scale down the update of the policy.
    """
    modules = [path for path in squares if group_of(path) is WeightGroup.PREDICTION_MODULES]
    clipped_alone = modules if detach else []
    norm = _norm_from_squares(
        [square for path, square in squares.items() if path not in clipped_alone]
    )
    norms = dict.fromkeys(squares, norm)
    modules_norm = None
    if modules:
        modules_norm = _norm_from_squares([squares[path] for path in modules])
        norms |= dict.fromkeys(clipped_alone, modules_norm)
    factors = {
        path: 1.0 if limit is None else jnp.minimum(1.0, limit / (each + 1e-6))
        for path, each in norms.items()
    }
    return _Clipping(factors, norm, modules_norm)


def updates_made(learner: ParamState) -> jax.Array:
    """Returns the number of updates that changed the weights."""
    return update_count(learner.optimizer)


def _num_filled(filled_MRT: jax.Array) -> jax.Array | int:
    """Returns how many micro-batches hold tokens, at least 1. Micro-batches of padding come
    last."""
    M = len(filled_MRT)
    return 1 if M == 1 else jnp.maximum(jnp.sum(jnp.any(filled_MRT, axis=(1, 2))), 1)


def _scan_first(function, carry, xs, count):
    """Runs `jax.lax.scan` over the first `count` of the M entries of `xs`; the device computes
    `count`.

    One program therefore serves any number of packed rows. Outputs of the other entries are neutral
    for a sum, a maximum or a minimum.
    """
    M = len(jax.tree.leaves(xs)[0])
    function = jax.jit(function, inline=True)  # traced once, for its shapes and for the loop

    def entry(i):
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False), xs)

    def neutral(path, leaf):
        name = str(getattr(path[-1], "key", "")) if path else ""
        return jnp.full((M, *leaf.shape), rl.algorithms.neutral_value(name), leaf.dtype)

    def body(i, state):
        carry, out = function(state[0], entry(i))
        return carry, jax.tree.map(
            lambda all, new: jax.lax.dynamic_update_index_in_dim(all, new, i, 0), state[1], out
        )

    out = jax.tree_util.tree_map_with_path(neutral, jax.eval_shape(function, carry, entry(0))[1])
    return jax.lax.fori_loop(0, count, body, (carry, out))


def _squares(grads: dict) -> dict[str, jax.Array]:
    return {path: jnp.sum(jnp.square(g)) for path, g in row_tables.summed(grads).items()}


def _norm_from_squares(squares: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(squares))


def _accumulated(total: Weights, grads: Weights) -> Weights:
    return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
