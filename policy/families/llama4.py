"""Llama 4 Scout and Maverick (Llama4ForCausalLM), and the text model of
Llama4ForConditionalGeneration.

Layers with rotary attention see only their own chunk of the text; the others have a query
temperature instead of positions.
"""

from __future__ import annotations

from typing import Any

from policy.config import (
    Attention,
    DecoderConfig,
    LayerSpec,
    Mlp,
    Moe,
    Norm,
    QueryTemperature,
    Router,
)
from policy.fields import names, tower_files
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    first,
    head_dim,
    layer_types,
    rope,
)
from policy.fields.names import Stored

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
MODEL_TYPES = ("llama4_text", "llama4")
NAMES = (
    names.ATTENTION
    | names.moved(names.MLP, ("", ""), ("mlp.", "feed_forward."))
    | names.moved(
        names.MLP,
        ("feed_forward.", "feed_forward.shared."),
        ("mlp.", "feed_forward.shared_expert."),
    )
    | names.joined(
        "feed_forward.",
        ("expert_gate_proj", "expert_up_proj"),
        "feed_forward.experts.gate_up_proj",
        "x e f+ -> x e f",
    )
    | {
        "feed_forward.router.weight": Stored("feed_forward.router.weight", "x e -> e x"),
        "feed_forward.expert_down_proj": Stored("feed_forward.experts.down_proj"),
    }
)

MULTIMODAL = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
PEFT_SWAPS_EXPERTS = True
TOWERS = {"image": tower_files.TILE_VISION}
KINDS = ("chunked_attention", "full_attention")
# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}
EXPERTS = 16


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    layers = hf["num_hidden_layers"]
    step = hf["interleave_moe_layer_step"]
    interval = hf["no_rope_layer_interval"]
    # `no_rope_layers` holds 1 for a layer with rotary positions and 0 for one without.
    rotary = [
        bool(n) for n in hf.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    ]
    if len(rotary) < layers:
        raise UnsupportedModel(f"no_rope_layers: {len(rotary)} entries for {layers} layers")
    kinds = layer_types(hf, KINDS, [KINDS[not rotates] for rotates in rotary[:layers]])
    sparse = first(hf, "moe_layers", default=range(step - 1, layers, step))
    dense = Mlp(hf["intermediate_size_mlp"], activation(hf))
    moe = _experts(hf)
    return decoder(
        "llama4",
        stored,
        hf,
        [
            LayerSpec(_mixer(hf, rotary[i], kinds[i]), moe if i in sparse else dense)
            for i in range(layers)
        ],
    )


def _mixer(hf: dict, rotates: bool, kind: str) -> Attention:
    tuned = not rotates and hf["attn_temperature_tuning"]
    return attention(
        hf,
        rope=rope(hf, head_dim(hf), interleaved=True) if rotates else None,
        qk_norm=Norm(eps=hf["rms_norm_eps"], scale="none")
        if rotates and hf["use_qk_norm"]
        else None,
        qk_norm_over="rotated_head",
        chunk=hf["attention_chunk_size"] if kind == "chunked_attention" else None,
        temperature=QueryTemperature(float(hf["attn_scale"]), float(hf["floor_scale"]))
        if tuned
        else None,
    )


def _experts(hf: dict) -> Moe:
    """Creates the experts. The shared expert has the width of a routed one; a sigmoid of the
    router's logit multiplies an expert's input."""
    width = hf["intermediate_size"]
    router = Router(
        experts=first(hf, "num_local_experts", "num_experts", default=EXPERTS),
        experts_per_token=hf["num_experts_per_tok"],
        score="sigmoid",
        renormalize=False,
    )
    return Moe(
        router, width, shared=Mlp(width, activation(hf)), activation=activation(hf), weigh="input"
    )


def towers(stored: dict) -> dict[str, Any]:
    """Reads the vision tower of a complete configuration."""
    return {"image": tower_files.tile_vision(stored["vision_config"])}
