"""The audio tower of the small Gemma 4: a conformer (arXiv 2005.08100) with attention to the last
rows only.

R clips, N frames, K numbers of a frame, M rows, D width of the tower, H heads, d their dimension, W
places that a row sees, E hidden size of the decoder.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.attention.dot_product_attention import MASKED
from policy.config import Norm, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.media import Conformer, halved
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, ones, stacked, weight, zeros
from policy.ops.rope import sinusoids
from policy.towers.blocks import Projections, convolved, for_towers, prepared, real_inputs, run

# A fresh per-dimension scale of queries, softplus(0) = ln 2, cancels QUERY_SCALE: scores are then q
# k / sqrt(d) times KEY_SCALE, as in transformers.
QUERY_SCALE = 1 / math.log(2)
KEY_SCALE = math.log(1 + math.e) / math.log(2)


class HalfStep(Projections):
    """A feed-forward between two norms, of four times the width, added in part: x + residual *
    f(x)."""

    def __init__(self, spec: Conformer, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        norm = Norm(1e-6, "before_cast")
        self.input_norm, self.output_norm = RMSNorm(D, norm, rngs), RMSNorm(D, norm, rngs)
        self.add(rngs, "up", ((D,), (4 * D,)), (("embed",), ("mlp",)), clipped=spec.clipped)
        self.add(rngs, "down", ((4 * D,), (D,)), (("mlp",), ("embed",)), clipped=spec.clipped)

    def __call__(self, x_RMD: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns x_RMD after the half step."""
        h = checkpoint_name(self.project(self.input_norm(x_RMD), "up", runtime), "mlpwi_0")
        h = self.project(ACTIVATIONS[self.spec.activation](h), "down", runtime)
        return x_RMD + checkpoint_name(self.output_norm(h) * self.spec.residual, "mlpwo")


class RelativeAttention(Projections):
    """Attention of each row to itself and the rows before it, W in all. Scores q (k + r), with r a
    projection of the distance's sinusoids, are bounded by cap tanh(s / cap). float32 inside."""

    def __init__(self, spec: Conformer, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        heads = (spec.heads, spec.head_dim)
        for name in "qkv":
            self.add(rngs, name, ((D,), heads), (("embed",), ("heads", "kv")), clipped=spec.clipped)
        self.add(rngs, "distance", ((D,), heads), (("embed",), ("heads", "kv")))
        self.scale = weight(rngs, (spec.head_dim,), ("kv",), zeros)
        self.add(rngs, "o", ((D,), (D,)), (("heads",), ("embed",)), clipped=spec.clipped)

    def __call__(self, x_RMD: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns the output of attention over the frames, [R, M, D], without a residual."""
        spec = self.spec
        W = self.spec.context
        q, k, v = (
            checkpoint_name(self.project(x_RMD, name, runtime).astype(jnp.float32), f"{word}_proj")
            for name, word in (("q", "query"), ("k", "key"), ("v", "value"))
        )
        q = (
            q
            * (QUERY_SCALE * spec.head_dim**-0.5)
            * jax.nn.softplus(self.scale[...].astype(jnp.float32))
        )
        back = sinusoids(jnp.arange(W)[None], spec.width)[0].astype(x_RMD.dtype)
        distance_WHd = self.project(back, "distance", runtime).astype(jnp.float32)
        keys, values = (_last(a, W) for a in (k * KEY_SCALE, v))
        scores = jnp.einsum("rmhd,rmwhd->rmhw", q, keys) + jnp.einsum(
            "rmhd,whd->rmhw", q, distance_WHd
        )
        scores = spec.cap * jnp.tanh(scores / spec.cap)
        exists = jnp.arange(x_RMD.shape[1])[:, None] >= jnp.arange(W)
        shares = jax.nn.softmax(jnp.where(exists[:, None], scores, MASKED), axis=-1)
        out = checkpoint_name(jnp.einsum("rmhw,rmwhd->rmhd", shares, values), "context")
        return self.project(out.reshape(x_RMD.shape).astype(x_RMD.dtype), "o", runtime)


class LightConvolution(Projections):
    """x + f(x) with f a gated linear unit, a causal depthwise convolution, a norm, an activation
    and a linear layer."""

    def __init__(self, spec: Conformer, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        norm = Norm(spec.eps, "before_cast")
        self.input_norm, self.norm = RMSNorm(D, norm, rngs), RMSNorm(D, norm, rngs)
        self.add(rngs, "up", ((D,), (2 * D,)), (("embed",), ("mlp",)), clipped=spec.clipped)
        self.conv = weight(rngs, (spec.kernel, D), (None, "norm"), normal(spec.initializer_range))
        self.add(rngs, "down", ((D,), (D,)), (("mlp",), ("embed",)), clipped=spec.clipped)

    def __call__(self, x_RMD: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns the frames [R, M, D] after the gated causal convolution, with its residual."""
        h, gate = jnp.split(self.project(self.input_norm(x_RMD), "up", runtime), 2, axis=-1)
        taps = self.conv[...].astype(h.dtype)[::-1]
        h = jnp.einsum("rmwd,wd->rmd", _last(h * jax.nn.sigmoid(gate), self.spec.kernel), taps)
        h = ACTIVATIONS[self.spec.activation](self.norm(h))
        return x_RMD + self.project(h, "down", runtime)


class ConformerBlock(nnx.Module):
    """A half step, attention between norms, a light convolution, a half step and a norm."""

    def __init__(self, spec: Conformer, rngs: nnx.Rngs):
        D = spec.width
        norm = Norm(1e-6, "before_cast")
        self.first, self.second = HalfStep(spec, rngs), HalfStep(spec, rngs)
        self.attention, self.convolution = (
            RelativeAttention(spec, rngs),
            LightConvolution(spec, rngs),
        )
        self.input_norm, self.attention_norm = RMSNorm(D, norm, rngs), RMSNorm(D, norm, rngs)
        self.output_norm = RMSNorm(D, norm, rngs)

    def __call__(self, x_RMD: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns the frames [R, M, D] after half a feed-forward, attention, convolution, and the
        other half."""
        x = self.first(x_RMD, runtime)
        h = self.attention(self.input_norm(x), runtime)
        x = x + checkpoint_name(self.attention_norm(h), "out_proj")
        return self.output_norm(self.second(self.convolution(x, runtime), runtime))


class CenteredScale(nnx.Module):
    """A layer norm with a weight and no bias, in float32."""

    def __init__(self, dim: int, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.weight = weight(rngs, (dim,), ("norm",), ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class ConformerTower(Projections):
    """Log-mel frames to rows of the decoder's width."""

    def __init__(self, spec: Conformer, out_width: int, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        first, second = spec.channels
        self.first_conv = weight(
            rngs, (3, 3, 1, first), (None, None, None, "mlp"), normal(spec.initializer_range)
        )
        self.second_conv = weight(
            rngs, (3, 3, first, second), (None, None, None, "mlp"), normal(spec.initializer_range)
        )
        self.first_norm = CenteredScale(first, spec.eps, rngs)
        self.second_norm = CenteredScale(second, spec.eps, rngs)
        self.add(rngs, "frame", ((halved(spec.mels, 2), second), (D,)), ((None, "mlp"), ("embed",)))
        self.blocks = stacked(partial(ConformerBlock, spec), rngs, spec.depth)
        self.add(rngs, "inner", ((D,), (spec.out,)), (("embed",), ("mlp",)), bias=True)
        self.row_norm = RMSNorm(spec.out, Norm(spec.eps, "none"), rngs)
        self.add(rngs, "out", ((spec.out,), (out_width,)), (("embed",), ("mlp",)))

    def __call__(
        self, values_RNK: jax.Array, shape_R2: jax.Array, runtime: Runtime
    ) -> tuple[jax.Array, None]:
        """Returns (rows [R, M, E], None) of clips of `shape` (frames, 1); frames past it are
        padding, which only rows after those of the clip see."""
        runtime = for_towers(runtime)
        frames = shape_R2
        x = values_RNK[..., None].astype(runtime.dtype)
        for kernel, norm in (
            (self.first_conv, self.first_norm),
            (self.second_conv, self.second_norm),
        ):
            real = real_inputs(frames, x.shape[1])
            x = jnp.where(real[..., None, None], x, 0)
            x = jax.nn.relu(norm(convolved(x, kernel[...])))
            frames = halved(frames, 1)
        x = prepared(self.project(x, "frame", runtime, over=2), None, runtime)
        x, _ = run(self.blocks, x, lambda block, x: block(x, runtime), runtime)
        x = self.row_norm(self.project(x, "inner", runtime))
        return self.project(x, "out", runtime), None


def _last(x: jax.Array, places: int) -> jax.Array:
    """Returns [R, M, places, ...]: each row and the rows before it, the nearest first; zeros before
    the first."""
    M = x.shape[1]
    x = jnp.pad(x, ((0, 0), (places - 1, 0), *((0, 0),) * (x.ndim - 2)))
    return jnp.stack(
        [x[:, places - 1 - back : places - 1 - back + M] for back in range(places)], axis=2
    )
