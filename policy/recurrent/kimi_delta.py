"""Kimi Delta Attention (arXiv 2510.26692): a gated delta net whose state decays by a number for
each key channel.

B rows, T tokens, E hidden, K key heads, D dimension of keys and values, W width of the convolution.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import DecoderConfig, KimiDeltaAttention, Runtime
from policy.ops.linear import linear
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, ones, weight
from policy.recurrent import channel_delta_rule
from policy.recurrent.delta_net import DeltaNet, log_uniform


class KimiDelta(DeltaNet):
    """A Kimi Delta Attention mixer, in the form of DeltaNet with one value head for each key head.
    Weights: q_proj, k_proj, v_proj [E, K, D]; q_conv, k_conv, v_conv [K, D, W]; b_proj [E, K];
    f_a_proj, g_a_proj [E, D]; f_b_proj, g_b_proj [D, K, D]; A_log [K]; dt_bias [K, D]; norm [D];
    o_proj [K, D, E].
    """

    rule: ClassVar[ModuleType] = channel_delta_rule

    def __init__(self, spec: KimiDeltaAttention, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        K = spec.heads
        D = spec.head_dim
        W = spec.conv_width
        init = normal(config.initializer_range)
        for name in "qkv":
            self._add_projection(rngs, name, (E, K, D), init)
            self._add_convolution(rngs, name, (K, D, W), init)
        for name in "fg":
            setattr(
                self, f"{name}_a_proj", weight(rngs, (E, D), ("embed", None), init, inputs=(0,))
            )
            setattr(
                self,
                f"{name}_b_proj",
                weight(rngs, (D, K, D), (None, "kv_heads", "kv"), init, inputs=(0,)),
            )
        self.b_proj = weight(
            rngs, (E, K), ("embed", "kv_heads"), init, inputs=(0,), quantizable=False
        )
        self.A_log = weight(rngs, (K,), ("kv_heads",), log_uniform)
        self.dt_bias = weight(rngs, (K, D), ("kv_heads", None), ones)
        self.norm = RMSNorm(D, spec.norm, rngs)
        self.o_proj = weight(rngs, (K, D, E), ("heads", "kv", "embed"), init, inputs=(0, 1))

    def _gates(self, x_BTE, real_BT, runtime: Runtime):
        """Returns (beta float32[B, K, 1, T], g float32[B, K, T, D]): the share of a value that is
        written, and the logarithm of the decay; 0 on padding."""
        beta = jax.nn.sigmoid(
            jnp.einsum("bte,ek->bkt", x_BTE, self.b_proj[...].astype(x_BTE.dtype)).astype(
                jnp.float32
            )
        )
        A_log, dt_bias = (w[...].astype(jnp.float32)[..., None] for w in (self.A_log, self.dt_bias))
        f = self._low_rank(x_BTE, "f", runtime) + dt_bias.swapaxes(1, 2)
        g = -jnp.exp(A_log)[..., None] * jax.nn.softplus(f)
        return jnp.where(real_BT[:, None], beta, 0.0)[:, :, None], jnp.where(
            real_BT[:, None, :, None], g, 0.0
        )

    def _output_gate(self, x_BTE: jax.Array, runtime: Runtime) -> jax.Array:
        return jax.nn.sigmoid(self._low_rank(x_BTE, "g", runtime))[:, :, None]

    def _low_rank(self, x_BTE: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        """Returns the product of two matrices with x, float32[B, K, T, D]."""
        latent = linear("bte,ed->btd", x_BTE, getattr(self, f"{name}_a_proj")[...], runtime)
        return linear(
            "btr,rkd->bktd", latent, getattr(self, f"{name}_b_proj")[...], runtime
        ).astype(jnp.float32)
