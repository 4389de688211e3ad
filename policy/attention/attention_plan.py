"""The types of attention over cut sequences: keys and their parts, bounds, positions, and the plan
that is known at compile time.

B rows, T tokens, H query heads, K key-value heads, D and V dimensions of keys and values. Small
letters are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from policy.attention.dot_product_attention import AttentionBounds, Mask, attend
from policy.attention.flash_attention import CutQueries
from policy.attention.sequence_shards import AXIS, balanced_places
from policy.cache.layer_cache import Visible
from policy.cache.media import Media
from policy.cache.step import Step
from policy.config import Runtime


class TokenPositions(NamedTuple):
    """The position in its document and the segment of each token, int32[b, t]; `Step.until`, which
    is None where no layer looks ahead; and `Tree.last`, None without trees."""

    positions: jax.Array
    segments: jax.Array
    until: jax.Array | None = None
    last: jax.Array | None = None


def _unchanged(parts, weights):
    return parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """The arrays from which `make(parts, weights) -> (k, v)` computes keys and values.

    parts: [B, K or 1, T, ?], one entry per token. weights: [?, H, ?], by head. Without weights the
    parts are keys and values.
    """

    parts: tuple[jax.Array, ...]
    weights: tuple[jax.Array, ...] = ()
    make: Callable = field(default=_unchanged, metadata={"static": True})


@dataclass(frozen=True)
class AttentionPlan:
    """Everything about a call that is known when it is compiled.

    devices: devices along the axis `context`. chunk: queries whose scores exist at a time.
    contiguous: tokens lie in order. balanced: each device has two runs of neighbours. trees:
    positions count along paths, so that a window cannot leave out keys by their place in the row.
    kernel: the kernel for TPUs; None: the dense form.
    """

    devices: int
    bounds: AttentionBounds
    chunk: int
    make: Callable
    contiguous: bool
    balanced: bool
    trees: bool
    kernel: CutQueries | None

    @classmethod
    def make_plan(
        cls, keys: Keys, step: Step, dtype: DTypeLike, bounds: AttentionBounds, runtime: Runtime
    ) -> AttentionPlan:
        """Plans a call over the tokens of `step` with queries of `dtype`."""
        assert runtime.layout is not None
        p = runtime.layout.mesh.shape[AXIS]
        kernel = None
        if bounds.chunk is None:
            places = balanced_places(step.segments.shape[1], p) if step.balanced else None
            kernel = CutQueries.of(step, dtype, runtime, AXIS, bounds, places)
        return cls(
            p,
            bounds,
            runtime.attention_chunk,
            keys.make,
            step.contiguous,
            step.balanced,
            step.tree is not None,
            kernel,
        )

    def mask(self, queries: TokenPositions, keys: TokenPositions) -> Mask:
        """Returns the mask between tokens at these positions."""
        bounds = self.bounds
        step = Step(queries.positions, queries.segments, media=Media(until=queries.until))
        return Mask(
            step,
            Visible({}, keys.positions, keys.segments, keys.last),
            bounds.window,
            bounds.chunk,
            bounds.looks_ahead,
        )

    def attend(
        self,
        q: jax.Array,
        queries: TokenPositions,
        k: jax.Array,
        v: jax.Array,
        keys: TokenPositions,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Computes attention of one device by the dense form."""
        return attend(q, k, v, self.mask(queries, keys), self.chunk, self.bounds.softcap, sinks)
