"""Granite 3 (GraniteForCausalLM): Llama with factors on embeddings, scores, the outputs of the
parts and logits."""

from __future__ import annotations

from policy.config import Attention, DecoderConfig, LayerSpec, Mamba2, Mlp, Moe
from policy.fields import names
from policy.fields.config_fields import activation, attention, decoder, head_dim, rope

ARCHITECTURES = ("GraniteForCausalLM",)
MODEL_TYPES = ("granite",)
NAMES = names.ATTENTION | names.MLP

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    mlp = Mlp(hf["intermediate_size"], activation(hf), bias=bool(hf["mlp_bias"]))
    return build("granite", stored, hf, mlp)


def build(
    family: str,
    stored: dict,
    hf: dict,
    feed_forward: Mlp | Moe,
    mixers: list[Attention | Mamba2] | None = None,
) -> DecoderConfig:
    """Creates a decoder whose layers have these mixers, by default rotary attention, and this
    feed-forward; `hf` is `stored` with the defaults of its class."""
    mixers = mixers or [mixer(hf)] * hf["num_hidden_layers"]
    scale = float(hf["residual_multiplier"])
    return decoder(
        family,
        stored,
        hf,
        [LayerSpec(each, feed_forward, residual_scale=scale) for each in mixers],
        embedding_scale=float(hf["embedding_multiplier"]),
        logit_scale=1.0 / hf["logits_scaling"],
    )


def mixer(hf: dict, *, rotary: bool = True) -> Attention:
    """Creates the attention of a layer, whose scores are multiplied by `attention_multiplier`."""
    rotation = rope(hf, head_dim(hf)) if rotary else None
    return attention(hf, rope=rotation, scale=float(hf["attention_multiplier"]))
