"""Keys and values that a layer keeps for later layers (Attention.keeps, Attention.shares).

Later layers attend to them in place of keys and values of their own. Without a cache these are the
keys and values of the call. With a cache they are the entries of the layer that keeps them, in
whatever form these are stored; the later layers only read them and have no entries.

A layer that keeps keys differs from its neighbours in its spec, so it is alone in its stack.

B rows, K key-value heads, T tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.intermediates import LayerAux
from policy.mesh.sharding import Layout


class SharedKeys(NamedTuple):
    """Keys and values [B, K, T, D] of the call's tokens, after norm and rotation, and the cache of
    the layer that keeps them, which holds these and earlier ones; None without a cache."""

    keys: jax.Array
    values: jax.Array
    cache: LayerCache | None


def for_later_stacks(
    step: Step, outputs: tuple[LayerAux, ...], cache: tuple | None, layout: Layout | None
) -> tuple[Step, tuple[LayerAux, ...]]:
    """Returns the step for later stacks, with the keys and values that the layers of a stack keep,
    and the outputs of these layers without them.

    outputs: one LayerAux with arrays [1, ...] for each layer of the pattern. cache: the parts of
    the stack's cache.
    """
    shared: dict[str, Any] = {}
    for i, output in enumerate(outputs):
        for name, (keys, values) in (output.kept or {}).items():
            assert len(keys) == 1, "a layer that keeps keys is alone in its stack"
            entries = None if cache is None else LayerCache.of(cache[0][i], 0, step, layout)
            shared[name] = SharedKeys(keys[0], values[0], entries)
    if not shared:
        return step, outputs
    return replace(step, shared=(step.shared or {}) | shared), tuple(
        replace(each, kept=None) for each in outputs
    )
