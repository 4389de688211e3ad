"""Granite 4 (GraniteMoeHybridForCausalLM): Mamba-2 and attention, most often without a rotation; a feed-forward that every
token passes, alone or next to experts."""

from __future__ import annotations

from policy.config import DecoderConfig, Mamba2, Mlp, Norm
from policy.families import granite, granitemoe, granitemoeshared
from policy.families.nemotron_h import OLD_KINDS, mamba_names, time_step_limit
from policy.huggingface.config_fields import UnsupportedModel, activation, first, layer_types

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
MODEL_TYPES = ("granitemoehybrid",)
NAMES = granitemoeshared.NAMES | granitemoeshared.shared_names("feed_forward.") | mamba_names("mamba.")

# The values of absent keys, by the class of transformers.
DEFAULTS = granitemoeshared.DEFAULTS | {
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, "Infinity"),
}
MAMBA, ATTENTION = "linear_attention", "full_attention"


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    kinds = _kinds(hf)
    rotary = hf["position_embedding_type"] == "rope"
    mixers = [_mamba(hf) if kind == MAMBA else granite.mixer(hf, rotary=rotary) for kind in kinds]
    shared = Mlp(hf["shared_intermediate_size"], activation(hf))
    feed_forward = granitemoe.experts(hf, shared) if hf["num_local_experts"] else shared
    return granite.build("granitemoehybrid", stored, hf, feed_forward, mixers)


def _kinds(hf: dict) -> list[str]:
    """Returns the kind of each layer: `layer_types`, in older files `layers_block_type`; by default all are Mamba-2."""
    kinds = first(hf, "layer_types", "layers_block_type", default=[MAMBA] * hf["num_hidden_layers"])
    named = [OLD_KINDS.get(str(kind), kind) for kind in kinds]
    return layer_types(hf | {"layer_types": named}, (MAMBA, ATTENTION), [])


def _mamba(hf: dict) -> Mamba2:
    heads, channels = hf["mamba_n_heads"], hf["mamba_expand"] * hf["hidden_size"]
    head_dim = channels // heads if hf["mamba_d_head"] == "auto" else hf["mamba_d_head"]
    if heads * head_dim != channels:
        raise UnsupportedModel(
            f"mamba_d_head: {heads} heads of {head_dim} are not mamba_expand x hidden_size, {channels} channels"
        )
    if activation(hf) != "silu":
        raise UnsupportedModel(f"hidden_act {hf['hidden_act']!r} is not supported in layers of Mamba-2, only 'silu'")
    low, high = time_step_limit(hf)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=hf["mamba_n_groups"],
        state=hf["mamba_d_state"],
        conv_width=hf["mamba_d_conv"],
        norm=Norm(hf["rms_norm_eps"]),
        conv_bias=bool(hf["mamba_conv_bias"]),
        bias=bool(hf["mamba_proj_bias"]),
        out_bias=bool(hf["mamba_proj_bias"]),
        dt_limit=(low, high),
    )
