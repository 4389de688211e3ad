"""Log-probabilities and entropies of distributions that filters have cut: of the tokens that they left alone.

A filter of the sampler (top_k, top_p, min_p) draws a token from the ids that it keeps. The distribution that it draws
from has the logarithm log p(token) - log sum p(kept), whatever the weights are. A loss over samples takes it for all
weights: those that sampled, those that learn and those of a reference (DeepSeek-V3.2, arXiv:2512.02556, section 3.1,
keep sampling mask).

Where few ids are left out, as by words that may not occur, they are named in place of those that are kept:
log p(token) - log(1 - sum p(left out)).

M tokens, E hidden, V vocabulary, K ids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.config import LogitScaling
from policy.heads import head

_LEAST = 1e-6
"""The least probability of all ids that are not left out: less is rounding of 1 - the others in float32."""


def logprobs(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    targets_M: jax.Array,
    kept_MK: jax.Array,
    temperature: jax.typing.ArrayLike,
    scaling: LogitScaling = LogitScaling(),
    tiling: head.Tiling = head.Tiling(),
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp, entropy), float32[M], of softmax(logits / temperature) over the ids of each token.

    kept_MK: int32, the ids, each once and the target among them; -1: none. Or the ids that are left out, id i as
    -2 - i, each once and the target not among them. A token without an id has the distribution over all ids. Both
    results are differentiable in hidden and weight.
    """
    ids_MK = jnp.maximum(jnp.where(kept_MK < -1, -2 - kept_MK, kept_MK), 0)
    named = jnp.concatenate([targets_M[:, None], ids_MK], axis=1)
    logp, entropy = head.logprobs(hidden_ME, weight_VE, named, temperature, scaling, tiling)
    logp, entropy = _without(logp, entropy, kept_MK < -1)
    is_kept = kept_MK >= 0
    cut = jnp.any(is_kept, axis=1)
    own = logp[:, 0]
    log_p = jnp.where(cut[:, None], jnp.where(is_kept, logp[:, 1:], -jnp.inf), 0.0)
    normal = jax.nn.logsumexp(log_p, axis=1)
    log_q = jnp.where(is_kept, log_p - normal[:, None], 0.0)
    entropy_of_kept = -jnp.sum(jnp.where(is_kept, jnp.exp(log_q) * log_q, 0.0), axis=1)
    return jnp.where(cut, own - normal, own), jnp.where(cut, entropy_of_kept, entropy)


def _without(logp_MK: jax.Array, entropy_M: jax.Array, left_out_MK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (log-probabilities of target and ids, entropy) of the distributions without the ids that are left out.

    logp_MK: over all ids, of the target first. left_out_MK: bool, of the ids.
    """
    log_p = jnp.where(left_out_MK, logp_MK[:, 1:], 0.0)
    p = jnp.where(left_out_MK, jnp.exp(log_p), 0.0)
    left = jnp.maximum(1.0 - p.sum(axis=1), _LEAST)
    is_cut, normal = jnp.any(left_out_MK, axis=1), jnp.log(left)
    entropy = (entropy_M + jnp.sum(p * log_p, axis=1)) / left + normal
    return jnp.where(is_cut[:, None], logp_MK - normal[:, None], logp_MK), jnp.where(is_cut, entropy, entropy_M)
