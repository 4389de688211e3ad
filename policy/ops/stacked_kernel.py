"""The product of sorted rows with the weights of their groups in one layer of a stack, by a TPU
kernel.

It serves decoding, where few rows meet many weights: each weight of the layer is read once, in
place, and all rows stay in VMEM. `jax.lax.ragged_dot` over a slice of the stack is its oracle.

M rows, E inputs of a product, J = E / 2, F outputs, G groups of rows (experts), R repeats of a
stack.
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
# Bytes of VMEM that rows, results and buffers may take, of at least 64 MiB of a chip, and that a
# kernel has by default.
VMEM = 40 << 20
DEFAULT = 16 << 20
# jax's names of chips with less VMEM.
SMALLER = ("TPU v2", "TPU v3", "TPU v4")


def served(rows_ME: jax.Array, weights_GEF: StackedWeight, layout: Layout | None) -> bool:
    """Tells whether this kernel computes this product. Float32 means the highest precision, which
    it does not have."""
    (M, E), (_, _, F) = rows_ME.shape, weights_GEF.shape
    floats = rows_ME.dtype == weights_GEF.dtype == jnp.bfloat16
    if not (has_vmem(layout) and floats and E % LANES == F % LANES == 0):
        return False
    return 2 * M * (E + F) + _buffers(M, *_blocks(E, F), E) <= VMEM


def has_vmem(layout: Layout | None) -> bool:
    """Tells whether the devices are TPUs with enough VMEM for the kernels of this module."""
    if layout is None or layout.platform != "tpu":
        return False
    return not layout.mesh.devices.flat[0].device_kind.startswith(SMALLER)


def _blocks(E: int, F: int) -> tuple[int, int]:
    """Returns the inputs and outputs of a block of weights."""
    inputs = _part(E, BLOCK // min(F, 1024))
    return inputs, _part(F, BLOCK // inputs)


def _buffers(M: int, inputs: int, outputs: int, E: int) -> int:
    """Counts the bytes of a kernel's buffers: two of rows, results and weights, and the sums."""
    return 2 * 2 * (M * (E + outputs) + inputs * outputs) + 4 * M * outputs


def product(
    rows_ME: jax.Array, weights_GEF: StackedWeight, sizes_G: jax.Array, interpret: bool = False
) -> jax.Array:
    """Computes rows[m] @ weights[group of m] in the rows' dtype: [M, F]. Rows past the last group
    are 0.

    sizes: int32, rows of each group.
    """
    ends = jnp.cumsum(sizes_G)
    bounds = jnp.concatenate([ends - sizes_G, ends]).astype(jnp.int32)
    layer = jnp.asarray(weights_GEF.layer, jnp.int32).reshape(1)
    arguments = all_varying(rows_ME, weights_GEF.array, layer, bounds)
    return cast(jax.Array, _PRODUCT.bind(*arguments, interpret=interpret))


def _part(size: int, most: int) -> int:
    """Returns the largest divisor of `size` that is a multiple of LANES and at most `most`, or
    LANES."""
    return max(
        (part for part in range(LANES, min(size, most) + 1, LANES) if size % part == 0),
        default=LANES,
    )


def _lowered(rows_ME, weights_RGEF, layer_1, bounds, *, interpret: bool) -> jax.Array:
    (M, _), (_, G, E, F) = rows_ME.shape, weights_RGEF.shape
    rows_ME = jnp.pad(rows_ME, ((0, -M % TILE), (0, 0)))
    inputs, outputs = _blocks(E, F)
    rows_ME = rows_ME if interpret else pltpu.with_memory_space_constraint(rows_ME, pltpu.VMEM)
    padded = len(rows_ME)
    limit = max(DEFAULT, 5 * _buffers(padded, inputs, outputs, E) // 4)
    return pl.pallas_call(
        partial(_kernel, groups=G),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(F // outputs, G, E // inputs),
            in_specs=[
                pl.BlockSpec((padded, E), lambda f, g, e, *_: (0, 0)),
                pl.BlockSpec(
                    (None, None, inputs, outputs), lambda f, g, e, layer, _: (layer[0], g, e, f)
                ),
            ],
            out_specs=pl.BlockSpec((padded, outputs), lambda f, g, e, *_: (0, f)),
            scratch_shapes=[pltpu.VMEM((padded, outputs), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"), vmem_limit_bytes=limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * E * F, bytes_accessed=2 * (M * (E + F) + G * E * F), transcendentals=0
        ),
        out_shape=_in_vmem((padded, F), rows_ME.dtype, interpret),
        interpret=interpret,
        name=NAME,
    )(layer_1, bounds, rows_ME, weights_RGEF)[:M]


def halves(rows_ME: jax.Array) -> jax.Array:
    """Returns rows [M, E] as [M, 2, E / 2], the form in which a TPU stores the numbers of a row
    together.

    Rows travel in it.
    """
    return rows_ME.reshape(len(rows_ME), 2, -1)


def joined(rows_M2J: jax.Array, layout: Layout | None, interpret: bool = False) -> jax.Array:
    """Returns the rows [M, E] of `halves`. On TPU a kernel reads them once and leaves them in VMEM.

    XLA would write the same to HBM and read it again.
    """
    M, _, J = rows_M2J.shape
    fits = (
        rows_M2J.dtype == jnp.bfloat16
        and J % LANES == 0
        and M % TILE == 0
        and 4 * M * J <= VMEM // 4
    )
    if not interpret and not (has_vmem(layout) and fits):
        return rows_M2J.reshape(M, 2 * J)
    return cast(jax.Array, _JOINED.bind(rows_M2J, interpret=interpret))


def _join(rows_M2J: jax.Array, *, interpret: bool) -> jax.Array:
    M, _, J = rows_M2J.shape

    def kernel(halves, rows):
        rows[:, :J] = halves[:, 0, :]
        rows[:, J:] = halves[:, 1, :]

    return pl.pallas_call(
        kernel,
        grid=(M // TILE,),
        in_specs=[pl.BlockSpec((TILE, 2, J), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((TILE, 2 * J), lambda i: (i, 0)),
        out_shape=_in_vmem((M, 2 * J), rows_M2J.dtype, interpret),
        interpret=interpret,
        name="join_halves",
    )(rows_M2J)


def _in_vmem(shape: tuple[int, ...], dtype: jnp.dtype, interpret: bool):
    """Returns the type of a result that a kernel leaves in VMEM."""
    return jax.ShapeDtypeStruct(shape, dtype) if interpret else pltpu.VMEM(shape, dtype)


_JOINED = primitive(
    "join_halves", lambda x, **_: x.update(shape=(x.shape[0], 2 * x.shape[2])), _join
)
_PRODUCT = primitive(
    "stacked_grouped_product",
    lambda x, w, *_, **__: x.update(shape=(x.shape[0], w.shape[3])),
    _lowered,
)


def _kernel(layer, bounds, rows, weights, out, sums, *, groups: int):
    """Adds the product of one block of the weights of one group to the sums of its rows."""
    del layer  # it chose the block
    g = pl.program_id(1)
    e = pl.program_id(2)
    inputs = weights.shape[0]
    first = bounds[g]
    end = bounds[groups + g]

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
