"""The loop of an update over its micro-batches.

T tokens, M micro-batches of R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

import rl.algorithms

Carry = TypeVar("Carry")
MicroBatch = TypeVar("MicroBatch")
Outputs = TypeVar("Outputs")


def num_filled(filled_MRT: jax.Array) -> jax.Array | int:
    """Returns how many micro-batches hold tokens, at least 1. Micro-batches of padding come
    last."""
    M = len(filled_MRT)
    return 1 if M == 1 else jnp.maximum(jnp.sum(jnp.any(filled_MRT, axis=(1, 2))), 1)


def scan_first(
    function: Callable[[Carry, MicroBatch], tuple[Carry, Outputs]],
    carry: Carry,
    xs: MicroBatch,
    count: jax.Array | int,
) -> tuple[Carry, Outputs]:
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
