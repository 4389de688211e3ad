"""The index selector of sparse latent attention (arXiv 2512.02556): which keys a query may see. B rows, T queries, C visible keys,
H index heads, D index dimension, r rank of the query latent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from policy.cache import Step, Visible
from policy.config import DecoderConfig, Indexer
from policy.layers.attention import Mask
from policy.layers.norms import MeanNorm
from policy.layers.parameter import normal, weight
from policy.layers.rope import rotate


class KeyIndexer(nnx.Module):
    """Scores every key for every query: sum_h w_h relu(q_h . k / sqrt(D)). Nothing of it reaches the gradient of the main path."""

    def __init__(self, spec: Indexer, q_lora_rank: int, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, H, D = config.hidden_size, spec.heads, spec.head_dim
        init = normal(config.initializer_range)
        self.wq_b = weight(rngs, (q_lora_rank, H, D), ("q_lora", "q_heads", "kv"), init)
        self.wk = weight(rngs, (E, D), ("embed", "kv"), init)
        self.k_norm = MeanNorm(D, spec.norm, rngs)
        self.weights_proj = weight(rngs, (E, H), ("embed", "q_heads"), init)

    def __call__(self, x_BTE: jax.Array, q_latent_BTr: jax.Array, step: Step) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """((queries [B, T, H, D], their weights float32[B, T, H]), keys [B, 1, T, D])."""
        spec, dtype = self.spec, x_BTE.dtype
        x, q_latent = jax.lax.stop_gradient((x_BTE, q_latent_BTr))
        table = step.rotations[str(spec.rope)]
        q = rotate(jnp.einsum("btr,rhd->bhtd", q_latent, self.wq_b[...].astype(dtype)), spec.rope, table)
        k = rotate(self.k_norm(x @ self.wk[...].astype(dtype))[:, None], spec.rope, table)
        w = (x @ self.weights_proj[...].astype(dtype)).astype(jnp.float32) * spec.heads**-0.5
        return (jnp.swapaxes(q, 1, 2), w), k


class IndexedMask(Mask):
    """A mask that leaves, of the keys a query may look at, the `topk` with the largest index scores."""

    def __init__(self, step: Step, visible: Visible, queries: tuple[jax.Array, jax.Array], spec: Indexer):
        super().__init__(step, visible)
        self.queries = (*self.queries, *queries)
        self.index_keys, self.spec = visible.arrays["index"][:, 0], spec

    def of(self, positions_BT: jax.Array, segments_BT: jax.Array, q_BTHD: jax.Array, w_BTH: jax.Array) -> jax.Array:
        """bool[B, T, C]."""
        allowed = super().of(positions_BT, segments_BT)
        if self.index_keys.shape[1] <= self.spec.topk:
            return allowed
        scores = jnp.einsum("bthd,bcd->bthc", q_BTHD, self.index_keys, preferred_element_type=jnp.float32)
        scores = jnp.einsum("bthc,bth->btc", jax.nn.relu(scores * self.spec.head_dim**-0.5), w_BTH)
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(jnp.where(allowed, scores, -jnp.inf)), self.spec.topk)
        B, T, _ = chosen.shape
        kept = jnp.zeros(allowed.shape, jnp.bool_)
        return allowed & kept.at[jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], chosen].set(True)
