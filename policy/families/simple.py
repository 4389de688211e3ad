"""SimpleLM, the smallest decoder: each layer multiplies x by one matrix, without residual, norm or
attention."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Matrix
from policy.fields import names
from policy.fields.config_fields import decoder

ARCHITECTURES = ("SimpleLM",)
MODEL_TYPES = ()  # its configurations are Llama's
NAMES = {"feed_forward.proj": names.Stored("mats.0.weight", "o i -> i o")}

# The values of absent keys, by the class of transformers.
DEFAULTS = {"initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    layer = LayerSpec(None, Matrix(), norms=(), residual=False)
    return decoder("simple", stored, hf, [layer] * hf["num_hidden_layers"])
