"""The vision tower of Llama 4.

R tiles, N patches, K numbers of a patch, D width of the tower, M rows, E hidden size of the
decoder.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import LayerNorm, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.media import TileVision
from policy.ops.norms import MeanNorm
from policy.ops.parameter import normal, stacked, weight
from policy.towers.blocks import (
    Projections,
    TowerBlock,
    axis_angles,
    for_towers,
    prepared,
    run,
    turn_by,
    within,
)


class TileVisionTower(Projections):
    """The patches of a square tile to rows of the decoder's width."""

    def __init__(self, spec: TileVision, out_width: int, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.encoder.width
        self.patch_shape = (spec.channels, spec.patch, spec.patch)
        joined = spec.merge**2 * D
        self.add(rngs, "patch", (self.patch_shape, (D,)), ((None,) * 3, ("embed",)))
        self.class_token = weight(rngs, (D,), ("norm",), normal(spec.initializer_range))
        self.positions = weight(
            rngs, (spec.side**2 + 1, D), (None, "embed"), normal(spec.initializer_range)
        )
        self.first_norm = MeanNorm(D, LayerNorm(spec.encoder.eps), rngs)
        self.blocks = stacked(partial(TowerBlock, spec.encoder), rngs, spec.encoder.depth)
        self.norm = MeanNorm(D, LayerNorm(spec.encoder.eps), rngs)
        self.add(rngs, "up", ((joined,), (spec.inner,)), (("embed",), ("mlp",)))
        self.add(rngs, "down", ((spec.inner,), (spec.out,)), (("mlp",), ("embed",)))
        self.add(rngs, "out", ((spec.out,), (out_width,)), (("embed",), ("mlp",)))

    def __call__(
        self, values_RNK: jax.Array, shape_R2: jax.Array, runtime: Runtime
    ) -> tuple[jax.Array, None]:
        """Returns (rows [R, M, E], None). Every tile has all `side` x `side` patches; inputs past
        them are padding."""
        spec = self.spec
        runtime = for_towers(runtime)
        R = len(values_RNK)
        side = spec.side
        x = prepared(values_RNK[:, : side**2], None, runtime).reshape(R, side**2, *self.patch_shape)
        x = self.project(x, "patch", runtime, over=3)
        last = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (R, 1, x.shape[-1]))
        x = jnp.concatenate([x, last], axis=1) + self.positions[...].astype(x.dtype)
        mask = within(jnp.ones(x.shape[:2], jnp.int32))
        turn = turn_by(self._angles(R), interleaved=True)
        x = self.first_norm(x)
        x, _ = run(self.blocks, x, lambda block, x: block(x, mask, turn, runtime), runtime)
        x = self._shuffled(self.norm(x)[:, :-1])
        act = ACTIVATIONS["gelu"]
        x = act(self.project(act(self.project(x, "up", runtime)), "down", runtime))
        return self.project(x, "out", runtime), None

    def _angles(self, tiles: int) -> jax.Array:
        """Returns the angles of patches and class token, float32[R, N + 1, d / 2]: by column, then
        by row, both counted from 1. The class token does not turn."""
        spec = self.spec
        number = jnp.arange(self.spec.side**2)[None]
        axes = (number % spec.side + 1, number // spec.side + 1)
        dim = spec.encoder.head_dim // 2
        angles = jnp.concatenate([axis_angles(at, dim, spec.theta) for at in axes], axis=-1)
        return jnp.broadcast_to(
            jnp.pad(angles, ((0, 0), (0, 1), (0, 0))), (tiles, spec.side**2 + 1, angles.shape[-1])
        )

    def _shuffled(self, x_RND: jax.Array) -> jax.Array:
        """Joins the outputs of each square of `merge` x `merge` patches, row by row."""
        cells = self.spec.side // self.spec.merge
        k = self.spec.merge
        x = x_RND.reshape(len(x_RND), cells, k, cells, k, -1)
        return jnp.swapaxes(x, 2, 3).reshape(len(x_RND), cells**2, -1)
