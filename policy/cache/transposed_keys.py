"""Keys of a contiguous cache that lie as [D, C] for each row and head, not as [C, D].

Decoding multiplies the few queries of a row with all of its keys. On CPU that product reads keys
that lie so once, in the order of memory (docs/decisions.md).

Shapes: R repeats of a stack, S slots, K heads, C entries, D head dimension, B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TransposedKeys:
    """The keys of the layers of a stack part: [R, S, K, D, C]."""

    array: jax.Array

    @property
    def places(self) -> int:
        """Returns C, the entries of a row."""
        return self.array.shape[4]

    def read(self, layer: jax.Array | int) -> jax.Array:
        """Returns the keys of layer number `layer`, [S, K, C, D]. A product that has them on the
        right reads them where they are."""
        return jnp.swapaxes(self.array[layer], 2, 3)

    def write(
        self, layer: jax.Array | int, rows: jax.Array, positions_BT: jax.Array, keys_BTKD: jax.Array
    ) -> TransposedKeys:
        """Writes keys of layer number `layer`, row b in slot rows[b]; those past the end are
        dropped."""
        array = self.array.at[layer, rows, :, :, positions_BT]
        keys = keys_BTKD.astype(self.array.dtype)
        return TransposedKeys(array.set(keys, mode="drop", unique_indices=True))

    def insert(self, slots_B: jax.Array, first: TransposedKeys) -> TransposedKeys:
        """Copies the entries of row b of a shorter cache to the first places of slot slots[b].
        Slots past the end, all different, are skipped."""
        array = self.array.at[:, slots_B, :, :, : first.places]
        return TransposedKeys(array.set(first.array, mode="drop", unique_indices=True))
