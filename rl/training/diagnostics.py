"""Computes the metrics of `diagnostics`: activations of each layer, and gradient norms by kind of part."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.config import DecoderConfig
from policy.intermediates import Activations

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
    raise ValueError(f"{path} belongs to no part of rl/training/diagnostics.py; add a pattern for it there")


def gradient_norms(squares: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns grad_norm/<part>: the gradient norm of all weights of a part, before clipping.

    squares: sum of squares of the gradient, by path of the weight.
    """
    groups: dict[str, list] = {}
    for path, square in squares.items():
        groups.setdefault(part(path), []).append(square)
    return {f"grad_norm/{name}": jnp.sqrt(sum(group)) for name, group in groups.items()}


def activation_metrics(
    activations: dict[str, Activations], filled_MRT: jax.Array, config: DecoderConfig
) -> dict[str, jax.Array]:
    """Returns activation/mean/<layer>, activation/std/<layer> and activation/zeros/<layer>.

    They are over all tokens of M micro-batches that are not padding. Layers count from 0, prediction modules from mtp1.
    activations: by path of the layer, arrays [M, repeats]. A shared token counts once.
    """
    tokens_M = jnp.sum(filled_MRT, axis=(1, 2))
    share = (tokens_M / jnp.maximum(jnp.sum(tokens_M), 1))[:, None]
    metrics = {}
    for path, each in activations.items():
        mean, zeros = (jnp.sum(share * a, axis=0) for a in (each.mean, each.fraction_zero))
        std = jnp.sqrt(jnp.sum(share * (jnp.square(each.std) + jnp.square(each.mean - mean)), axis=0))
        numbers = config.numbers(path) if path.startswith("stacks.") else [f"mtp{d + 1}" for d in range(mean.size)]
        for r, number in enumerate(numbers):
            metrics |= {
                f"activation/{name}/{number}": a[r] for name, a in (("mean", mean), ("std", std), ("zeros", zeros))
            }
    return metrics
