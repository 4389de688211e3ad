"""Mixture of experts without dropping. N tokens, k experts per token, X experts, E hidden, F expert width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.config import DecoderConfig, Moe, Router
from policy.layers.grouped import block_rows, combine, dispatch, plan, product
from policy.layers.mlp import ACTIVATIONS, FeedForward
from policy.layers.parameter import RouterBias, normal, weight


class TopKRouter(nnx.Module):
    """Chooses experts by float32 scores. `weight` [E, X]; `bias` [X] shifts the choice only and learns by `bias_update`."""

    def __init__(self, spec: Router, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        shape = (config.hidden_size, spec.experts)
        self.weight = weight(rngs, shape, ("embed", None), normal(config.initializer_range))
        if spec.correction_bias:
            self.bias = RouterBias(jnp.zeros(spec.experts, jnp.float32), out_sharding=(None,))

    def __call__(self, x_NE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(experts int[N, k], weights float32[N, k], scores float32[N, X])."""
        spec = self.spec
        logits = jnp.dot(x_NE.astype(jnp.float32), self.weight[...].astype(jnp.float32), precision="highest")
        scores = jax.nn.sigmoid(logits) if spec.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        choice = scores + self.bias[...] if spec.correction_bias else scores
        choice = jax.lax.stop_gradient(choice)
        if spec.groups > 1:
            choice = jnp.where(self._eligible(choice), choice, -jnp.inf)
        _, experts = jax.lax.top_k(choice, spec.experts_per_token)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if spec.renormalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (1e-20 if spec.score == "sigmoid" else 0.0))
        return experts, weights * spec.scale, scores

    def _eligible(self, choice_NX: jax.Array) -> jax.Array:
        """bool[N, X]: experts whose group is among the best `topk_groups`."""
        spec = self.spec
        grouped = choice_NX.reshape(-1, spec.groups, spec.experts // spec.groups)
        best = jax.lax.top_k(grouped, 2)[0].sum(-1) if spec.group_score == "top2" else grouped.max(-1)
        _, kept = jax.lax.top_k(best, spec.topk_groups)
        mask = jax.nn.one_hot(kept, spec.groups, dtype=jnp.bool_).any(axis=1)
        return jnp.repeat(mask, spec.experts // spec.groups, axis=-1)


class MixtureOfExperts(nnx.Module):
    """sum over the chosen experts of weight * down(act(gate(x)) * up(x)), plus the shared experts."""

    def __init__(self, spec: Moe, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        X, E, F = spec.router.experts, config.hidden_size, spec.width
        init = normal(config.initializer_range)
        self.router = TopKRouter(spec.router, config, rngs)
        self.expert_gate_proj = weight(rngs, (X, E, F), ("exp", "embed_moe", "mlp_moe"), init)
        self.expert_up_proj = weight(rngs, (X, E, F), ("exp", "embed_moe", "mlp_moe"), init)
        self.expert_down_proj = weight(rngs, (X, F, E), ("exp", "mlp_moe", "embed_moe"), init)
        if spec.shared:
            self.shared = FeedForward(spec.shared, config, rngs)

    def __call__(self, x_BTE: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (x_BTE, what the router did: `counts` [X] and `balance`, see `routing_statistics`)."""
        spec, dtype = self.spec, x_BTE.dtype
        x_NE = x_BTE.reshape(-1, x_BTE.shape[-1])
        experts, weights, scores = self.router(x_NE)
        k, X = spec.router.experts_per_token, spec.router.experts
        routes = plan(experts, X, block=block_rows(experts.size, X))
        rows = dispatch(x_NE, routes)
        gate = checkpoint_name(product(rows, self.expert_gate_proj[...].astype(dtype), routes), "mlpwi_0")
        up = checkpoint_name(product(rows, self.expert_up_proj[...].astype(dtype), routes), "mlpwi_1")
        down = product(ACTIVATIONS[spec.activation](gate) * up, self.expert_down_proj[...].astype(dtype), routes)
        out = combine(checkpoint_name(down, "mlpwo"), weights, routes)
        if spec.shared:
            out = out + self.shared(x_NE)
        B, T = segments_BT.shape
        statistics = routing_statistics(experts.reshape(B, T, k), scores.reshape(B, T, X), segments_BT)
        return out.reshape(x_BTE.shape), statistics


def routing_statistics(experts_BTK: jax.Array, scores_BTX: jax.Array, segments_BT: jax.Array) -> dict[str, jax.Array]:
    """`counts` float32[X]: choices of each expert, padding left out. `balance`: the sequence-wise balance term of DeepSeek-V3
    (arXiv 2412.19437, eq. 17-20), summed over rows: sum_e f_e P_e with f_e = X / (k T) * choices of e, and P_e the mean share of
    e in the scores. 1 for a row that uses its experts evenly; rows of padding add 0."""
    B, T, k = experts_BTK.shape
    X = scores_BTX.shape[-1]
    valid = (segments_BT != 0).astype(jnp.float32)
    chosen = jax.nn.one_hot(experts_BTK, X, dtype=jnp.float32).sum(axis=2) * valid[..., None]
    tokens = jnp.maximum(valid.sum(axis=1), 1.0)
    share = scores_BTX / (scores_BTX.sum(axis=-1, keepdims=True) + 1e-20) * valid[..., None]
    frequency = chosen.sum(axis=1) * (X / k) / tokens[:, None]
    return {
        "counts": chosen.sum(axis=(0, 1)),
        "balance": jnp.sum(jax.lax.stop_gradient(frequency) * share.sum(axis=1) / tokens[:, None]),
    }


def bias_update(bias_X: jax.Array, counts_X: jax.Array, rate: float) -> jax.Array:
    """The selection bias after a step (arXiv 2408.15664): up by `rate` for experts chosen less than the mean, down for others.

    `counts` are those of the whole optimiser batch; the last axis is the experts.
    """
    return bias_X + rate * jnp.sign(counts_X.mean(axis=-1, keepdims=True) - counts_X)
