"""Splits trees of weights, gradients and moments into device memory and host memory.

The same function computes the device part on the device and the host part on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp

from policy.mesh.sharding import Layout
from policy.ops.host_memory import fetch, on_host

Tree = TypeVar("Tree")


def _is_dict(node: object) -> TypeGuard[dict]:
    return isinstance(node, dict)


def _select(tree: Tree, paths: frozenset[str], listed: bool) -> Tree:
    """Returns `tree` with the dict entries whose path is in `paths` if `listed`, else with the
    other entries."""

    def chosen(node):
        return {k: v for k, v in node.items() if (k in paths) == listed} if _is_dict(node) else node

    return jax.tree.map(chosen, tree, is_leaf=_is_dict)


def on_each_memory(function: Callable, paths: frozenset[str], *trees: Any) -> list:
    """Calls `function` on the device for the arrays there, and on the host for the arrays at
    `paths`, in host memory.

    Returns both results, or only the first one if there are no `paths`.
    """
    if not paths:
        return [function(*trees)]
    device_part, host_part = (
        [_select(tree, paths, listed) for tree in trees] for listed in (False, True)
    )
    return [function(*device_part), on_host(function, *host_part)]


def fetched_except(tables: frozenset[str], params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Fetches weights in host memory to the device, but not the tables."""
    return {path: array if path in tables else fetch(array) for path, array in params.items()}


def copied(params: dict[str, jax.Array], tables: frozenset[str]) -> dict[str, jax.Array]:
    """Returns copies of weights. The host copies the tables at these paths, in host memory."""

    def copies(weights):
        return jax.tree.map(jnp.copy, weights)

    return joined(on_each_memory(copies, tables, fetched_except(tables, params)))


def reusable(params: dict[str, jax.Array], layout: Layout) -> dict[str, jax.Array]:
    """Returns weights whose memory an update can reuse.

    On one CPU those of `policy.load` lie where numpy has read them. jax does not own that memory,
    so the first update would hold the weights twice.
    """
    if layout.platform != "cpu" or layout.mesh.size > 1:
        return params
    return jax.tree.map(lambda a: jax.device_put(a, may_alias=False), params)


def mixed(
    reference: dict, params: dict, mix: jax.Array, tables: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns mix * params + (1 - mix) * reference. The host mixes the tables at these paths, in
    host memory."""

    def mixture(reference, params, mix):
        return jax.tree.map(
            lambda r, p: (mix * p + (1 - mix) * r).astype(r.dtype), reference, params
        )

    return joined(on_each_memory(mixture, tables, reference, fetched_except(tables, params), mix))


def joined(parts: Sequence[Tree]) -> Tree:
    """Merges the results of `on_each_memory` into one tree. A leaf that is not a dict comes from
    the device part."""
    return jax.tree.map(
        lambda *nodes: (
            {k: v for node in nodes for k, v in node.items()} if _is_dict(nodes[0]) else nodes[0]
        ),
        *parts,
        is_leaf=_is_dict,
    )
