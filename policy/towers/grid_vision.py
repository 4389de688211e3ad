"""The vision tower of Qwen3-VL, Qwen3.5 and Qwen3-Omni.

R pictures, N patches, K numbers of a patch, D width of the tower, M rows, E hidden size of the
decoder, S deepstack features.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import LayerNorm, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.media import GridVision
from policy.ops.norms import MeanNorm
from policy.ops.parameter import normal, stacked, weight
from policy.towers.blocks import (
    Projections,
    TowerBlock,
    axis_angles,
    for_towers,
    grid_positions,
    prepared,
    real_inputs,
    run,
    turn_by,
    within,
)


class Merger(Projections):
    """Joins the patches of a block to one row: a norm of each patch, or of the joined ones
    (`joined_norm`), then two linear layers with an exact GELU."""

    def __init__(self, spec: GridVision, out_width: int, joined_norm: bool, rngs: nnx.Rngs):
        joined = spec.merge**2 * spec.encoder.width
        self.spec = spec
        self.joined = joined
        self.joined_norm = joined_norm
        self.norm = MeanNorm(
            joined if joined_norm else spec.encoder.width, LayerNorm(spec.encoder.eps), rngs
        )
        self.add(rngs, "up", ((joined,), (joined,)), (("embed",), ("mlp",)), bias=True)
        self.add(rngs, "down", ((joined,), (out_width,)), (("mlp",), ("embed",)), bias=True)

    def __call__(self, x_RND: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns the rows [R, M, E]."""
        shape = (x_RND.shape[0], -1, self.joined)
        x = self.norm(x_RND.reshape(shape)) if self.joined_norm else self.norm(x_RND).reshape(shape)
        return self.project(ACTIVATIONS["gelu"](self.project(x, "up", runtime)), "down", runtime)


class GridVisionTower(Projections):
    """Patches to rows of the decoder's width, with deepstack features."""

    def __init__(self, spec: GridVision, out_width: int, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.encoder.width
        self.patch_shape = (spec.channels, spec.frames, spec.patch, spec.patch)
        self.add(rngs, "patch", (self.patch_shape, (D,)), ((None,) * 4, ("embed",)), bias=True)
        self.positions = weight(
            rngs, (spec.side**2, D), (None, "embed"), normal(spec.initializer_range)
        )
        self.blocks = stacked(partial(TowerBlock, spec.encoder), rngs, spec.encoder.depth)
        self.merger = Merger(spec, out_width, False, rngs)
        if spec.deepstack:
            self.deepstack = stacked(
                partial(Merger, spec, out_width, True), rngs, len(spec.deepstack)
            )

    def __call__(
        self, values_RNK: jax.Array, shape_R2: jax.Array, runtime: Runtime
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns (rows [R, M, E], features [S, R, M, E] or None) of pictures of `shape` (height,
        width) in patches; patches past it are padding. N is a multiple of the patches of a row."""
        spec = self.spec
        runtime = for_towers(runtime)
        N = values_RNK.shape[1]
        real = real_inputs(shape_R2, N)
        row, column = grid_positions(shape_R2, N, spec.merge)
        x = prepared(values_RNK, real, runtime).reshape(*values_RNK.shape[:2], *self.patch_shape)
        x = self.project(x, "patch", runtime, over=4)
        x = x + self._positions(row, column, shape_R2).astype(x.dtype)
        axis = spec.encoder.head_dim // 2
        turn = turn_by(
            jnp.concatenate([axis_angles(at, axis, spec.theta) for at in (row, column)], axis=-1)
        )
        mask = within(real.astype(jnp.int32))
        x, kept = run(
            self.blocks, x, lambda block, x: block(x, mask, turn, runtime), runtime, spec.deepstack
        )
        return self.merger(x, runtime), self._features(kept, runtime)

    def _positions(self, row: jax.Array, column: jax.Array, shape_R2: jax.Array) -> jax.Array:
        """Interpolates the table of positions, float32[R, N, D]: linear in both directions, with
        the corners of the picture at those of the table."""
        side = self.spec.side
        table = self.positions[...].astype(jnp.float32)
        total = jnp.float32(0.0)
        (top, down), (left, right) = (
            _between(at, shape_R2[:, axis, None], side) for axis, at in enumerate((row, column))
        )
        for at_y, weight_y in ((top, 1 - down), (jnp.minimum(top + 1, side - 1), down)):
            for at_x, weight_x in ((left, 1 - right), (jnp.minimum(left + 1, side - 1), right)):
                total += table[at_y * side + at_x] * (weight_y * weight_x)[..., None]
        return total

    def _features(self, kept: list[jax.Array], runtime: Runtime) -> jax.Array | None:
        if not kept:
            return None
        graph, weights = nnx.split(self.deepstack)
        mergers = (
            nnx.merge(graph, jax.tree.map(lambda a, j=j: a[j], weights)) for j in range(len(kept))
        )
        return jnp.stack([merger(x, runtime) for merger, x in zip(mergers, kept, strict=True)])


def _between(at_RN: jax.Array, length_R1: jax.Array, side: int) -> tuple[jax.Array, jax.Array]:
    """Returns (entry of the table below a row or column, the share of the next entry). Padding
    stays in the table."""
    place = at_RN.astype(jnp.float32) * (side - 1) / jnp.maximum(length_R1 - 1, 1)
    low = jnp.clip(jnp.floor(place), 0, side - 1)
    return low.astype(jnp.int32), place - low
