"""The vision tower of Gemma 4.

R pictures, N patches, K numbers of a patch, D width of the tower, H heads, G key-value heads, d
their dimension, M rows, E hidden size of the decoder.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.attention.dot_product_attention import Mask
from policy.config import Norm, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.media import PooledVision
from policy.ops.norms import RMSNorm
from policy.ops.parameter import Constant, normal, ones, stacked, weight, zeros
from policy.towers.blocks import (
    Projections,
    attention,
    axis_angles,
    for_towers,
    grid_positions,
    prepared,
    real_inputs,
    run,
    turn_by,
    within,
)


class PooledBlock(Projections):
    """A block between norms, like those of Gemma 4's text model, with attention to all of the
    picture. Scores are not scaled, since queries and keys are normed."""

    def __init__(self, spec: PooledVision, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        d = spec.head_dim
        inner = spec.mlp_width
        norm = Norm(spec.eps, "before_cast")
        self.input_norm, self.attention_norm = RMSNorm(D, norm, rngs), RMSNorm(D, norm, rngs)
        self.mlp_norm, self.output_norm = RMSNorm(D, norm, rngs), RMSNorm(D, norm, rngs)
        for name, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)):
            axes = ("embed",), ("heads", "kv")
            self.add(rngs, name, ((D,), (heads, d)), axes, clipped=spec.clipped)
        self.q_norm, self.k_norm = RMSNorm(d, norm, rngs), RMSNorm(d, norm, rngs)
        self.v_norm = RMSNorm(d, Norm(spec.eps, "none"), rngs)
        self.add(
            rngs, "o", ((spec.heads, d), (D,)), (("heads", "kv"), ("embed",)), clipped=spec.clipped
        )
        for name in ("gate", "up"):
            self.add(rngs, name, ((D,), (inner,)), (("embed",), ("mlp",)), clipped=spec.clipped)
        self.add(rngs, "down", ((inner,), (D,)), (("mlp",), ("embed",)), clipped=spec.clipped)

    def __call__(self, x_RND: jax.Array, mask: Mask, turns: tuple, runtime: Runtime) -> jax.Array:
        """Returns x_RND after the block. `turns` rotate the halves of queries and keys [R, H, N, d
        / 2]."""
        h = self.input_norm(x_RND)
        q, k, v = (jnp.swapaxes(self.project(h, name, runtime), 1, 2) for name in "qkv")
        q, k = (
            jnp.concatenate(
                [turn(half) for turn, half in zip(turns, jnp.split(a, 2, axis=-1), strict=True)],
                axis=-1,
            )
            for a in (self.q_norm(q), self.k_norm(k))
        )
        h = self.project(attention(q, k, self.v_norm(v), mask, runtime), "o", runtime, over=2)
        x_RND = x_RND + checkpoint_name(self.attention_norm(h), "out_proj")
        h = self.mlp_norm(x_RND)
        gate, up = (
            checkpoint_name(self.project(h, name, runtime), f"mlpwi_{i}")
            for i, name in enumerate(("gate", "up"))
        )
        h = self.project(ACTIVATIONS[self.spec.activation](gate) * up, "down", runtime)
        return x_RND + checkpoint_name(self.output_norm(h), "mlpwo")


class PooledVisionTower(Projections):
    """Patches to rows of the decoder's width."""

    def __init__(self, spec: PooledVision, out_width: int, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        self.patch_shape = (spec.patch, spec.patch, spec.channels)
        self.add(rngs, "patch", (self.patch_shape, (D,)), ((None,) * 3, ("embed",)))
        self.positions = weight(
            rngs, (2, spec.positions, D), (None, None, "embed"), normal(spec.initializer_range)
        )
        self.blocks = stacked(partial(PooledBlock, spec), rngs, spec.depth)
        if spec.standardized:
            self.shift = Constant(zeros(rngs.params(), (D,)), out_sharding=("norm",))
            self.scale = Constant(ones(rngs.params(), (D,)), out_sharding=("norm",))
        self.row_norm = RMSNorm(D, Norm(spec.eps, "none"), rngs)
        self.add(rngs, "out", ((D,), (out_width,)), (("embed",), ("mlp",)))

    def __call__(
        self, values_RNK: jax.Array, shape_R2: jax.Array, runtime: Runtime
    ) -> tuple[jax.Array, None]:
        """Returns (rows [R, M, E], None) of pictures of `shape` (height, width) in patches; patches
        past it are padding. N is a multiple of pool * pool, height and width are multiples of pool.
        """
        spec = self.spec
        runtime = for_towers(runtime)
        N = values_RNK.shape[1]
        real, (row, column) = real_inputs(shape_R2, N), grid_positions(shape_R2, N)
        x = prepared(2 * (values_RNK - 0.5), real, runtime)
        x = self.project(x.reshape(*x.shape[:2], *self.patch_shape), "patch", runtime, over=3)
        across, down = self.positions[...].astype(x.dtype)
        x = (
            x
            + across[jnp.minimum(column, spec.positions - 1)]
            + down[jnp.minimum(row, spec.positions - 1)]
        )
        dim = spec.head_dim // 2
        turns = tuple(turn_by(axis_angles(at, dim, spec.theta)) for at in (column, row))
        mask = within(real.astype(jnp.int32))
        x, _ = run(self.blocks, x, lambda block, x: block(x, mask, turns, runtime), runtime)
        rows = self._pooled(x, real, row, column, shape_R2) * spec.width**0.5
        if spec.standardized:
            rows = (rows - self.shift[...]) * self.scale[...]
        return self.project(self.row_norm(rows.astype(x.dtype)), "out", runtime), None

    def _pooled(
        self,
        x_RND: jax.Array,
        real: jax.Array,
        row: jax.Array,
        column: jax.Array,
        shape_R2: jax.Array,
    ):
        """Returns the means over squares of `pool` x `pool` patches, float32[R, M, D]."""
        k = self.spec.pool
        M = x_RND.shape[1] // self.spec.pool**2
        cell = column // k + shape_R2[:, 1:] // k * (row // k)
        shares = jnp.where(real[..., None] & (cell[..., None] == jnp.arange(M)), 1 / k**2, 0.0)
        return jnp.einsum("rnm,rnd->rmd", shares, x_RND.astype(jnp.float32), precision="highest")
