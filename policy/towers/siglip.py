"""The vision tower of Gemma 3: SigLIP, pooled and projected.

R pictures, N patches, K numbers of a patch, D width of the tower, M rows, E hidden size of the
decoder.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import LayerNorm, Norm, Runtime
from policy.media import Siglip
from policy.ops.norms import MeanNorm, RMSNorm
from policy.ops.parameter import normal, stacked, weight
from policy.towers.blocks import Projections, TowerBlock, for_towers, prepared, run, within


class SiglipTower(Projections):
    """The patches of a square picture to rows of the decoder's width."""

    def __init__(self, spec: Siglip, out_width: int, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.encoder.width
        eps = spec.encoder.eps
        self.patch_shape = (spec.channels, spec.patch, spec.patch)
        self.add(rngs, "patch", (self.patch_shape, (D,)), ((None,) * 3, ("embed",)), bias=True)
        self.positions = weight(
            rngs, (spec.side**2, D), (None, "embed"), normal(spec.initializer_range)
        )
        self.blocks = stacked(partial(TowerBlock, spec.encoder), rngs, spec.encoder.depth)
        self.norm = MeanNorm(D, LayerNorm(eps), rngs)
        self.row_norm = RMSNorm(D, Norm(eps, "zero_centred"), rngs)
        self.add(rngs, "out", ((D,), (out_width,)), (("embed",), ("mlp",)))

    def __call__(
        self, values_RNK: jax.Array, shape_R2: jax.Array, runtime: Runtime
    ) -> tuple[jax.Array, None]:
        """Returns (rows [R, M, E], None). Every picture has all `side` x `side` patches; inputs
        past them are padding."""
        spec = self.spec
        runtime = for_towers(runtime)
        R = len(values_RNK)
        side = spec.side
        cells = spec.side // spec.pool
        x = prepared(values_RNK[:, : side**2], None, runtime).reshape(R, side**2, *self.patch_shape)
        x = self.project(x, "patch", runtime, over=3)
        x = x + self.positions[...].astype(x.dtype)
        mask = within(jnp.ones(x.shape[:2], jnp.int32))
        x, _ = run(self.blocks, x, lambda block, x: block(x, mask, None, runtime), runtime)
        x = self.norm(x).reshape(R, cells, spec.pool, cells, spec.pool, -1)
        x = jnp.mean(x.astype(jnp.float32), axis=(2, 4)).astype(x.dtype).reshape(R, cells**2, -1)
        return self.project(self.row_norm(x), "out", runtime), None
