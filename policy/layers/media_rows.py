"""Rows of pictures and sounds in the residual stream: in the place of token embeddings, and added
after the first layers (deepstack).

The index of the step says which row goes where (policy/cache/media.py). Rows are read in the dtype
of the table, so that the gradients of a row that several tokens use are summed in this dtype.

B rows, T tokens, M rows of the table, E hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policy.cache.media import Media
from policy.config import DecoderConfig
from policy.mesh.sharding import Layout, constrain


def check(config: DecoderConfig, media: Media) -> None:
    """Raises ValueError for a table that does not fit the decoder."""
    if media.index is None:
        return
    layers = sum(spec.deepstack for spec in config.layers)
    if media.table.shape[1:] != (config.hidden_size,):
        raise ValueError(
            f"media: the table has shape {media.table.shape}; expected [rows, {config.hidden_size}]"
        )
    if media.deep is not None and media.deep.shape != (layers, *media.table.shape):
        raise ValueError(
            f"media: deep has shape {media.deep.shape}; expected {(layers, *media.table.shape)}"
        )


def place(x_BTE: jax.Array, media: Media, layout: Layout | None) -> jax.Array:
    """Puts the rows of the table in the place of the embeddings `x`."""
    if media.index is None:
        return x_BTE
    return jnp.where(media.index[..., None] >= 0, _rows(media.table, media, x_BTE, layout), x_BTE)


def add_deep(
    x_BTE: jax.Array, media: Media, layer: jax.Array | int, layout: Layout | None
) -> jax.Array:
    """Adds the features of layer number `layer` to its output `x`, at the tokens that have a
    row."""
    if media.deep is None:
        return x_BTE
    features_ME = jax.lax.dynamic_index_in_dim(media.deep, layer, keepdims=False)
    rows_BTE = _rows(features_ME, media, x_BTE, layout)
    return jnp.where(media.index[..., None] >= 0, x_BTE + rows_BTE, x_BTE)


def _rows(table_ME: jax.Array, media: Media, x_BTE: jax.Array, layout: Layout | None) -> jax.Array:
    """Returns table[index] in the dtype and with the sharding of `x`; row 0 where there is no
    row."""
    rows_BTE = jnp.asarray(table_ME)[jnp.maximum(media.index, 0)].astype(x_BTE.dtype)
    return constrain(rows_BTE, ("batch", "length", None), layout)
