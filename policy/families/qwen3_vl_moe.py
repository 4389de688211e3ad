"""Qwen3-VL mixture of experts (Qwen3VLMoeForConditionalGeneration), text side: the attention of
Qwen3-VL with experts, whose chosen weights always sum to 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Norm, Router
from policy.fields import names, tower_files
from policy.fields.config_fields import (
    activation,
    attention,
    decoder,
    deepstack_layers,
    first,
    head_dim,
    rope,
    rope_by_sections,
    sparse_layers,
    unwrapped,
)
from policy.fields.names import Stored, Table

ARCHITECTURES = ("Qwen3VLMoeForConditionalGeneration",)
MODEL_TYPES = ("qwen3_vl_moe", "qwen3_vl_moe_text")
WRAPPED = ("model.", "model.language_model.")
MULTIMODAL = (("visual.", "model.visual."), WRAPPED)
TOWERS = {"image": names.moved(tower_files.GRID_VISION, ("", ""), ("", "visual."))}


def _either(written: Table, released: Table) -> Table:
    """Returns the entries of `written`, with those of `released` as other spellings of the same
    tensors."""
    return {end: replace(place, also=(released[end],)) for end, place in written.items()}


def _gate_up(layout: str) -> Table:
    parts = ("expert_gate_proj", "expert_up_proj")
    return names.joined("feed_forward.", parts, "mlp.experts.gate_up_proj", layout)


def _down(layout: str) -> Table:
    return {"feed_forward.expert_down_proj": Stored("mlp.experts.down_proj", layout)}


# transformers 5 writes [experts, outputs, inputs]; the released files hold [experts, inputs,
# outputs].
NAMES = (
    names.ATTENTION
    | names.MLP
    | {"feed_forward.router.weight": names.MOE["feed_forward.router.weight"]}
    | _either(_gate_up("x f+ e -> x e f"), _gate_up("x e f+ -> x e f"))
    | _either(_down("x e f -> x f e"), _down("x f e"))
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128000,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_theta": 500000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
}
EXPERTS = 60
SECTIONS = (24, 20, 20)
# After which layers of the tower a feature is taken; as many layers of the decoder receive one.
DEEPSTACK = (8, 16, 24)


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | unwrapped(stored)
    rotary = rope_by_sections(rope(hf, head_dim(hf)), hf, SECTIONS)
    features = deepstack_layers(stored, DEEPSTACK)
    mixer = attention(hf, rope=rotary, qk_norm=Norm(eps=hf["rms_norm_eps"]))
    experts = first(hf, "num_experts", "num_local_experts", "n_routed_experts", default=EXPERTS)
    router = Router(experts=experts, experts_per_token=hf["num_experts_per_tok"])
    moe = Moe(router, hf["moe_intermediate_size"], activation=activation(hf))
    dense = Mlp(hf["intermediate_size"], activation(hf))
    layers = [
        LayerSpec(mixer, moe if sparse else dense, deepstack=n < features)
        for n, sparse in enumerate(sparse_layers(hf, experts))
    ]
    return decoder("qwen3_vl_moe", stored, hf, layers)


def towers(stored: dict) -> dict[str, Any]:
    """Reads the vision tower of a complete configuration."""
    return {"image": tower_files.grid_vision(stored["vision_config"], DEEPSTACK)}
