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

from policy.sharding import Layout

LANES = 128
# What jax calls the chips for which XLA has a kernel of its own (libtpu 0.0.51: v5p, and not v4, v5e, v6e or 7x).
HAVE_THEIR_OWN = ("TPU v5", "TPU v5p")
# Rows, inputs and outputs of a block: 10 MiB of the 16 MiB of VMEM that a kernel has on the smallest chip, in bfloat16 and with
# two of each block but the sum.
BLOCK = (512, 1024, 1024)
# Inside `jax.shard_map` a kernel has to say over which devices its result differs. These do not, and nothing but `checked(False)`
# lets them be traced there; `_as_varying` says it after them.


def served(rows_ME: jax.Array, weights_GEF: jax.Array, layout: Layout | None) -> bool:
    """Whether these kernels compute this product: of bfloat16, as float32 means the highest precision, which they do not have."""
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    whole = all(size % LANES == 0 for size in weights_GEF.shape[1:])
    return device.platform == "tpu" and device.device_kind not in HAVE_THEIR_OWN and rows_ME.dtype == jnp.bfloat16 and whole


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(rows_ME: jax.Array, weights_GEF: jax.Array, sizes_G: jax.Array, interpret: bool = False) -> jax.Array:
    """rows[m] @ weights[group of m], in rows' dtype: [M, F]; rows past the last group are anything. Group by group, `sizes` of
    them. Gradients are in the dtypes of rows and weights."""
    _, E, F = weights_GEF.shape
    with checked(False):
        out = gmm(_whole(rows_ME), weights_GEF, sizes_G, rows_ME.dtype, _block(rows_ME, E, F), interpret=interpret)
    return _as_varying(out[: len(rows_ME)], rows_ME)


def _forward(rows_ME, weights_GEF, sizes_G, interpret):
    return product(rows_ME, weights_GEF, sizes_G, interpret), (rows_ME, weights_GEF, sizes_G)


def _backward(interpret, saved, g_MF):
    rows, weights, sizes = saved
    _, E, F = weights.shape
    g, how = _whole(g_MF), {"interpret": interpret}
    with checked(False):
        d_rows = gmm(g, weights, sizes, rows.dtype, _block(rows, F, E), transpose_rhs=True, **how)[: len(rows)]
        d_weights = tgmm(_whole(rows).swapaxes(0, 1), g, sizes, weights.dtype, _block(rows, E, F), **how)
    return _as_varying(d_rows, rows), _as_varying(d_weights, weights), None


product.defvjp(_forward, _backward)


def _block(rows_ME: jax.Array, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Rows, inputs and outputs of a block of this product."""
    rows = min(BLOCK[0], -(-len(rows_ME) // LANES) * LANES)
    return rows, min(BLOCK[1], inputs), min(BLOCK[2], outputs)


def _whole(rows_ME: jax.Array) -> jax.Array:
    """The rows of whole blocks, with some past the end."""
    return jnp.pad(rows_ME, ((0, -len(rows_ME) % _block(rows_ME, LANES, LANES)[0]), (0, 0)))


def _as_varying(array: jax.Array, like: jax.Array) -> jax.Array:
    """Marked as differing over the devices that `like` differs over, inside `jax.shard_map`: a kernel says nothing of it."""
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array
