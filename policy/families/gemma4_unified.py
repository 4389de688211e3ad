"""The text model of Gemma 4 12B (Gemma4UnifiedForConditionalGeneration), which has no towers:
Gemma 4's layers without embeddings for each layer and without experts."""

from __future__ import annotations

from policy.config import DecoderConfig
from policy.families import gemma4

ARCHITECTURES = ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration")
MODEL_TYPES = ("gemma4_unified_text", "gemma4_unified")
NAMES = gemma4.NAMES

# The values of absent keys, by the class of transformers. It has no keys for embeddings for each
# layer and for experts.
DEFAULTS = gemma4.DEFAULTS | {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
ABSENT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    return gemma4.build("gemma4_unified", stored, DEFAULTS | stored | ABSENT)
