"""ERNIE 4.5 with experts (Ernie4_5_MoeForCausalLM): softmax routing with a correction of the
choice, and shared experts."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp, Moe, Router
from policy.families import ernie4_5
from policy.fields import names
from policy.fields.config_fields import UnsupportedModel, activation, decoder
from policy.fields.names import Stored

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM",)
MODEL_TYPES = ("ernie4_5_moe",)
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.MOE
    | names.moved(
        names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mlp.shared_experts.")
    )
    | {
        "feed_forward.router.correction_bias": Stored(
            "mlp.moe_statics.e_score_correction_bias", "1 x -> x"
        )
    }
)
# Modules that predict further tokens.
SKIP = (r"(model\.)?mtp.*",)

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if hf["use_bias"]:
        raise UnsupportedModel(
            "use_bias true is not supported by this family: its head would have a bias"
        )
    mixer = ernie4_5.mixer(hf)
    dense = ernie4_5.dense(hf)
    experts = _experts(hf)
    layers = [LayerSpec(mixer, experts if sparse else dense) for sparse in _sparse_layers(hf)]
    return decoder("ernie4_5_moe", stored, hf, layers)


def _sparse_layers(hf: dict) -> list[bool]:
    """Returns whether each layer has experts: every `moe_layer_interval`-th from
    `moe_layer_start_index` to `moe_layer_end_index` (-1: the last layer)."""
    layers = hf["num_hidden_layers"]
    interval = hf["moe_layer_interval"]
    start = hf["moe_layer_start_index"]
    end = hf["moe_layer_end_index"]
    last = layers - 1 if end == -1 else end
    return [start <= i <= last and (i + 1) % interval == 0 for i in range(layers)]


def _experts(hf: dict) -> Moe:
    width = hf["moe_intermediate_size"]
    shared = hf["moe_num_shared_experts"]
    return Moe(
        Router(hf["moe_num_experts"], hf["moe_k"], correction_bias=True),
        width,
        shared=Mlp(width * shared, activation(hf)) if shared else None,
        activation=activation(hf),
    )
