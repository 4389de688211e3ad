"""Granite 4 (GraniteMoeHybridForCausalLM): Mamba-2 and attention, usually without rotary positions;
a feed-forward alone, or as the shared expert next to routed ones."""

from __future__ import annotations

from policy.config import DecoderConfig, Mamba2, Mlp, Norm
from policy.families import granite, granitemoe, granitemoeshared
from policy.families.nemotron_h import OLD_KINDS
from policy.fields import names
from policy.fields.config_fields import activation, first, layer_types, mamba2

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
MODEL_TYPES = ("granitemoehybrid",)
# Without experts the feed-forward itself is stored as shared_mlp.
NAMES = (
    granitemoeshared.NAMES | granitemoeshared.shared_names("feed_forward.") | names.mamba2("mamba.")
)

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
MAMBA = "linear_attention"
ATTENTION = "full_attention"


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
    """Returns the kind of each layer: `layer_types`, in older files `layers_block_type`; by default
    all are Mamba-2."""
    kinds = first(hf, "layer_types", "layers_block_type", default=[MAMBA] * hf["num_hidden_layers"])
    named = [OLD_KINDS.get(str(kind), kind) for kind in kinds]
    return layer_types(hf | {"layer_types": named}, (MAMBA, ATTENTION), [])


def _mamba(hf: dict) -> Mamba2:
    norm = Norm(hf["rms_norm_eps"])
    out_bias = bool(hf["mamba_proj_bias"])
    return mamba2(hf, hf["mamba_expand"] * hf["hidden_size"], norm=norm, out_bias=out_bias)
