"""Log-probabilities and entropies of distributions that filters have cut: of the tokens that they
left alone.

A filter of the sampler (top_k, top_p, min_p) draws a token from the ids that it keeps. The
distribution that it draws from has the logarithm log p(token) - log sum p(kept), whatever the
weights are. A loss over samples takes it for all weights: those that sampled, those that learn and
those of a reference (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, keep sampling mask).

Where few ids are left out, as by words that may not occur, they are named in place of those that
are kept. Their logits are -inf, so the sum over the others is exact even where nearly all
probability is left out.

M tokens (rows and positions flattened), E hidden, V vocabulary, I ids that a filter names per
token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.config import LogitScaling
from policy.heads import head
from policy.heads.adapted_head import Head


def logprobs(
    hidden_ME: jax.Array,
    weight_VE: Head,
    targets_M: jax.Array,
    kept_MI: jax.Array,
    temperature: jax.typing.ArrayLike,
    scaling: LogitScaling = LogitScaling(),
    tiling: head.Tiling = head.Tiling(),
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp, entropy), float32[M], of softmax(logits / temperature) over the ids of each
    token.

    kept_MI: int32, the ids, each once and the target among them; -1: none. Or the ids that are left
    out, id i as -2 - i, each once and the target not among them. A token without an id has the
    distribution over all ids. Both results are differentiable in hidden and weight.
    """
    named = jnp.concatenate([targets_M[:, None], jnp.maximum(kept_MI, 0)], axis=1)
    left_out_MI = jnp.where(kept_MI < -1, -2 - kept_MI, -1)
    logp, entropy = head.logprobs(
        hidden_ME, weight_VE, named, temperature, scaling, tiling, left_out_MI
    )
    is_kept = kept_MI >= 0
    cut = jnp.any(is_kept, axis=1)
    own = logp[:, 0]
    log_p = jnp.where(cut[:, None], jnp.where(is_kept, logp[:, 1:], -jnp.inf), 0.0)
    normal = jax.nn.logsumexp(log_p, axis=1)
    log_q = jnp.where(is_kept, log_p - normal[:, None], 0.0)
    entropy_of_kept = -jnp.sum(jnp.where(is_kept, jnp.exp(log_q) * log_q, 0.0), axis=1)
    return jnp.where(cut, own - normal, own), jnp.where(cut, entropy_of_kept, entropy)
