"""One step of an optimizer: at once, or a layer at a time for weights and moments in host memory.

Weights and gradients are flat dicts by path. Any optax transformation goes whose state is counters and such dicts, and that treats
every number on its own, as AdamW does; one that looks at the norm of a whole array cannot go a layer at a time.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import optax

from policy.ops.host_memory import fetch, put_back


def stored_as(transform: optax.GradientTransformation, dtype: str, master: bool) -> optax.GradientTransformation:
    """`transform`, computed in float32, whose moments are kept in `dtype`. `master`: it steps a copy of the weights in float32,
    which is the first part of its state, and the weights are that copy rounded; for weights in bfloat16, where a step smaller than
    half of the last bit, 1/512 of a number, would be lost."""

    def kept(state):
        return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, state)

    def init(weights):
        wide = _wide(weights)
        state = kept(transform.init(wide))
        return (wide, *state) if master else state

    def update(grads, state, weights):
        wide, state = (state[0], state[1:]) if master else (_wide(weights), state)
        changes, state = transform.update(grads, _wide(state), wide)
        if not master:
            return changes, kept(state)
        wide = optax.apply_updates(wide, changes)
        # Exact: the difference of two numbers in bfloat16 that are close together has a place in float32.
        changes = jax.tree.map(
            lambda new, old: new.astype(old.dtype).astype(jnp.float32) - old.astype(jnp.float32), wide, weights
        )
        return changes, (wide, *kept(state))

    return optax.GradientTransformation(init, update)


def _wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def at_once(transform: optax.GradientTransformation, grads: dict, state: Any, weights: dict, good: jax.Array):
    """(weights, state, norm of the change) after a step; the first two as they were where it is not `good`."""
    changes, new_state = transform.update(grads, state, weights)
    new = (optax.apply_updates(weights, changes), new_state)
    return *jax.tree.map(lambda a, b: jnp.where(good, a, b), new, (weights, state)), norm(changes)


def norm(tree) -> jax.Array:
    """The Euclidean norm of all numbers. That of optax adds up real and imaginary parts, which host memory has no place for."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def by_layer(transform: optax.GradientTransformation, grads: dict, state: Any, weights: dict, good: jax.Array):
    """The same, with no more than one layer of a stack, or one array outside the stacks, on its way at a time: what lives in host
    memory is fetched, stepped and written back in place. Gradients are in device memory."""
    entries, structure = jax.tree.flatten(state, is_leaf=_by_path)
    moments = {i: each for i, each in enumerate(entries) if _by_path(each)}
    counters = {i: each for i, each in enumerate(entries) if not _by_path(each)}

    def whole(moments, counters):
        return jax.tree.unflatten(structure, [moments.get(i, counters.get(i)) for i in range(len(entries))])

    def step(grads, weights, moments):
        """(weights, moments, counters, sum of squares of the change) of some paths, on the device."""
        weights, state, change = at_once(transform, grads, whole(moments, counters), weights, good)
        new = dict(enumerate(jax.tree.leaves(state, is_leaf=_by_path)))
        return weights, {i: new[i] for i in moments}, {i: new[i] for i in counters}, jnp.square(change)

    squares, stepped = jnp.float32(0.0), counters
    for group in _groups(weights):
        slopes, here = _of(group, grads), (_of(group, weights), {i: _of(group, each) for i, each in moments.items()})
        if group[0].startswith("stacks."):
            here, stepped, change = _over_layers(step, slopes, here, counters)
        else:
            *new, stepped, change = step(slopes, *fetch(here))
            here = put_back(tuple(new), here)
        weights = weights | here[0]
        moments = {i: each | here[1][i] for i, each in moments.items()}
        squares += change
    return weights, whole(moments, stepped), jnp.sqrt(squares)


def _over_layers(step, grads: dict, arrays: tuple, counters: dict):
    """`step` for one layer after the other of a stack, whose arrays are all [R, ...]. The loop carries them, so that each is
    written in place; as inputs and outputs of a scan they would be there twice."""

    def layer(r, carry):
        arrays, _, squares = carry
        one, slopes = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, r, 0, keepdims=False), (arrays, grads))
        *new, stepped, change = step(slopes, *fetch(one))
        new = put_back(tuple(new), arrays)
        put = jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, r, 0), arrays, new)
        return put, stepped, squares + change

    repeats = next(iter(grads.values())).shape[0]
    return jax.lax.fori_loop(0, repeats, layer, (arrays, counters, jnp.float32(0.0)))


def start(transform: optax.GradientTransformation, weights: dict, places: Any) -> Any:
    """The state before the first step, where `places` says; made one group of arrays after the other, so that all moments are never
    on the device together."""
    flat_places, structure = jax.tree.flatten(places, is_leaf=_by_path)
    found = [{} if _by_path(place) else None for place in flat_places]
    for group in _groups(weights):
        here = [_of(group, place) if _by_path(place) else place for place in flat_places]
        made = jax.jit(transform.init, out_shardings=jax.tree.unflatten(structure, here))(fetch(_of(group, weights)))
        made = jax.block_until_ready(jax.tree.leaves(made, is_leaf=_by_path))
        found = [old | new if _by_path(new) else new for old, new in zip(found, made, strict=True)]
    return jax.tree.unflatten(structure, found)


def _by_path(entry: Any) -> bool:
    return isinstance(entry, dict)


def _of(group: list[str], arrays: dict) -> dict:
    return {path: arrays[path] for path in group}


def _groups(weights: dict) -> list[list[str]]:
    """Paths that are stepped together: all of a stack, and every other one alone."""

    def key(path):
        return ".".join(path.split(".")[:2]) if path.startswith("stacks.") else path

    return [list(group) for _, group in groupby(sorted(weights, key=key), key=key)]
