"""The vision tower of Qwen2.5-VL.

R pictures, N patches, K numbers of a patch, D width of the tower, H heads, d their dimension, M
rows, E hidden size of the decoder, n groups of the patches of a picture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.attention.dot_product_attention import Mask, attend, in_chunks, of_chunks
from policy.cache.layer_cache import Visible
from policy.cache.step import Step
from policy.config import Norm, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.media import WindowVision
from policy.ops.norms import RMSNorm
from policy.ops.parameter import stacked
from policy.towers.blocks import (
    Projections,
    axis_angles,
    for_towers,
    grid_positions,
    prepared,
    real_inputs,
    run,
    turn_by,
    within,
)


class WindowBlock(Projections):
    """A pre-norm block with RMS norms, a gated feed-forward and biases."""

    def __init__(self, spec: WindowVision, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        H = spec.heads
        d = spec.head_dim
        inner = spec.mlp_width
        self.input_norm = RMSNorm(D, Norm(spec.eps), rngs)
        for name in "qkv":
            self.add(rngs, name, ((D,), (H, d)), (("embed",), ("heads", "kv")), bias=True)
        self.add(rngs, "o", ((H, d), (D,)), (("heads", "kv"), ("embed",)), bias=True)
        self.mlp_norm = RMSNorm(D, Norm(spec.eps), rngs)
        for name in ("gate", "up"):
            self.add(rngs, name, ((D,), (inner,)), (("embed",), ("mlp",)), bias=True)
        self.add(rngs, "down", ((inner,), (D,)), (("mlp",), ("embed",)), bias=True)

    def __call__(
        self,
        x_RND: jax.Array,
        full: jax.Array,
        windows_RN: jax.Array,
        turn: Callable,
        runtime: Runtime,
    ) -> jax.Array:
        """Returns x_RND after the block. `full`: patches attend to all of their picture, else to
        their window. `windows` are those of the patches, in ascending order, 0 for padding. `turn`
        rotates queries and keys [R, H, N, d]."""
        h = self.input_norm(x_RND)
        q, k, v = (jnp.swapaxes(self.project(h, name, runtime), 1, 2) for name in "qkv")
        q, k = (checkpoint_name(turn(a), name) for a, name in ((q, "query_proj"), (k, "key_proj")))
        v = checkpoint_name(v, "value_proj")

        def everywhere(q, k, v):
            return attend(
                q, k, v, within((windows_RN > 0).astype(jnp.int32)), runtime.attention_chunk
            )

        def in_windows(q, k, v):
            return window_attention(
                q, k, v, windows_RN, self.spec.window_patches, runtime.attention_chunk
            )

        h = jax.lax.cond(full, everywhere, in_windows, q * self.spec.head_dim**-0.5, k, v)
        h = jnp.swapaxes(checkpoint_name(h, "context"), 1, 2)
        x_RND = x_RND + checkpoint_name(self.project(h, "o", runtime, over=2), "out_proj")
        h = self.mlp_norm(x_RND)
        gate, up = (
            checkpoint_name(self.project(h, name, runtime), f"mlpwi_{i}")
            for i, name in enumerate(("gate", "up"))
        )
        h = self.project(ACTIVATIONS[self.spec.activation](gate) * up, "down", runtime)
        return x_RND + checkpoint_name(h, "mlpwo")


class WindowVisionTower(Projections):
    """Patches to rows of the decoder's width."""

    def __init__(self, spec: WindowVision, out_width: int, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.width
        joined = spec.merge**2 * spec.width
        self.patch_shape = (spec.channels, spec.frames, spec.patch, spec.patch)
        self.add(rngs, "patch", (self.patch_shape, (D,)), ((None,) * 4, ("embed",)))
        self.blocks = stacked(partial(WindowBlock, spec), rngs, spec.depth)
        self.norm = RMSNorm(D, Norm(spec.eps), rngs)
        self.add(rngs, "up", ((joined,), (joined,)), (("embed",), ("mlp",)), bias=True)
        self.add(rngs, "down", ((joined,), (out_width,)), (("mlp",), ("embed",)), bias=True)

    def __call__(
        self, values_RNK: jax.Array, shape_R2: jax.Array, runtime: Runtime
    ) -> tuple[jax.Array, None]:
        """Returns (rows [R, M, E], None) of pictures of `shape` (height, width) in patches; patches
        past it are padding. N is a multiple of the patches of a row.

        The patches of a window are brought together first, and rows are returned in the order of
        the inputs.
        """
        spec = self.spec
        runtime = for_towers(runtime)
        R, N = values_RNK.shape[:2]
        real = real_inputs(shape_R2, N)
        row, column = grid_positions(shape_R2, N, spec.merge)
        windows = self._windows(row, column, shape_R2, real)
        order = self._order(windows)
        values, row, column, windows = (
            self._sorted(a, order) for a in (values_RNK, row, column, windows)
        )
        x = prepared(values, windows > 0, runtime).reshape(R, N, *self.patch_shape)
        x = self.project(x, "patch", runtime, over=4)
        axis = spec.head_dim // 2
        turn = turn_by(
            jnp.concatenate([axis_angles(at, axis, spec.theta) for at in (row, column)], axis=-1)
        )
        full = np.isin(np.arange(spec.depth), spec.full)
        x, _ = run(
            self.blocks,
            x,
            lambda block, x, full: block(x, full, windows, turn, runtime),
            runtime,
            each=(full,),
        )
        joined = self.norm(x).reshape(R, -1, spec.merge**2 * spec.width)
        rows = self.project(
            ACTIVATIONS["gelu"](self.project(joined, "up", runtime)), "down", runtime
        )
        return jnp.take_along_axis(rows, jnp.argsort(order, axis=1)[..., None], axis=1), None

    def _windows(
        self, row: jax.Array, column: jax.Array, shape_R2: jax.Array, real: jax.Array
    ) -> jax.Array:
        """Returns the window of each patch, int32[R, N]: 1, 2, ... row by row; 0 for padding."""
        side = self.spec.window * self.spec.merge
        across = -(-shape_R2[:, 1:] // side)
        return jnp.where(real, 1 + row // side * across + column // side, 0)

    def _order(self, windows_RN: jax.Array) -> jax.Array:
        """Returns the squares of patches in the order of their windows, int32[R, M], with padding
        at the end."""
        squares = windows_RN[:, :: self.spec.merge**2]
        return jnp.argsort(jnp.where(squares > 0, squares, windows_RN.shape[1] + 1), axis=1)

    def _sorted(self, a: jax.Array, order_RM: jax.Array) -> jax.Array:
        """Returns an array of patches [R, N, ...] in this order of their squares."""
        squares = a.reshape(a.shape[0], -1, self.spec.merge**2, *a.shape[2:])
        index = order_RM.reshape(*order_RM.shape, *(1,) * (squares.ndim - 2))
        return jnp.take_along_axis(squares, index, axis=1).reshape(a.shape)


def window_attention(
    q_RHNd: jax.Array,
    k_RHNd: jax.Array,
    v_RHNd: jax.Array,
    windows_RN: jax.Array,
    size: int,
    chunk: int,
) -> jax.Array:
    """Computes softmax attention [R, H, N, d] among the patches of each window, with the scale
    already in q.

    Patches are in the order of their windows, 0 is padding, and a window has at most `size`
    patches. So the window of a patch ends in its group of `size` patches or in one of the two
    groups next to it.
    """
    R, H, N, d = q_RHNd.shape
    q = _groups(q_RHNd, size, 2)
    k, v = (_with_neighbours(a, size, 2) for a in (k_RHNd, v_RHNd))
    own = _groups(windows_RN, size, 1)
    near = _with_neighbours(windows_RN, size, 1)
    mask = Mask(Step(jnp.zeros_like(own), own), Visible({}, jnp.zeros_like(near), near))
    out = attend(q, k, v, mask, chunk).reshape(R, -1, H, size, d)
    return of_chunks(jnp.moveaxis(out, 1, 0), 2)[:, :, :N]


def _groups(a: jax.Array, size: int, axis: int) -> jax.Array:
    """Returns the n groups of `size` entries of an axis as items, [R n, ...]. The last one is
    padded."""
    return _items(in_chunks(a, size, axis))


def _with_neighbours(a: jax.Array, size: int, axis: int) -> jax.Array:
    """Returns each group of `size` entries of an axis between the one before it and the one after
    it, [R n, ...]; zeros where there is none."""
    groups = in_chunks(a, size, axis)
    padded = jnp.pad(groups, [(1, 1)] + [(0, 0)] * a.ndim)
    return _items(jnp.concatenate([padded[:-2], groups, padded[2:]], axis=axis + 1))


def _items(groups: jax.Array) -> jax.Array:
    """Joins the axis of groups, which is the first one, and that of items."""
    groups = jnp.moveaxis(groups, 0, 1)
    return groups.reshape(-1, *groups.shape[2:])
