"""Counts the floating-point operations of a decoder from its configuration: the numerator of
utilisation.

A product with a weight counts 2 per weight element and token. Attention counts 2 per element of a
query and of a value and per key that the query sees; a causal sequence of n tokens has n (n + 1) /
2 pairs, fewer with a window. A gradient counts twice its forward pass. Recomputation (remat),
padding, norms, activations and sampling do not count. Frameworks that count every pair of tokens
report up to twice as much at long context. A weight under an adapter has no gradient: its products
count once forward and once for the gradient of their inputs.

N rows, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from policy.adapter_spec import LORA_A, LORA_B
from policy.config import (
    Attention,
    CompressedAttention,
    Compression,
    LatentAttention,
    LayerSpec,
    Mamba2,
    Recurrent,
    SharedIndexer,
    ShortConv,
)
from policy.media import is_tower
from rl.accounting import chips

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from policy.adapters.learning import Adapters
    from policy.mesh.sharding import Layout
    from policy.model import Graph

EMBEDDING = "embed_tokens"


@dataclass(frozen=True, eq=False)
class Operations:
    """Counts the operations of the model of `graph`, with or without its `head`. adapters: what
    learns over its weights; None: the weights learn."""

    graph: Graph
    head: bool = True
    adapters: Adapters | None = None

    @cached_property
    def active_weights(self) -> float:
        """Returns how many weight elements multiply one token, without adapters. Of the E routed
        experts, k count.

        Lookup tables, norms, biases and convolutions do not count.
        """
        return sum(map(self._of_token, self._multiplied))

    @cached_property
    def adapter_weights(self) -> float:
        """Returns how many elements of factors of adapters multiply one token. A factor that all
        experts share multiplies it for each of its k experts. Of the embedding B does, and A is
        looked up."""
        if self.adapters is None:
            return 0.0
        multiplied = {*self._multiplied}
        result = 0.0
        for target in self.adapters.spec.adapted:
            experts = self._experts_of_token(target.path)
            if target.path in multiplied:
                result += experts * self._of_matrix(target.path + LORA_A)
            if target.path in multiplied or target.path == EMBEDDING:
                result += experts * self._of_matrix(target.path + LORA_B)
        return result

    def _of_matrix(self, path: str) -> float:
        """Returns the elements of a factor of an adapter, of one expert, in all layers."""
        assert self.adapters is not None  # which has the factor
        return _without_experts(self.adapters.sizes[path], self.adapters.axes[path])

    @cached_property
    def _without_gradient(self) -> float:
        """Returns how many of the `active_weights` do not learn."""
        if self.adapters is None:
            return 0.0
        learned = {*self.adapters.spec.train}
        return sum(self._of_token(path) for path in self._multiplied if path not in learned)

    @cached_property
    def _multiplied(self) -> list[str]:
        """Returns the paths of the weights that multiply tokens."""
        config = self.graph.config
        head = ({EMBEDDING} if config.tied_head else {"lm_head"}) if self.head else set()
        return [
            path
            for path in self.graph.shapes
            if not is_tower(path)  # towers read pictures and sounds, not tokens
            and (path in head or path in self.graph.matrices)
        ]

    def _of_token(self, path: str) -> float:
        """Returns how many elements of a weight multiply one token."""
        of_one = _without_experts(self.graph.shapes[path].shape, self.graph.axes[path])
        return self._experts_of_token(path) * of_one

    def _experts_of_token(self, path: str) -> int:
        """Returns how many experts with a weight like this one a token goes to; 1 for weights of no
        routed expert."""
        if "exp" not in self.graph.axes[path]:
            return 1
        moe = self._layer(path).moe
        assert moe is not None  # only experts have an "exp" axis
        return moe.router.experts_per_token

    def forward(self, lengths: ArrayLike, weighed: float | None = None) -> float:
        """Returns the operations of one forward pass over sequences of these lengths.

        weighed: tokens that the weights multiply, if completions share a prompt; None: all.
        """
        lengths = np.asarray(lengths, np.float64)
        tokens = float(lengths.sum()) if weighed is None else weighed
        mixers = [mixer for spec in self.graph.config.layers for mixer in spec.mixers]
        if (mtp := self.graph.config.multi_token_prediction) is not None:
            mixers += list(mtp.layer.mixers) * mtp.depth
        different = {mixer: mixers.count(mixer) for mixer in mixers}
        weights = self.active_weights + self.adapter_weights
        return 2.0 * weights * tokens + sum(
            n * _mixing(mixer, lengths) for mixer, n in different.items()
        )

    def with_gradient(self, lengths: ArrayLike) -> float:
        """Returns the operations of one forward pass over sequences of these lengths and of the
        gradient of all that learns."""
        tokens = float(np.sum(lengths))
        return 3.0 * self.forward(lengths) - 2.0 * self._without_gradient * tokens

    def of_runs(self, ends: np.ndarray, starts: np.ndarray) -> float:
        """Returns the operations of one forward pass over runs of tokens: of a sequence up to
        `ends`, without its tokens up to `starts`, which another run has computed."""
        return self.forward(ends) - self.forward(starts)

    def of_runs_with_gradient(self, ends: np.ndarray, starts: np.ndarray) -> float:
        """Returns the operations of one forward pass over such runs and of its gradient."""
        return self.with_gradient(ends) - self.with_gradient(starts)

    def _layer(self, path: str) -> LayerSpec:
        """Returns the layer that the weight at `path` belongs to."""
        config = self.graph.config
        parts = path.split(".")
        if parts[0] == "stacks":
            return config.stacks[int(parts[1])].pattern[int(parts[3])]
        assert (
            config.multi_token_prediction is not None
        )  # every other routed layer is a prediction module
        return config.multi_token_prediction.layer


def _without_experts(size: tuple[int, ...], axes: tuple[str | None, ...]) -> float:
    """Returns the elements of an array, of one of its experts."""
    return math.prod(each for each, axis in zip(size, axes, strict=True) if axis != "exp")


def _mixing(
    mixer: Attention | LatentAttention | CompressedAttention | Recurrent, lengths: np.ndarray
) -> float:
    """Returns the operations between tokens of one layer."""
    if isinstance(mixer, ShortConv):
        return 0.0  # convolutions do not count
    if isinstance(mixer, Recurrent):
        # Per token: read the state with the key (not Mamba2), write it, read it with the query.
        products = 4.0 if isinstance(mixer, Mamba2) else 6.0
        return products * mixer.value_heads * mixer.key_dim * mixer.value_dim * float(lengths.sum())
    if isinstance(mixer, Attention):
        operations = 4.0 * mixer.heads * mixer.head_dim
        if (blocks := mixer.indexer) is None:
            return operations * _pairs(lengths, mixer.window, mixer.chunk)
        size = blocks.block_size
        full, rest = np.divmod(lengths, size)
        in_open_blocks = float((full * size * (size - 1) / 2 + rest * (rest + 1) / 2).sum())
        seen = size * _block_pairs(lengths, size, blocks.blocks) + in_open_blocks
        return operations * seen + 2.0 * blocks.heads * blocks.head_dim * _block_pairs(
            lengths, size
        )
    if isinstance(mixer, CompressedAttention):
        seen = _pairs(lengths, mixer.window)
        chosen, scored = (
            (0.0, 0.0) if mixer.compression is None else _with_entries(mixer.compression, lengths)
        )
        return 4.0 * mixer.heads * mixer.head_dim * (seen + chosen) + scored
    numbers = mixer.nope_dim + mixer.rope.dim + mixer.v_dim
    if mixer.indexer is None:
        return 2.0 * mixer.heads * numbers * _pairs(lengths)
    chosen = 2.0 * mixer.heads * numbers * _pairs(lengths, mixer.indexer.topk)
    if isinstance(mixer.indexer, SharedIndexer):
        return chosen
    return chosen + 2.0 * mixer.indexer.heads * mixer.indexer.head_dim * _pairs(lengths)


def _with_entries(compression: Compression, lengths: np.ndarray) -> tuple[float, float]:
    """Returns (pairs of a query and an entry that it sees, the operations that choose them)."""
    if (indexer := compression.indexer) is None:
        return _block_pairs(lengths, compression.rate), 0.0
    scored = 2.0 * indexer.heads * indexer.head_dim * _block_pairs(lengths, compression.rate)
    return _block_pairs(lengths, compression.rate, indexer.topk), scored


def _block_pairs(lengths: np.ndarray, rate: int, topk: int | None = None) -> float:
    """Counts pairs of a query and a block of `rate` tokens that is complete at it: of at most
    `topk` blocks each."""
    most = np.minimum(lengths // rate, topk or np.inf)
    return float((rate * most * (most - 1) / 2 + most * (lengths - most * rate + 1)).sum())


def _pairs(lengths: np.ndarray, window: int | None = None, chunk: int | None = None) -> float:
    """Counts pairs of a query and a key it sees in causal sequences: at most `window` keys, none
    before its `chunk`."""
    if chunk:
        full, rest = np.divmod(lengths, chunk)
        return float((full * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2).sum())
    seen = np.minimum(lengths, window or np.inf)
    return float((seen * (seen + 1) / 2 + (lengths - seen) * seen).sum())


def rates(
    phase: str, operations: float, tokens: float, seconds: float, layout: Layout
) -> dict[str, float]:
    """Returns the metrics of a phase of a step, per device: tokens per second, TFLOP/s and
    utilisation.

    Utilisation is the share of the bfloat16 peak, for chips in rl/accounting/chips.py. A phase of 0
    seconds has no metrics.
    """
    if not seconds:
        return {}
    devices = layout.mesh.devices
    each = seconds * devices.size
    rate = operations / each / 1e12
    chip = chips.of(devices.flat[0].device_kind)
    result = {f"perf/{phase}_tokens_per_s": tokens / each, f"perf/{phase}_tflops_per_s": rate}
    return result | ({f"perf/mfu_{phase}": rate / chip.tflops} if chip else {})


def memory_share(bytes_: float, seconds: float, layout: Layout) -> dict[str, float]:
    """Returns the share of HBM bandwidth that sampling used, for chips in rl/accounting/chips.py.

    bytes_: read from the memory of each device.
    """
    chip = chips.of(layout.mesh.devices.flat[0].device_kind)
    return (
        {"perf/sample_hbm_utilisation": bytes_ / (seconds * chip.bandwidth * 1e9)}
        if chip and seconds
        else {}
    )


def lengths(segments_NT: np.ndarray) -> np.ndarray:
    """Returns the tokens of each sequence of these rows; the sequences of a row are segments 1, 2,
    ..."""
    segments = np.asarray(segments_NT)
    counts = [
        np.count_nonzero(segments == number, axis=1)
        for number in range(1, int(segments.max(initial=0)) + 1)
    ]
    result = np.concatenate(counts) if counts else np.zeros(0, int)
    return result[result > 0]
