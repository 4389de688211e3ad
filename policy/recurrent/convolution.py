"""Causal depthwise convolutions over the tokens of each sequence, with taps `dilation` tokens
apart, and the inputs that a cache keeps of them.

B rows, K key heads of J channels, T tokens, W taps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp

from policy.cache.layer_cache import LayerCache
from policy.cache.paths import Tree
from policy.cache.paths import before as entries_before


def convolve(
    inputs_BKTJ: jax.Array, kernel_KJW: jax.Array, documents_BT: jax.Array, dilation: int = 1
) -> jax.Array:
    """Computes float32[B, K, T, J]: out_t = sum_w kernel[w] in_(t + w dilation), where the last tap
    belongs to token t itself. `inputs` starts with the (W - 1) dilation inputs of earlier calls. A
    tap in another document counts as 0."""
    W = kernel_KJW.shape[-1]
    T = documents_BT.shape[1]
    sources = jnp.pad(documents_BT, ((0, 0), ((W - 1) * dilation, 0)))
    out = jnp.float32(0.0)
    for w in range(W):
        tap = slice(w * dilation, w * dilation + T)
        same = (sources[:, tap] == documents_BT)[:, None, :, None]
        out = out + jnp.where(same, inputs_BKTJ[:, :, tap], 0) * kernel_KJW[:, None, :, w]
    return out


def convolve_paths(
    inputs_BKTJ: jax.Array, kernel_KJW: jax.Array, tree: Tree, dilation: int = 1
) -> jax.Array:
    """Computes `convolve` along the paths of trees, from the inputs of the T tokens: a tap before
    the path counts as 0."""
    inputs = inputs_BKTJ.astype(jnp.float32)  # gradients of all paths add up in float32
    W = kernel_KJW.shape[-1]
    out = inputs * kernel_KJW[:, None, :, W - 1]
    for back in range(1, W):
        tap = jax.vmap(partial(entries_before, tree=tree, times=back * dilation), 1, 1)(inputs)
        out = out + tap * kernel_KJW[:, None, :, W - 1 - back]
    return out


def last_inputs(inputs_BKTJ: jax.Array, real_BT: jax.Array, count: int) -> jax.Array:
    """Returns [B, K, count, J]: the `count` inputs up to the last real token. The first `count`
    inputs come from earlier calls and are returned if no token is real."""
    end = jnp.max(jnp.where(real_BT, 1 + jnp.arange(real_BT.shape[1]), 0), axis=1)
    at = end[:, None] + jnp.arange(count)
    return jnp.take_along_axis(inputs_BKTJ, at[:, None, :, None], axis=2)


def with_state(cache: LayerCache, name: str, value: jax.Array) -> LayerCache:
    """Returns the cache with `value` as the rows of the state `name`."""
    array = cast(jax.Array, cache.arrays[name])
    return replace(
        cache, arrays=cache.arrays | {name: array.at[cache.index].set(value.astype(array.dtype))}
    )
