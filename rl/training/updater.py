"""Compiles one optimiser update of some weights.

N rows, T tokens, M micro-batches of R rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import rl.algorithms
from policy import modes
from policy.execution import row_tables
from policy.execution.encoding import PaddedInputs
from policy.intermediates import Aux, Routing
from policy.layers import batch_split
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.modes import VALUE_HEAD
from policy.ops.dropout import row_seeds
from policy.ops.host_memory import belongs_there, fetch, in_host_memory, to_device
from policy.programs.compiled_cache import CompiledCache
from rl.config.stage import OptimizerOptions, StageOptions
from rl.training.auxiliary_losses import auxiliary_loss, load_metrics, totals, updated_biases
from rl.training.batch import Batch
from rl.training.critic import Critic
from rl.training.diagnostics import activation_metrics, gradient_norms
from rl.training.host_memory import joined, on_each_memory
from rl.training.media.towers import TowerGradients
from rl.training.optimizer import (
    WeightAxes,
    at_once,
    at_update,
    by_layer,
    optimizer,
    schedule,
    sharding_of_moment,
    start,
    update_count,
)
from rl.training.optimizer import norm as norm_of
from rl.training.teacher import FeatureProjections
from rl.training.trainable import MODULES, frozen_weights, trained_paths


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
    `rl.algorithms.reduce_metrics` reduces. aux: the outputs of the layers. tokens: arrays [R, T] by
    name, for the record of a run. head_gradient: of the loss of a value head; None: there is none.
    """

    loss: jax.Array
    metrics: dict[str, jax.Array]
    aux: Aux
    tokens: dict[str, jax.Array] = field(default_factory=dict)
    head_gradient: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpdateOutput:
    """The results of an update.

    learner, companion: the weights after it. metrics: scalars on the device. tokens: arrays [N, T]
    of the loss, before the weights changed.
    """

    learner: ParamState
    companion: ParamState | None
    metrics: dict[str, jax.Array]
    tokens: dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Terms:
    """What the micro-batches of an update give besides gradients, each stacked over them, or
    reduced.

    routing, activations: outputs of layers, by path of the layer. The other fields are as in
    LossOutput; `loss` has the auxiliary losses too.
    """

    loss: jax.Array
    metrics: dict[str, jax.Array]
    routing: dict[str, Routing]
    activations: dict[str, jax.Array]
    tokens: dict[str, jax.Array]
    head_gradient: jax.Array | None


def _first_step(model: Graph | Critic | FeatureProjections, stage: StageOptions) -> int:
    """Returns the steps of a stage before the first update of the model: a policy waits while only
    its critic learns."""
    return 0 if isinstance(model, Critic) else getattr(stage.algorithm, "critic_warmup", 0)


class OptimizerStep:
    """Compiles one optimiser update of some weights: of the policy, a critic or a reward model.

    It sums gradients over micro-batches, clips them, runs the optimizer and updates the selection biases of
    routers.
    An update that is not finite, or whose gradient is exactly 0, changes nothing.
    """

    def __init__(
        self,
        model: Graph | Critic | FeatureProjections,
        loss: Callable[..., LossOutput],
        options: OptimizerOptions,
        stage: StageOptions,
        seed: int,
        companion: OptimizerStep | None = None,
    ):
        """Defines the update.

        Args:
          model: the model of the weights.
          loss: (params, micro-batch, its PolicyInputs) -> LossOutput.
          options: settings of the optimizer.
          stage: settings of the stage.
          seed: seed of the run, for dropout.
          companion: update of other weights that learn in the same program, which `loss` reads from
          `params`. A value
            head: `loss` returns its gradient and reports value/loss. Projections: the gradient of
            `loss` is theirs too.
        """
        self.model = model
        self._loss = loss
        self._options = options
        self._stage = stage
        self.companion = companion
        self._frozen = frozen_weights(model, stage)
        self._trained_paths = trained_paths(model.axes, model.runtime, self._frozen)
        self._tables = model.tables & self._trained_paths
        self._seed, self._diagnostics = (
            seed if stage.dropout else None,
            stage.diagnostics and isinstance(model, Graph),
        )
        self._graph = model if isinstance(model, Graph) else model.trunk
        self.layout = self._graph.layout
        self._set_rates()

    def _set_rates(self) -> None:
        """Defines the learning rate and the optimizer from the options."""
        stage = self._stage
        model = self.model
        first = _first_step(model, stage)  # a plan does not know the steps of `epochs`
        self._first_update = first * stage.updates_per_step
        self.rate = schedule(
            self._options, max(0, (stage.steps or 0) - first), stage.updates_per_step
        )
        inputs = self._graph.inputs
        axes = WeightAxes(
            names=model.axes,
            inputs={path: inputs[path] for path in model.axes if path in inputs},
            layout=self.layout,
        )
        transform = optimizer(self._options, self.rate, axes, model.runtime.param_dtype)
        self._transform = self._frozen.without_changes(transform)

    def with_rates(
        self, options: OptimizerOptions, stage: StageOptions, companion: OptimizerStep | None = None
    ) -> OptimizerStep:
        """Returns a copy with the learning rates of other options and numbers of steps, whose
        program is a new one. All other settings must be the same. companion: that of the copy."""
        other = copy.copy(self)
        other.__dict__.pop("executable", None)
        other._options = options
        other._stage = stage
        other.companion = companion
        other._set_rates()
        return other

    def _split(self, params: dict) -> tuple[dict, dict]:
        """Returns (weights with a gradient, other weights). Biases of routers are trained, but
        without a gradient."""
        paths = self._trained_paths - self.model.untrained
        return {k: v for k, v in params.items() if k in paths}, {
            k: v for k, v in params.items() if k not in paths
        }

    def start(self, params: dict[str, jax.Array]) -> ParamState:
        """Returns the state before the first update, which owns `params`."""
        return ParamState(
            params, block_on_cpu_mesh(self._start(self._split(params)[0]), self.layout)
        )

    @property
    def _in_host_memory(self) -> bool:
        return bool(self.model.hosted - self.model.tables) or self._options.host_memory

    def _start(self, weights: dict[str, jax.Array]):
        if self._in_host_memory:
            return start(self._transform, weights, self.shardings.optimizer)
        return jax.jit(self._transform.init, out_shardings=self.shardings.optimizer)(weights)

    @cached_property
    def shardings(self) -> ParamState:
        """Returns the sharding of each array of a ParamState.

        Moments are sharded as their weights are, or further (`Layout.moment_spec`). Counters are
        replicated. Moments of a table in host memory are in host memory.
        """
        weights = self.model.shardings

        def sharding(path, entry):
            keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
            if not keys:
                return self.layout.replicated
            weight = keys[-1]
            moment = self._moment_shardings.get(
                weight, NamedSharding(self.layout.mesh, weights[weight].spec)
            )
            moment = sharding_of_moment(moment, entry.shape, self.model.sizes[weight])
            hosted = self._options.host_memory and belongs_there(self.model.axes[weight])
            return in_host_memory(moment) if hosted or weight in self.model.tables else moment

        trained = {
            path: jax.ShapeDtypeStruct(self.model.sizes[path], jnp.float32)
            for path in self._split(weights)[0]
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
            if path not in self.model.tables
        }

    def _shard_as_moments(self, arrays: dict) -> dict:
        """Shards weights or gradients as their moments, if moments are sharded further.

        XLA then reduce-scatters the gradients, each device updates its part of the weights, and XLA
        all-gathers them.
        """
        shardings = self._moment_shardings
        return {
            path: jax.lax.with_sharding_constraint(a, shardings[path]) if path in shardings else a
            for path, a in arrays.items()
        }

    @cached_property
    def executable(self) -> CompiledCache:
        """Returns the update, which compiles at the first call of each shape."""
        update = jax.jit(
            self._update,
            donate_argnums=(0, 4),
            out_shardings=UpdateOutput(
                self.shardings, self.companion and self.companion.shardings, None, None
            ),
            static_argnames="micro_rows",
            compiler_options=batch_split.compiler_options(self._graph.runtime),
        )
        return CompiledCache(update, self.layout.platform)

    def __call__(
        self,
        learner: ParamState,
        batch: Batch,
        inputs: Any,
        micro_rows: int,
        extra_params: dict[str, jax.Array] | None = None,
        companion: ParamState | None = None,
        tower_inputs: Sequence[PaddedInputs] | None = None,
        number: int | None = None,
    ) -> UpdateOutput:
        """Makes one update, which donates the arrays of `learner` and `companion`.

        batch: a mini-batch, a multiple of `micro_rows` rows. inputs: its PolicyInputs.
        extra_params: frozen weights that the loss reads, by path. companion: the weights of
        `self.companion` if this update trains them, else None. tower_inputs: of the items of the table among
        `extra_params`, if this update trains a tower, else None. number: of the update in its
        stage, from 0, which its learning rate follows from; None: the number of updates that
        changed the weights.
        """
        arguments = (learner, batch, inputs, extra_params or {}, companion)
        if number is not None:
            arguments = (*arguments, tower_inputs, np.int32(number))
        elif tower_inputs is not None:
            arguments = (*arguments, tower_inputs)
        return block_on_cpu_mesh(self.executable(*arguments, micro_rows=micro_rows), self.layout)

    def _update(
        self,
        learner,
        batch: Batch,
        inputs,
        extra_params=None,
        companion=None,
        tower_inputs=None,
        number=None,
        *,
        micro_rows: int,
    ) -> UpdateOutput:
        trained, others = self._split(learner.params)
        if self._seed is not None:
            batch = batch.replace(
                dropout=row_seeds(self._seed, updates_made(learner), batch.tokens.shape[0])
            )
        constants = others | (extra_params or {})
        joint = companion.params if companion else {}
        if VALUE_HEAD in joint:  # it has a loss of its own
            constants = constants | joint
            joint = {}
        towers = TowerGradients(self._graph, trained | joint, constants, tower_inputs)
        grads, terms = self._gradients(*towers.arguments, batch, inputs, micro_rows)
        grads = towers.gradients(grads)
        metrics = terms.metrics
        if companion is not None:  # then there is an update for it
            step = cast(Any, self.companion)
            gradients = {path: grads.pop(path) for path in joint}
            companion, more = step.apply(
                companion,
                gradients or {VALUE_HEAD: terms.head_gradient},
                metrics.get("value/loss", terms.loss),
                {},
                number,
            )
            metrics |= {
                f"{step.model.metrics}/{name}": value
                for name, value in more.items()
                if name != "loss"
            }
        learner, step_metrics = self.apply(learner, grads, terms.loss, terms.routing, number)
        return UpdateOutput(learner, companion, metrics | step_metrics, terms.tokens)

    def apply(
        self,
        learner: ParamState,
        grads: dict,
        loss: jax.Array,
        routing: dict,
        number: jax.Array | None = None,
    ) -> tuple[ParamState, dict]:
        """Returns (learner after an update by these gradients, metrics), in a jitted function.
        routing: router loads. number: as in `__call__`."""
        number = (
            updates_made(learner) if number is None else jnp.maximum(number - self._first_update, 0)
        )
        trained, others = self._split(learner.params)
        grads = self._frozen.filled(grads, 0.0)
        squares = to_device(joined(on_each_memory(_squares, self._tables, grads)))
        part_norms = gradient_norms(squares) if self._diagnostics else {}
        detach = self._stage.mtp is not None and self._stage.mtp.detach
        factors, norm, norms = _clipping(squares, self._options.clip_norm, detach=detach)
        finite = _is_finite(loss, norm, norms)
        # A gradient of 0, as from equal rewards, changes nothing: otherwise the old moments would
        # change the weights.
        good = finite & (sum(squares.values()) > 0)
        arguments = grads, factors, at_update(learner.optimizer, number), trained, good
        weights, states, changes = zip(
            *on_each_memory(self._apply_optimizer, self._tables, *arguments), strict=True
        )
        biases = {path: array for path, array in others.items() if path in self._trained_paths}
        new_biases = updated_biases(biases, routing, self._stage.router.bias_rate)
        new_biases = self._frozen.filled(new_biases, biases)
        others = others | jax.tree.map(lambda a, b: jnp.where(good, a, b), new_biases, biases)
        metrics = {
            "loss": loss,
            "optim/lr": self.rate(number),
            "optim/grad_norm": norm,
            "optim/update_norm": jnp.where(good, norm_of(to_device(changes)), 0.0),
            "optim/skipped": 1.0 - finite,
        }
        metrics |= part_norms | norms | load_metrics(routing)
        return ParamState(joined(weights) | others, joined(states)), metrics

    def _apply_optimizer(self, grads, factors, state, weights, good):
        """Returns (weights, optimizer state, norm of the change) after an update. Tables in host
        memory stay there."""
        step = by_layer if self._in_host_memory and not weights.keys() <= self._tables else at_once
        grads = jax.tree.map(jnp.multiply, row_tables.summed(grads), factors)
        weights = self._shard_as_moments(weights) if step is at_once else weights
        return step(self._transform, grads, state, weights, good)

    @cached_property
    def losses_executable(self) -> CompiledCache:
        """Returns the program of `losses`, which compiles at the first call of each shape."""
        return CompiledCache(
            jax.jit(self._losses, static_argnames="micro_rows"), self.layout.platform
        )

    def losses(
        self,
        params: dict[str, jax.Array],
        batch: Batch,
        inputs: Any,
        micro_rows: int,
        extra_params: dict,
    ) -> dict[str, jax.Array]:
        """Returns the metrics of the loss of a batch, `loss` among them, without a gradient and
        without dropout.

        Arguments as in `__call__`. The losses of routers, indexers and prediction modules are not
        in it.
        """
        values = self.losses_executable(params, batch, inputs, extra_params, micro_rows=micro_rows)
        return block_on_cpu_mesh(values, self.layout)

    def _losses(
        self, params, batch: Batch, inputs, extra_params, *, micro_rows: int
    ) -> dict[str, jax.Array]:
        trained, others = self._split(params)
        constants = others | extra_params
        micros = self._micro_batches((batch, inputs), micro_rows)
        dense = {path: weight for path, weight in trained.items() if path not in self._tables}
        multiplied = self._graph.cast_for_products(dense)

        def micro_step(_, xs):
            _, looked_up = self._looked_up(trained | constants, xs[0])
            output = self._loss(multiplied | looked_up | constants, *xs)
            return (), (output.loss, output.metrics)

        scan = (
            jax.lax.scan
            if self._tables
            else partial(_scan_first, count=_num_filled(micros[0].filled))
        )
        loss, metrics = scan(micro_step, (), micros)[1]
        return rl.algorithms.reduce_metrics(metrics) | {"loss": loss.sum()}

    def _micro_batches(self, tree: Any, R: int) -> Any:
        """Reshapes [N, ...] to [M, R, ...], each micro-batch sharded by rows; scalars (totals) are
        repeated."""
        N = tree[0].tokens.shape[0]
        M = N // R

        def split(a):
            if not jnp.ndim(a):
                return jnp.broadcast_to(a, (M,))
            return constrain(
                a.reshape(M, R, *a.shape[1:]), (None, "batch", *[None] * (a.ndim - 1)), self.layout
            )

        return jax.tree.map(split, tree)

    def _looked_up(self, params: dict, micro: Batch) -> tuple[dict, dict]:
        """Returns what `row_tables.read_rows` reads for a micro-batch from tables in host memory;
        ({}, {}) without such tables."""
        if not self._tables:
            return {}, {}
        step = replace(
            modes.make_step(micro.tokens, segments=micro.segments, tree=micro.tree),
            tokens=micro.tokens,
        )
        return row_tables.read_rows(self._graph, params, step, self._tables)

    def _gradients(
        self, trained: dict, constants: dict, batch: Batch, inputs, R: int
    ) -> tuple[dict, _Terms]:
        """Returns (float32 gradients by path, further terms): sums over micro-batches, of tokens
        arrays [N, T]."""
        M = batch.tokens.shape[0] // R
        N = M * R
        micros = self._micro_batches((batch, inputs), R)
        batch_totals = totals(batch)
        if self._stage.router.balance == "batch" and M > 1:
            # An extra forward pass, of which XLA drops the head: the balance loss of every
            # micro-batch needs the token count of each expert in the mini-batch.
            def count(_, xs):
                routing = self._loss(trained | constants, *xs).aux.by_layer("routing")
                return None, {path: each.counts for path, each in routing.items()}

            counts = jax.tree.map(lambda a: a.sum(axis=0), jax.lax.scan(count, None, micros)[1])
            batch_totals = replace(batch_totals, counts=counts)

        def objective(weights, micro, inputs):
            output = self._loss(weights | constants, micro, inputs)
            aux = output.aux
            auxiliary, auxiliary_metrics = auxiliary_loss(self._stage, aux, micro, batch_totals)
            loss = output.loss + auxiliary
            return loss, _Terms(
                loss=loss,
                metrics=output.metrics | auxiliary_metrics,
                routing=aux.by_layer("routing"),
                activations=aux.by_layer("activations") if self._diagnostics else {},
                tokens=output.tokens,
                head_gradient=output.head_gradient,
            )

        dense = {path: weight for path, weight in trained.items() if path not in self._tables}
        multiplied = self._graph.cast_for_products(dense)

        def micro_step(total, xs):
            rows, looked_up = self._looked_up(trained | constants, xs[0])
            grads, terms = jax.grad(objective, has_aux=True)(multiplied | looked_up, *xs)
            table_grads = row_tables.gradients(
                self._graph, rows, {path: grads.pop(path) for path in looked_up}
            )
            return _accumulated(total, self._shard_as_moments(fetch(grads))), (table_grads, terms)

        # Gradients of tables in host memory stay in host memory. There, only a scan can stack
        # arrays.
        scan = (
            jax.lax.scan
            if self._tables
            else partial(_scan_first, count=_num_filled(micros[0].filled))
        )
        grads, (table_grads, stacked) = scan(
            micro_step, self._shard_as_moments(_zeros(dense)), micros
        )
        metrics = rl.algorithms.reduce_metrics(stacked.metrics)
        if self._diagnostics:
            metrics |= activation_metrics(
                stacked.activations, batch.filled.reshape(M, R, -1), self._graph.config
            )
        head_gradient, routing = jax.tree.map(
            lambda a: a.sum(axis=0), (stacked.head_gradient, stacked.routing)
        )
        terms = replace(
            stacked,
            loss=stacked.loss.sum(),
            metrics=metrics,
            routing=routing,
            tokens={name: array.reshape(N, -1) for name, array in stacked.tokens.items()},
            head_gradient=head_gradient,
        )
        return grads | table_grads, terms


def _clipping(
    squares: dict[str, jax.Array], limit: float | None, *, detach: bool
) -> tuple[dict, jax.Array, dict]:
    """Returns (factor of each gradient, norm before clipping, metrics) from the sums of squares by
    path.

    With `detach`, prediction modules are clipped by their own norm, so that their gradients do not
    scale down the update of the policy.
    """
    metrics: dict[str, jax.Array] = {}
    modules = [path for path in squares if path.startswith(MODULES)]
    clipped_alone = modules if detach else []
    norm = _norm_from_squares(
        [square for path, square in squares.items() if path not in clipped_alone]
    )
    norms = dict.fromkeys(squares, norm)
    if modules:
        metrics["mtp/grad_norm"] = _norm_from_squares([squares[path] for path in modules])
        norms |= dict.fromkeys(clipped_alone, metrics["mtp/grad_norm"])
    factors = {
        path: 1.0 if limit is None else jnp.minimum(1.0, limit / (each + 1e-6))
        for path, each in norms.items()
    }
    return factors, norm, metrics


def _is_finite(loss: jax.Array, norm: jax.Array, norms: dict[str, jax.Array]) -> jax.Array:
    """Returns whether an update is finite. `norm` leaves out prediction modules that are clipped by
    their own norm."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return finite & jnp.isfinite(norms["mtp/grad_norm"]) if "mtp/grad_norm" in norms else finite


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


def _accumulated(total: dict, grads: dict) -> dict:
    return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)


def _zeros(weights: dict) -> dict:
    return {path: jnp.zeros(w.shape, jnp.float32) for path, w in weights.items()}
