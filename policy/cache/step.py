"""The metadata of a forward pass.

Shapes: B rows, T tokens, M pages of a row, R repeats of a stack, L layers with embeddings of their
own, n numbers of such an embedding, k experts or selected keys of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from policy.cache.media import Media
from policy.cache.paths import Tree
from policy.config import Rope
from policy.ops.dropout import Dropout

# Stands for the experts of a token whose route is not known; the router chooses there.
UNKNOWN = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """Where the tokens of a call sit and what they may attend to: the metadata of a forward pass.

    positions, segments: int32[B, T], the position of each token in its sequence, and the number of
    its sequence within
        the row (0: padding). Without `tree`, tokens attend to tokens of their own segment only.
    tree: where sequences share beginnings (policy/cache/paths.py); then `segments` are its nodes,
    and tokens attend to
        their paths. None: they share none.
    tokens, rotations: int32[B, T] and the (cos, sin) tables of all rotary embeddings; the decoder
    fills both in. dropout: for training only.
    pages: int32[B, M], the pages of each row in a paged cache.
    routes: the experts that tokens are sent to, -1 where unknown, int[B, T, R, k] by path of the
    layer; inside a layer
        its own int[B, T, k]. None: routers choose.
    layer_embeddings: the embeddings for each layer, [L, B, T, n]; inside a layer its
    own [B, T, n]. shared: the keys and values that layers before this one keep
    (policy/layers/shared_keys.py), by name. selection: int32[B, T, k], the keys that the nearest
    indexer with `keeps` chose (policy/layers/shared_index.py).

    media: the rows of pictures and sounds that stand in the place of token embeddings; None: the
    call has none. Rotary embeddings with sections turn by `media.turns`; order and masks go by
    `positions`. Layers that look ahead see keys up to `media.until`, the position of the last token
    of each token's block, its own outside of blocks. No call ends inside a block.

    Three flags are static, known when a program is compiled:
    contiguous: queries look at nothing before this call, and each segment is one run of tokens
    whose positions count by
        one; or, with `tree`, tokens lie in preorder. Order and segments, or nodes, then say what a
        query
        sees; windows and chunks of trees go by positions.
    balanced: `contiguous` was true before the tokens were put into the balanced order of
        policy/attention/sequence_shards.py.
    anywhere: row b is not slot b. On a mesh its pages may then lie in any shard of the pool, not
    only in the shard of
        the devices that compute the row.
    """

    positions: jax.Array
    segments: jax.Array
    tokens: jax.Array | None = None
    rotations: dict[str, Any] | None = None
    dropout: Dropout | None = None
    pages: jax.Array | None = None
    routes: Any = None
    layer_embeddings: jax.Array | None = None
    shared: dict[str, Any] | None = None
    selection: jax.Array | None = None
    media: Media | None = None
    tree: Tree | None = None
    contiguous: bool = field(default=False, metadata={"static": True})
    balanced: bool = field(default=False, metadata={"static": True})
    anywhere: bool = field(default=False, metadata={"static": True})

    def rotation(self, rope: Rope) -> Any:
        """Returns the (cos, sin) tables of one rotary embedding."""
        assert self.rotations is not None, "the decoder fills in the rotations"
        return self.rotations[str(rope)]

    def keys(self, name: str) -> Any:
        """Returns the keys and values that an earlier layer keeps under `name`."""
        assert self.shared is not None, "the decoder hands on what a layer keeps"
        return self.shared[name]

    @property
    def turns(self) -> jax.Array | None:
        """Returns the rotary positions of pictures and sounds, `media.turns`; None for text."""
        return None if self.media is None else self.media.turns

    @property
    def until(self) -> jax.Array | None:
        """Returns how far queries look ahead, `media.until`; None where none does."""
        return None if self.media is None else self.media.until

    def for_layer(self, layer: jax.Array | int) -> Step:
        """Returns the step of layer number `layer`. Needs `dropout`."""
        assert self.dropout is not None
        return replace(self, dropout=self.dropout.for_layer(layer))
