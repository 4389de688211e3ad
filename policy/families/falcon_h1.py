"""Falcon-H1 (FalconH1ForCausalLM, arXiv 2507.22448): the sum of attention and Mamba-2 in every
layer, with factors on embeddings, on inputs and outputs of the parts, on projections and on logits.
"""

from __future__ import annotations

from policy.config import (
    AttentionAndMamba2,
    DecoderConfig,
    LayerSpec,
    Mamba2,
    Mamba2Scales,
    Mlp,
    Norm,
    Scales,
)
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    first,
    head_dim,
    mamba2,
    rope,
)
from policy.fields.names import Stored

ARCHITECTURES = ("FalconH1ForCausalLM",)
MODEL_TYPES = ("falcon_h1",)
TOP = names.TOP | {"norm.weight": Stored("model.final_layernorm.weight")}
NAMES = (
    {
        "input_layernorm.weight": Stored("input_layernorm.weight"),
        "pre_feedforward_layernorm.weight": Stored("pre_ff_layernorm.weight"),
    }
    | names.moved(
        {end: place for end, place in names.ATTENTION.items() if end.startswith("mixer.")},
        ("mixer.", "mixer.attention."),
    )
    | names.moved(names.mamba2("mamba."), ("Mamba2.", "mixer.mamba."))
    | names.moved(names.MLP, ("", ""), ("mlp.", "feed_forward."))
)

# The values of absent keys, by the class of transformers. `head_dim` is not declared there.
DEFAULTS = {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "projectors_bias": False,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "time_step_limit": (0.0, "Infinity"),
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "mlp_multipliers": (1.0, 1.0),
    "ssm_multipliers": (1.0,) * 5,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    dim = head_dim(hf)
    mixer = AttentionAndMamba2(
        # A factor on keys is a factor on scores.
        attention(hf, rope=rope(hf, dim), scale=dim**-0.5 * float(hf["key_multiplier"])),
        _mamba(hf),
        Scales(float(hf["attention_in_multiplier"]), float(hf["attention_out_multiplier"])),
        Scales(float(hf["ssm_in_multiplier"]), float(hf["ssm_out_multiplier"])),
    )
    gate, out = _factors(hf, "mlp_multipliers")
    mlp = Mlp(
        hf["intermediate_size"],
        activation(hf),
        bias=bool(hf["mlp_bias"]),
        gate_scale=gate,
        out_scale=out,
    )
    return decoder(
        "falcon_h1",
        stored,
        hf,
        [LayerSpec(mixer, mlp)] * hf["num_hidden_layers"],
        embedding_scale=float(hf["embedding_multiplier"]),
        logit_scale=float(hf["lm_head_multiplier"]),
    )


def _mamba(hf: dict) -> Mamba2:
    return mamba2(
        hf,
        first(hf, "mamba_d_ssm", default=hf["mamba_expand"] * hf["hidden_size"]),
        norm=Norm(hf["rms_norm_eps"], "before_cast") if hf["mamba_rms_norm"] else None,
        gate="after_norm" if hf["mamba_norm_before_gate"] else "before_norm",
        out_bias=bool(hf["projectors_bias"]),
        scales=Mamba2Scales(*_factors(hf, "ssm_multipliers")),
    )


def _factors(hf: dict, key: str) -> list[float]:
    """Returns the factors of a list, by default 1. Raises UnsupportedModel for a list of another
    length."""
    default = DEFAULTS[key]
    values = first(hf, key, default=default)
    if len(values) != len(default):
        raise UnsupportedModel(f"{key}: {len(values)} factors, expected {len(default)}")
    return [float(value) for value in values]
