"""Mixtral 8x7B and 8x22B (MixtralForCausalLM, arXiv 2401.04088): Mistral with a mixture of experts
in every layer."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Moe, Router
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, first, head_dim, rope
from policy.fields.names import Stored

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPES = ("mixtral",)
CONVERTED_BY_PEFT = ("w1", "w2", "w3")
# w1 is the gate, w3 the up projection. The class of transformers holds them under the names that
# other families store.
NAMES = names.ATTENTION | {
    path: Stored(
        f"block_sparse_moe.{name}.weight", layout, also=(names.MOE[path], *names.MOE[path].also)
    )
    for path, name, layout in (
        ("feed_forward.router.weight", "gate", "x e -> e x"),
        ("feed_forward.expert_gate_proj", "experts.{e}.w1", "f e -> e f"),
        ("feed_forward.expert_up_proj", "experts.{e}.w3", "f e -> e f"),
        ("feed_forward.expert_down_proj", "experts.{e}.w2", "e f -> f e"),
    )
}

# The values of absent keys, by the class of transformers. A `sliding_window` of null is no window.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "num_experts_per_tok": 2,
}
EXPERTS = 8


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    mixer = attention(hf, rope=rope(hf, head_dim(hf)), window=hf["sliding_window"])
    router = Router(
        experts=first(hf, "num_local_experts", "num_experts", default=EXPERTS),
        experts_per_token=hf["num_experts_per_tok"],
    )
    moe = Moe(router, hf["intermediate_size"], activation=activation(hf))
    return decoder("mixtral", stored, hf, [LayerSpec(mixer, moe)] * hf["num_hidden_layers"])
