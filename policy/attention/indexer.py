"""The indexer of sparse latent attention (arXiv 2512.02556), which selects the keys that a query
may see.

B rows, T queries, C visible keys, E hidden, H heads of the index, D their dimension, r rank of the
query latent, k selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from policy.attention.dot_product_attention import Mask
from policy.cache.layer_cache import LayerOutput, Visible
from policy.cache.step import Step
from policy.config import DecoderConfig, EntryIndexer, Indexer, Runtime
from policy.mesh.explicit import auto_axes, spec_of
from policy.mesh.sharding import Layout, constrain
from policy.ops.norms import MeanNorm
from policy.ops.parameter import normal, split_module, weight
from policy.ops.rope import rotate


class KeyIndexer(nnx.Module):
    """Scores every key for every query: sum_h w_h relu(q_h . k / sqrt(D)).

    Its inputs are detached, so that its loss does not reach the rest of the decoder.
    """

    def __init__(self, spec: Indexer, q_lora_rank: int, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        H = spec.heads
        D = spec.head_dim
        init = normal(config.initializer_range)
        self.wq_b = weight(
            rngs,
            (q_lora_rank, H, D),
            ("q_lora", "q_heads", "kv"),
            init,
            inputs=(0,),
            quantizable=False,
        )
        self.wk = weight(rngs, (E, D), ("embed", "kv"), init, inputs=(0,), quantizable=False)
        self.k_norm = MeanNorm(D, spec.norm, rngs)
        self.weights_proj = weight(
            rngs, (E, H), ("embed", "q_heads"), init, inputs=(0,), quantizable=False
        )

    def __call__(
        self, x_BTE: jax.Array, q_latent_BTr: jax.Array, step: Step
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Returns ((queries [B, T, H, D], their weights float32[B, T, H]), keys [B, 1, T, D]).

        The weights are computed in float32 whatever the dtype: lower precision decides near ties
        differently.
        """
        spec = self.spec
        dtype = x_BTE.dtype
        x, q_latent = jax.lax.stop_gradient((x_BTE, q_latent_BTr))
        table = step.rotation(spec.rope)
        q = rotate(
            jnp.einsum("btr,rhd->bhtd", q_latent, self.wq_b[...].astype(dtype)), spec.rope, table
        )
        k = rotate(self.k_norm(x @ self.wk[...].astype(dtype))[:, None], spec.rope, table)
        w = jnp.dot(
            x.astype(jnp.float32), self.weights_proj[...].astype(jnp.float32), precision="highest"
        )
        return (jnp.swapaxes(q, 1, 2), w * spec.heads**-0.5), k


SelectedT = TypeVar("SelectedT")


def by_rows(
    select: Callable[..., SelectedT],
    layout: Layout | None,
    *arrays_BTC: jax.Array,
    shared: tuple[jax.Array, ...] = (),
) -> SelectedT:
    """Runs `select` on each device's own queries: the partitioner would gather all rows on every
    device for top_k. `shared`: further arguments [B, ...], which all queries of a row read."""
    if layout is None or layout.mesh.size == 1:
        return select(*arrays_BTC, *shared)
    queries = layout.spec(
        ("cache_batch" if layout.cache_rows_differ else "batch", "length", None),
        arrays_BTC[0].shape,
    )
    specs = (*[queries] * len(arrays_BTC), *[PartitionSpec(queries[0])] * len(shared))
    return jax.shard_map(
        select, mesh=layout.mesh, in_specs=specs, out_specs=queries, check_vma=False
    )(*arrays_BTC, *shared)


class IndexedMask(Mask):
    """Allows the `topk` visible keys with the largest index scores; at equal scores the earlier key
    wins.

    With no more than `topk` keys it allows all of them and scores none. counts: (`Tree.count` of
    the queries,) in trees, else ().
    """

    def __init__(
        self,
        step: Step,
        visible: Visible,
        queries: tuple[jax.Array, jax.Array],
        spec: Indexer | EntryIndexer,
        layout: Layout | None = None,
    ):
        super().__init__(step, visible)
        self.layout = layout
        self.step = step
        self.own = visible
        if layout is not None and layout.cache_rows_differ:
            q, w = (constrain(a, ("cache_batch", *[None] * (a.ndim - 1)), layout) for a in queries)
            queries = q, w
        self.queries: tuple[jax.Array, ...] = (*self.queries, *queries)
        self.index_keys = visible.arrays["index"][:, 0]
        self.topk = spec.topk
        self.spec = spec
        self.counts: tuple[jax.Array, ...] = () if step.tree is None else (step.tree.count,)

    @property
    def selects(self) -> bool:
        """Tells whether there are more keys than a query may see."""
        return self.index_keys.shape[1] > self.topk

    def visible(self, positions_BT: jax.Array, segments_BT: jax.Array, *_) -> jax.Array:
        """Returns the keys that these queries could see without an indexer, bool[B, T, C]."""
        return super().of(positions_BT, segments_BT)

    def scores(self, q_BTHD: jax.Array, w_BTH: jax.Array) -> jax.Array:
        """Returns the index scores of all keys, visible or not, float32[B, T, C]."""
        dots = jnp.einsum(
            "bthd,bcd->bthc", q_BTHD, self.index_keys, preferred_element_type=jnp.float32
        )
        return jnp.einsum(
            "bthc,bth->btc",
            jax.nn.relu(dots * q_BTHD.shape[-1] ** -0.5),
            w_BTH,
            precision="highest",
        )

    def best(self, visible_BTC: jax.Array, scores_BTC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (indices of the selected keys int32[B, T, k], whether each counts bool[B, T, k]).

        Keys that are not visible come last and do not count.
        """
        return self._choose(self._best, visible_BTC, scores_BTC)

    def _best(self, visible_BTC, scores_BTC):
        _, chosen = jax.lax.top_k(
            jnp.where(visible_BTC, scores_BTC, -jnp.inf), min(self.topk, scores_BTC.shape[-1])
        )
        return chosen, jnp.take_along_axis(visible_BTC, chosen, axis=-1)

    def kept(self, visible_BTC: jax.Array, scores_BTC: jax.Array) -> jax.Array:
        """Returns the selection of `best` as a mask, bool[B, T, C]."""
        return self._choose(self._kept, visible_BTC, scores_BTC) if self.selects else visible_BTC

    def _kept(self, visible_BTC, scores_BTC):
        chosen, counts = self._best(visible_BTC, scores_BTC)
        B, T, _ = chosen.shape
        none = jnp.zeros(visible_BTC.shape, jnp.bool_)
        return none.at[jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], chosen].set(
            counts, unique_indices=True
        )

    def _choose(self, select, visible_BTC, scores_BTC):
        return by_rows(select, self.layout, visible_BTC, jax.lax.stop_gradient(scores_BTC))

    @property
    def keeps(self) -> bool:
        """Tells whether later layers see the keys that this mask selects."""
        return isinstance(self.spec, Indexer) and self.spec.keeps and self.selects

    def selected(self, selection_BTk: jax.Array) -> SelectedMask:
        """Returns the mask of keys that this one has selected already."""
        return SelectedMask(self.step, self.own, selection_BTk, self.layout)

    def choose(
        self, positions_BT: jax.Array, segments_BT: jax.Array, q_BTHD: jax.Array, w_BTH: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `best` of some queries. The arguments are the arrays of `queries`, cut along
        T."""
        return self.best(self.visible(positions_BT, segments_BT), self.scores(q_BTHD, w_BTH))

    def of(
        self, positions_BT: jax.Array, segments_BT: jax.Array, q_BTHD: jax.Array, w_BTH: jax.Array
    ) -> jax.Array:
        """Returns the mask bool[B, T, C] of some queries. The arguments are the arrays of
        `queries`, cut along T."""
        visible = self.visible(positions_BT, segments_BT)
        return self.kept(visible, self.scores(q_BTHD, w_BTH)) if self.selects else visible


class SelectedMask(Mask):
    """Allows the keys that an indexer selected: columns int32[B, T, k], -1 where a query has
    fewer."""

    def __init__(
        self, step: Step, visible: Visible, selection: jax.Array, layout: Layout | None = None
    ):
        super().__init__(step, visible)
        self.layout = layout
        self.columns = visible.positions.shape[1]
        self.topk = selection.shape[-1]
        self.queries: tuple[jax.Array, ...] = (*self.queries, selection)

    def choose(
        self, positions_BT: jax.Array, segments_BT: jax.Array, selection_BTk: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (indices of the selected keys int32[B, T, k], whether each counts bool[B, T,
        k])."""
        return jnp.maximum(selection_BTk, 0), selection_BTk >= 0

    def of(
        self, positions_BT: jax.Array, segments_BT: jax.Array, selection_BTk: jax.Array
    ) -> jax.Array:
        """Returns the mask bool[B, T, C] of some queries. The arguments are the arrays of
        `queries`, cut along T."""
        return by_rows(self._allowed, self.layout, selection_BTk)

    def _allowed(self, selection_BTk: jax.Array) -> jax.Array:
        B, T, _ = selection_BTk.shape
        columns = jnp.where(
            selection_BTk >= 0, selection_BTk, self.columns
        )  # past the last column: dropped
        none = jnp.zeros((B, T, self.columns), jnp.bool_)
        return none.at[jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], columns].set(
            True, mode="drop"
        )


def with_auto_axes(
    layer: nnx.Module, x_BTE: jax.Array, step: Step, runtime: Runtime
) -> LayerOutput:
    """Runs an attention layer without a cache in explicit mode and leaves shardings to the
    partitioner: a choice of keys has none of its own."""
    weights, module = split_module(layer)

    def run(weights, x_BTE, step):
        output = module(weights)(x_BTE, step, None, runtime)
        return output.hidden, output.aux

    places = (spec_of(x_BTE), PartitionSpec())
    hidden, aux = cast(tuple, auto_axes(run, places, weights, x_BTE, step))
    return LayerOutput(hidden, None, aux)
