"""Towers: pictures and sounds to rows that stand in the place of token embeddings. One file a kind,
and policy/media.py describes each as data.

A module is created by `(spec, out_width, rngs)`. A call takes values float32[R, N, K], the inputs
of R items padded to N, and shapes int32[R, 2], (height, width) in patches or (frames, 1). It
returns rows [R, M, E] and deepstack features [S, R, M, E] or None. The first
`spec.rows_of(shape)` rows of an item are its own; the others stand for padding.
Padding changes no row of an item, nor does another item.
"""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx

from policy.media import (
    ChunkedAudio,
    Conformer,
    GridVision,
    PooledVision,
    Siglip,
    TileVision,
    Tower,
    WindowVision,
)
from policy.towers.chunked_audio import ChunkedAudioTower
from policy.towers.conformer import ConformerTower
from policy.towers.grid_vision import GridVisionTower
from policy.towers.pooled_vision import PooledVisionTower
from policy.towers.siglip import SiglipTower
from policy.towers.tile_vision import TileVisionTower
from policy.towers.window_vision import WindowVisionTower

MODULES: dict[type, Callable[..., nnx.Module]] = {
    GridVision: GridVisionTower,
    WindowVision: WindowVisionTower,
    Siglip: SiglipTower,
    TileVision: TileVisionTower,
    PooledVision: PooledVisionTower,
    Conformer: ConformerTower,
    ChunkedAudio: ChunkedAudioTower,
}


def create(spec: Tower, out_width: int, rngs: nnx.Rngs) -> nnx.Module:
    """Creates the tower that `spec` describes, with rows of `out_width`."""
    return MODULES[type(spec)](spec, out_width, rngs)
