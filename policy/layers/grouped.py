"""Products of rows with the weights of the group that each row belongs to: the arithmetic of a mixture of experts.

N tokens, k choices each, G groups (experts), M rows of the sorted layout, E hidden, F width. The rows of a group lie next to
each other. On TPU and GPU the product is `jax.lax.ragged_dot`. XLA on CPU computes that one for every group on every row, so
there the groups are padded to whole blocks of rows and each block is multiplied with its group's weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from policy.config import Runtime
from policy.layers.linear import Weight, linear, ragged_linear


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Where every choice of every token goes. `token` int[M]: the token of a row (N for padding rows); `row` int[N, k]: the row
    of a choice; `sizes` int[G]: choices of each group; `block_group` int[blocks]: group of each block, None without blocks."""

    token: jax.Array
    row: jax.Array
    sizes: jax.Array
    block_group: jax.Array | None


def plan(choices_NK: jax.Array, groups: int, *, block: int | None) -> Plan:
    """Sorts the choices by group, stably; with `block`, each group starts at a multiple of `block` rows."""
    N, k = choices_NK.shape
    flat = choices_NK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=groups)
    if block is None:
        row = jnp.zeros_like(order).at[order].set(jnp.arange(N * k), unique_indices=True)
        return Plan(order // k, row.reshape(N, k), sizes, None)
    blocks_of = -(-sizes // block)
    block_end = jnp.cumsum(blocks_of)
    first_row = (block_end - blocks_of) * block
    sorted_group = flat[order]
    place = first_row[sorted_group] + jnp.arange(N * k) - (jnp.cumsum(sizes) - sizes)[sorted_group]
    blocks = (N * k + groups * (block - 1)) // block
    token = jnp.full(blocks * block, N, order.dtype).at[place].set(order // k, unique_indices=True)
    row = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
    block_group = jnp.minimum(jnp.searchsorted(block_end, jnp.arange(blocks), side="right"), groups - 1)
    return Plan(token, row.reshape(N, k), sizes, block_group)


def groups_of(plan: Plan) -> jax.Array:
    """int[M]: the group of each row."""
    M = plan.token.shape[0]
    if plan.block_group is None:
        return jnp.repeat(jnp.arange(plan.sizes.shape[0]), plan.sizes, total_repeat_length=M)
    return jnp.repeat(plan.block_group, M // plan.block_group.shape[0])


def block_rows(rows: int, groups: int) -> int | None:
    """Rows per block on this platform: None where ragged_dot is a kernel; on CPU a power of two near the mean group size, at
    most 64 (64 rows reach 91 GFLOP/s on one core, 8 rows 46)."""
    if jax.default_backend() != "cpu":
        return None
    return min(64, 1 << max(0, (rows // groups).bit_length() - 1))


@jax.custom_vjp
def dispatch(x_NE: jax.Array, plan: Plan) -> jax.Array:
    """The rows [M, E] of the sorted layout; padding rows are 0. Its gradient is a gather too: each token sums its k rows."""
    return jnp.take(x_NE, plan.token, axis=0, mode="fill", fill_value=0)


def _dispatch_backward(plan: Plan, g_ME: jax.Array):
    return jnp.sum(g_ME[plan.row], axis=1), None


dispatch.defvjp(lambda x, plan: (dispatch(x, plan), plan), _dispatch_backward)


@jax.custom_vjp
def combine(rows_ME: jax.Array, weights_NK: jax.Array, plan: Plan) -> jax.Array:
    """sum_k weights[n, k] * rows[row[n, k]], in float32, as rows' dtype: [N, E]."""
    chosen = rows_ME[plan.row].astype(jnp.float32)
    return jnp.einsum("nke,nk->ne", chosen, weights_NK.astype(jnp.float32)).astype(rows_ME.dtype)


def _combine_backward(saved, g_NE: jax.Array):
    rows, weights, plan = saved
    g32 = g_NE.astype(jnp.float32)
    g_weights = jnp.einsum("nke,ne->nk", rows[plan.row].astype(jnp.float32), g32).astype(weights.dtype)
    weight_of_row = jnp.zeros(rows.shape[0], jnp.float32).at[plan.row].set(weights.astype(jnp.float32), unique_indices=True)
    g_rows = jnp.take(g32, plan.token, axis=0, mode="fill", fill_value=0) * weight_of_row[:, None]
    return g_rows.astype(rows.dtype), g_weights, None


combine.defvjp(lambda rows, weights, plan: (combine(rows, weights, plan), (rows, weights, plan)), _combine_backward)


def product(rows_ME: jax.Array, weights_GEF: Weight, plan: Plan, runtime: Runtime) -> jax.Array:
    """rows[m] @ weights[group of m], in rows' dtype: [M, F]."""
    if plan.block_group is None:
        return ragged_linear(rows_ME, weights_GEF, plan.sizes.astype(jnp.int32), runtime)
    blocks = rows_ME.reshape(plan.block_group.shape[0], -1, rows_ME.shape[-1])
    out = linear("bre,bef->brf", blocks, weights_GEF.astype(rows_ME.dtype)[plan.block_group], runtime)
    return out.reshape(rows_ME.shape[0], -1)
