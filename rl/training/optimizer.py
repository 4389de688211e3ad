"""Computes learning rates, and makes one step of an optimizer: at once, or layer by layer for
weights and moments in host memory.

Weights and gradients are flat dicts by path. The state of the optax transformation must consist of
counters and such dicts. The transformation must be elementwise, as AdamW is: one that takes the
norm of an array cannot run layer by layer.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from policy.ops.host_memory import fetch, put_back
from rl.config.stage import OptimizerOptions


def schedule(options: OptimizerOptions, steps: int, updates_per_step: int = 1) -> optax.Schedule:
    """Returns the learning rate of an update of a stage, counted from 0: `learning_rate` of
    rl/training/learning_rate.py, in float32."""
    peak = options.learning_rate
    warm = options.warmup_steps
    first = warm // updates_per_step
    rest = max(1, steps - 1 - first)
    by_step = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * options.final_fraction, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, options.final_fraction),
    }[options.schedule]

    def after_warmup(update):
        return by_step((update + warm) // updates_per_step - first)

    if not warm:
        return after_warmup
    return optax.join_schedules(
        [optax.linear_schedule(peak / (warm + 1), peak, warm), after_warmup], [warm]
    )


def at_update(state: Any, update: jax.Array) -> Any:
    """Returns the state of `adamw` whose next step has the learning rate of this update.

    Its own count leaves out updates that changed nothing.
    """

    def is_schedule(entry):
        return isinstance(entry, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda e: e._replace(count=update) if is_schedule(e) else e, state, is_leaf=is_schedule
    )


def adamw(
    options: OptimizerOptions, rate: optax.Schedule, axes: dict, param_dtype: str
) -> optax.GradientTransformation:
    """Returns AdamW for weights in `param_dtype`. Weight decay acts on matrices only, not on
    vectors."""
    decayed = {path: len([a for a in names if a != "layers"]) > 1 for path, names in axes.items()}
    transform = optax.adamw(
        rate,
        b1=options.beta1,
        b2=options.beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=lambda params: {path: decayed[path] for path in cast(dict, params)},
    )
    if param_dtype == options.state_dtype == "float32":
        return transform
    return stored_as(
        transform,
        options.state_dtype,
        master=param_dtype != "float32" and options.state_dtype == "float32",
    )


def stored_as(
    transform: optax.GradientTransformation, dtype: str, master: bool
) -> optax.GradientTransformation:
    """Returns `transform` computed in float32, with moments stored in `dtype`.

    master: the step updates a float32 copy of the weights, the first part of the state, and the
    weights are that copy rounded. bfloat16 weights need it: they lose steps smaller than half of
    the last bit, 1/512 of a number.
    """

    def to_stored_dtype(state):
        return jax.tree.map(
            lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
        )

    def init(weights):
        wide = _wide(weights)
        state = to_stored_dtype(transform.init(wide))
        return (wide, *state) if master else state

    def update(grads, state, weights):
        wide, state = (state[0], state[1:]) if master else (_wide(weights), state)
        changes, state = transform.update(grads, _wide(state), wide)
        if not master:
            return changes, to_stored_dtype(state)
        wide = optax.apply_updates(wide, changes)
        # Exact: float32 represents the difference of two close bfloat16 numbers.
        changes = jax.tree.map(
            lambda new, old: new.astype(old.dtype).astype(jnp.float32) - old.astype(jnp.float32),
            wide,
            weights,
        )
        return changes, (wide, *to_stored_dtype(state))

    return optax.GradientTransformation(
        cast(optax.TransformInitFn, init), cast(optax.TransformUpdateFn, update)
    )


def _wide(tree: Any) -> Any:
    return jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def at_once(
    transform: optax.GradientTransformation, grads: dict, state: Any, weights: dict, good: jax.Array
) -> tuple[dict, Any, jax.Array]:
    """Returns (weights, state, norm of the change) after a step; weights and state are unchanged if
    not `good`."""
    changes, new_state = transform.update(grads, state, weights)
    new = (optax.apply_updates(weights, changes), new_state)
    weights, state = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, (weights, state))
    return weights, state, norm(changes)


def norm(tree: Any) -> jax.Array:
    """Returns the Euclidean norm. Host memory supports no complex numbers, which optax's norm
    handles."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def by_layer(
    transform: optax.GradientTransformation, grads: dict, state: Any, weights: dict, good: jax.Array
) -> tuple[dict, Any, jax.Array]:
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
    for group in _groups(weights):
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
    """Runs `step` for each layer of a stack, whose arrays are all [R, ...].

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


def start(transform: optax.GradientTransformation, weights: dict, shardings: Any) -> Any:
    """Returns the state before the first step, with these shardings.

    The state is created group by group, so that the device never holds all moments.
    """
    entries, structure = jax.tree.flatten(shardings, is_leaf=_by_path)
    state: list[Any] = [{} if _by_path(entry) else None for entry in entries]
    for group in _groups(weights):
        selected = [_select(entry, group) if _by_path(entry) else entry for entry in entries]
        init = jax.jit(transform.init, out_shardings=jax.tree.unflatten(structure, selected))
        created = jax.block_until_ready(
            jax.tree.leaves(init(fetch(_select(weights, group))), is_leaf=_by_path)
        )
        state = [
            old | new if _by_path(new) else new for old, new in zip(state, created, strict=True)
        ]
    return jax.tree.unflatten(structure, state)


def _by_path(entry: Any) -> bool:
    """Returns whether an entry of the state is a dict of arrays by path; other entries are
    counters."""
    return isinstance(entry, dict)


def _select(arrays: dict, paths: list[str]) -> dict:
    return {path: arrays[path] for path in paths}


def _groups(weights: dict) -> list[list[str]]:
    """Returns the paths that are stepped together: all paths of a stack, and every other path
    alone."""

    def key(path):
        return ".".join(path.split(".")[:2]) if path.startswith("stacks.") else path

    return [list(group) for _, group in groupby(sorted(weights, key=key), key=key)]
