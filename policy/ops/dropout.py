"""Dropout whose bits depend only on the row, the layer and the place in the layer: not on
micro-batches, on the sharding of rows, or on whether layers are scanned.

B rows, T tokens, X any size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp

from policy.mesh.explicit import auto_axes, in_explicit_mode, spec_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """The dropout of one layer: elements become 0 with probability `rate`, the others are divided
    by 1 - rate.

    `seeds` uint32[B], one for each row; `layer` is the number of the layer (the embedding is -1).
    `places` int32[1, T]: the position of each token in its row; None: tokens are in order.
    """

    seeds: jax.Array
    layer: jax.Array | int = -1
    places: jax.Array | None = None
    rate: float = field(default=0.0, metadata={"static": True})

    def for_layer(self, layer: jax.Array | int) -> Dropout:
        """Returns the dropout of another layer."""
        return replace(self, layer=layer)


def row_seeds(seed: int, update: jax.Array, rows: int) -> jax.Array:
    """Returns uint32[rows]: the seeds of the rows of one update."""
    key = jax.random.fold_in(jax.random.key(seed), update)
    return jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), dtype=jnp.uint32))(
        jnp.arange(rows)
    )


def drop(x_BTX: jax.Array, dropout: Dropout | None, place: int = 0) -> jax.Array:
    """Drops elements of x; `place` numbers the dropouts of one layer."""
    if dropout is None or dropout.rate == 0.0:
        return x_BTX
    if in_explicit_mode():
        return cast(
            jax.Array, auto_axes(partial(drop, place=place), spec_of(x_BTX), x_BTX, dropout)
        )

    def keep(seed):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), dropout.layer + 1), place)
        return jax.random.bernoulli(key, 1.0 - dropout.rate, x_BTX.shape[1:])

    kept = jax.vmap(keep)(dropout.seeds)
    kept = kept if dropout.places is None else kept[:, dropout.places[0]]
    return jnp.where(kept, x_BTX / (1.0 - dropout.rate), 0).astype(x_BTX.dtype)
