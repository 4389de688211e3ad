"""Products of rows with the weights of the group that each row belongs to: the arithmetic of a
mixture of experts.

The rows of a group are neighbours. On TPU and GPU the product is `jax.lax.ragged_dot`, or a kernel
of policy/ops/grouped_kernel.py where XLA has none. XLA on CPU would compute every group on every
row, so there the groups are padded to full blocks of rows and each block is multiplied with its
group's weights.

A choice of G or more names a group of another device, or none. It has no row and adds nothing. The
content of unused rows reaches neither a result nor a gradient.

N tokens, K = k choices each, G groups (experts), M rows of the sorted layout, E hidden, F width
of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jax.typing import DTypeLike

from policy.config import Runtime
from policy.ops.adapted import Adapted
from policy.ops.linear import Weight, linear, ragged_linear

# Each group of rows starts at a multiple of this number; None: groups follow one another without
# gaps.
Block = int | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedRows:
    """The row of every choice of every token.

    token: int[M], the token of a row (N for padding rows). row: int[N, k], the row of a choice
    (past the end if it has none). sizes: int[G], choices of each group. block_group: int[blocks],
    group of each block; None without blocks. partial: whether some choices may have no row.
    """

    token: jax.Array
    row: jax.Array
    sizes: jax.Array
    block_group: jax.Array | None
    partial: bool = field(default=False, metadata={"static": True})

    @property
    def used(self) -> jax.Array:
        """Tells which rows belong to a choice, in a layout without blocks: bool[M, 1]."""
        return (jnp.arange(self.token.shape[0]) < self.sizes.sum())[:, None]


def plan(
    choices_NK: jax.Array,
    groups: int,
    *,
    block: Block,
    partial: bool = False,
    room: int | None = None,
) -> GroupedRows:
    """Sorts the choices by group, stably.

    block: each group starts at a multiple of so many rows. partial: must be set where choices may
    name other groups than 0 .. groups - 1. room: an upper bound, known to the caller, of the
    choices that name one of the groups; None: all of them may.
    """
    N, k = choices_NK.shape
    M = N * k if room is None else min(room, N * k)
    flat = choices_NK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=groups)
    if block is None:
        row = jnp.zeros_like(order).at[order].set(jnp.arange(N * k), unique_indices=True)
        token = order[:M] // k
        if partial:
            token = jnp.where(jnp.arange(M) < sizes.sum(), token, N)
            row = jnp.where(flat < groups, row, row + N * k)
        return GroupedRows(token, row.reshape(N, k), sizes, None, partial)
    blocks_of = -(-sizes // block)
    block_end = jnp.cumsum(blocks_of)
    first_row = (block_end - blocks_of) * block
    sorted_group = flat[order]
    place = first_row[sorted_group] + jnp.arange(N * k) - (jnp.cumsum(sizes) - sizes)[sorted_group]
    blocks = (M + groups * (block - 1)) // block
    if partial:
        place = jnp.where(sorted_group < groups, place, blocks * block + jnp.arange(N * k))
    token = (
        jnp.full(blocks * block, N, order.dtype)
        .at[place]
        .set(order // k, unique_indices=True, mode="drop")
    )
    row = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
    block_group = jnp.minimum(
        jnp.searchsorted(block_end, jnp.arange(blocks), side="right"), groups - 1
    )
    return GroupedRows(token, row.reshape(N, k), sizes, block_group, partial)


def groups_of(plan: GroupedRows) -> jax.Array:
    """Returns the group of each row, int[M]."""
    M = plan.token.shape[0]
    if plan.block_group is None:
        return jnp.repeat(jnp.arange(plan.sizes.shape[0]), plan.sizes, total_repeat_length=M)
    return jnp.repeat(plan.block_group, M // plan.block_group.shape[0])


def block_rows(tokens: int, choices: int, groups: int, platform: str) -> Block:
    """Returns the rows per block on a platform.

    None where ragged_dot is a kernel. On CPU a power of two near the mean group size, at most 64:
    larger blocks are no faster.
    """
    if platform != "cpu":
        return None
    return min(64, 1 << max(0, (tokens * choices // groups).bit_length() - 1))


def _of_choices(rows_ME: jax.Array, plan: GroupedRows) -> jax.Array:
    """Returns the row of every choice, [N, k, E]; 0 for choices without a row."""
    return (
        jnp.take(rows_ME, plan.row, axis=0, mode="fill", fill_value=0)
        if plan.partial
        else rows_ME[plan.row]
    )


@jax.custom_vjp
def dispatch(x_NE: jax.Array, plan: GroupedRows) -> jax.Array:
    """Returns the rows [M, E] of the sorted layout; padding rows are 0.

    The gradient is a gather: each token sums its k rows.
    """
    return jnp.take(x_NE, plan.token, axis=0, mode="fill", fill_value=0)


def _dispatch_backward(plan: GroupedRows, g_ME: jax.Array):
    return jnp.sum(_of_choices(g_ME, plan), axis=1), None


dispatch.defvjp(lambda x, plan: (dispatch(x, plan), plan), _dispatch_backward)


def by_row(values_NK: jax.Array, plan: GroupedRows) -> jax.Array:
    """Returns the value of the choice that each row belongs to, [M]; 0 for other rows."""
    return (
        jnp.zeros(plan.token.shape[0], values_NK.dtype)
        .at[plan.row]
        .set(values_NK, unique_indices=True, mode="drop")
    )


@jax.custom_vjp
def combine(rows_ME: jax.Array, weights_NK: jax.Array, plan: GroupedRows) -> jax.Array:
    """Computes sum_k weights[n, k] * rows[row[n, k]] in float32: [N, E] in the rows' dtype."""
    chosen = _of_choices(rows_ME, plan).astype(jnp.float32)
    return jnp.einsum("nke,nk->ne", chosen, weights_NK.astype(jnp.float32)).astype(rows_ME.dtype)


def _combine_backward(saved, g_NE: jax.Array):
    rows, weights, plan = saved
    g32 = g_NE.astype(jnp.float32)
    g_weights = jnp.einsum("nke,ne->nk", _of_choices(rows, plan).astype(jnp.float32), g32).astype(
        weights.dtype
    )
    g_rows = (
        jnp.take(g32, plan.token, axis=0, mode="fill", fill_value=0)
        * by_row(weights.astype(jnp.float32), plan)[:, None]
    )
    return g_rows.astype(rows.dtype), g_weights, None


combine.defvjp(
    lambda rows, weights, plan: (combine(rows, weights, plan), (rows, weights, plan)),
    _combine_backward,
)


def product(
    rows_ME: jax.Array,
    weights_GEF: Weight,
    plan: GroupedRows,
    runtime: Runtime,
    bias_GF: jax.Array | None = None,
) -> jax.Array:
    """Computes rows[m] @ weights[group of m] + bias[group of m] in the rows' dtype: [M, F]."""
    if plan.block_group is not None:
        blocks = rows_ME.reshape(plan.block_group.shape[0], -1, rows_ME.shape[-1])
        weights = _of_groups(weights_GEF, plan.block_group, rows_ME.dtype)
        out = linear("bre,bef->brf", blocks, weights, runtime)
        out = out.reshape(rows_ME.shape[0], -1)
    else:
        out = ragged_linear(rows_ME, weights_GEF, plan.sizes.astype(jnp.int32), runtime)
    if bias_GF is not None:
        out = out + bias_GF.astype(out.dtype)[groups_of(plan)]
    # Kernels leave rows past the last group undefined. `where` makes these 0 here and in the
    # gradient.
    return jnp.where(plan.used, out, 0) if plan.partial and plan.block_group is None else out


def _of_groups(weights_GEF: Weight, group_B: jax.Array, dtype: DTypeLike) -> Weight:
    """Returns the weights of the groups of blocks of rows."""
    if isinstance(weights_GEF, Adapted):
        base = _of_groups(weights_GEF.base, group_B, dtype)
        return replace(weights_GEF.of_groups(group_B), base=base)
    weights: Any = weights_GEF
    weights = weights if isinstance(weights, qwix.QArray) else weights.astype(dtype)
    return weights[group_B]
