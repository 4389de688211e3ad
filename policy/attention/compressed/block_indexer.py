"""The indexer of blocks of keys in grouped-query attention (Qwen4ExpTextQSAIndexer of
transformers).

B rows, T queries, C visible keys, n blocks, E hidden, H heads of the index, D their dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from policy.attention.compressed.compressor import OwnBlocks
from policy.attention.dot_product_attention import MASKED, Mask, attend
from policy.attention.indexer import by_rows
from policy.cache.layer_cache import LayerCache, Visible, gather_entries
from policy.cache.step import Step
from policy.config import BlockIndexer, DecoderConfig
from policy.mesh.sharding import Layout
from policy.ops.norms import RMSNorm
from policy.ops.parameter import normal, weight
from policy.ops.rope import rotate, rotation


class BlockKeyIndexer(nnx.Module):
    """Scores blocks of keys for every query, as BlockIndexer says. Weights: q_proj [E, H, D],
    k_proj [E, 1, D], q_norm and k_norm [D].

    Its input is detached. No loss trains it.
    """

    def __init__(self, spec: BlockIndexer, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        H = spec.heads
        D = spec.head_dim
        init = normal(config.initializer_range)
        self.q_proj = weight(
            rngs, (E, H, D), ("embed", "q_heads", "kv"), init, inputs=(0,), quantizable=False
        )
        self.k_proj = weight(
            rngs, (E, 1, D), ("embed", None, "kv"), init, inputs=(0,), quantizable=False
        )
        self.q_norm = RMSNorm(D, spec.norm, rngs)
        self.k_norm = RMSNorm(D, spec.norm, rngs)

    def __call__(self, x_BTE: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Returns (queries [B, H, T, D], keys of the tokens [B, 1, T, D] before the mean over a
        block)."""
        spec = self.spec
        x = jax.lax.stop_gradient(x_BTE)
        q, k = (
            jnp.einsum("bte,ehd->bhtd", x, projection[...].astype(x.dtype))
            for projection in (self.q_proj, self.k_proj)
        )
        return rotate(self.q_norm(q), spec.rope, step.rotation(spec.rope)), k

    def blocks(self, step: Step, visible: Visible, in_cache: bool) -> KeyBlocks:
        """Returns the complete blocks of the tokens that are `visible`, by their keys "index".

        The keys of all blocks are computed in every call: over a cache it reads the D index numbers
        of every token, next to the keys and values of all heads.
        """
        size = self.spec.block_size
        tokens = visible.arrays["index"][:, 0]
        if in_cache:
            B, C = visible.positions.shape
            n = C // size
            parts = tokens[:, : n * size].reshape(B, n, size, -1)
            ends = jnp.broadcast_to(jnp.arange(size - 1, n * size, size), (B, n))
            marks = ends, jnp.ones_like(ends)
        else:
            own = OwnBlocks.of(step, size, size)
            ends = own.ends
            marks = (own.ends, own.segments, *(() if own.last is None else (own.last,)))
            B, n, _ = own.tokens.shape
            parts = jnp.take_along_axis(tokens, own.tokens.reshape(B, n * size, 1), axis=1).reshape(
                B, n, size, -1
            )
        means = jnp.mean(parts.astype(jnp.float32), axis=2).astype(tokens.dtype)
        table = rotation(self.spec.rope, jnp.maximum(ends - (size - 1), 0))
        keys = rotate(self.k_norm(means)[:, None], self.spec.rope, table)[:, 0]
        return KeyBlocks(jax.lax.stop_gradient(keys), marks)


class KeyBlocks(NamedTuple):
    """Blocks of keys: keys [B, n, D]; marks: position, segment (0: no block) and, in trees,
    `Tree.last` of the last token of each, int32[B, n]."""

    keys: jax.Array
    marks: tuple[jax.Array, ...]


class BlockMask(Mask):
    """Allows the tokens of the `spec.blocks` visible blocks with the largest index scores, and
    those of the query's own block while that is not complete. At equal scores the earlier block
    wins."""

    def __init__(
        self,
        step: Step,
        visible: Visible,
        q_BHTD: jax.Array,
        blocks: KeyBlocks,
        spec: BlockIndexer,
        layout: Layout | None = None,
    ):
        super().__init__(step, visible)
        self.layout = layout
        self.spec = spec
        self.blocks = blocks
        self.queries: tuple[jax.Array, ...] = (*self.queries, jnp.swapaxes(q_BHTD, 1, 2))

    @staticmethod
    def selects(spec: BlockIndexer, length: int) -> bool:
        """Tells whether `length` visible tokens may have more complete blocks than a query sees."""
        return length // spec.block_size > spec.blocks

    def of(self, positions_BT: jax.Array, segments_BT: jax.Array, q_BTHD: jax.Array) -> jax.Array:
        """Returns the mask bool[B, T, C] of some queries. The arguments are the arrays of
        `queries`, cut along T."""
        size = self.spec.block_size
        complete_BTn = Mask.of(self.between((), self.blocks.marks), positions_BT, segments_BT)
        numbers = self.blocks.marks[0] // size, self.keys[0] // size
        chosen_BTC = by_rows(
            self._chosen, self.layout, complete_BTn, self.scores(q_BTHD), shared=numbers
        )
        open_BTC = numbers[1][:, None] >= ((positions_BT + 1) // size)[..., None]
        return super().of(positions_BT, segments_BT) & (chosen_BTC | open_BTC)

    def scores(self, q_BTHD: jax.Array) -> jax.Array:
        """Returns the index scores of all blocks, visible or not, float32[B, T, n]."""
        dots = jnp.einsum(
            "bthd,bnd->bthn", q_BTHD, self.blocks.keys, preferred_element_type=jnp.float32
        )
        return jnp.sum(jax.nn.relu(dots), axis=2) * q_BTHD.shape[-1] ** -0.5

    def choose(
        self, positions_BT: jax.Array, segments_BT: jax.Array, q_BTHD: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (the columns of a cache that queries see int32[B, T, k], whether each counts
        bool[B, T, k]), with k of `columns`. The arguments are the arrays of `queries`, cut along T.
        """
        size = self.spec.block_size
        C = self.keys[0].shape[1]
        complete_BTn = Mask.of(self.between((), self.blocks.marks), positions_BT, segments_BT)
        best, counts = by_rows(self._best, self.layout, complete_BTn, self.scores(q_BTHD))
        opened = ((positions_BT + 1) // size)[..., None]
        blocks = jnp.concatenate([best, opened], axis=-1)
        columns = blocks[..., None] * size + jnp.arange(size)
        counts = jnp.concatenate([counts, (segments_BT != 0)[..., None]], axis=-1)
        seen = counts[..., None] & (columns <= positions_BT[..., None, None])
        merged = (*positions_BT.shape, -1)
        return jnp.minimum(columns, C - 1).reshape(merged), seen.reshape(merged)

    @property
    def columns(self) -> int:
        """Returns how many columns `choose` names for a query."""
        return (min(self.spec.blocks, self.blocks.keys.shape[1]) + 1) * self.spec.block_size

    def _best(self, complete_BTn: jax.Array, scores_BTn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (the best blocks int32[B, T, k], whether each is complete bool[B, T, k])."""
        k = min(self.spec.blocks, complete_BTn.shape[-1])
        _, best = jax.lax.top_k(jnp.where(complete_BTn, scores_BTn, -jnp.inf), k)
        return best, jnp.take_along_axis(complete_BTn, best, axis=-1)

    def _chosen(
        self,
        complete_BTn: jax.Array,
        scores_BTn: jax.Array,
        numbers_Bn: jax.Array,
        of_keys_BC: jax.Array,
    ) -> jax.Array:
        """Returns the keys in the best blocks, bool[B, T, C]. `numbers` are those of the blocks and
        of the keys' own: on the path of a query each number stands for one block."""
        B, T, _ = complete_BTn.shape
        best, counts = self._best(complete_BTn, scores_BTn)
        count = -(-of_keys_BC.shape[1] // self.spec.block_size)
        number = jnp.where(
            counts, jnp.take_along_axis(numbers_Bn[:, None], best, axis=-1), count
        )  # dropped
        none = jnp.zeros((B, T, count), jnp.bool_)
        chosen = none.at[jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], number].set(
            True, mode="drop"
        )
        return jnp.take_along_axis(chosen, of_keys_BC[:, None], axis=-1)


def attend_blocks(
    q_BHTD: jax.Array, visible: Visible, mask: BlockMask, cache: LayerCache | None, chunk: int
) -> jax.Array:
    """Computes softmax(q k^T) v over the keys that `mask` allows, [B, H, T, D], with the scale
    already in q. `chunk` as in policy/attention/dot_product_attention.py.

    Over a cache a few queries read copies of the keys and values that they see; otherwise all keys
    are scored and a mask leaves those.
    """
    T = q_BHTD.shape[2]
    C = visible.positions.shape[1]
    if cache is None or T * mask.columns >= C:
        return attend(q_BHTD, visible.arrays["k"], visible.arrays["v"], mask, chunk)
    columns, counts = mask.choose(*mask.queries)
    keys, values = (gather_entries(cache, name, columns, q_BHTD.dtype) for name in "kv")
    B, H, _, D = q_BHTD.shape
    q = q_BHTD.reshape(B, keys.shape[1], -1, T, D)
    scores = jnp.einsum("bkgtd,bktcd->bkgtc", q, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(counts[:, None, None], scores, MASKED), axis=-1).astype(
        values.dtype
    )
    return jnp.einsum("bkgtc,bktcd->bkgtd", weights, values).reshape(B, H, T, D)
