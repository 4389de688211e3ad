"""Trees of weights, gradients and moments of which some live in host memory: these are computed on by the host, the others on the
device, by the same function."""

from __future__ import annotations

import jax

from policy.ops.host_memory import on_host


def _is_dict(node) -> bool:
    return isinstance(node, dict)


def part(tree, paths: frozenset[str], inside: bool):
    """`tree` with only those entries of its dicts (by path of the weight) that are among `paths`, or only the others."""

    def chosen(node):
        return {k: v for k, v in node.items() if (k in paths) == inside} if _is_dict(node) else node

    return jax.tree.map(chosen, tree, is_leaf=_is_dict)


def by_place(function, paths: frozenset[str], *trees) -> list:
    """[function of what is on the device, function of what `paths` names, on the host]; without paths the former alone, of all."""
    if not paths:
        return [function(*trees)]
    near, far = ([part(tree, paths, inside) for tree in trees] for inside in (False, True))
    return [function(*near), on_host(function, *far)]


def joined(parts: list):
    """One tree of the parts that `by_place` made; what is no dict is that of the device."""
    return jax.tree.map(
        lambda *nodes: {k: v for node in nodes for k, v in node.items()} if _is_dict(nodes[0]) else nodes[0],
        *parts,
        is_leaf=_is_dict,
    )
