"""Computes the metrics of `diagnostics`, activations of each layer and gradient norms by kind of
part, and looks for numbers that are not finite.

M micro-batches, R rows of a micro-batch, T tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.config import DecoderConfig
from policy.intermediates import ActivationStatistics
from policy.mesh import processes

# Part -> substrings of the paths of its weights. The first part that matches counts.
PARTS = {
    "mtp": ("mtp.",),
    "engram": (".lookup.",),
    "hyper_connections": ("_residual.", "streams."),
    "indexer": (".indexer.",),
    "router": (".router.",),
    "experts": (".expert_", ".experts.", ".shared.", ".shared_gate"),
    "feed_forward": (".feed_forward.",),
    "mixer": (".mixer.",),
    "embedding": ("embed_", "layer_embedding"),
    "head": ("lm_head", "value_head"),
    "norms": ("norm.", "layernorm."),
}


def part(path: str) -> str:
    """Returns the part of the model that a weight belongs to, a key of PARTS.

    Raises ValueError for a weight that matches no part.
    """
    for name, patterns in PARTS.items():
        if any(pattern in path for pattern in patterns):
            return name
    raise ValueError(
        f"{path} belongs to no part of rl/training/diagnostics.py; add a pattern for it there"
    )


def gradient_norms(squares: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns grad_norm/<part>: the gradient norm of all weights of a part, before clipping.

    squares: sum of squares of the gradient, by path of the weight.
    """
    groups: dict[str, list] = {}
    for path, square in squares.items():
        groups.setdefault(part(path), []).append(square)
    return {f"grad_norm/{name}": jnp.sqrt(sum(group)) for name, group in groups.items()}


def activation_metrics(
    activations: dict[str, ActivationStatistics], filled_MRT: jax.Array, config: DecoderConfig
) -> dict[str, jax.Array]:
    """Returns activation/mean/<layer>, activation/std/<layer> and activation/zeros/<layer>.

    They are over all tokens of M micro-batches that are not padding. Layers count from 0,
    prediction modules from mtp1. activations: by path of the layer, arrays [M, repeats]. A shared
    token counts once.
    """
    tokens_M = jnp.sum(filled_MRT, axis=(1, 2))
    share = (tokens_M / jnp.maximum(jnp.sum(tokens_M), 1))[:, None]
    metrics = {}
    for path, each in activations.items():
        mean, zeros = (jnp.sum(share * a, axis=0) for a in (each.mean, each.fraction_zero))
        std = jnp.sqrt(
            jnp.sum(share * (jnp.square(each.std) + jnp.square(each.mean - mean)), axis=0)
        )
        numbers = (
            config.layer_numbers(path)
            if path.startswith("stacks.")
            else [f"mtp{d + 1}" for d in range(mean.size)]
        )
        for r, number in enumerate(numbers):
            metrics |= {
                f"activation/{name}/{number}": a[r]
                for name, a in (("mean", mean), ("std", std), ("zeros", zeros))
            }
    return metrics


def not_finite(tree: object) -> str | None:
    """Returns the path of an array of floats with a number that is not finite, or None. All
    processes return the same.

    Each device looks at its shards; shards in host memory and those of CPUs are looked at in place.
    """
    verdicts = [
        (path, _all_finite(shard.data))
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        for shard in leaf.addressable_shards
    ]
    mine = next(
        (
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, good in verdicts
            if not good
        ),
        None,
    )
    return next(filter(None, processes.all_gather_object(mine)), None)


def _all_finite(shard: jax.Array) -> Any:
    on_device = (
        shard.sharding.memory_kind in (None, "device")
        and next(iter(shard.devices())).platform != "cpu"
    )
    return jnp.isfinite(shard).all() if on_device else np.isfinite(np.asarray(shard)).all()
