"""Routes that are given: experts chosen by another pass over the same tokens, in place of a router's own choice (router replay,
arXiv 2510.11370).

A generator and a trainer that round differently choose other experts where two scores are close, and then compute with other
weights. With the generator's routes the trainer computes what was sampled from. Only the choice is given: the weights of the chosen
experts come from the router's own scores, so that the gradient reaches it.

B rows, T tokens, k experts per token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.cache import Step
from policy.intermediates import Replayed

# In the place of the experts of a token whose routes are not known; its router decides.
UNKNOWN = -1


def replay(own_BTK: jax.Array, step: Step) -> tuple[jax.Array, Replayed | None]:
    """(the experts that compute each token: those of `step.routes` where they are known, else the router's own; how many were
    given, and how many of these the router would not have chosen, in whatever order). None without routes."""
    if step.routes is None:
        return own_BTK, None
    given = step.routes.astype(own_BTK.dtype)
    known = given != UNKNOWN
    counted = (known & (step.segments != 0)[..., None]).astype(jnp.float32)
    agrees = jnp.any(given[..., :, None] == own_BTK[..., None, :], axis=-1)
    return jnp.where(known, given, own_BTK), Replayed(counted.sum(), jnp.sum(counted * ~agrees))
