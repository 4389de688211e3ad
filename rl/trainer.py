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
from jax.sharding import NamedSharding

import rl.algorithms
from policy import batch_split, modes, processes, sequence_cut, tables
from policy.cache import Step
from policy.executables import Executables
from policy.layers.dropout import Dropout, row_seeds
from policy.memory import belongs_there, fetch, in_host_memory, to_device
from policy.model import Graph
from policy.sharding import Layout, constrain, settle
from rl.algorithms import PolicyInputs
from rl.auxiliary import auxiliary_loss, load_metrics, moved_biases, totals
from rl.batch import Batch
from rl.config import OptimizerOptions, StageOptions
from rl.critic import Critic
from rl.hosted import by_place, joined
from rl.internals import activation_metrics, gradient_norms
from rl.learned import MODULES, learned
from rl.operations import Operations, lengths
from rl.optimizerstep import at_once, by_layer, start, stored_as
from rl.optimizerstep import norm as norm_of
from rl.packing import Packing, packing, row_counts

# Tokens of a micro-batch on CPU.
CPU_TOKENS = 768


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


def optimizer(options: OptimizerOptions, rate: optax.Schedule, axes: dict, param_dtype: str) -> optax.GradientTransformation:
    """AdamW for weights in `param_dtype`. Weight decay acts on matrices only: not on norms, biases and anything else of one
    dimension."""
    decayed = {path: len([a for a in names if a != "layers"]) > 1 for path, names in axes.items()}
    adamw = optax.adamw(
        rate,
        b1=options.beta1,
        b2=options.beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=lambda params: {path: decayed[path] for path in params},
    )
    if param_dtype == options.state_dtype == "float32":
        return adamw
    return stored_as(adamw, options.state_dtype, master=param_dtype != "float32" and options.state_dtype == "float32")


class Updater:
    """One optimiser update of some weights as a compiled program: gradients summed over micro-batches, clipping, AdamW, and the
    rule that moves the selection biases of routers. An update that is not finite, or whose gradient is exactly 0, leaves everything
    as it was."""

    def __init__(self, owner: Graph | Critic, loss, options: OptimizerOptions, stage: StageOptions, seed: int):
        """`loss(params, micro, totals) -> (scalar, metrics, Aux)`: micro-batches are summed."""
        self.owner, self._loss, self._options, self._stage = owner, loss, options, stage
        self._learned = learned(owner.axes, owner.runtime)
        self._seed = seed if stage.dropout else None
        self._internals = stage.internal_metrics and isinstance(owner, Graph)
        self._graph = owner if isinstance(owner, Graph) else owner.trunk
        self.layout = self._graph.layout
        self.rate = schedule(options, stage.steps * stage.updates_per_step)
        self._transform = optimizer(options, self.rate, owner.axes, owner.runtime.param_dtype)

    def _split(self, params: dict) -> tuple[dict, dict]:
        """(weights with a gradient, the others)."""
        moves = self._learned - self.owner.untrained
        return {k: v for k, v in params.items() if k in moves}, {k: v for k, v in params.items() if k not in moves}

    def start(self, params: dict[str, jax.Array]) -> Learner:
        return Learner(params, settle(self._start(self._split(params)[0]), self.layout))

    @property
    def _in_host_memory(self) -> bool:
        return bool(self.owner.hosted - self.owner.tables) or self._options.host_memory

    def _start(self, weights: dict[str, jax.Array]):
        if self._in_host_memory:
            return start(self._transform, weights, self.shardings.optimizer)
        return jax.jit(self._transform.init, out_shardings=self.shardings.optimizer)(weights)

    @cached_property
    def shardings(self) -> Learner:
        """Where each array of the learner lives: moments are cut as their weights are, or further (`Layout.moment_spec`), counters
        are everywhere. Moments of a table in host memory are there too."""
        weights = self.owner.shardings

        def place(path, _):
            keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
            if not keys:
                return self.layout.replicated
            weight = keys[-1]
            moment = self._moments.get(weight, NamedSharding(self.layout.mesh, weights[weight].spec))
            moves = self._options.host_memory and belongs_there(self.owner.axes[weight])
            return in_host_memory(moment) if moves or weight in self.owner.tables else moment

        trained = {k: jax.ShapeDtypeStruct((1,), jnp.float32) for k in self._split(weights)[0]}
        return Learner(weights, jax.tree_util.tree_map_with_path(place, jax.eval_shape(self._transform.init, trained)))

    @cached_property
    def _moments(self) -> dict[str, NamedSharding]:
        """Where moments live that are cut further than their weights, by path."""
        if not self.layout.moments_over_data:
            return {}
        specs = {path: self.layout.moment_spec(self.owner.axes[path], shape) for path, shape in self.owner.sizes.items()}
        return {path: NamedSharding(self.layout.mesh, spec) for path, spec in specs.items() if path not in self.owner.tables}

    def _spread(self, arrays: dict) -> dict:
        """Weights or gradients cut as their moments are, where those are cut further: gradients are then added up over the devices
        in the place of their moment only, and every device steps its part of the weights, which are gathered at the end."""
        places = self._moments
        return {path: jax.lax.with_sharding_constraint(a, places[path]) if path in places else a for path, a in arrays.items()}

    @cached_property
    def program(self) -> Executables:
        update = jax.jit(
            self._update,
            donate_argnums=0,
            out_shardings=(self.shardings, None),
            static_argnames="micro_rows",
            compiler_options=batch_split.compiler_options(self._graph.runtime),
        )
        return Executables(update, self.layout.platform)

    def __call__(self, learner: Learner, batch: Batch, inputs, micro_rows: int, beside=None) -> tuple[Learner, dict]:
        """The learner after one update, and its metrics (on the device). `batch` holds a multiple of `micro_rows` rows. `beside`:
        weights by path that the loss takes besides the learner's, and that stay."""
        return settle(self.program(learner, batch, inputs, beside or {}, micro_rows=micro_rows), self.layout)

    def _update(self, learner: Learner, batch: Batch, inputs, beside=None, *, micro_rows: int):
        trained, still = self._split(learner.params)
        count = learner.optimizer[-1].count  # AdamW's last part counts the updates of its schedule
        if self._seed is not None:
            batch = batch.replace(dropout=row_seeds(self._seed, count, batch.tokens.shape[0]))
        grads, loss, metrics, routing = self._gradients(trained, still | (beside or {}), batch, inputs, micro_rows)
        squares = to_device(joined(by_place(_squares, self.owner.tables, grads)))
        if self._internals:
            metrics |= gradient_norms(squares)
        factors, norm, norms = self._clipping(squares)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Moments of earlier updates do not move weights that nothing was learnt about: of rewards that are all equal.
        good = finite & (sum(squares.values()) > 0)
        arguments = grads, factors, learner.optimizer, trained, good
        weights, states, changes = zip(*by_place(self._stepped, self.owner.tables, *arguments), strict=True)
        constants = {path: array for path, array in still.items() if path in self._learned}
        moved = moved_biases(constants, routing, self._stage.router.bias_rate)
        kept = still | jax.tree.map(lambda a, b: jnp.where(good, a, b), moved, constants)
        new = Learner(joined(weights) | kept, joined(states))
        metrics |= {
            "loss": loss,
            "optim/lr": self.rate(count),
            "optim/grad_norm": norm,
            "optim/update_norm": norm_of(to_device(changes)),
            "optim/skipped": 1.0 - finite,
        }
        return new, metrics | norms | load_metrics(routing)

    def _clipping(self, squares: dict[str, jax.Array]) -> tuple[dict, jax.Array, dict]:
        """(what each gradient is multiplied by, their norm before, metrics), from the sums of squares of the gradients by path.
        Prediction modules that are trained apart from the policy are clipped by themselves, so that they do not shorten its
        steps."""
        limit, mtp, found = self._options.clip_norm, self._stage.mtp, {}
        modules = [path for path in squares if path.startswith(MODULES)]
        apart = modules if mtp and mtp.detach else []
        norm = _length([square for path, square in squares.items() if path not in apart])
        norms = dict.fromkeys(squares, norm)
        if modules:
            found["mtp/grad_norm"] = _length([squares[path] for path in modules])
            norms |= dict.fromkeys(apart, found["mtp/grad_norm"])
        factors = {path: 1.0 if limit is None else jnp.minimum(1.0, limit / (each + 1e-6)) for path, each in norms.items()}
        return factors, norm, found

    def _stepped(self, grads, factors, state, weights, good):
        """(weights, state of the optimizer, norm of the change) after a step. Tables in host memory are stepped there."""
        step = by_layer if self._in_host_memory and not weights.keys() <= self.owner.tables else at_once
        grads = jax.tree.map(jnp.multiply, tables.summed(grads), factors)
        return step(self._transform, grads, state, self._spread(weights) if step is at_once else weights, good)

    def _gradients(self, trained, still, batch: Batch, inputs, R: int):
        """Sums over the micro-batches, in float32: (gradients, loss, metrics, what the routers did by path of the layer)."""
        M = batch.tokens.shape[0] // R
        N = M * R

        def cut(a):
            """[N, ...] -> [M, R, ...], the rows of a micro-batch spread over the mesh; totals are repeated."""
            if not (jnp.ndim(a) and a.shape[0] == N):
                return jnp.broadcast_to(a, (M, *jnp.shape(a)))
            return constrain(a.reshape(M, R, *a.shape[1:]), (None, "batch", *[None] * (a.ndim - 1)), self.layout)

        micros, whole = jax.tree.map(cut, (batch, inputs)), totals(batch)
        if self._stage.router.balance == "batch" and M > 1:
            # A forward pass of its own, without the head: how often an expert is chosen in the batch has to be known before the
            # first micro-batch's gradient.
            def count(_, xs):
                return None, {path: each.counts for path, each in self._loss(trained | still, *xs)[2].found("routing").items()}

            whole = replace(whole, counts=jax.tree.map(lambda a: a.sum(axis=0), jax.lax.scan(count, None, micros)[1]))

        def objective(weights, micro, inputs):
            loss, metrics, aux = self._loss(weights | still, micro, inputs)
            besides, found = auxiliary_loss(self._stage, aux, micro, whole)
            return loss + besides, (metrics | found, aux.found("routing"), aux.found("activations") if self._internals else {})

        matrices = {path: weight for path, weight in trained.items() if path not in self.owner.tables}
        read = self._graph.as_multiplied(matrices)

        def one(total, xs):
            rows, looked_up = {}, {}
            if self.owner.tables:
                rows, looked_up = tables.read_rows(self._graph, trained | still, xs[0].tokens, xs[0].segments)
            (loss, rest), grads = jax.value_and_grad(objective, has_aux=True)(read | looked_up, *xs)
            slopes = tables.gradients(self._graph, rows, {path: grads.pop(path) for path in looked_up})
            return _added(total, self._spread(fetch(grads))), (slopes, (loss, *rest))

        # Slopes of tables in host memory lie there, where only a scan can stack them.
        over = jax.lax.scan if self._graph.tables else partial(_over, count=_filled(micros[0].segments))
        grads, (slopes, found) = over(one, self._spread(_zeros(matrices)), micros)
        loss, metrics, routing, inside = found
        metrics = rl.algorithms.reduce_metrics(metrics)
        if self._internals:
            metrics |= activation_metrics(inside, batch.segments.reshape(M, R, -1), self.owner.config)
        return grads | slopes, loss.sum(), metrics, jax.tree.map(lambda a: a.sum(axis=0), routing)


def _filled(segments_MRT: jax.Array) -> jax.Array | int:
    """How many micro-batches are not padding only, at least 1; padding comes last."""
    M = len(segments_MRT)
    return 1 if M == 1 else jnp.maximum(jnp.sum(jnp.any(segments_MRT != 0, axis=(1, 2))), 1)


def _over(function, carry, xs, count):
    """`jax.lax.scan` over the first `count` of the M entries of `xs`, a number known on the device only, so that packed rows
    of any number take one program. Outputs of the others are what a sum, a maximum or a minimum does not notice."""
    M = len(jax.tree.leaves(xs)[0])
    function = jax.jit(function, inline=True)  # traced once, for its shapes and for the loop

    def entry(i):
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False), xs)

    def blank(path, leaf):
        name = str(getattr(path[-1], "key", "")) if path else ""
        return jnp.full((M, *leaf.shape), rl.algorithms.unnoticed(name), leaf.dtype)

    def body(i, state):
        carry, out = function(state[0], entry(i))
        return carry, jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, i, 0), state[1], out)

    out = jax.tree_util.tree_map_with_path(blank, jax.eval_shape(function, carry, entry(0))[1])
    return jax.lax.fori_loop(0, count, body, (carry, out))


def _squares(grads: dict) -> dict[str, jax.Array]:
    return {path: jnp.sum(jnp.square(g)) for path, g in tables.summed(grads).items()}


def _length(squares) -> jax.Array:
    return jnp.sqrt(sum(squares))


def _added(total: dict, grads: dict) -> dict:
    return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)


def _zeros(weights: dict) -> dict:
    return {path: jnp.zeros(w.shape, jnp.float32) for path, w in weights.items()}


def ways(layout: Layout) -> int:
    """Parts into which a mesh cuts the rows of a batch."""
    mesh = layout.mesh.shape
    return mesh["data"] * mesh["fsdp"] * mesh["expert"]


def by_rows(tree, layout: Layout):
    """Arrays [N, ...] of the host, of which each of several processes brings its own rows to its devices. Those of one process stay
    as they are."""
    if processes.count() == 1:
        return tree
    return jax.tree.map(lambda a: processes.placed(a, layout.sharding(("batch", *[None] * (a.ndim - 1)), a.shape)), tree)


def by_micro_batch(program, batch: Batch, place: Packing, R: int, layout: Layout) -> tuple[np.ndarray, ...]:
    """What `program(tokens, segments, routes)` gives for R packed rows at a time, each array [N, T] on the host."""
    packed = place.pack(batch.tokens), place.segments, place.routes(batch)
    parts = []
    for i in range(0, place.used, R):
        parts.append(settle(program(*by_rows(jax.tree.map(lambda a, i=i: a[i : i + R], packed), layout)), layout))
    return tuple(place.unpack(np.concatenate([processes.on_host(p) for p in each])) for each in zip(*parts, strict=True))


class Trainer:
    """The compiled programs of one stage: updates of policy and critic, log-probabilities and values of a batch."""

    def __init__(self, graph: Graph, stage: StageOptions, algorithm, seed: int = 0):
        """`seed` is that of the run; dropout needs it."""
        self.graph, self.stage, self.algorithm = graph, stage, algorithm
        self.operations, self.done = Operations(graph), 0.0
        self.temperature = np.float32((stage.sampling.temperature if algorithm.needs_rollouts else 0.0) or 1.0)
        # Only updates may drop choices of experts: the generator and what is compared with it never do.
        self._learning = graph.at(**stage.runtime)
        loss = self._parts_loss if stage.indexer.training == "dense_warmup" else self._policy_loss
        self.policy = Updater(self._learning, loss, stage.optimizer, stage, seed)
        self.critic = None
        if algorithm.needs_critic:
            self._critic = Critic(graph, shared=algorithm.critic_trunk == "policy")
            self.critic = Updater(self._critic, self._critic_loss, stage.critic, stage, seed)

    @property
    def executables(self) -> dict[str, Executables]:
        """The programs of a step by the names that a plan gives them."""
        found = {"update": self.policy.program, "log-probabilities": self._logprobs}
        return found | ({"update of the critic": self.critic.program, "values": self._values} if self.critic else {})

    def scores_first(self, *, exact: bool) -> bool:
        """Whether log-probabilities of the policy are computed before the updates of a step; `exact`: those of the generator are
        the model's own."""
        needed = self.algorithm.needs_old_logp(self.stage.updates_per_step)
        return needed and (self.algorithm.needs_entropy or not exact)

    def start(self, params: dict[str, jax.Array], seed: int) -> RunState:
        """The state at the beginning of the stage. Takes `params` over; reference and critic are copies of them."""
        reference = critic = None
        if self.algorithm.needs_reference:
            reference = jax.jit(lambda a: jax.tree.map(jnp.copy, fetch(a)), out_shardings=self.graph.shardings)(params)
        if self.critic:
            critic = self.critic.start(self._critic.init(params, self.algorithm.value_init_std, seed))
        return settle(RunState(self.policy.start(params), reference, critic), self.graph.layout)

    def renew_reference(self, state: RunState, mix: float) -> RunState:
        """The state with a reference model of `mix` parts of the policy and 1 - `mix` of what it was."""
        reference = settle(self._renewed(state.reference, state.policy.params, np.float32(mix)), self.graph.layout)
        return RunState(state.policy, reference, state.critic)

    @cached_property
    def _renewed(self):
        def mixed(reference, params, mix):
            return jax.tree.map(lambda r, p: (mix * p + (1 - mix) * r).astype(r.dtype), reference, fetch(params))

        return jax.jit(mixed, donate_argnums=0, out_shardings=self.graph.shardings)

    def abstract(self) -> RunState:
        """Shapes and places of the state, for a checkpoint to be read into."""
        shapes = jax.eval_shape(partial(self.start, seed=0), self.graph.shapes)
        places = RunState(
            self.policy.shardings,
            self.graph.shardings if shapes.reference is not None else None,
            self.critic.shardings if self.critic else None,
        )
        return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)

    def layout(self, segments_NT: np.ndarray) -> tuple[Packing, int]:
        """(how these sequences are packed, packed rows of one gradient computation)."""
        counts, R = self.row_counts(*segments_NT.shape)
        place = packing(segments_NT, counts, sequence_cut.multiple(self._learning.runtime))
        return place, R or place.shape[0]

    def row_counts(self, N: int, T: int) -> tuple[list[int], int | None]:
        """(numbers of packed rows that N sequences in rows of T may come in, rows of one gradient computation; None: all)."""
        multiple = ways(self.graph.layout) * (batch_split.PARTS if self.graph.runtime.batch_split else 1)
        micro = self.stage.micro_batch or self._micro_batch(N, T)
        if micro is None:
            return row_counts(N, multiple), None
        R = -(-min(micro, N) // multiple) * multiple
        return [-(-N // R) * R], R

    def _micro_batch(self, N: int, T: int) -> int | None:
        """Rows of a micro-batch where the stage says nothing; None: all. On CPU what a layer leaves for the backward pass then
        stays in the caches: 64 rows of 96 tokens took 1.4 times as long at once as 8 at a time, for 1M and 25M weights. Balancing
        experts over the whole batch would cost a forward pass more."""
        on_cpu = self.graph.layout.platform == "cpu"
        return -(-N // -(-N * T // CPU_TOKENS)) if on_cpu and self.stage.router.balance == "sequence" else None

    def update(
        self, state: RunState, batch: Batch, *, critic_only: bool = False, controls: dict[str, float] | None = None
    ) -> tuple[RunState, dict]:
        """One optimiser update of the policy, and of the critic if there is one, from the sequences of `batch`, one a row;
        `controls` for `PolicyInputs`.

        Raises ValueError where the stage replays routes and the batch has none.
        """
        if self.stage.router_replay and batch.routes is None:
            raise ValueError("router_replay: this batch has no routes; take it from Rollouts.batch(..., replay=True)")
        if not critic_only:
            self._did(self.operations, batch, passes=3)
        if state.critic is not None:
            self._did(self._critic.operations, batch, passes=1 if self._critic.shared else 3)
        place, R = self.layout(batch.segments)
        batch = by_rows(place.batch(batch), self.graph.layout)
        policy, critic, values, metrics = state.policy, state.critic, {}, {"perf/packed_share": place.share(R)}
        inputs = self._totals(batch, {name: np.float32(value) for name, value in controls.items()} if controls else None)
        if critic is not None:  # first, while the policy is the one whose states gave the old values
            critic, found = self.critic(critic, batch, inputs, R, self._critic.beside(policy.params))
            del found["loss"]  # value/loss, and the balance term that value/moe/balance holds
            values = {k if k.startswith("value/") else f"value/{k}": v for k, v in found.items()}
        if not critic_only:
            policy, found = self.policy(policy, batch, inputs, R)
            metrics |= found
        return RunState(policy, state.reference, critic), metrics | values

    @cached_property
    def _totals(self):
        """PolicyInputs of a whole batch with its totals; what a loss needs of it besides the policy's own numbers."""

        def totals(batch: Batch, controls: dict[str, jax.Array] | None = None) -> PolicyInputs:
            inputs = PolicyInputs(
                mask=batch.mask,
                old_logp=batch.old_logp,
                sampler_logp=batch.sampler_logp,
                ref_logp=batch.ref_logp,
                entropy=batch.entropy,
                advantages=batch.advantages,
                margin=batch.margin,
                segments=batch.segments,
                prompt=batch.prompt,
                correct=batch.correct,
                controls=controls,
                max_length=self.stage.sampling.max_new_tokens,
            )
            return self.algorithm.with_totals(inputs)

        return jax.jit(totals)

    def _did(self, operations: Operations, batch: Batch, passes: int) -> None:
        """Adds passes over `batch` to the operations that this trainer has done: one forward, two more for a gradient."""
        self.done += passes * operations.forward(lengths(batch.segments))

    def _step(self, micro: Batch) -> Step:
        step = replace(modes.sit(micro.tokens, segments=micro.segments), routes=micro.routes)
        return step if micro.dropout is None else replace(step, dropout=Dropout(micro.dropout, rate=self.stage.dropout))

    def _parts_loss(self, params, micro: Batch, inputs: PolicyInputs):
        """Nothing but what the layers bring along: no head is computed."""
        return jnp.float32(0.0), {}, self._learning.aux(params, micro.tokens, self._step(micro))

    def _policy_loss(self, params, micro: Batch, inputs: PolicyInputs):
        logp, entropy, aux = self._learning.logprobs(params, micro.tokens, self._step(micro), self.temperature)
        loss, metrics = self.algorithm.loss(replace(inputs, logp=logp, entropy=entropy))
        return loss, metrics, aux

    def _critic_loss(self, params, micro: Batch, inputs: PolicyInputs):
        step = replace(modes.sit(micro.tokens, segments=micro.segments), routes=micro.routes if self._critic.shared else None)
        values, _, aux = self._critic.values(params, micro.tokens, step)
        loss, metrics = self.algorithm.value_loss(values, micro.old_values, micro.returns, inputs)
        return loss, metrics, aux

    def logprobs(self, params, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(logp, entropy), float32[N, T] on the host, by the training graph under `params`, micro-batch by micro-batch. Where the
        batch has routes its tokens go there."""
        self._did(self.operations, batch, passes=1)
        return self._by_micro_batch(self._logprobs, params, batch)

    def values(self, state: RunState, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The critic's values of the states before and after each token, float32[N, T] on the host."""
        self._did(self._critic.operations, batch, passes=1)
        params = self._critic.beside(state.policy.params) | state.critic.params
        # A critic with a trunk of its own is another model: its routers choose themselves.
        return self._by_micro_batch(self._values, params, batch if self._critic.shared else batch.replace(routes=None))

    def _by_micro_batch(self, program, params, batch: Batch) -> tuple[np.ndarray, ...]:
        place, R = self.layout(batch.segments)
        return by_micro_batch(partial(program, params), batch, place, R, self.graph.layout)

    @cached_property
    def _logprobs(self):
        def run(params, tokens, segments, routes):
            tokens = constrain(tokens, ("batch", None), self.graph.layout)
            step = replace(modes.sit(tokens, segments=segments), routes=routes)
            return self.graph.logprobs(params, tokens, step, self.temperature)[:2]

        return Executables(jax.jit(run), self.graph.layout.platform)

    @cached_property
    def _values(self):
        def run(params, tokens, segments, routes):
            tokens = constrain(tokens, ("batch", None), self.graph.layout)
            return self._critic.values(params, tokens, replace(modes.sit(tokens, segments=segments), routes=routes))[:2]

        return Executables(jax.jit(run), self.graph.layout.platform)
