"""How many floating-point operations a decoder needs, counted from its configuration; the numerator of utilisation.

The convention: a product with a weight counts 2 for each number of it and each token, and attention 2 for each number of a query
and of a value and each key that the query sees (causal: a sequence of n tokens has n (n + 1) / 2 pairs, fewer with a window). A
gradient costs twice what its forward pass does. What is computed again (remat) or computed for padding does not count, nor do
norms, activations and sampling. Frameworks that count every pair of tokens, seen or not, show up to twice as much at long context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from policy.config import Attention, GatedDeltaNet, LatentAttention, LayerSpec
from rl.reporting import chips

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout
    from policy.model import Graph

# Logical axes that matrices outside of policy/ops/linear.py sum over: routers, gates and indexers.
_INPUTS = {"embed", "q_lora"}


@dataclass(frozen=True, eq=False)
class Operations:
    """Of the model of `graph`, with or without its `head` of V outputs."""

    graph: Graph
    head: bool = True

    @cached_property
    def active_weights(self) -> float:
        """Numbers of the matrices that one token is multiplied with: of E routed experts the k that it goes to. Tables in which
        rows are looked up count nothing, norms, biases and convolutions neither."""
        result, config = 0.0, self.graph.config
        head = ({"embed_tokens"} if config.tied_head else {"lm_head"}) if self.head else set()
        for path, shape in self.graph.shapes.items():
            if path not in head and path not in self.graph.inputs and not _INPUTS & set(self.graph.axes[path]):
                continue
            share = 1.0
            if "exp" in self.graph.axes[path]:
                router = self._layer(path).moe.router
                share = router.experts_per_token / router.experts
            result += share * math.prod(shape.shape)
        return result

    def forward(self, lengths, weighed: float | None = None) -> float:
        """Of one pass over sequences of these lengths. `weighed`: tokens that are multiplied with the weights, where they are
        fewer than all: completions share the prompt that they continue."""
        lengths = np.asarray(lengths, np.float64)
        tokens = float(lengths.sum()) if weighed is None else weighed
        mixers = [spec.mixer for spec in self.graph.config.layers]
        if (mtp := self.graph.config.multi_token_prediction) is not None:
            mixers += [mtp.layer.mixer] * mtp.depth
        different = {mixer: mixers.count(mixer) for mixer in mixers if mixer is not None}
        return 2.0 * self.active_weights * tokens + sum(n * _mixing(mixer, lengths) for mixer, n in different.items())

    def _layer(self, path: str) -> LayerSpec:
        """The layer whose weights lie at `path`."""
        config, parts = self.graph.config, path.split(".")
        if parts[0] == "stacks":
            return config.stacks[int(parts[1])].pattern[int(parts[3])]
        return config.multi_token_prediction.layer


def _mixing(mixer: Attention | LatentAttention | GatedDeltaNet, lengths: np.ndarray) -> float:
    """What a layer does between tokens."""
    if isinstance(mixer, GatedDeltaNet):
        # The state read with the key, written, and read with the query.
        return 6.0 * mixer.value_heads * mixer.key_dim * mixer.value_dim * float(lengths.sum())
    if isinstance(mixer, Attention):
        return 4.0 * mixer.heads * mixer.head_dim * _pairs(lengths, mixer.window, mixer.chunk)
    numbers = mixer.nope_dim + mixer.rope.dim + mixer.v_dim
    if mixer.indexer is None:
        return 2.0 * mixer.heads * numbers * _pairs(lengths)
    chosen = 2.0 * mixer.heads * numbers * _pairs(lengths, mixer.indexer.topk)
    return chosen + 2.0 * mixer.indexer.heads * mixer.indexer.head_dim * _pairs(lengths)


def _pairs(lengths: np.ndarray, window: int | None = None, chunk: int | None = None) -> float:
    """Pairs of a query and a key that it sees, in causal sequences: at most `window` keys a query, none before its `chunk`."""
    if chunk:
        whole, rest = np.divmod(lengths, chunk)
        return float((whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2).sum())
    seen = np.minimum(lengths, window or np.inf)
    return float((seen * (seen + 1) / 2 + (lengths - seen) * seen).sum())


def rates(part: str, operations: float, tokens: float, seconds: float, layout: Layout) -> dict[str, float]:
    """Metrics of a part of a step, for each device of the mesh: tokens and 10^12 operations a second, and the share of the most it
    can do in bfloat16 where that is known (rl/reporting/chips.py). None of a part that took no time: it was left out."""
    if not seconds:
        return {}
    devices = layout.mesh.devices
    each = seconds * devices.size
    rate, chip = operations / each / 1e12, chips.of(devices.flat[0].device_kind)
    result = {f"perf/{part}_tokens_per_s": tokens / each, f"perf/{part}_tflops_per_s": rate}
    return result | ({f"perf/mfu_{part}": rate / chip.tflops} if chip else {})


def memory_share(bytes_: float, seconds: float, layout: Layout) -> dict[str, float]:
    """The metric of so many bytes read from the memory of each device while sampling, as a share of what it delivers at most; none
    where that is not known (rl/reporting/chips.py)."""
    chip = chips.of(layout.mesh.devices.flat[0].device_kind)
    return {"perf/sample_hbm_utilisation": bytes_ / (seconds * chip.bandwidth * 1e9)} if chip and seconds else {}


def lengths(segments_NT: np.ndarray) -> np.ndarray:
    """Tokens of each sequence in these rows, where they are numbered 1, 2, ..."""
    segments = np.asarray(segments_NT)
    counts = [np.count_nonzero(segments == number, axis=1) for number in range(1, int(segments.max(initial=0)) + 1)]
    result = np.concatenate(counts) if counts else np.zeros(0, int)
    return result[result > 0]
