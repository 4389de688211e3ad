"""Estimates what a remat policy keeps between the forward and the backward pass, from the shapes of
weights. Nothing is traced or compiled.

A token of a layer has an input, the outputs of products with weights, the output of attention and,
in short rows, the scores of attention. Rows of experts are counted without the padding of their
blocks, and recurrent mixers by their products alone: factors (`_KeptOverCounted`) stand for the
rest.
tests/unit/test_activations.py compares the sums with the values that jax keeps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import jax.numpy as jnp

from policy import remat
from policy.attention.block_attention import SHORTEST_FLAT
from policy.config import Attention, CompressedAttention, DecoderConfig, LatentAttention, LayerSpec
from policy.heads.head import CHUNK_LOGITS, Tiling
from policy.media import is_tower
from policy.mesh.sharding import axes_of
from policy.model import Graph

# The last name of a weight's path -> the names of policy/remat.py for its product, each as wide.
_PRODUCTS = {
    "q_proj": ("query_proj",),
    "k_proj": ("key_proj",),
    "v_proj": ("value_proj",),
    "q_a_proj": ("query_wa_proj", "mla_q"),
    "q_b_proj": ("query_proj",),
    "kv_a_proj": ("kv_wa_proj", "mla_kv"),
    "kv_b_proj": ("key_proj",),
    "kv_proj": ("key_proj",),
    "o_proj": ("out_proj",),
    "o_b_proj": ("out_proj",),
    "gate_proj": ("mlpwi_0",),
    "up_proj": ("mlpwi_1",),
    "down_proj": ("mlpwo",),
}
_DERIVED = ("mla_q", "mla_kv")  # norms of other products: `none` computes them again


class _KeptOverCounted(NamedTuple):
    """Kept numbers over counted ones, under the policy `none` and under others."""

    none: float
    others: float


# Decoders whose layers have attention and dense feed-forwards only, and others.
_DENSE = _KeptOverCounted(none=1.1, others=1.1)
_FURTHER = _KeptOverCounted(none=2.75, others=1.5)


class Activations:
    """Numbers per token and device in all layers, by the name of the value.

    widest: the numbers of one repeat of the pattern of layers that has most.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._numbers: dict[str, float] = defaultdict(float)
        repeats: dict[str, float] = defaultdict(float)
        for path, inputs in graph.inputs.items():
            if is_tower(path) or graph.axes[path][0] != "layers":
                continue
            outputs, summed = self._of_token(path, inputs)
            kind = path.rsplit(".", 1)[-1].removeprefix("expert_")
            values = dict.fromkeys(_PRODUCTS.get(kind, (kind,)), outputs)
            if kind == "o_proj":
                values["context"] = summed
            if kind == "up_proj" and "exp" in graph.axes[path]:
                values["rows of experts"] = _experts(graph.config) * graph.config.hidden_size
            if kind == "down_proj" and not self._is_read(path):
                values = {}
            count = graph.shapes[path].shape[0]
            for name, numbers in values.items():
                self._numbers[name] += count * numbers
            repeats[".".join(path.split(".")[:2])] += sum(values.values())
        inputs = graph.config.hidden_size * (getattr(graph.config.hyper_connections, "streams", 1))
        self._numbers["decoder_layer_input"] = float(inputs * _repeats(graph.config))
        self.widest = max(repeats.values(), default=0.0)
        self._more = _DENSE if all(map(_is_dense, graph.config.layers)) else _FURTHER
        self._heads = [
            mixer.heads
            for layer in graph.config.layers
            for mixer in layer.mixers
            if isinstance(mixer, Attention | LatentAttention | CompressedAttention)
        ]

    def _of_token(self, path: str, inputs: tuple[int, ...]) -> tuple[float, float]:
        """Returns (the outputs, the inputs) of the product with a weight, per token and device."""
        graph = self.graph
        rules = dict(graph.layout.rules)
        rows = {*rules["batch"], *rules["length"]}
        mesh = graph.layout.mesh.shape
        axes = graph.axes[path]
        sizes = graph.shapes[path].shape
        spec = [axes_of(dims) for dims in graph.layout.spec(axes, sizes)]
        experts = _experts(graph.config) if "exp" in axes else 1

        def numbers(dims: list[int]) -> float:
            cut = math.prod(mesh[axis] for i in dims for axis in spec[i] if axis not in rows)
            return experts * math.prod(sizes[i] for i in dims) / cut

        others = [i for i, axis in enumerate(axes) if axis not in ("layers", "exp")]
        return numbers([i for i in others if i not in inputs]), numbers(
            [i for i in others if i in inputs]
        )

    def _is_read(self, path: str) -> bool:
        """Whether the backward pass reads the output of this down projection: that of experts, and
        that with a norm behind it."""
        layer = ".".join(path.split(".")[:4])
        norm = f"{layer}.post_feedforward_layernorm"
        return "exp" in self.graph.axes[path] or any(
            each.startswith(norm) for each in self.graph.paths
        )

    def scores(self, length: int) -> float:
        """Returns the scores of attention per token of a row of `length` tokens, in all layers.
        Long rows are computed in chunks, by blocks or by kernels, which keep none."""
        by_blocks = self.graph.layout.platform == "cpu" and length >= SHORTEST_FLAT
        if by_blocks or length > self.graph.runtime.attention_chunk:
            return 0.0
        return float(sum(self._heads) * length / self.graph.layout.mesh.shape["tensor"])

    def kept(self, policy: str, length: int, tensors: tuple[tuple[str, str], ...] = ()) -> float:
        """Returns the bytes per token that a policy keeps in the memory of a device, in rows of
        `length` tokens. `tensors`: of the policy "custom"."""
        if policy == "none":
            numbers = sum(n for name, n in self._numbers.items() if name not in _DERIVED)
            return self._more.none * (self._bytes * numbers + 4.0 * self.scores(length))
        saved = remat.saved(policy, tensors)
        names = {*saved.device} | ({"decoder_layer_input"} - {*saved.host})
        return self._more.others * self._bytes * sum(self._numbers[name] for name in sorted(names))

    def working(self, length: int) -> float:
        """Returns the bytes per token of what the backward pass of one repeat of a stack computes:
        its values and as many gradients."""
        scores = 4.0 * self.scores(length) / max(1, len(self._heads))
        return 2.0 * (self._bytes * self.widest + scores)

    def head(self, tokens: float) -> float:
        """Returns the bytes of a tile of logits and of its gradient, for so many tokens of a
        device. The tile is the largest; on a CPU tiles are smaller."""
        vocabulary = self.graph.config.vocab_size / self.graph.layout.mesh.shape["tensor"]
        return 8.0 * min(CHUNK_LOGITS, tokens * vocabulary)

    @property
    def _bytes(self) -> int:
        return jnp.dtype(self.graph.runtime.dtype).itemsize


def kept_logits(graph: Graph, tokens: float, sides: int = 1) -> float:
    """Returns the bytes of logits that a device keeps for the gradient of so many tokens. sides: 2
    where they are compared with the logits of a teacher."""
    own = graph.config.vocab_size // graph.layout.mesh.shape["tensor"]
    runtime = graph.runtime
    tiling = Tiling(runtime.num_vocab_tiling, graph.layout, runtime.kept_logits_mib)
    rows = sides * tokens
    return 4.0 * rows * own if tiling.keeps(math.ceil(rows), own) else 0.0


def _is_dense(layer: LayerSpec) -> bool:
    return layer.moe is None and all(
        isinstance(mixer, Attention | LatentAttention) for mixer in layer.mixers
    )


def _experts(config: DecoderConfig) -> int:
    """Returns how many experts compute a token."""
    return max((spec.moe.router.experts_per_token for spec in config.layers if spec.moe), default=1)


def _repeats(config: DecoderConfig) -> int:
    return sum(stack.repeats for stack in config.stacks)
