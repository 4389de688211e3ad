"""The thinker of Qwen3-Omni (Qwen3OmniMoeThinkerForConditionalGeneration): Qwen3 with experts and
rotary sections, whose first layers receive deepstack features of the vision tower, and with an
audio tower. Its talker and its vocoder, which speak, are not read."""

from __future__ import annotations

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

ARCHITECTURES = (
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
)
MODEL_TYPES = ("qwen3_omni_moe_thinker", "qwen3_omni_moe", "qwen3_omni_moe_text")
CONVERTED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")
PART = "thinker_config"
PREFIXES = (("thinker.", ""),)
SKIP = (r"talker\..*", r"code2wav\..*")
# The thinker's own files have the names of the tables.
WRAPPED = ("", "")
MULTIMODAL = ()
TOWERS = {
    "image": names.moved(tower_files.GRID_VISION_OF_OMNI, ("", ""), ("", "visual.")),
    "audio": names.moved(tower_files.CHUNKED_AUDIO, ("", ""), ("", "audio_tower.")),
}
NAMES = names.ATTENTION | names.MLP | names.MOE

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 1000000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
EXPERTS = 128
SECTIONS = (24, 20, 20)
# After which layers of the vision tower a feature is taken; as many layers of the decoder receive
# one.
DEEPSTACK = (8, 16, 24)


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | unwrapped(stored)
    rotary = rope_by_sections(rope(hf, head_dim(hf)), hf, SECTIONS)
    features = deepstack_layers(stored, DEEPSTACK)
    mixer = attention(hf, rope=rotary, qk_norm=Norm(eps=hf["rms_norm_eps"]))
    router = Router(
        experts=first(hf, "num_experts", "num_local_experts", default=EXPERTS),
        experts_per_token=hf["num_experts_per_tok"],
        renormalize=bool(hf["norm_topk_prob"]),
    )
    moe = Moe(router, hf["moe_intermediate_size"], activation=activation(hf))
    dense = Mlp(hf["intermediate_size"], activation(hf))
    layers = [
        LayerSpec(mixer, moe if sparse else dense, deepstack=n < features)
        for n, sparse in enumerate(sparse_layers(hf, router.experts))
    ]
    return decoder("qwen3_omni", stored, hf, layers)


def towers(stored: dict) -> dict[str, Any]:
    """Reads the towers of a complete configuration, which may lack one."""
    result: dict[str, Any] = {}
    if stored.get("vision_config") is not None:
        result["image"] = tower_files.grid_vision(stored["vision_config"], DEEPSTACK)
    if stored.get("audio_config") is not None:
        result["audio"] = tower_files.chunked_audio(stored["audio_config"])
    return result
