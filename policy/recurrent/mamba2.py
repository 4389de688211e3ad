"""Mamba-2 (arXiv 2405.21060): a state that decays by a number of each token, with a gate and a norm on its output.

B rows, T tokens, E hidden, K groups, G heads of a group, D dimensions of B and C, V dimensions of a head, W width of the
convolution.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import DecoderConfig, Mamba2, Runtime
from policy.intermediates import LayerAux
from policy.ops.parameter import normal, ones, weight, zeros
from policy.recurrent import linear_rule
from policy.recurrent.delta_net import DeltaNet, log_uniform


class Mamba2Mixer(DeltaNet):
    """A Mamba-2 mixer, in the form of DeltaNet: q is C, k is B, v is x and a is dt. Weights: q_proj, k_proj [E, K, D];
    v_proj, z_proj [E, K, GV]; a_proj [E, K, G]; q_conv, k_conv [K, D, W]; v_conv [K, GV, W]; A_log, D, dt_bias [K, G];
    norm [K, GV]; o_proj [K, GV, E]; with conv_bias a bias for each channel of the convolution; with proj_bias q_bias,
    k_bias [K, D], v_bias, z_bias [K, GV], a_bias [K, G] and o_bias [E].
    """

    rule: ClassVar[ModuleType] = linear_rule

    def __init__(self, spec: Mamba2, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E, K, D, V, W = config.hidden_size, spec.groups, spec.state, spec.head_dim, spec.conv_width
        G = spec.heads // K
        init = normal(config.initializer_range)
        for name, dim in {"q": D, "k": D, "v": G * V, "z": G * V, "a": G}.items():
            inputs = None if name == "a" else (0,)
            setattr(self, f"{name}_proj", weight(rngs, (E, K, dim), ("embed", "kv_heads", "kv"), init, inputs=inputs))
            if spec.proj_bias:
                setattr(self, f"{name}_bias", weight(rngs, (K, dim), ("kv_heads", "kv"), zeros))
        for name, dim in {"q": D, "k": D, "v": G * V}.items():
            setattr(self, f"{name}_conv", weight(rngs, (K, dim, W), ("kv_heads", "kv", None), init))
            if spec.conv_bias:
                setattr(self, f"{name}_conv_bias", weight(rngs, (K, dim), ("kv_heads", "kv"), zeros))
        self.A_log = weight(rngs, (K, G), ("kv_heads", None), log_uniform)
        self.D = weight(rngs, (K, G), ("kv_heads", None), ones)
        self.dt_bias = weight(rngs, (K, G), ("kv_heads", None), ones)
        self.norm = weight(rngs, (K, G * V), ("kv_heads", "kv"), ones)
        self.o_proj = weight(rngs, (K, G * V, E), ("heads", "kv", "embed"), init, inputs=(0, 1))
        if spec.proj_bias:
            self.o_bias = weight(rngs, (E,), ("norm",), zeros)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> tuple[jax.Array, LayerCache | None, LayerAux]:
        """Computes (x_BTE, cache, LayerAux) as DeltaNet; the bias of the output is added to the sum of all heads."""
        out, cache, aux = super().__call__(x_BTE, step, cache, runtime)
        return out + self.o_bias[...].astype(out.dtype) if self.spec.proj_bias else out, cache, aux

    def _project(self, x_BTE: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        out = super()._project(x_BTE, name, runtime)
        return out + self._bias(name, out)[:, None] if self.spec.proj_bias else out

    def _conv_input(self, x_BTE: jax.Array, real_BT: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        out = super()._conv_input(x_BTE, real_BT, name, runtime)
        return jnp.where(real_BT[:, None, :, None], out, 0) if self.spec.proj_bias else out

    def _gate(self, x_BTE: jax.Array, name: str) -> jax.Array:
        out = super()._gate(x_BTE, name)
        return out + self._bias(name, out)[:, None] if self.spec.proj_bias else out

    def _bias(self, name: str, like: jax.Array) -> jax.Array:
        return getattr(self, f"{name}_bias")[...].astype(like.dtype)

    def _activated(self, convolved_BKTJ: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.spec.conv_bias:
            biases = [getattr(self, f"{name}_conv_bias")[...].astype(jnp.float32) for name in "qkv"]
            convolved_BKTJ = convolved_BKTJ + jnp.concatenate(biases, axis=-1)[:, None]
        dim = self.spec.state
        q, k, v = jnp.split(jax.nn.silu(convolved_BKTJ), [dim, 2 * dim], axis=-1)
        return q, k, self._heads(v)

    def _gates(self, x_BTE, real_BT, runtime: Runtime):
        """Returns (dt, dt A), float32[B, K, G, T]: the factor of what is written, and the logarithm of the decay; 0 on
        padding."""
        a = self._gate(x_BTE, "a").astype(jnp.float32).swapaxes(2, 3)
        A_log, dt_bias = (w[...].astype(jnp.float32)[..., None] for w in (self.A_log, self.dt_bias))
        dt = jnp.clip(jax.nn.softplus(a + dt_bias), *self.spec.dt_limit)
        dt = jnp.where(real_BT[:, None, None], dt, 0.0)
        return dt, -jnp.exp(A_log) * dt

    def _gated(self, out_BKGTV: jax.Array, v_BKGTV: jax.Array, x_BTE: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns [B, K, T, GV]: (out + D x) silu(z), normed over the channels of a group."""
        B, K, G, T, V = out_BKGTV.shape
        out = out_BKGTV + self.D[...].astype(jnp.float32)[..., None, None] * v_BKGTV
        out = jnp.swapaxes(out, 2, 3).reshape(B, K, T, G * V)
        out = out * jax.nn.silu(self._project(x_BTE, "z", runtime).astype(jnp.float32))
        out = out * jax.lax.rsqrt(jnp.mean(jnp.square(out), axis=-1, keepdims=True) + self.spec.norm_eps)
        return out.astype(x_BTE.dtype) * self.norm[...].astype(x_BTE.dtype)[:, None]
