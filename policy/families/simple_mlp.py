"""SimpleMlpLM: each layer multiplies x by two matrices, without residual, norm, attention or
activation."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mlp
from policy.fields import names
from policy.fields.config_fields import decoder

ARCHITECTURES = ("SimpleMlpLM",)
MODEL_TYPES = ()  # its configurations are Llama's
NAMES = {
    "feed_forward.up_proj": names.Stored("mats.0.weight", "f e -> e f"),
    "feed_forward.down_proj": names.Stored("mats.1.weight", "e f -> f e"),
}

# The values of absent keys, by the class of transformers.
DEFAULTS = {"initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    layer = LayerSpec(
        None, Mlp(hf["intermediate_size"], "linear", gated=False), norms=(), residual=False
    )
    return decoder("simple_mlp", stored, hf, [layer] * hf["num_hidden_layers"])
