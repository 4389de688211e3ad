"""The product of sorted rows with the weights of their groups in one layer of a stack, by a TPU kernel.

It serves decoding, where few rows meet many weights: each weight of the layer is read once, in place, and all rows stay
in VMEM. `jax.lax.ragged_dot` over a slice of the stack is its oracle.

M rows, E inputs, F outputs, G groups, R repeats of a stack.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from policy.mesh.sharding import Layout
from policy.ops.grouped_kernel import LANES, all_varying, primitive
from policy.ops.stacked import StackedWeight

# Name of the kernel in compiled programs. rl/plan/hlo.py counts one layer of its stacked operand.
NAME = "gmm_stacked"
# Rows that a product takes at a time: tiles that no row of a group lies in are skipped.
TILE = 64
# Numbers of a block of weights, 2 MiB in bfloat16; a kernel holds two.
BLOCK = 1 << 20
# Bytes of VMEM that a kernel may take, of at least 64 MiB of the chips since v5e, and that its rows may take of it.
VMEM, ROWS = 40 << 20, 24 << 20


def served(rows_ME: jax.Array, weights_GEF: StackedWeight, layout: Layout | None) -> bool:
    """Tells whether this kernel computes this product. Float32 means the highest precision, which it does not have."""
    (M, E), (_, _, F) = rows_ME.shape, weights_GEF.shape
    here = layout is not None and layout.platform == "tpu"
    floats = rows_ME.dtype == weights_GEF.dtype == jnp.bfloat16
    return here and floats and E % LANES == F % LANES == 0 and 2 * M * (E + 4 * _part(F, BLOCK // LANES)) <= ROWS


def product(rows_ME: jax.Array, weights_GEF: StackedWeight, sizes_G: jax.Array, interpret: bool = False) -> jax.Array:
    """Computes rows[m] @ weights[group of m] in the rows' dtype: [M, F]. Rows past the last group are 0.

    sizes: int32, rows of each group.
    """
    ends = jnp.cumsum(sizes_G)
    bounds = jnp.concatenate([ends - sizes_G, ends]).astype(jnp.int32)
    layer = jnp.asarray(weights_GEF.layer, jnp.int32).reshape(1)
    arguments = all_varying(rows_ME, weights_GEF.array, layer, bounds)
    return cast(jax.Array, _PRODUCT.bind(*arguments, interpret=interpret))


def _part(size: int, most: int) -> int:
    """Returns the largest divisor of `size` that is a multiple of LANES and at most `most`, or LANES."""
    return max((part for part in range(LANES, min(size, most) + 1, LANES) if size % part == 0), default=LANES)


def _lowered(rows_ME, weights_RGEF, layer_1, bounds, *, interpret: bool) -> jax.Array:
    (M, _), (_, G, E, F) = rows_ME.shape, weights_RGEF.shape
    rows_ME = jnp.pad(rows_ME, ((0, -M % TILE), (0, 0)))
    inputs = _part(E, BLOCK // min(F, 1024))
    outputs = _part(F, BLOCK // inputs)
    padded = len(rows_ME)
    return pl.pallas_call(
        partial(_kernel, groups=G),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(F // outputs, G, E // inputs),
            in_specs=[
                pl.BlockSpec((padded, E), lambda f, g, e, *_: (0, 0)),
                pl.BlockSpec((None, None, inputs, outputs), lambda f, g, e, layer, _: (layer[0], g, e, f)),
            ],
            out_specs=pl.BlockSpec((padded, outputs), lambda f, g, e, *_: (0, f)),
            scratch_shapes=[pltpu.VMEM((padded, outputs), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * E * F, bytes_accessed=2 * (M * (E + F) + G * E * F), transcendentals=0
        ),
        out_shape=jax.ShapeDtypeStruct((padded, F), rows_ME.dtype),
        interpret=interpret,
        name=NAME,
    )(layer_1, bounds, rows_ME, weights_RGEF)[:M]


_PRODUCT = primitive(
    "stacked_grouped_product", lambda x, w, *_, **__: x.update(shape=(x.shape[0], w.shape[3])), _lowered
)


def _kernel(layer, bounds, rows, weights, out, sums, *, groups: int):
    """Adds the product of one block of the weights of one group to the sums of its rows."""
    del layer  # it chose the block
    g, e, inputs = pl.program_id(1), pl.program_id(2), weights.shape[0]
    first, end = bounds[g], bounds[groups + g]

    @pl.when((g == 0) & (e == 0))
    def _():
        sums[...] = jnp.zeros_like(sums)

    def tile(i, carry):
        place = pl.ds(pl.multiple_of(i * TILE, TILE), TILE)
        x = rows[place, pl.ds(pl.multiple_of(e * inputs, LANES), inputs)]
        part = jnp.dot(x, weights[...], preferred_element_type=jnp.float32)
        row = i * TILE + jax.lax.broadcasted_iota(jnp.int32, part.shape, 0)
        sums[place, :] += jnp.where((row >= first) & (row < end), part, 0.0)
        return carry

    jax.lax.fori_loop(first // TILE, pl.cdiv(end, TILE), tile, 0)

    @pl.when((g == pl.num_programs(1) - 1) & (e == pl.num_programs(2) - 1))
    def _():
        out[...] = sums[...].astype(out.dtype)
