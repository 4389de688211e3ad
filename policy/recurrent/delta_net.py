"""Gated delta net (arXiv 2412.06464): linear attention whose state is updated by the delta rule and
decays by a gate.

B rows, T tokens, E hidden, K key heads, G value heads of a key head, D and V dimensions of keys and
values, J = 2D + GV channels of a key head in the convolution, W its width, X any number of
channels.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from policy.attention.sequence_shards import replicate_length
from policy.cache.layer_cache import LayerCache, LayerOutput
from policy.cache.paths import Tree, number_documents
from policy.cache.step import Step
from policy.config import DecoderConfig, GatedDeltaNet, Runtime
from policy.intermediates import LayerAux
from policy.mesh.explicit import in_explicit_mode, over_devices, reshard_like, spec_of
from policy.mesh.sharding import from_cache, to_cache
from policy.ops.linear import linear
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, ones, split_module, weight, zeros
from policy.recurrent import delta_rule
from policy.recurrent.convolution import convolve, convolve_paths, last_inputs, with_state

# Inputs of the convolution -> the names under which remat policies save them.
CONVOLVED = {"q": "query_proj", "k": "key_proj", "v": "value_proj"}


def log_uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Draws log(A) for A uniform in [0.01, 16); the lower bound keeps the logarithm finite."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


class QueriesKeysValues(NamedTuple):
    """The inputs of a recurrence, float32: queries and keys [B, K, T, D], values
    [B, K, G, T, V]."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array


class DeltaNet(nnx.Module):
    """A gated delta net mixer. Weights: q_proj, k_proj [E, K, D]; v_proj, z_proj [E, K, GV];
    b_proj, a_proj [E, K, G]; q_conv, k_conv [K, D, W]; v_conv [K, GV, W]; A_log, dt_bias [K, G];
    norm [V]; o_proj [K, GV, E]. The value heads of a key head are consecutive.

    Everything between the projections is float32, on every platform: errors of the state add up
    over the tokens. `rule` is the module of the recurrence.
    """

    rule: ClassVar[ModuleType] = delta_rule

    def __init__(self, spec: GatedDeltaNet, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        K = spec.key_heads
        D = spec.key_dim
        V = spec.value_dim
        W = spec.conv_width
        G = spec.value_heads // K
        init = normal(config.initializer_range)
        for name, dim in {"q": D, "k": D, "v": G * V, "z": G * V, "b": G, "a": G}.items():
            self._add_projection(rngs, name, (E, K, dim), init, quantizable=name in "qkvz")
        for name, dim in {"q": D, "k": D, "v": G * V}.items():
            self._add_convolution(rngs, name, (K, dim, W), init)
        self.A_log = weight(rngs, (K, G), ("kv_heads", None), log_uniform)
        self.dt_bias = weight(rngs, (K, G), ("kv_heads", None), ones)
        self.norm = RMSNorm(V, spec.norm, rngs)
        self.o_proj = weight(rngs, (K, G * V, E), ("heads", "kv", "embed"), init, inputs=(0, 1))

    def _add_projection(
        self,
        rngs: nnx.Rngs,
        name: str,
        shape_EKX: tuple[int, int, int],
        init: Initializer,
        *,
        quantizable: bool = True,
        bias: bool = False,
    ) -> None:
        """Declares NAME_proj [E, K, X] of the input and, with `bias`, NAME_bias [K, X]."""
        axes = ("embed", "kv_heads", "kv")
        array = weight(rngs, shape_EKX, axes, init, inputs=(0,), quantizable=quantizable)
        setattr(self, f"{name}_proj", array)
        if bias:
            setattr(self, f"{name}_bias", weight(rngs, shape_EKX[1:], axes[1:], zeros))

    def _add_convolution(
        self,
        rngs: nnx.Rngs,
        name: str,
        shape_KXW: tuple[int, int, int],
        init: Initializer,
        *,
        bias: bool = False,
    ) -> None:
        """Declares NAME_conv [K, X, W] and, with `bias`, NAME_conv_bias [K, X]."""
        axes = ("kv_heads", "kv", None)
        setattr(self, f"{name}_conv", weight(rngs, shape_KXW, axes, init))
        if bias:
            setattr(self, f"{name}_conv_bias", weight(rngs, shape_KXW[:2], axes[:2], zeros))

    def __call__(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Computes the output of the mixer. Padding leaves the cache as it is. Without a cache
        every document of a row starts from an empty state; with one, the first document of a row
        continues from the cached state. In trees a token continues from the state after the token
        before it on its path."""
        if in_explicit_mode():
            return LayerOutput(self._over_devices(x_BTE, step, runtime), cache, LayerAux())
        return self._own_heads(x_BTE, step, cache, runtime)

    def _own_heads(
        self, x_BTE: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Computes the share of this module's heads in the output."""
        real = step.segments != 0
        documents = number_documents(step.segments)
        x = jnp.where(real[..., None], replicate_length(x_BTE, runtime), 0)
        inputs = self._conv_inputs(x, real, cache, runtime)
        q, k, v = self._activated(self._convolved(inputs, documents, step.tree))
        beta, g = (to_cache(a, runtime.layout) for a in self._gates(x, real, runtime))
        B, K, G, T, V = v.shape
        if cache is None:
            state = jnp.zeros((B, K, G, q.shape[-1], V), jnp.float32)
        else:
            state = cast(jax.Array, cache.arrays["state"])[cache.index].reshape(B, K, G, -1, V)
        tentative = cache is not None and runtime.tentative
        aux = LayerAux()
        with jax.default_matmul_precision("highest"):
            if tentative:
                out, states = self.rule.stepwise(q, k, v, beta, g, state)
                aux = LayerAux(
                    states={
                        "conv": self._windows(inputs, T),
                        "state": states.reshape(B, T, K * G, -1, V),
                    }
                )
            elif step.tree is not None:
                out = self.rule.chunked_trees(q, k, v, beta, g, step.tree)
            elif T == 1:
                out, state = self.rule.single(q, k, v, beta, g, state)
            else:
                out, state = self.rule.chunked(q, k, v, beta, g, documents, state)
        if cache is not None and not tentative:
            cache = with_state(
                cache, "conv", self._stored(last_inputs(inputs, real, self.spec.conv_width - 1))
            )
            cache = with_state(cache, "state", state.reshape(B, K * G, -1, V))
        out = checkpoint_name(out, "context")
        out = checkpoint_name(
            self._gated(from_cache(out, runtime.layout), v, x, runtime), "attention_out"
        )
        out = linear("bktv,kve->bte", out, self.o_proj[...], runtime)
        return LayerOutput(checkpoint_name(out, "out_proj"), cache, aux)

    def _over_devices(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array:
        """Computes the output without a cache in explicit mode: each device takes full sequences of
        its rows and its own heads, and the outputs are summed over the devices that share the
        heads."""
        layout = runtime.layout
        weights, module = split_module(self)
        assert layout is not None  # explicit mode has a mesh
        rows = layout.spec(("batch", None, None), x_BTE.shape)
        heads = layout.spec(("kv_heads",), (self.spec.key_heads,))[0]
        alone = replace(runtime, layout=None)

        def local(weights, x_bTE, step):
            net = cast(DeltaNet, module(weights))
            out = net._own_heads(x_bTE, step, None, alone).hidden
            return out if heads is None else jax.lax.psum(out, heads)

        places = [layout.used(spec_of(w)) for w in weights], rows, PartitionSpec(rows[0])
        out = over_devices(local, layout.mesh, places, rows, check_vma=False)(
            weights, x_BTE, Step(step.positions, step.segments, tree=step.tree)
        )
        return reshard_like(out, x_BTE)

    def _project(self, x_BTE: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        return linear("bte,ekd->bktd", x_BTE, getattr(self, f"{name}_proj")[...], runtime)

    def _conv_input(
        self, x_BTE: jax.Array, real_BT: jax.Array, name: str, runtime: Runtime
    ) -> jax.Array:
        """Returns an input of the convolution, [B, K, T, channels]; 0 on padding, where x is 0."""
        return self._project(x_BTE, name, runtime)

    def _gate(self, x_BTE: jax.Array, name: str) -> jax.Array:
        return jnp.einsum(
            "bte,ekg->bktg", x_BTE, getattr(self, f"{name}_proj")[...].astype(x_BTE.dtype)
        )

    def _heads(self, a_BKTX: jax.Array) -> jax.Array:
        """Splits value heads: [B, K, T, GV] -> [B, K, G, T, V]."""
        return jnp.swapaxes(a_BKTX.reshape(*a_BKTX.shape[:3], -1, self.spec.value_dim), 2, 3)

    def _stored(self, inputs_BKTJ: jax.Array) -> jax.Array:
        """Reshapes inputs of the convolution to the form that the cache stores: [B, 1, T, KJ]."""
        B, K, T, J = inputs_BKTJ.shape
        return inputs_BKTJ.swapaxes(1, 2).reshape(B, 1, T, K * J)

    def _windows(self, inputs_BKTJ: jax.Array, T: int) -> jax.Array:
        """Returns the inputs of the convolution that the cache would store after each of the T
        tokens: [B, T, 1, W - 1, KJ]."""
        before = self.spec.conv_width - 1
        return jnp.stack(
            [self._stored(inputs_BKTJ[:, :, t + 1 : t + 1 + before]) for t in range(T)], axis=1
        )

    def _conv_inputs(
        self, x_BTE: jax.Array, real_BT: jax.Array, cache: LayerCache | None, runtime: Runtime
    ) -> jax.Array:
        """Returns the inputs of the convolution, preceded by the W - 1 inputs of earlier calls:
        [B, K, W - 1 + T, J]."""
        inputs = [self._conv_input(x_BTE, real_BT, name, runtime) for name in CONVOLVED]
        inputs = [
            checkpoint_name(each, label)
            for each, label in zip(inputs, CONVOLVED.values(), strict=True)
        ]
        inputs = to_cache(jnp.concatenate(inputs, axis=-1), runtime.layout)
        B, K, _, J = inputs.shape
        before = self.spec.conv_width - 1
        if cache is None:
            return jnp.pad(inputs, ((0, 0), (0, 0), (before, 0), (0, 0)))
        window = (
            cast(jax.Array, cache.arrays["conv"])[cache.index]
            .reshape(B, before, K, J)
            .swapaxes(1, 2)
        )
        return jnp.concatenate([window.astype(inputs.dtype), inputs], axis=2)

    def _convolved(
        self, inputs_BKTJ: jax.Array, documents_BT: jax.Array, tree: Tree | None
    ) -> jax.Array:
        """Returns the convolution at each of the T tokens, float32[B, K, T, J]."""
        kernel = jnp.concatenate(
            [getattr(self, f"{name}_conv")[...].astype(jnp.float32) for name in CONVOLVED], axis=1
        )
        if tree is None:
            return convolve(inputs_BKTJ, kernel, documents_BT)
        return convolve_paths(inputs_BKTJ[:, :, self.spec.conv_width - 1 :], kernel, tree)

    def _activated(self, convolved_BKTJ: jax.Array) -> QueriesKeysValues:
        """Returns the inputs of the recurrence: the output of the convolution after silu, q and k
        of unit length."""
        dim = self.spec.key_dim
        q, k, v = jnp.split(jax.nn.silu(convolved_BKTJ), [dim, 2 * dim], axis=-1)
        return QueriesKeysValues(_unit(q) * dim**-0.5, _unit(k), self._heads(v))

    def _gated(
        self, out_BKGTV: jax.Array, v_BKGTV: jax.Array, x_BTE: jax.Array, runtime: Runtime
    ) -> jax.Array:
        """Returns the input of the last projection, [B, K, T, GV]: the normed output of the
        recurrence times a gate."""
        B, K, G, T, V = out_BKGTV.shape
        out = self.norm(out_BKGTV) * self._output_gate(x_BTE, runtime)
        return jnp.swapaxes(out, 2, 3).reshape(B, K, T, G * V).astype(x_BTE.dtype)

    def _output_gate(self, x_BTE: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns the factor of the normed output, float32[B, K, G, T, V]."""
        z = self._heads(self._project(x_BTE, "z", runtime).astype(jnp.float32))
        return jax.nn.sigmoid(z) if self.spec.gate == "sigmoid" else jax.nn.silu(z)

    def _gates(self, x_BTE, real_BT, runtime: Runtime):
        """Returns (beta, g), float32[B, K, G, T]: the share of a value that is written, and the
        logarithm of the decay; 0 on padding."""
        b, a = (self._gate(x_BTE, name).astype(jnp.float32).swapaxes(2, 3) for name in "ba")
        A_log, dt_bias = (w[...].astype(jnp.float32)[..., None] for w in (self.A_log, self.dt_bias))
        g = -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)
        beta = self.spec.beta_scale * jax.nn.sigmoid(b)
        return tuple(jnp.where(real_BT[:, None, None], each, 0.0) for each in (beta, g))


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
