"""The audio tower of Qwen3-Omni.

R clips, N frames, K numbers of a frame, C chunks of a clip, F frames of a chunk, D width of the
tower, M rows, E hidden size of the decoder.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from policy.config import LayerNorm, Runtime
from policy.experts.mlp import ACTIVATIONS
from policy.media import ChunkedAudio, halved
from policy.ops.norms import MeanNorm
from policy.ops.parameter import normal, stacked, weight, zeros
from policy.ops.rope import sinusoids
from policy.towers.blocks import (
    Projections,
    TowerBlock,
    convolved,
    for_towers,
    prepared,
    real_inputs,
    run,
    within,
)

CONVOLUTIONS = ("first", "second", "third")


class ChunkedAudioTower(Projections):
    """Log-mel frames to rows of the decoder's width."""

    def __init__(self, spec: ChunkedAudio, out_width: int, rngs: nnx.Rngs):
        self.spec = spec
        D = spec.encoder.width
        channels = spec.channels
        for name, inputs in zip(CONVOLUTIONS, (1, channels, channels), strict=True):
            setattr(
                self,
                f"{name}_conv",
                weight(
                    rngs,
                    (3, 3, inputs, channels),
                    (None, None, None, "mlp"),
                    normal(spec.initializer_range),
                ),
            )
            setattr(self, f"{name}_bias", weight(rngs, (channels,), ("mlp",), zeros))
        self.add(
            rngs, "frame", ((halved(spec.mels, 3), channels), (D,)), ((None, "mlp"), ("embed",))
        )
        self.blocks = stacked(partial(TowerBlock, spec.encoder), rngs, spec.encoder.depth)
        self.norm = MeanNorm(D, LayerNorm(spec.encoder.eps), rngs)
        self.add(rngs, "up", ((D,), (D,)), (("embed",), ("mlp",)), bias=True)
        self.add(rngs, "down", ((D,), (out_width,)), (("mlp",), ("embed",)), bias=True)

    def __call__(
        self, values_RNK: jax.Array, shape_R2: jax.Array, runtime: Runtime
    ) -> tuple[jax.Array, None]:
        """Returns (rows [R, M, E], None) of clips of `shape` (frames, 1); frames past it are
        padding."""
        spec = self.spec
        runtime = for_towers(runtime)
        x = prepared(values_RNK, real_inputs(shape_R2, values_RNK.shape[1]), runtime)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % spec.chunk), (0, 0)))
        x = self._chunks(x.reshape(-1, spec.chunk, spec.mels), runtime)
        x = x.reshape(len(values_RNK), -1, x.shape[-1])
        groups = jnp.where(self._real_rows(shape_R2, x.shape[1]), self._windows(x.shape[1]), 0)
        mask = within(groups)
        x, _ = run(self.blocks, x, lambda block, x: block(x, mask, None, runtime), runtime)
        x = self.project(self.norm(x), "up", runtime)
        return self.project(ACTIVATIONS[spec.encoder.activation](x), "down", runtime), None

    def _chunks(self, x_CFK: jax.Array, runtime: Runtime) -> jax.Array:
        """Returns the rows of each chunk of frames, with sinusoids that start anew in each: [C,
        rows, D]."""
        x = x_CFK[..., None]
        for name in CONVOLUTIONS:
            kernel = getattr(self, f"{name}_conv")[...]
            bias = getattr(self, f"{name}_bias")[...]
            x = ACTIVATIONS["gelu"](convolved(x, kernel) + bias.astype(x.dtype))
        x = self.project(x, "frame", runtime, over=2)
        return x + sinusoids(jnp.arange(x.shape[1])[None], x.shape[-1]).astype(x.dtype)

    def _windows(self, rows: int) -> jax.Array:
        """Returns the number of each row's window, from 1."""
        return jnp.arange(rows) // (self.spec.chunk_rows * self.spec.window) + 1

    def _real_rows(self, shape_R2: jax.Array, rows: int) -> jax.Array:
        """Returns bool[R, M]. Only the last chunk of a clip has fewer rows than there is room
        for."""
        spec = self.spec
        frames = shape_R2[:, 0]
        rest = halved(frames % spec.chunk, 3)
        return jnp.arange(rows) < (spec.chunk_rows * (frames // spec.chunk) + rest)[:, None]
