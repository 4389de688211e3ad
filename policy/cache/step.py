"""Where the tokens of a call sit: their positions, segments, pages and routes. B rows, T tokens, R layers, k experts per token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from policy.ops.dropout import Dropout

# Stands in for the experts of a token whose route is not known; the router decides there.
UNKNOWN = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """Where the tokens of a call sit: position inside the document and segment (0: padding), both int32[B, T].

    The decoder fills in `tokens`, int32[B, T], and `rotations`, the (cos, sin) tables of all its rotary embeddings. `dropout` is
    for training only. `pages`, over a paged cache: the pages of each row, int32[B, M]. `routes`: the experts that tokens are to go
    to, -1 where they are not known, int[B, T, R, k] by path of the layer; in a layer its own, int[B, T, k]. None: routers choose.

    `whole`, known when a program is compiled: nothing before this call is looked at, and each segment is one run of tokens whose
    positions count by one, so that who looks at whom follows from order and segments alone. `balanced`: so it was, before the
    tokens were put into the balanced order of policy/attention/sequence_shards.py. `anywhere`: rows are not slots, and on a mesh their pages
    may lie in any part of the pool.
    """

    positions: jax.Array
    segments: jax.Array
    tokens: jax.Array | None = None
    rotations: dict[str, Any] | None = None
    dropout: Dropout | None = None
    pages: jax.Array | None = None
    routes: Any = None
    whole: bool = field(default=False, metadata={"static": True})
    balanced: bool = field(default=False, metadata={"static": True})
    anywhere: bool = field(default=False, metadata={"static": True})

    def at(self, layer: jax.Array | int) -> Step:
        """The same for the layer of that number."""
        return replace(self, dropout=self.dropout.at(layer))
