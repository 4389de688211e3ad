"""The product of sorted rows with the weights of their groups, by jax's Pallas kernels (megablox).

They serve TPUs on which XLA has no kernel for `jax.lax.ragged_dot`: there XLA multiplies all rows
with the weights of every group. `jax.lax.ragged_dot` is their oracle.

M rows, E inputs of a product, F outputs, G groups of rows (experts).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax._src.config import _check_vma as checked
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.extend.core import Primitive
from jax.interpreters import mlir

from policy.mesh.sharding import Layout


class BlockSize(NamedTuple):
    """How many rows, inputs and outputs of a product a kernel computes at a time."""

    rows: int
    inputs: int
    outputs: int


LANES = 128
# jax's names of the chips for which XLA has a kernel (libtpu 0.0.51: v5p, and not v4, v5e, v6e or
# 7x).
HAVE_XLA_KERNEL = ("TPU v5", "TPU v5p")
# Rows, inputs and outputs of a block: 10 MiB of the 16 MiB of VMEM that a kernel has on the
# smallest chip, in bfloat16 and with two of each block but the sum.
BLOCK = BlockSize(512, 1024, 1024)


def served(rows_ME: jax.Array, weights_GEF: jax.Array, layout: Layout | None) -> bool:
    """Tells whether these kernels compute this product. Float32 means the highest precision, which
    they do not have."""
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    aligned = all(size % LANES == 0 for size in weights_GEF.shape[1:])
    lacks_kernel = device.platform == "tpu" and device.device_kind not in HAVE_XLA_KERNEL
    return lacks_kernel and rows_ME.dtype == jnp.bfloat16 and aligned


def product(
    rows_ME: jax.Array, weights_GEF: jax.Array, sizes_G: jax.Array, interpret: bool = False
) -> jax.Array:
    """Computes rows[m] @ weights[group of m] in the rows' dtype: [M, F]. Rows past the last group
    are undefined.

    sizes: rows of each group. Gradients have the dtypes of rows and weights.
    """
    return cast(jax.Array, _product(*all_varying(rows_ME, weights_GEF, sizes_G), interpret))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows_ME, weights_GEF, sizes_G, interpret: bool) -> jax.Array:
    return _FORWARD.bind(rows_ME, weights_GEF, sizes_G, interpret=interpret)


def _forward(rows_ME, weights_GEF, sizes_G, interpret):
    return _product(rows_ME, weights_GEF, sizes_G, interpret), (rows_ME, weights_GEF, sizes_G)


def _backward(interpret, saved, g_MF):
    return *(
        kernel.bind(*saved, g_MF, interpret=interpret) for kernel in (_OF_ROWS, _OF_WEIGHTS)
    ), None


_product.defvjp(_forward, _backward)


def primitive(name: str, result: Callable, kernel: Callable) -> Primitive:
    """Makes an instruction of `kernel`, whose result type is `result(*types)`.

    jax's kernels do not state over which axes of a `jax.shard_map` their results vary, and tracing
    needs that of each instruction, also when rematerialisation traces a program again. So the
    kernels are traced when the program is lowered.
    """

    def unchecked(*arguments, interpret):
        with checked(False):
            return kernel(*arguments, interpret=interpret)

    primitive = Primitive(name)
    primitive.def_abstract_eval(result)
    primitive.def_impl(
        lambda *arguments, interpret: jax.jit(partial(primitive.bind, interpret=interpret))(
            *arguments
        )
    )
    mlir.register_lowering(primitive, mlir.lower_fun(unchecked, multiple_results=False))
    return primitive


def _forward_kernel(rows_ME, weights_GEF, sizes_G, *, interpret: bool) -> jax.Array:
    _, E, F = weights_GEF.shape
    out = gmm(
        _pad_to_blocks(rows_ME),
        weights_GEF,
        sizes_G,
        rows_ME.dtype,
        _block(rows_ME, E, F),
        interpret=interpret,
    )
    return out[: len(rows_ME)]


def _gradient_of_rows(rows_ME, weights_GEF, sizes_G, g_MF, *, interpret: bool) -> jax.Array:
    _, E, F = weights_GEF.shape
    g_MF = _pad_to_blocks(g_MF)
    block = _block(rows_ME, F, E)
    out = gmm(
        g_MF, weights_GEF, sizes_G, rows_ME.dtype, block, transpose_rhs=True, interpret=interpret
    )
    return out[: len(rows_ME)]


def _gradient_of_weights(rows_ME, weights_GEF, sizes_G, g_MF, *, interpret: bool) -> jax.Array:
    _, E, F = weights_GEF.shape
    rows_EM = _pad_to_blocks(rows_ME).swapaxes(0, 1)
    block = _block(rows_ME, E, F)
    return tgmm(
        rows_EM, _pad_to_blocks(g_MF), sizes_G, weights_GEF.dtype, block, interpret=interpret
    )


_FORWARD = primitive(
    "grouped_product",
    lambda x, w, *_, **__: x.update(shape=(x.shape[0], w.shape[2])),
    _forward_kernel,
)
_OF_ROWS = primitive("grouped_product_rows", lambda x, *_, **__: x, _gradient_of_rows)
_OF_WEIGHTS = primitive("grouped_product_weights", lambda _, w, *__, **___: w, _gradient_of_weights)


def _block(rows_ME: jax.Array, inputs: int, outputs: int) -> BlockSize:
    """Returns the size of a block of this product."""
    rows = min(BLOCK.rows, -(-len(rows_ME) // LANES) * LANES)
    return BlockSize(rows, min(BLOCK.inputs, inputs), min(BLOCK.outputs, outputs))


def _pad_to_blocks(rows_ME: jax.Array) -> jax.Array:
    """Pads the rows to a multiple of the rows of a block."""
    return jnp.pad(rows_ME, ((0, -len(rows_ME) % _block(rows_ME, LANES, LANES).rows), (0, 0)))


def all_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Marks each array as varying along every axis of a `jax.shard_map` along which one of them
    varies."""
    axes = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    missing = (tuple(sorted(frozenset().union(*axes) - own)) for own in axes)
    return tuple(
        jax.lax.pcast(a, new, to="varying") if new else a
        for a, new in zip(arrays, missing, strict=True)
    )
