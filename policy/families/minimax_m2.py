"""MiniMax M2, M2.1 and M2.5 (MiniMaxM2ForCausalLM): experts in every layer, one norm over all heads
of queries and of keys, and a rotary embedding over a part of each head."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Moe, Norm, Router
from policy.families import mixtral
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    first,
    head_dim,
    rope_from_settings,
    rope_parameters,
)
from policy.fields.names import Stored

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
MODEL_TYPES = ("minimax_m2",)
CONVERTED_BY_PEFT = ("w1", "w2", "w3")
NAMES = mixtral.NAMES | {
    "feed_forward.router.correction_bias": Stored(
        "block_sparse_moe.e_score_correction_bias", also=(Stored("mlp.e_score_correction_bias"),)
    )
}
SKIP = (r"model\.mtp\..*",)
# Layers past num_hidden_layers predict further tokens.
SKIP_EXTRA_LAYERS = True

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196608,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": False,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
# Keys of published files, and the value that the class of transformers computes whatever they say.
FIXED = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer", "shared_intermediate_size": 0}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    _refuse(hf)
    if hf.get("rotary_dim") is not None:
        hf.setdefault("partial_rotary_factor", hf["rotary_dim"] / hf["head_dim"])
    mixer = attention(
        hf,
        rope=rope_from_settings(rope_parameters(hf), head_dim(hf)),
        qk_norm=Norm(eps=hf["rms_norm_eps"]),
        qk_norm_over="all_heads",
    )
    router = Router(
        experts=first(hf, "num_experts", default=hf["num_local_experts"]),
        experts_per_token=hf["num_experts_per_tok"],
        score="sigmoid",
        correction_bias=True,
    )
    moe = Moe(router, hf["intermediate_size"], activation=activation(hf))
    return decoder("minimax_m2", stored, hf, [LayerSpec(mixer, moe)] * hf["num_hidden_layers"])


def _refuse(hf: dict) -> None:
    for key, value in FIXED.items():
        if hf.get(key, value) != value:
            raise UnsupportedModel(
                f"{key} {hf[key]!r} is not supported by this family; known: {value!r}"
            )
    if set(hf.get("attn_type_list") or [1]) != {1}:
        raise UnsupportedModel(
            "attn_type_list: layers with linear attention (0) are not supported by this family"
        )
