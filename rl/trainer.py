"""Weights and their updates. The trainer knows no algorithm: it makes the arrays that one asks for, and steps its loss.

N rows, T tokens, M micro-batches of R rows, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rl.algorithms
from policy import batch_split, modes
from policy.layers.dropout import Dropout, row_seeds
from policy.model import Graph
from policy.sharding import constrain, settle
from rl.algorithms import PolicyInputs
from rl.auxiliary import Whole, auxiliary_loss, load_metrics, moved_biases
from rl.batch import Batch
from rl.config import OptimizerOptions, StageOptions
from rl.critic import Critic


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learner:
    """Weights that learn, and the state of their optimizer. Donated to every update, which writes the new ones in place."""

    params: dict[str, jax.Array]
    optimizer: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunState:
    """Every array of a stage. `reference` are weights that stay as they were at its start; absent parts are None."""

    policy: Learner
    reference: dict[str, jax.Array] | None
    critic: Learner | None


def schedule(options: OptimizerOptions, updates: int) -> optax.Schedule:
    """The learning rate by update: linear warm-up, then constant, or linear or cosine down to `final_fraction` of it."""
    peak, warm = options.learning_rate, options.warmup_steps
    rest = max(1, updates - warm)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * options.final_fraction, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, options.final_fraction),
    }[options.schedule]
    return optax.join_schedules([optax.linear_schedule(peak / (warm + 1), peak, warm), after], [warm]) if warm else after


def optimizer(options: OptimizerOptions, rate: optax.Schedule, axes: dict) -> optax.GradientTransformation:
    """AdamW. Weight decay acts on matrices only: not on norms, biases and anything else of one dimension."""
    decayed = {path: len([a for a in names if a != "layers"]) > 1 for path, names in axes.items()}
    return optax.adamw(
        rate,
        b1=options.beta1,
        b2=options.beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=lambda params: {path: decayed[path] for path in params},
    )


class Updater:
    """One optimiser update of some weights as a compiled program: gradients summed over micro-batches, clipping, AdamW, and the
    rule that moves the selection biases of routers. An update that is not finite leaves everything as it was."""

    def __init__(self, owner: Graph | Critic, loss, options: OptimizerOptions, stage: StageOptions, seed: int):
        """`loss(params, micro, totals) -> (scalar, metrics, Aux)`: micro-batches are summed."""
        self.owner, self._loss, self._options, self._stage = owner, loss, options, stage
        self._seed = seed if stage.dropout else None
        self.layout = owner.layout if isinstance(owner, Graph) else owner.trunk.layout
        self.rate = schedule(options, stage.steps * stage.updates_per_step)
        self._transform = optimizer(options, self.rate, owner.axes)

    def _split(self, params: dict) -> tuple[dict, dict]:
        """(weights with a gradient, the others)."""
        still = self.owner.untrained
        return {k: v for k, v in params.items() if k not in still}, {k: v for k, v in params.items() if k in still}

    def start(self, params: dict[str, jax.Array]) -> Learner:
        init = jax.jit(self._transform.init, out_shardings=self.shardings.optimizer)
        return Learner(params, settle(init(self._split(params)[0]), self.layout))

    @cached_property
    def shardings(self) -> Learner:
        """Where each array of the learner lives: moments where their weights do, counters everywhere."""
        weights = self.owner.shardings

        def place(path, _):
            keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
            return weights[keys[-1]] if keys else self.layout.replicated

        trained = {k: jax.ShapeDtypeStruct((1,), jnp.float32) for k in self._split(weights)[0]}
        return Learner(weights, jax.tree_util.tree_map_with_path(place, jax.eval_shape(self._transform.init, trained)))

    @cached_property
    def program(self):
        runtime = (self.owner if isinstance(self.owner, Graph) else self.owner.trunk).runtime
        return jax.jit(
            self._update,
            donate_argnums=0,
            out_shardings=(self.shardings, None),
            static_argnames="micro_rows",
            compiler_options=batch_split.compiler_options(runtime),
        )

    def __call__(self, learner: Learner, batch: Batch, inputs, micro_rows: int) -> tuple[Learner, dict]:
        """The learner after one update, and its metrics (on the device). `batch` holds a multiple of `micro_rows` rows."""
        return settle(self.program(learner, batch, inputs, micro_rows=micro_rows), self.layout)

    def _update(self, learner: Learner, batch: Batch, inputs, *, micro_rows: int):
        trained, still = self._split(learner.params)
        count = learner.optimizer[-1].count  # AdamW's last part counts the updates of its schedule
        if self._seed is not None:
            batch = batch.replace(dropout=row_seeds(self._seed, count, batch.tokens.shape[0]))
        grads, loss, metrics, routing = self._gradients(trained, still, batch, inputs, micro_rows)
        norm = optax.tree.norm(grads)
        if self._options.clip_norm is not None:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, self._options.clip_norm / (norm + 1e-6)), grads)
        changes, state = self._transform.update(grads, learner.optimizer, trained)
        new = Learner(optax.apply_updates(trained, changes) | moved_biases(still, routing, self._stage.router.bias_rate), state)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, learner)
        metrics |= {
            "loss": loss,
            "optim/lr": self.rate(count),
            "optim/grad_norm": norm,
            "optim/update_norm": optax.tree.norm(changes),
            "optim/skipped": 1.0 - good,
        }
        return new, metrics | load_metrics(routing)

    def _gradients(self, trained, still, batch: Batch, inputs, R: int):
        """Sums over the micro-batches, in float32: (gradients, loss, metrics, what the routers did by path of the layer)."""
        M = batch.tokens.shape[0] // R
        N = M * R

        def cut(a):
            """[N, ...] -> [M, R, ...], the rows of a micro-batch spread over the mesh; totals are repeated."""
            if not (jnp.ndim(a) and a.shape[0] == N):
                return jnp.broadcast_to(a, (M, *jnp.shape(a)))
            return constrain(a.reshape(M, R, *a.shape[1:]), (None, "batch", *[None] * (a.ndim - 1)), self.layout)

        micros = jax.tree.map(cut, (batch, inputs))
        filled = batch.segments != 0
        whole = Whole(jnp.sum(jnp.any(filled, axis=1)), jnp.sum(filled))
        if self._stage.router.balance == "batch" and M > 1:
            # A forward pass of its own, without the head: how often an expert is chosen in the batch has to be known before the
            # first micro-batch's gradient.
            def count(_, xs):
                return None, {path: each.counts for path, each in self._loss(trained | still, *xs)[2].found("routing").items()}

            whole = replace(whole, counts=jax.tree.map(lambda a: a.sum(axis=0), jax.lax.scan(count, None, micros)[1]))

        def objective(weights, micro, totals):
            loss, metrics, aux = self._loss(weights | still, micro, totals)
            besides, found = auxiliary_loss(self._stage, aux, whole)
            return loss + besides, (metrics | found, aux.found("routing"))

        def one(total, xs):
            (loss, (metrics, routing)), grads = jax.value_and_grad(objective, has_aux=True)(trained, *xs)
            total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
            return total, (loss, metrics, routing)

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
        grads, (loss, metrics, routing) = jax.lax.scan(one, zeros, micros)
        return grads, loss.sum(), rl.algorithms.reduce_metrics(metrics), jax.tree.map(lambda a: a.sum(axis=0), routing)


class Trainer:
    """The compiled programs of one stage: updates of policy and critic, log-probabilities and values of a batch."""

    def __init__(self, graph: Graph, stage: StageOptions, algorithm, seed: int = 0):
        """`seed` is that of the run; dropout needs it."""
        self.graph, self.stage, self.algorithm = graph, stage, algorithm
        self.temperature = np.float32((stage.sampling.temperature if algorithm.needs_rollouts else 0.0) or 1.0)
        # Only updates may drop choices of experts: the generator and what is compared with it never do.
        limits = {name: getattr(stage.router, name) for name in ("capacity_factor", "ragged_buffer_factor")}
        self._learning = graph.at(**limits)
        self.policy = Updater(graph, self._policy_loss, stage.optimizer, stage, seed)
        self.critic = None
        if algorithm.needs_critic:
            self._critic = Critic(graph)
            self.critic = Updater(self._critic, self._critic_loss, stage.critic, stage, seed)

    def start(self, params: dict[str, jax.Array], seed: int) -> RunState:
        """The state at the beginning of the stage. Takes `params` over; reference and critic are copies of them."""
        reference = critic = None
        if self.algorithm.needs_reference:
            reference = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=self.graph.shardings)(params)
        if self.critic:
            critic = self.critic.start(self._critic.init(params, self.algorithm.value_init_std, seed))
        return settle(RunState(self.policy.start(params), reference, critic), self.graph.layout)

    def abstract(self) -> RunState:
        """Shapes and places of the state, for a checkpoint to be read into."""
        shapes = jax.eval_shape(partial(self.start, seed=0), self.graph.shapes)
        places = RunState(
            self.policy.shardings,
            self.graph.shardings if shapes.reference is not None else None,
            self.critic.shardings if self.critic else None,
        )
        return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)

    def micro_rows(self, rows: int) -> int:
        """Rows of one gradient computation: what the stage says, or all; a multiple of what the mesh and the schedule split a batch
        into."""
        mesh = self.graph.layout.mesh.shape
        ways = mesh["data"] * mesh["fsdp"] * mesh["expert"] * (batch_split.PARTS if self.graph.runtime.batch_split else 1)
        return -(-min(self.stage.micro_batch or rows, rows) // ways) * ways

    def update(self, state: RunState, batch: Batch, *, critic_only: bool = False) -> tuple[RunState, dict]:
        """One optimiser update of the policy, and of the critic if there is one, from the rows of `batch`."""
        R = self.micro_rows(len(batch.prompt))
        batch = batch.filled(R)
        policy, critic, metrics = state.policy, state.critic, {}
        if not critic_only:
            policy, metrics = self.policy(policy, batch, self._totals(batch), R)
        if critic is not None:
            critic, found = self.critic(critic, batch, self._totals(batch), R)
            del found["loss"]  # value/loss, and the balance term that value/moe/balance holds
            metrics = metrics | {k if k.startswith("value/") else f"value/{k}": v for k, v in found.items()}
        return RunState(policy, state.reference, critic), metrics

    @cached_property
    def _totals(self):
        """PolicyInputs of a whole batch with its totals; what a loss needs of it besides the policy's own numbers."""

        def totals(batch: Batch) -> PolicyInputs:
            inputs = PolicyInputs(
                mask=batch.mask,
                old_logp=batch.old_logp,
                sampler_logp=batch.sampler_logp,
                ref_logp=batch.ref_logp,
                entropy=batch.entropy,
                advantages=batch.advantages,
                prompt=batch.prompt,
                max_length=self.stage.sampling.max_new_tokens,
            )
            return self.algorithm.with_totals(inputs)

        return jax.jit(totals)

    def _policy_loss(self, params, micro: Batch, inputs: PolicyInputs):
        step = modes.sit(micro.tokens, segments=micro.segments)
        if micro.dropout is not None:
            step = replace(step, dropout=Dropout(micro.dropout, rate=self.stage.dropout))
        logp, entropy, aux = self._learning.logprobs(params, micro.tokens, step, self.temperature)
        loss, metrics = self.algorithm.loss(replace(inputs, logp=logp, entropy=entropy))
        return loss, metrics, aux

    def _critic_loss(self, params, micro: Batch, inputs: PolicyInputs):
        step = modes.sit(micro.tokens, segments=micro.segments)
        values, aux = self._critic.values(params, micro.tokens, step)
        loss, metrics = self.algorithm.value_loss(values, micro.old_values, micro.returns, inputs)
        return loss, metrics, aux

    def logprobs(self, params, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(logp, entropy), float32[N, T] on the host, by the training graph under `params`, micro-batch by micro-batch."""
        return self._by_micro_batch(self._logprobs, params, batch)

    def values(self, state: RunState, batch: Batch) -> np.ndarray:
        """The critic's value of the state before each token, float32[N, T] on the host."""
        return self._by_micro_batch(self._values, state.critic.params, batch)[0]

    def _by_micro_batch(self, program, params, batch: Batch) -> tuple[np.ndarray, ...]:
        N, R = len(batch.prompt), self.micro_rows(len(batch.prompt))
        batch = batch.filled(R)
        parts = []
        for i in range(0, len(batch.prompt), R):
            out = program(params, batch.tokens[i : i + R], batch.segments[i : i + R])
            parts.append(settle(out, self.graph.layout))
        return tuple(np.concatenate([np.asarray(p) for p in each])[:N] for each in zip(*parts, strict=True))

    @cached_property
    def _logprobs(self):
        def run(params, tokens, segments):
            tokens = constrain(tokens, ("batch", None), self.graph.layout)
            return self.graph.logprobs(params, tokens, modes.sit(tokens, segments=segments), self.temperature)[:2]

        return jax.jit(run)

    @cached_property
    def _values(self):
        def run(params, tokens, segments):
            tokens = constrain(tokens, ("batch", None), self.graph.layout)
            return self._critic.values(params, tokens, modes.sit(tokens, segments=segments))[:1]

        return jax.jit(run)
