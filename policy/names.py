"""How a weight of ours is stored in a Hugging Face file. A family's table maps the end of our path to one of these.

Ours are [inputs..., outputs...]; a torch Linear stores [outputs, inputs] with heads flattened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plain:
    """The same layout up to the shape: norms, biases, embedding tables."""

    name: str

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if len(shape) != 2 or not self.name.endswith("bias") else (math.prod(shape),)

    def read(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return stored.reshape(shape)

    def write(self, ours: np.ndarray) -> np.ndarray:
        return ours.reshape(self.stored_shape(ours.shape))


@dataclass(frozen=True)
class Linear:
    """A torch Linear; the first `inputs` dimensions of ours are its input."""

    name: str
    inputs: int = 1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])

    def read(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return stored.T.reshape(shape)

    def write(self, ours: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(ours.reshape(self.stored_shape(ours.shape)[::-1]).T)


@dataclass(frozen=True)
class Experts:
    """One Linear per expert, `name` with {e}, stacked along axis 0. Also read from `fused` [experts, outputs, inputs],
    of which ours is part number `part` of `parts` along the outputs."""

    name: str
    fused: str
    part: int = 0
    parts: int = 1


ATTENTION = {
    "input_layernorm.weight": Plain("input_layernorm.weight"),
    "pre_feedforward_layernorm.weight": Plain("post_attention_layernorm.weight"),
    "mixer.q_proj": Linear("self_attn.q_proj.weight"),
    "mixer.k_proj": Linear("self_attn.k_proj.weight"),
    "mixer.v_proj": Linear("self_attn.v_proj.weight"),
    "mixer.o_proj": Linear("self_attn.o_proj.weight", inputs=2),
    "mixer.q_bias": Plain("self_attn.q_proj.bias"),
    "mixer.k_bias": Plain("self_attn.k_proj.bias"),
    "mixer.v_bias": Plain("self_attn.v_proj.bias"),
    "mixer.o_bias": Plain("self_attn.o_proj.bias"),
    "mixer.q_norm.weight": Plain("self_attn.q_norm.weight"),
    "mixer.k_norm.weight": Plain("self_attn.k_norm.weight"),
}

MLP = {
    f"feed_forward.{kind}_{part}": form(f"mlp.{kind}_proj.{stored}")
    for kind in ("gate", "up", "down")
    for part, stored, form in (("proj", "weight", Linear), ("bias", "bias", Plain))
}

MOE = {
    "feed_forward.router.weight": Linear("mlp.gate.weight"),
    "feed_forward.expert_gate_proj": Experts("mlp.experts.{e}.gate_proj.weight", "mlp.experts.gate_up_proj", 0, 2),
    "feed_forward.expert_up_proj": Experts("mlp.experts.{e}.up_proj.weight", "mlp.experts.gate_up_proj", 1, 2),
    "feed_forward.expert_down_proj": Experts("mlp.experts.{e}.down_proj.weight", "mlp.experts.down_proj"),
}

# Outside the layers; the same for every family that does not say otherwise.
TOP = {
    "embed_tokens": Plain("model.embed_tokens.weight"),
    "norm.weight": Plain("model.norm.weight"),
    "lm_head": Plain("lm_head.weight"),
}
LAYER_PREFIX = "model.layers.{n}."
