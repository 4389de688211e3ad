"""Mamba-2 (arXiv 2405.21060): a state that decays by a factor computed from each token, with a gate
and a norm on its output.

B rows, T tokens, E hidden, K key heads (groups), G value heads of a key head (heads of a group), D
and V dimensions of keys and values (state and head of the paper), J channels of a key head in the
convolution, W its width, X any number of channels.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from policy.cache.layer_cache import LayerCache, LayerOutput
from policy.cache.step import Step
from policy.config import DecoderConfig, Mamba2, Norm, Runtime
from policy.ops.linear import scaled
from policy.ops.parameter import normal, ones, weight, zeros
from policy.recurrent import linear_rule
from policy.recurrent.delta_net import DeltaNet, QueriesKeysValues, log_uniform

# Projections of the input -> the name in Mamba2Scales.
_TERMS = {"z": "z", "v": "x", "k": "B", "q": "C", "a": "dt"}


class Mamba2Mixer(DeltaNet):
    """A Mamba-2 mixer, in the form of DeltaNet: q is C, k is B, v is x and a is dt. Weights:
    q_proj, k_proj [E, K, D]; v_proj, z_proj [E, K, GV]; a_proj [E, K, G]; q_conv, k_conv [K, D, W];
    v_conv [K, GV, W]; A_log, D, dt_bias [K, G]; norm [K, GV]; o_proj [K, GV, E]; with conv_bias a
    bias for each channel of the convolution; with bias q_bias, k_bias [K, D], v_bias, z_bias [K,
    GV] and a_bias [K, G]; with out_bias o_bias [E].
    """

    rule: ClassVar[ModuleType] = linear_rule

    def __init__(self, spec: Mamba2, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        K = spec.groups
        D = spec.state
        V = spec.head_dim
        W = spec.conv_width
        G = spec.heads // K
        init = normal(config.initializer_range)
        for name, dim in {"q": D, "k": D, "v": G * V, "z": G * V, "a": G}.items():
            self._add_projection(
                rngs, name, (E, K, dim), init, quantizable=name != "a", bias=spec.bias
            )
        for name, dim in {"q": D, "k": D, "v": G * V}.items():
            self._add_convolution(rngs, name, (K, dim, W), init, bias=spec.conv_bias)
        self.A_log = weight(rngs, (K, G), ("kv_heads", None), log_uniform)
        self.D = weight(rngs, (K, G), ("kv_heads", None), ones)
        self.dt_bias = weight(rngs, (K, G), ("kv_heads", None), ones)
        if spec.norm is not None:
            self.norm = weight(rngs, (K, G * V), ("kv_heads", "kv"), ones)
        self.o_proj = weight(rngs, (K, G * V, E), ("heads", "kv", "embed"), init, inputs=(0, 1))
        if spec.out_bias:
            self.o_bias = weight(rngs, (E,), ("norm",), zeros)

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Computes the output as DeltaNet does; its bias is added to the sum of all heads."""
        output = super().__call__(x_BTE, step, cache, runtime)
        if not self.spec.out_bias:
            return output
        out = output.hidden
        return output._replace(hidden=out + self.o_bias[...].astype(out.dtype))

    def _project(self, x_BTE: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        return self._finished(super()._project(x_BTE, name, runtime), name)

    def _conv_input(
        self, x_BTE: jax.Array, real_BT: jax.Array, name: str, runtime: Runtime
    ) -> jax.Array:
        out = super()._conv_input(x_BTE, real_BT, name, runtime)
        return jnp.where(real_BT[:, None, :, None], out, 0) if self.spec.bias else out

    def _gate(self, x_BTE: jax.Array, name: str) -> jax.Array:
        return self._finished(super()._gate(x_BTE, name), name)

    def _finished(self, projected_BKTX: jax.Array, name: str) -> jax.Array:
        """Adds the bias of a projection of the input and multiplies by its factor."""
        if self.spec.bias:
            projected_BKTX = (
                projected_BKTX
                + getattr(self, f"{name}_bias")[...].astype(projected_BKTX.dtype)[:, None]
            )
        if self.spec.scales is None:
            return projected_BKTX
        return scaled(projected_BKTX, getattr(self.spec.scales, _TERMS[name]))

    def _activated(self, convolved_BKTJ: jax.Array) -> QueriesKeysValues:
        if self.spec.conv_bias:
            biases = [getattr(self, f"{name}_conv_bias")[...].astype(jnp.float32) for name in "qkv"]
            convolved_BKTJ = convolved_BKTJ + jnp.concatenate(biases, axis=-1)[:, None]
        dim = self.spec.state
        q, k, v = jnp.split(jax.nn.silu(convolved_BKTJ), [dim, 2 * dim], axis=-1)
        return QueriesKeysValues(q, k, self._heads(v))

    def _gates(self, x_BTE, real_BT, runtime: Runtime):
        """Returns (dt, dt A), float32[B, K, G, T]: the factor of what is written, and the logarithm
        of the decay; 0 on padding."""
        a = self._gate(x_BTE, "a").astype(jnp.float32).swapaxes(2, 3)
        A_log, dt_bias = (w[...].astype(jnp.float32)[..., None] for w in (self.A_log, self.dt_bias))
        dt = jnp.clip(jax.nn.softplus(a + dt_bias), *self.spec.dt_limit)
        dt = jnp.where(real_BT[:, None, None], dt, 0.0)
        return dt, -jnp.exp(A_log) * dt

    def _gated(
        self, out_BKGTV: jax.Array, v_BKGTV: jax.Array, x_BTE: jax.Array, runtime: Runtime
    ) -> jax.Array:
        """Returns [B, K, T, GV]: (out + D x) silu(z), normed over the channels of a group before or
        after silu(z)."""
        B, K, G, T, V = out_BKGTV.shape
        out = out_BKGTV + self.D[...].astype(jnp.float32)[..., None, None] * v_BKGTV
        out = jnp.swapaxes(out, 2, 3).reshape(B, K, T, G * V)
        gate = jax.nn.silu(self._project(x_BTE, "z", runtime).astype(jnp.float32))
        if self.spec.norm is None:
            return (out * gate).astype(x_BTE.dtype)
        if self.spec.gate == "after_norm":
            return (self._normed(out, self.spec.norm, x_BTE.dtype) * gate).astype(x_BTE.dtype)
        return self._normed(out * gate, self.spec.norm, x_BTE.dtype).astype(x_BTE.dtype)

    def _normed(self, x_BKTX: jax.Array, norm: Norm, dtype: DTypeLike) -> jax.Array:
        """Returns the norm over the channels of a group."""
        normed = x_BKTX * jax.lax.rsqrt(
            jnp.mean(jnp.square(x_BKTX), axis=-1, keepdims=True) + norm.eps
        )
        normed = normed.astype(dtype) if norm.scale == "after_cast" else normed
        return normed * self.norm[...].astype(normed.dtype)[:, None]
