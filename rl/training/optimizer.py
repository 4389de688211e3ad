"""The rules of the optimizers (`RULES`), and one step of them: at once (`at_once`), or layer by
layer for weights and moments in host memory (`by_layer`).

Weights and gradients are flat dicts by path. The state of the optax transformation must consist of
counters and such dicts. Layer by layer, the transformation must be elementwise, as AdamW is: one
that takes the norm of an array cannot run there.

A step that is not `good` leaves weights and state as they are. The rules choose between old and new
moments themselves (`chosen`) and take the change from the chosen ones: what the program returns is
then also what its change reads, so XLA overwrites the old moments. A choice after the rule makes
XLA compute the new moments twice, which needs a copy of the old ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from policy.mesh.sharding import Layout, axes_of
from policy.ops.host_memory import fetch, put_back
from policy.ops.parameter import MatrixDims
from rl.config.stage import OptimizerOptions
from rl.training.learning_rate import learning_rate

State = TypeVar("State", bound=optax.OptState)
"""The state of an optimizer: a tree of arrays, or of their shapes or shardings."""
Good = jax.Array | bool
"""Whether a step changes weights and state."""


def schedule(options: OptimizerOptions, steps: int, updates_per_step: int = 1) -> optax.Schedule:
    """Returns `learning_rate` as a function of the update, in float32."""
    rate = partial(learning_rate, options, steps, updates_per_step, xp=jnp)
    return cast(optax.Schedule, rate)


def at_update(state: State, update: jax.Array) -> State:
    """Returns the state of `optimizer` whose next step has the learning rate of this update.

    The count of the optimizer leaves out updates that changed nothing.
    """

    def is_schedule(entry):
        return isinstance(entry, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda e: e._replace(count=update) if is_schedule(e) else e, state, is_leaf=is_schedule
    )


@dataclass(frozen=True)
class WeightAxes:
    """What the rules of optimizers know of weights, by path.

    names: logical axes of each weight. matrices: dimensions of the weights that products read: of
    all but norms, embeddings, output heads, kernels of convolutions and vectors. layout: the mesh
    and its rules.

    A matrix has a row for each number that its product sums over and a column for each number of
    the result. A query projection [layers, embed, heads, head_dim] is one matrix [embed, heads *
    head_dim] a layer. Each expert, and each group of heads with an input of its own, has a matrix
    too.
    """

    names: Mapping[str, tuple[str | None, ...]]
    matrices: Mapping[str, MatrixDims]
    layout: Layout

    def rows(self, path: str) -> tuple[int, ...]:
        """Returns the dimensions of the rows of a matrix: those that products sum over, or the ids
        of a table. () if the weight is no matrix."""
        if path in self.matrices:
            return self.matrices[path].rows
        names = self.names[path]
        return tuple(range(len(names) - 1)) if names[-1] in _TABLE_WIDTHS else ()

    def columns(self, path: str) -> tuple[int, ...]:
        """Returns the dimensions of a matrix that are neither rows nor numbers of matrices; of
        another weight all dimensions but the layers and experts."""
        if path in self.matrices:
            return self.matrices[path].columns
        rows = self.rows(path)
        return tuple(
            dim
            for dim, name in enumerate(self.names[path])
            if dim not in rows and name not in _STACKS
        )

    def decays(self, path: str) -> bool:
        """Whether weight decay acts on a weight: on matrices, tables and kernels of convolutions,
        and not on norms, biases and other vectors, also where heads or experts give them a second
        axis."""
        axes = [axis for axis in self.names[path] if axis != "layers"]
        return len(axes) > 1 and not _VECTOR.fullmatch(path.rpartition(".")[2])


_VECTOR = re.compile(r".*(bias|norm)|A_log|D|magnitude")
"""Last word of the path of a vector that may have two axes. A_log, dt_bias and D are those of the
state of Mamba 2 and of delta nets, which their papers do not decay, magnitude that of DoRA."""
_STACKS = ("layers", "exp")
"""Axes that count vectors."""
_TABLE_WIDTHS = ("embed_vocab", "engram_row")
"""Last axis of a table whose rows are looked up by ids."""


def chosen(good: Good, new: State, old: State) -> State:
    """Returns the new arrays after a good step, else the old ones."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def optimizer(
    options: OptimizerOptions, rate: optax.Schedule, axes: WeightAxes, param_dtype: str
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer for weights in `param_dtype`, with the decay of `WeightAxes.decays`.

    Its update takes `good` too: whether moments change.
    """
    transform = optax.chain(
        RULES[options.name](options, axes),
        optax.add_decayed_weights(
            options.weight_decay,
            mask=lambda params: {path: axes.decays(path) for path in cast(dict, params)},
        ),
        optax.scale_by_learning_rate(rate),
    )
    if param_dtype == options.state_dtype == "float32":
        return transform
    return stored_as(
        transform,
        options.state_dtype,
        master=param_dtype != "float32" and options.state_dtype == "float32",
    )


def _adamw(options: OptimizerOptions, axes: WeightAxes) -> optax.GradientTransformationExtraArgs:
    b1, b2, eps = options.beta1, options.beta2, options.eps
    assert b1 is not None and b2 is not None and eps is not None
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(grads, state, weights=None, *, good: Good = True):
        count = cast(jax.Array, optax.safe_increment(state.count))
        mu = chosen(good, optax.tree.update_moment(grads, state.mu, b1, 1), state.mu)
        nu = chosen(good, optax.tree.update_moment(grads, state.nu, b2, 2), state.nu)
        changes = jax.tree.map(
            lambda mean, square: mean / (jnp.sqrt(square) + eps),
            optax.tree.bias_correction(mu, b1, count),
            optax.tree.bias_correction(nu, b2, count),
        )
        return changes, optax.ScaleByAdamState(count, mu, nu)

    return _rule(adam.init, update)


def _lion(options: OptimizerOptions, axes: WeightAxes) -> optax.GradientTransformationExtraArgs:
    assert options.beta1 is not None and options.beta2 is not None
    lion = optax.scale_by_lion(b1=options.beta1, b2=options.beta2)

    def update(grads, state, weights=None, *, good: Good = True):
        changes, new = cast(Any, lion.update(grads, state))
        return changes, new._replace(mu=chosen(good, new.mu, state.mu))

    return _rule(lion.init, update)


def _sgd(options: OptimizerOptions, axes: WeightAxes) -> optax.GradientTransformationExtraArgs:
    decay = options.momentum
    if not decay:
        return counted(optax.identity())

    def ahead(grad, momentum):
        return grad + decay * momentum

    def update(grads, state, weights=None, *, good: Good = True):
        momentum = chosen(good, jax.tree.map(ahead, grads, state.trace), state.trace)
        changes = jax.tree.map(ahead, grads, momentum) if options.nesterov else momentum
        return changes, optax.TraceState(momentum)

    return counted(_rule(optax.trace(decay).init, update))


def _rule(init: Callable, update: Callable) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


class Counted(NamedTuple):
    """count: updates that changed the weights. inner: state of the rule."""

    count: jax.Array
    inner: Any


def counted(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns a rule that counts updates, for one that does not."""
    rule = optax.with_extra_args_support(rule)

    def init(weights):
        return Counted(jnp.zeros([], jnp.int32), rule.init(weights))

    def update(grads, state, weights=None, *, good: Good = True):
        changes, inner = rule.update(grads, state.inner, weights, good=good)
        return changes, Counted(cast(jax.Array, optax.safe_increment(state.count)), inner)

    return _rule(init, update)


class Muon(NamedTuple):
    """momentum: of matrices, by path. adam: state of Adam for all other weights."""

    momentum: dict[str, jax.Array]
    adam: optax.ScaleByAdamState


def _muon(options: OptimizerOptions, axes: WeightAxes) -> optax.GradientTransformationExtraArgs:
    """Muon (https://kellerjordan.github.io/posts/muon): the momentum M of a matrix, made nearly
    orthogonal, times a scale; Adam for all other weights (docs/optimizers.md).

    M <- b M + (1 - b) G, for gradients G and b = momentum. With `nesterov`, the change is that of
    b M + (1 - b) G with the new M. The scale is 0.2 sqrt(max(d_in, d_out)), which gives a change
    the root mean square of one of AdamW (arXiv:2502.16982, section 2.2), or
    sqrt(max(1, d_out / d_in)).
    """
    adam = _adamw(options, axes)
    decay = options.momentum
    steps = options.ns_steps
    scale_name = options.update_scale
    assert decay is not None and steps is not None and scale_name is not None

    def split(arrays):
        matrices = {path: a for path, a in arrays.items() if path in axes.matrices}
        return matrices, {path: a for path, a in arrays.items() if path not in matrices}

    def mean(momentum, grad):
        return decay * momentum + (1 - decay) * grad

    def change(path, momentum):
        rows = math.prod(momentum.shape[dim] for dim in axes.rows(path))
        columns = math.prod(momentum.shape[dim] for dim in axes.columns(path))
        scale = {
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
            "original": math.sqrt(max(1.0, columns / rows)),
        }[scale_name]
        return scale * orthogonalized(path, momentum, axes, steps)

    def init(weights):
        matrices, others = split(weights)
        return Muon(jax.tree.map(jnp.zeros_like, matrices), cast(Any, adam.init(others)))

    def update(grads, state, weights=None, *, good: Good = True):
        matrices, others = split(grads)
        new = jax.tree.map(mean, state.momentum, matrices)
        momentum = chosen(good, new, state.momentum)
        ahead = jax.tree.map(mean, momentum, matrices) if options.nesterov else momentum
        changes = {path: change(path, each) for path, each in ahead.items()}
        other_changes, adam_state = cast(Any, adam.update(others, state.adam, good=good))
        return changes | other_changes, Muon(momentum, adam_state)

    return _rule(init, update)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X. They raise small singular values
fastest, and leave all of them between about 0.7 and 1.2."""


def orthogonalized(path: str, weight: jax.Array, axes: WeightAxes, steps: int) -> jax.Array:
    """Returns nearly U V^T of each matrix U S V^T of an array of the shape of the weight at `path`.

    On a mesh each device gets full matrices, so that the products of the iteration exchange
    nothing. Of an array [28 layers, 1024, 3072] with its rows cut over 8 devices, each device gets
    4 matrices [1024, 3072] of 32, of which 4 are zeros.
    """
    mesh = axes.layout.mesh
    rows = axes.rows(path)
    columns = axes.columns(path)
    spec = axes.layout.moment_spec(axes.names[path], weight.shape)
    stack = [dim for dim in range(weight.ndim) if dim not in rows + columns]
    stack.sort(key=lambda dim: not axes_of(spec[dim]))  # one of them may be cut, such as experts
    order = (*stack, *rows, *columns)
    x = weight.transpose(order)
    stacked = x.shape[: len(stack)]
    matrix = x.shape[len(stack) :]
    cut = axes_of(spec[stack[0]]) if stack else ()
    cuts = [cut, *(axes_of(spec[dim]) for dim in rows + columns)]
    specs = _uncut(cuts, {axis: size for axis, size in mesh.shape.items() if size > 1})
    parts = math.prod(mesh.shape[axis] for axis in axes_of(specs[-1][0]))
    outer = stacked[0] if cut else 1
    x = x.reshape(outer, -1, *matrix)
    inner = x.shape[1]
    filled = -inner % (parts // math.gcd(parts, outer))
    x = jnp.pad(x, [(0, 0), (0, filled), *[(0, 0)] * len(matrix)])
    padded = x.shape
    x = x.reshape(-1, *matrix)
    for each in specs:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, each))
    size = math.prod(weight.shape[dim] for dim in rows)
    x = _newton_schulz(x.reshape(len(x), size, -1), steps).reshape(x.shape)
    for each in reversed(specs):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, each))
    x = x.reshape(padded)[:, :inner].reshape(*stacked, *matrix)
    return x.transpose([order.index(dim) for dim in range(len(order))])


def _uncut(cuts: list[tuple[str, ...]], sizes: dict[str, int]) -> list[PartitionSpec]:
    """Returns shardings of an array, from the one that `cuts` names by dimension to one that cuts
    only the first dimension, over all mesh axes.

    Each moves one mesh axis, in one all-to-all; the partitioner would gather the array to move
    several at once. sizes: of the mesh axes that cut something.
    """
    now = [[axis for axis in cut if axis in sizes] for cut in cuts]
    specs = [PartitionSpec(*map(tuple, now))]
    for cut in now[1:]:
        while cut:
            now[0].append(cut.pop())
            specs.append(PartitionSpec(*map(tuple, now)))
    used = {axis for cut in now for axis in cut}
    now[0] += [axis for axis in sizes if axis not in used]
    return [*specs, PartitionSpec(*map(tuple, now))]


def _newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """Returns `x` with its singular vectors and singular values near 1, by `steps` iterations. x:
    matrices [..., rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Adafactor(NamedTuple):
    """count: updates that changed the weights. Means of squared gradients by path: of each row and
    of each column of matrices, whose other dimensions have length 1, and of every number of other
    weights."""

    count: jax.Array
    rows: dict[str, jax.Array]
    columns: dict[str, jax.Array]
    squares: dict[str, jax.Array]


def _adafactor(
    options: OptimizerOptions, axes: WeightAxes
) -> optax.GradientTransformationExtraArgs:
    """Adafactor (arXiv:1804.04235) without momentum. The mean of squares of a matrix is the product
    of its row means and its column means over the mean of all."""

    threshold = options.clip_threshold
    rate = options.decay_rate
    assert threshold is not None and rate is not None

    def mean(array, dims):
        return jnp.mean(array, axis=dims, keepdims=True)

    def is_matrix(path):
        return bool(axes.rows(path))

    def init(weights):
        shapes = {path: a for path, a in weights.items() if is_matrix(path)}
        rows = {path: jnp.zeros_like(mean(a, axes.columns(path))) for path, a in shapes.items()}
        columns = {path: jnp.zeros_like(mean(a, axes.rows(path))) for path, a in shapes.items()}
        squares = {path: jnp.zeros_like(a) for path, a in weights.items() if path not in shapes}
        return Adafactor(jnp.zeros([], jnp.int32), rows, columns, squares)

    def direction(path, grad, state):
        if not is_matrix(path):
            return grad * jax.lax.rsqrt(state.squares[path])
        rows = state.rows[path]
        rows = rows / mean(rows, axes.rows(path))
        return grad * jax.lax.rsqrt(rows) * jax.lax.rsqrt(state.columns[path])

    def change(path, grad, state, weight):
        dims = axes.rows(path) + axes.columns(path)
        change = direction(path, grad, state)
        rms = jnp.sqrt(mean(jnp.square(change), dims))
        change = change / jnp.maximum(1.0, rms / threshold)
        if not options.scale_parameter:
            return change
        return change * jnp.maximum(1e-3, jnp.sqrt(mean(jnp.square(weight), dims)))

    def update(grads, state, weights, *, good: Good = True):
        count = cast(jax.Array, optax.safe_increment(state.count))
        decay = 1.0 - count.astype(jnp.float32) ** -rate
        squared = {path: jnp.square(grad) + 1e-30 for path, grad in grads.items()}

        def updated(means, dims_of):
            new = {
                path: decay * old + (1.0 - decay) * mean(squared[path], dims_of(path))
                for path, old in means.items()
            }
            return chosen(good, new, means)

        new = Adafactor(
            count,
            updated(state.rows, axes.columns),
            updated(state.columns, axes.rows),
            updated(state.squares, lambda path: ()),
        )
        changes = {path: change(path, grad, new, weights[path]) for path, grad in grads.items()}
        return changes, new

    return _rule(init, update)


Rule = Callable[[OptimizerOptions, WeightAxes], optax.GradientTransformationExtraArgs]

RULES: dict[str, Rule] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "sgd": _sgd,
    "adafactor": _adafactor,
}
"""Name of an optimizer -> its change of the weights, before weight decay and the learning rate."""


def operations(
    options: OptimizerOptions, axes: WeightAxes, sizes: Mapping[str, tuple[int, ...]]
) -> float:
    """Returns the operations of the products of a step for weights of these sizes, on all
    devices."""
    count = _OPERATIONS.get(options.name)
    return 0.0 if count is None else sum(count(options, axes, sizes))


def _newton_schulz_operations(
    options: OptimizerOptions, axes: WeightAxes, sizes: Mapping[str, tuple[int, ...]]
) -> Iterator[float]:
    """Yields the operations of the iterations for each array: 4 m^2 n + 2 m^3 an iteration for a
    matrix with sides m <= n."""
    assert options.ns_steps is not None
    for path, size in sizes.items():
        if path not in axes.matrices:
            continue
        rows = math.prod(size[dim] for dim in axes.rows(path))
        columns = math.prod(size[dim] for dim in axes.columns(path))
        m = min(rows, columns)
        n = max(rows, columns)
        matrices = math.prod(size) // (rows * columns)
        yield options.ns_steps * matrices * (4.0 * m * m * n + 2.0 * m**3)


_OPERATIONS = {"muon": _newton_schulz_operations}
"""Name of an optimizer whose rule has products -> their operations for each array."""


def update_count(state: optax.OptState) -> jax.Array:
    """Returns the number of updates that changed the weights, from the state of an optimizer."""

    def counts(entry):
        fields = getattr(entry, "_fields", ())
        return "count" in fields and not isinstance(entry, optax.ScaleByScheduleState)

    return next(entry.count for entry in jax.tree.leaves(state, is_leaf=counts) if counts(entry))


def sharding_of_moment(
    weight_sharding: NamedSharding, shape: tuple[int, ...], weight_shape: tuple[int, ...]
) -> NamedSharding:
    """Returns the sharding of a moment of a weight: the weight's, but dimensions that the moment
    has a mean over, of length 1, are not cut."""
    if shape == weight_shape:
        return weight_sharding
    kept = [
        cut if size == full else None
        for cut, size, full in zip(weight_sharding.spec, shape, weight_shape, strict=True)
    ]
    return NamedSharding(weight_sharding.mesh, PartitionSpec(*kept))


def stored_as(
    transform: optax.GradientTransformation, dtype: str, master: bool
) -> optax.GradientTransformationExtraArgs:
    """Returns `transform` computed in float32, with moments stored in `dtype`.

    master: the step updates a float32 copy of the weights, the first part of the state, and the
    weights are that copy rounded. bfloat16 weights need it: they lose steps smaller than half of
    the last bit, 1/512 of a number.
    """

    transform = optax.with_extra_args_support(transform)

    def to_stored_dtype(state):
        return jax.tree.map(
            lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
        )

    def init(weights):
        wide = _wide(weights)
        state = to_stored_dtype(transform.init(wide))
        return (wide, *state) if master else state

    def update(grads, state, weights, *, good: Good = True):
        wide, state = (state[0], state[1:]) if master else (_wide(weights), state)
        changes, state = transform.update(grads, _wide(state), wide, good=good)
        if not master:
            return changes, to_stored_dtype(state)
        wide = chosen(good, optax.apply_updates(wide, changes), wide)
        # Exact: float32 represents the difference of two close bfloat16 numbers.
        changes = jax.tree.map(
            lambda new, old: new.astype(old.dtype).astype(jnp.float32) - old.astype(jnp.float32),
            wide,
            weights,
        )
        return changes, (wide, *to_stored_dtype(state))

    return _rule(init, update)


def _wide(tree: State) -> State:
    return jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def at_once(
    transform: optax.GradientTransformationExtraArgs,
    grads: dict,
    state: State,
    weights: dict,
    good: jax.Array,
) -> tuple[dict, State, jax.Array]:
    """Returns (weights, state, norm of the change) after a step; weights and state are unchanged if
    not `good`."""
    changes, stepped = transform.update(grads, state, weights, good=good)
    new_weights = cast(dict, optax.apply_updates(weights, changes))
    new_state = jax.tree.map(
        lambda new, old: new if _by_path(new) else jnp.where(good, new, old),
        stepped,
        state,
        is_leaf=_by_path,
    )
    return chosen(good, new_weights, weights), new_state, norm(changes)


def norm(tree: optax.Updates) -> jax.Array:
    """Returns the Euclidean norm. Host memory supports no complex numbers, which optax's norm
    handles."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def by_layer(
    transform: optax.GradientTransformationExtraArgs,
    grads: dict,
    state: State,
    weights: dict,
    good: jax.Array,
) -> tuple[dict, State, jax.Array]:
    """Returns the same as `at_once`, with one layer of a stack, or one other array, on the device
    at a time.

    Arrays in host memory are fetched, stepped and written back in place. Gradients are in device
    memory.
    """
    entries, structure = jax.tree.flatten(state, is_leaf=_by_path)
    moments = {i: each for i, each in enumerate(entries) if _by_path(each)}
    counters = {i: each for i, each in enumerate(entries) if not _by_path(each)}

    def merged(moments, counters):
        return jax.tree.unflatten(
            structure, [moments.get(i, counters.get(i)) for i in range(len(entries))]
        )

    def step(grads, weights, moments):
        """Returns (weights, moments, counters, sum of squares of the change) of some paths, on the
        device."""
        weights, state, change = at_once(transform, grads, merged(moments, counters), weights, good)
        new = dict(enumerate(jax.tree.leaves(state, is_leaf=_by_path)))
        return (
            weights,
            {i: new[i] for i in moments},
            {i: new[i] for i in counters},
            jnp.square(change),
        )

    squares = jnp.float32(0.0)
    stepped = counters
    for group in _stepped_together(weights):
        group_grads = _select(grads, group)
        arrays = _select(weights, group), {i: _select(each, group) for i, each in moments.items()}
        if group[0].startswith("stacks."):
            arrays, stepped, change = _step_layers(step, group_grads, arrays, counters)
        else:
            *new, stepped, change = step(group_grads, *fetch(arrays))
            arrays = put_back(tuple(new), arrays)
        weights = weights | arrays[0]
        moments = {i: each | arrays[1][i] for i, each in moments.items()}
        squares += change
    return weights, merged(moments, stepped), jnp.sqrt(squares)


def _step_layers(step, grads: dict, arrays: tuple, counters: dict):
    """Runs `step` for each layer of a stack, whose arrays are all [repeats, ...].

    The loop carries the arrays, so each is written in place. A scan would hold its inputs and its
    outputs.
    """

    def layer(r, carry):
        arrays, _, squares = carry
        layer_arrays, layer_grads = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, r, 0, keepdims=False), (arrays, grads)
        )
        *new, stepped, change = step(layer_grads, *fetch(layer_arrays))
        new = put_back(tuple(new), arrays)
        arrays = jax.tree.map(
            lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, r, 0), arrays, new
        )
        return arrays, stepped, squares + change

    repeats = next(iter(grads.values())).shape[0]
    return jax.lax.fori_loop(0, repeats, layer, (arrays, counters, jnp.float32(0.0)))


def start(
    transform: optax.GradientTransformation, weights: dict, shardings: optax.OptState
) -> optax.OptState:
    """Returns the state before the first step, with these shardings.

    The state is created group by group, so that the device never holds all moments.
    """
    entries, structure = jax.tree.flatten(shardings, is_leaf=_by_path)
    state: list[Any] = [{} if _by_path(entry) else None for entry in entries]
    for group in _stepped_together(weights):
        selected = [_select(entry, group) if _by_path(entry) else entry for entry in entries]
        init = jax.jit(transform.init, out_shardings=jax.tree.unflatten(structure, selected))
        created = jax.block_until_ready(
            jax.tree.leaves(init(fetch(_select(weights, group))), is_leaf=_by_path)
        )
        state = [
            old | new if _by_path(new) else new for old, new in zip(state, created, strict=True)
        ]
    return jax.tree.unflatten(structure, state)


def _by_path(entry: object) -> TypeGuard[dict]:
    """Returns whether an entry of the state is a dict of arrays by path; other entries are
    counters."""
    return isinstance(entry, dict)


def _select(arrays: dict, paths: list[str]) -> dict:
    return {path: arrays[path] for path in paths}


def _stepped_together(weights: dict) -> list[list[str]]:
    """Returns the paths that are stepped together: all paths of a stack, and every other path
    alone."""

    def key(path):
        return ".".join(path.split(".")[:2]) if path.startswith("stacks.") else path

    return [list(group) for _, group in groupby(sorted(weights, key=key), key=key)]
