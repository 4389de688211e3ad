"""Routes that are given: experts chosen by another pass over the same tokens, in place of a router's own choice (router replay,
arXiv 2510.11370).

A generator and a trainer that round differently choose other experts where two scores are close, and then compute with other
weights. With the generator's routes the trainer computes what was sampled from. Only the choice is given: the weights of the chosen
experts come from the router's own scores, so that the gradient reaches it.

B rows, T tokens, k experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from policy.cache import Step
from policy.intermediates import Replayed

if TYPE_CHECKING:
    from policy.layers.moe import TopKRouter

# In the place of the experts of a token of which they are not known; its router decides.
UNKNOWN = -1


def replay(router: TopKRouter, chosen: tuple[jax.Array, ...], step: Step) -> tuple[jax.Array, jax.Array, Replayed | None]:
    """(the experts that compute each token, int[B, T, k]: those of `step.routes` where they are known, else the router's own; their
    weights float32[B, T, k]; how many were given, and how many of these the router would not have chosen, in whatever order).
    `chosen` is what the router returned, [B, T, ...] each; it stays as it is without routes."""
    own, weights, scores = chosen
    if step.routes is None:
        return own, weights, None
    given = step.routes.astype(own.dtype)
    known = given != UNKNOWN
    counted = (known & (step.segments != 0)[..., None]).astype(jnp.float32)
    agrees = jnp.any(given[..., :, None] == own[..., None, :], axis=-1)
    experts = jnp.where(known, given, own)
    return experts, router.weigh(scores, experts), Replayed(counted.sum(), jnp.sum(counted * ~agrees))
