"""The product of sorted rows with the weights of their groups by Pallas kernels of jax (megablox), for TPUs on which XLA has none
for `jax.lax.ragged_dot`: it multiplies all rows with the weights of every group there, 128 times the work for 128 experts.

`jax.lax.ragged_dot` is their oracle. M rows, E inputs, F outputs, G groups.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax._src.config import _check_vma as checked
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.extend.core import Primitive
from jax.interpreters import mlir

from policy.mesh.sharding import Layout

LANES = 128
# What jax calls the chips for which XLA has a kernel of its own (libtpu 0.0.51: v5p, and not v4, v5e, v6e or 7x).
HAVE_THEIR_OWN = ("TPU v5", "TPU v5p")
# Rows, inputs and outputs of a block: 10 MiB of the 16 MiB of VMEM that a kernel has on the smallest chip, in bfloat16 and with
# two of each block but the sum.
BLOCK = (512, 1024, 1024)


def served(rows_ME: jax.Array, weights_GEF: jax.Array, layout: Layout | None) -> bool:
    """Whether these kernels compute this product: of bfloat16, as float32 means the highest precision, which they do not have."""
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    whole = all(size % LANES == 0 for size in weights_GEF.shape[1:])
    return (
        device.platform == "tpu"
        and device.device_kind not in HAVE_THEIR_OWN
        and rows_ME.dtype == jnp.bfloat16
        and whole
    )


def product(rows_ME: jax.Array, weights_GEF: jax.Array, sizes_G: jax.Array, interpret: bool = False) -> jax.Array:
    """rows[m] @ weights[group of m], in rows' dtype: [M, F]; rows past the last group are anything. Group by group, `sizes` of
    them. Gradients are in the dtypes of rows and weights."""
    return _product(*_all_varying(rows_ME, weights_GEF, sizes_G), interpret)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows_ME, weights_GEF, sizes_G, interpret: bool) -> jax.Array:
    return _FORWARD.bind(rows_ME, weights_GEF, sizes_G, interpret=interpret)


def _forward(rows_ME, weights_GEF, sizes_G, interpret):
    return _product(rows_ME, weights_GEF, sizes_G, interpret), (rows_ME, weights_GEF, sizes_G)


def _backward(interpret, saved, g_MF):
    return *(kernel.bind(*saved, g_MF, interpret=interpret) for kernel in (_OF_ROWS, _OF_WEIGHTS)), None


_product.defvjp(_forward, _backward)


def _primitive(name: str, result, kernel) -> Primitive:
    """`kernel` as an instruction of its own, `result` the type of what it makes. jax's kernels do not say over which devices of a
    `jax.shard_map` their results differ, which must be known of each instruction, also where rematerialisation makes a program
    anew. So they are traced where nothing asks any more: when the program is lowered."""

    def unchecked(*arguments, interpret):
        with checked(False):
            return kernel(*arguments, interpret=interpret)

    primitive = Primitive(name)
    primitive.def_abstract_eval(result)
    primitive.def_impl(lambda *arguments, interpret: jax.jit(partial(primitive.bind, interpret=interpret))(*arguments))
    mlir.register_lowering(primitive, mlir.lower_fun(unchecked, multiple_results=False))
    return primitive


def _of_rows(rows_ME, weights_GEF, sizes_G, *, interpret: bool) -> jax.Array:
    _, E, F = weights_GEF.shape
    out = gmm(_whole(rows_ME), weights_GEF, sizes_G, rows_ME.dtype, _block(rows_ME, E, F), interpret=interpret)
    return out[: len(rows_ME)]


def _gradient_of_rows(rows_ME, weights_GEF, sizes_G, g_MF, *, interpret: bool) -> jax.Array:
    _, E, F = weights_GEF.shape
    how = {"transpose_rhs": True, "interpret": interpret}
    return gmm(_whole(g_MF), weights_GEF, sizes_G, rows_ME.dtype, _block(rows_ME, F, E), **how)[: len(rows_ME)]


def _gradient_of_weights(rows_ME, weights_GEF, sizes_G, g_MF, *, interpret: bool) -> jax.Array:
    _, E, F = weights_GEF.shape
    rows_EM, block = _whole(rows_ME).swapaxes(0, 1), _block(rows_ME, E, F)
    return tgmm(rows_EM, _whole(g_MF), sizes_G, weights_GEF.dtype, block, interpret=interpret)


_FORWARD = _primitive("grouped_product", lambda x, w, *_, **__: x.update(shape=(x.shape[0], w.shape[2])), _of_rows)
_OF_ROWS = _primitive("grouped_product_rows", lambda x, *_, **__: x, _gradient_of_rows)
_OF_WEIGHTS = _primitive("grouped_product_weights", lambda _, w, *__, **___: w, _gradient_of_weights)


def _block(rows_ME: jax.Array, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Rows, inputs and outputs of a block of this product."""
    rows = min(BLOCK[0], -(-len(rows_ME) // LANES) * LANES)
    return rows, min(BLOCK[1], inputs), min(BLOCK[2], outputs)


def _whole(rows_ME: jax.Array) -> jax.Array:
    """The rows of whole blocks, with some past the end."""
    return jnp.pad(rows_ME, ((0, -len(rows_ME) % _block(rows_ME, LANES, LANES)[0]), (0, 0)))


def _all_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Each marked as differing over all devices of a `jax.shard_map` that one of them differs over."""
    axes = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    missing = (tuple(sorted(frozenset().union(*axes) - own)) for own in axes)
    return tuple(jax.lax.pcast(a, new, to="varying") if new else a for a, new in zip(arrays, missing, strict=True))
