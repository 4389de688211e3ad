"""Manifold-constrained hyper-connections (arXiv 2512.24880): G residual streams that every part of
a layer reads as a weighted sum and writes back, while a doubly stochastic matrix mixes them.

B rows, T tokens, G streams, E hidden, Z numbers of a mapping.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from policy.config import DecoderConfig, HyperConnections
from policy.ops.linear import einsum
from policy.ops.parameter import normal, ones, weight, zeros

# Initial scale of the token-dependent part of a mapping (appendix A of the paper). The static part
# starts at 0: all streams are read with equal weights, written with weight 1 and mixed evenly, so
# that a fresh decoder with pre-norms computes the same as without hyper-connections.
FIRST_SCALE = 0.01


def _settings(config: DecoderConfig) -> HyperConnections:
    assert isinstance(
        config.hyper_connections, HyperConnections
    )  # other decoders do not create these modules
    return config.hyper_connections


class Mapping(nnx.Module):
    """Computes Z numbers for each token, in `parts` with a scale each: scale (RMS(x) W) + bias,
    float32.

    Weights: weight [G, E, Z]; bias [Z]; scale, one for each part; norm [G, E] if configured.
    """

    def __init__(self, parts: tuple[int, ...], config: DecoderConfig, rngs: nnx.Rngs):
        settings = _settings(config)
        self.parts = parts
        self.eps = settings.norm_eps
        G = settings.streams
        E = config.hidden_size
        Z = sum(parts)
        self.weight = weight(
            rngs,
            (G, E, Z),
            (None, "embed", None),
            normal(config.initializer_range),
            inputs=(0, 1),
            quantizable=False,
        )
        self.bias = weight(rngs, (Z,), (None,), zeros)
        self.scale = weight(rngs, (len(parts),), (None,), jax.nn.initializers.constant(FIRST_SCALE))
        self.norm = weight(rngs, (G, E), (None, "norm"), ones) if settings.norm_weight else None

    def __call__(self, x_BTGE: jax.Array) -> list[jax.Array]:
        """Returns the numbers of each part, float32[..., B, T]. With tokens last, vector
        registers are full for any G."""
        x = x_BTGE.astype(jnp.float32)
        w = self.weight[...].astype(jnp.float32)
        if self.norm is not None:
            w = w * self.norm[...].astype(jnp.float32)[..., None]
        # The norm divides the few results instead of x, which avoids a normed float32 copy of all
        # streams.
        out_ZBT = einsum("btge,gez->zbt", x, w, precision="highest")
        out_ZBT = out_ZBT * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=(2, 3)) + self.eps)
        scale, bias = (each[...].astype(jnp.float32) for each in (self.scale, self.bias))
        out_ZBT = (
            out_ZBT * jnp.repeat(scale, np.array(self.parts))[:, None, None] + bias[:, None, None]
        )
        return jnp.split(out_ZBT, np.cumsum(self.parts)[:-1])


class HyperConnection(nnx.Module):
    """Connects one part F of a layer to the streams x [B, T, G, E], with the interface of
    policy/layers/residual.py:

    x'_m = post_m F(sum_g pre_g x_g) + sum_k mixing[k, m] x_k; pre = sigmoid(.) + eps, post = 2
    sigmoid(.), and `mixing` is doubly stochastic. The mappings are float32, the sums over the
    streams in the dtype of x.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = _settings(config)
        G = self.config.streams
        mixing = len(_permutations(G)) if self.config.variant == "lite" else G * G
        self.mapping = Mapping((G, G, mixing), config, rngs)

    def read(self, x_BTGE: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns (input of the part [B, T, E], (post float32[G, B, T], mixing
        float32[G, G, B, T]))."""
        pre, post, mixing = self.mapping(x_BTGE)
        return _collapse(x_BTGE, jax.nn.sigmoid(pre) + self.config.eps), (
            2 * jax.nn.sigmoid(post),
            self._matrix(mixing),
        )

    def write(
        self, x_BTGE: jax.Array, out_BTE: jax.Array, mix: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Mixes the streams and adds the output of the part to them."""
        mixed = jnp.einsum("kmbt,btke->btme", mix[1].astype(x_BTGE.dtype), x_BTGE)
        return self.write_second(mixed, out_BTE, mix)

    def write_second(
        self, x_BTGE: jax.Array, out_BTE: jax.Array, mix: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Adds the output of a second part that read the same input, after `write`."""
        return x_BTGE + jnp.einsum("mbt,bte->btme", mix[0].astype(x_BTGE.dtype), out_BTE)

    def _matrix(self, mixing: jax.Array) -> jax.Array:
        G, (B, T) = self.config.streams, mixing.shape[1:]
        if self.config.variant == "lite":
            return jnp.einsum(
                "pbt,pkm->kmbt",
                jax.nn.softmax(mixing, axis=0),
                _permutations(G),
                precision="highest",
            )
        return sinkhorn(
            mixing.reshape(G, G, B, T), self.config.sinkhorn_iterations, self.config.eps
        )


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Computes a nearly doubly stochastic matrix over axes 0 (rows) and 1 (columns): a softmax of
    each row, then columns and rows divided by their sums in turn, `iterations` times for the
    columns, which come last. As in transformers' DeepSeek-V4; the paper starts from exp(logits)
    instead, which differs where 20 iterations have not converged."""

    def normalised(matrix, axis):
        return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + eps)

    def once(matrix, _):
        return normalised(normalised(matrix, 1), 0), None

    first = normalised(jax.nn.softmax(logits, axis=1) + eps, 0)
    return jax.lax.scan(once, first, length=iterations - 1)[0]


def _permutations(G: int) -> np.ndarray:
    """Returns float32[G!, G, G]: every permutation matrix, in lexicographic order; the first is the
    identity."""
    return np.eye(G, dtype=np.float32)[list(itertools.permutations(range(G)))]


def _collapse(x_BTGE: jax.Array, weights_GBT: jax.Array) -> jax.Array:
    return jnp.einsum("gbt,btge->bte", weights_GBT.astype(x_BTGE.dtype), x_BTGE)


class Streams(nnx.Module):
    """The ends of the streams: G copies of the embedding at the start, and their reduction for the
    final norm: their sum, or with `reduce: head` a sum with weights sigmoid(.) + eps from a mapping
    of its own (DeepSeek-V4)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = _settings(config)
        self.head = (
            Mapping((self.config.streams,), config, rngs) if self.config.reduce == "head" else None
        )

    def expand(self, x_BTE: jax.Array) -> jax.Array:
        """Copies the embedding into all streams: [B, T, G, E]."""
        return jnp.repeat(x_BTE[:, :, None], self.config.streams, axis=2)

    def reduce(self, x_BTGE: jax.Array) -> jax.Array:
        """Sums the streams, weighted or not: [B, T, E]."""
        if self.head is None:
            return jnp.sum(x_BTGE, axis=2)
        return _collapse(x_BTGE, jax.nn.sigmoid(self.head(x_BTGE)[0]) + self.config.eps)
