"""What a stage with `diagnostics` logs of the inside of a model: activations of each layer, and gradients by kind of part."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.config import DecoderConfig
from policy.intermediates import Activations

# Part -> what the path of its weights holds; the first that fits counts.
PARTS = {
    "mtp": ("mtp.",),
    "engram": (".lookup.",),
    "hyper_connections": ("_residual.", "streams."),
    "indexer": (".indexer.",),
    "router": (".router.",),
    "experts": (".expert_", ".experts.", ".shared.", ".shared_gate"),
    "feed_forward": (".feed_forward.",),
    "mixer": (".mixer.",),
    "embedding": ("embed_",),
    "head": ("lm_head", "value_head"),
    "norms": ("norm.", "layernorm."),
}


def part(path: str) -> str:
    """The part of the model that a weight belongs to, a key of PARTS.

    Raises ValueError for a weight that fits none.
    """
    for name, patterns in PARTS.items():
        if any(pattern in path for pattern in patterns):
            return name
    raise ValueError(f"{path} belongs to no part of rl/training/diagnostics.py; add a pattern for it there")


def gradient_norms(squares: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """grad_norm/<part>: norm of the gradient of all weights of a part, before clipping, from the sums of squares by path."""
    groups: dict[str, list] = {}
    for path, square in squares.items():
        groups.setdefault(part(path), []).append(square)
    return {f"grad_norm/{name}": jnp.sqrt(sum(found)) for name, found in groups.items()}


def activation_metrics(
    found: dict[str, Activations], segments_MRT: jax.Array, config: DecoderConfig
) -> dict[str, jax.Array]:
    """activation/mean/<layer>, activation/std/<layer> and activation/zeros/<layer> over all tokens of M micro-batches that are not
    padding, layers counted from 0, prediction modules from mtp1. `found` is by path of the layer, arrays [M, repeats]."""
    tokens_M = jnp.sum(segments_MRT != 0, axis=(1, 2))
    share = (tokens_M / jnp.maximum(jnp.sum(tokens_M), 1))[:, None]
    metrics = {}
    for path, each in found.items():
        mean, zeros = (jnp.sum(share * a, axis=0) for a in (each.mean, each.fraction_zero))
        std = jnp.sqrt(jnp.sum(share * (jnp.square(each.std) + jnp.square(each.mean - mean)), axis=0))
        numbers = config.numbers(path) if path.startswith("stacks.") else [f"mtp{d + 1}" for d in range(mean.size)]
        for r, number in enumerate(numbers):
            metrics |= {
                f"activation/{name}/{number}": a[r] for name, a in (("mean", mean), ("std", std), ("zeros", zeros))
            }
    return metrics
