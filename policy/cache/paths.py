"""What comes before a token in its sequence: in rows of segments, one after the other, and in rows
of trees.

A tree holds sequences with equal beginnings, and each shared beginning once. A node is a run of
tokens that the same sequences share. The path of a token is the nodes from the root of its tree to
its own. The nodes of a row stand in preorder: each before the nodes that continue it. A token sees
the tokens of its path up to itself and no others. A sequence alone is a tree of one node.

B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """The trees of packed rows, int32[B, T] each; numpy.ndarray on the host.

    node: the number of each token's node in its row, from 1; 0: padding. last: the number of the
    last node that continues this one, or its own. So a query sees a key iff node_k <= node_q <=
    last_k, and the key is not after it. position: along the path, from 0. before: the place in the
    row of the token before it on the path; -1: none. count: how many sequences the token stands
    for.
    """

    node: Any
    last: Any
    position: Any
    before: Any
    count: Any

    FILLS: ClassVar = {"node": 0, "last": 0, "position": 0, "before": -1, "count": 0}
    """The fields on padding."""

    @classmethod
    def of_shapes(cls, tokens: jax.ShapeDtypeStruct) -> Tree:
        """Returns the trees of rows of tokens as shapes."""
        return cls(*[tokens] * len(cls.FILLS))


def places_before(tree: Tree, times: int) -> jax.Array:
    """Returns int32[B, T]: the place of the token `times` tokens before each on its path; -1: there
    is none."""
    places = tree.before
    for _ in range(times - 1):
        places = jnp.where(
            places < 0, -1, jnp.take_along_axis(tree.before, jnp.maximum(places, 0), axis=1)
        )
    return places


def taken(x_BT: jax.Array, places_BT: jax.Array) -> jax.Array:
    """Returns the entries [B, T, ...] of `x` at these places of its rows, 0 at place -1."""
    index = jnp.expand_dims(places_BT, tuple(range(2, x_BT.ndim)))
    return jnp.where(index < 0, 0, jnp.take_along_axis(x_BT, jnp.maximum(index, 0), axis=1)).astype(
        x_BT.dtype
    )


def before(x_BT: jax.Array, tree: Tree | None = None, times: int = 1) -> jax.Array:
    """Returns [B, T, ...]: at t the entry of the token `times` tokens before token t in its
    sequence.

    Ignore it where `scored` is false: it is 0 there, or the entry of another sequence.
    """
    if tree is not None:
        return taken(x_BT, places_before(tree, times))
    T = x_BT.shape[1]
    others = [(0, 0)] * (x_BT.ndim - 2)
    times = min(times, T)
    return jnp.pad(x_BT[:, : T - times], ((0, 0), (times, 0), *others))


def scored(segments_BT: jax.Array, tree: Tree | None = None, times: int = 1) -> jax.Array:
    """Returns bool[B, T]: whether a token is real and has `times` tokens before it in its sequence,
    so that `before` holds what predicts it."""
    if tree is not None:
        return places_before(tree, times) >= 0
    return (before(segments_BT, times=times) == segments_BT) & (segments_BT != 0)


def first(segments_BT: jax.Array, tree: Tree | None = None) -> jax.Array:
    """Returns bool[B, T], true once for each sequence: at its first token, in a tree at the first
    token of its last node."""
    if tree is None:
        return (segments_BT != 0) & ~scored(segments_BT)
    return (tree.node != 0) & (tree.node == tree.last) & (before(tree.node) != tree.node)


def number_documents(segments_BT: jax.Array) -> jax.Array:
    """Returns int32[B, T]: the number of each token's document in its row, from 0. Padding counts
    as part of the document before it (or after it, at the start of a row), so that only a real
    token begins a document."""
    index = jnp.arange(segments_BT.shape[1])
    last = jax.lax.cummax(jnp.where(segments_BT != 0, index, 0), axis=1)
    filled = jnp.take_along_axis(segments_BT, last, axis=1)
    previous = jnp.pad(filled[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum((filled != previous) & (previous != 0), axis=1, dtype=jnp.int32)
