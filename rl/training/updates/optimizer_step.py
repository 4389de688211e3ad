"""What an update does with the gradient of one group of weights: clipping, the optimizer, and the
selection biases of routers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from policy.execution import row_tables
from policy.mesh.sharding import block_on_cpu_mesh
from policy.ops.host_memory import belongs_there, in_host_memory, to_device
from rl.config.stage import OptimizerOptions, StageOptions
from rl.training.auxiliary_losses import load_metrics, updated_biases
from rl.training.diagnostics import gradient_norms
from rl.training.host_memory import joined, on_each_memory
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
from rl.training.weights import LearningModel, Value, WeightGroup, group_of, split


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ParamState:
    """Trained weights and the state of their optimizer. Every update donates these arrays and
    reuses their memory."""

    params: dict[str, jax.Array]
    optimizer: Any


def updates_made(learner: ParamState) -> jax.Array:
    """Returns the number of updates that changed the weights."""
    return update_count(learner.optimizer)


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


def _squares(grads: dict) -> dict[str, jax.Array]:
    return {path: jnp.sum(jnp.square(g)) for path, g in row_tables.summed(grads).items()}


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


def _norm_from_squares(squares: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(squares))
