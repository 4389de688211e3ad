"""Nemotron-H, Nemotron Nano 2 and 3 (NemotronHForCausalLM, arXiv 2504.03624): layers of one part,
Mamba-2, attention without a rotation, or a feed-forward without a gate."""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, Mamba2, Mlp, Moe, Norm, Router
from policy.fields import names
from policy.fields.config_fields import (
    UnsupportedModel,
    activation,
    attention,
    decoder,
    first,
    layer_types,
    time_step_limit,
)
from policy.fields.names import Stored

ARCHITECTURES = ("NemotronHForCausalLM",)
MODEL_TYPES = ("nemotron_h",)
LAYER_PREFIX = "backbone.layers.{n}."
TOP = {
    "embed_tokens": Stored("backbone.embeddings.weight"),
    "norm.weight": Stored("backbone.norm_f.weight"),
    "lm_head": Stored("lm_head.weight"),
}
NAMES = (
    {
        f"{norm}.weight": Stored("norm.weight")
        for norm in ("input_layernorm", "pre_feedforward_layernorm")
    }
    | names.moved(
        {k: v for k, v in names.ATTENTION.items() if k.startswith("mixer.")},
        ("", ""),
        ("self_attn.", "mixer."),
    )
    | names.moved(names.MLP, ("", ""), ("mlp.", "mixer."))
    | names.moved(
        names.MLP, ("feed_forward.", "feed_forward.shared."), ("mlp.", "mixer.shared_experts.")
    )
    | names.mamba2("mixer.")
    | {
        "feed_forward.router.weight": Stored("mixer.gate.weight", "x e -> e x"),
        "feed_forward.router.correction_bias": Stored("mixer.gate.e_score_correction_bias"),
        "feed_forward.expert_up_proj": Stored("mixer.experts.{e}.up_proj.weight", "f e -> e f"),
        "feed_forward.expert_down_proj": Stored("mixer.experts.{e}.down_proj.weight", "e f -> f e"),
        "feed_forward.latent_in_proj": Stored("mixer.fc1_latent_proj.weight", "l e -> e l"),
        "feed_forward.latent_out_proj": Stored("mixer.fc2_latent_proj.weight", "e l -> l e"),
    }
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "hidden_size": 4096,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_limit": (0.0, "Infinity"),
    "use_conv_bias": True,
    "use_bias": False,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
}
# Keys whose only supported value is the one given here.
_FIXED = {
    "use_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mamba_hidden_act": "silu",
    "n_shared_experts": 1,
    "residual_in_fp32": False,
    "sliding_window": None,
}
# Names of keys in other files -> the name above.
_RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}
MAMBA = "linear_attention"
ATTENTION = "full_attention"
MLP = "mlp"
MOE = "moe"
_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
# Kinds of layers in files of transformers 4 -> the name above.
OLD_KINDS = {"mamba": MAMBA, "attention": ATTENTION}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    for key, value in _FIXED.items():
        if stored.get(key, value) not in (value, None):
            raise UnsupportedModel(
                f"{key} {stored[key]!r} is not supported by this family, only {value!r}"
            )
    hf = DEFAULTS | {_RENAMED.get(key, key): value for key, value in stored.items()}
    inner = activation(hf, "mlp_hidden_act")
    norm = Norm(hf["layer_norm_epsilon"], "before_cast")
    parts = {
        MAMBA: LayerSpec(_mamba(hf), None, ("input_layernorm",)),
        ATTENTION: LayerSpec(attention(hf), None, ("input_layernorm",)),
        MLP: LayerSpec(
            None, Mlp(hf["intermediate_size"], inner, gated=False), ("pre_feedforward_layernorm",)
        ),
        MOE: LayerSpec(None, _experts(hf), ("pre_feedforward_layernorm",)),
    }
    return decoder("nemotron_h", stored, hf, [parts[kind] for kind in _kinds(hf)], norm=norm)


def _kinds(hf: dict) -> list[str]:
    """Returns the kind of each layer: `layers_block_type`, or `hybrid_override_pattern` with a
    letter for each layer. Their length is the number of layers, whatever num_hidden_layers says."""
    pattern = first(hf, "layers_block_type", "layer_types")
    if pattern is None:
        pattern = [
            _LETTERS.get(letter, letter)
            for letter in first(hf, "hybrid_override_pattern", default="ME*-")
        ]
    kinds = [OLD_KINDS.get(str(kind), kind) for kind in pattern]
    return layer_types(
        {"layer_types": kinds, "num_hidden_layers": len(kinds)}, (MAMBA, ATTENTION, MLP, MOE), []
    )


def _mamba(hf: dict) -> Mamba2:
    return Mamba2(
        heads=hf["mamba_num_heads"],
        head_dim=hf["mamba_head_dim"],
        groups=hf["n_groups"],
        state=hf["ssm_state_size"],
        conv_width=hf["conv_kernel"],
        norm=Norm(hf["layer_norm_epsilon"]),
        conv_bias=bool(hf["use_conv_bias"]),
        dt_limit=time_step_limit(hf),
    )


def _experts(hf: dict) -> Moe:
    router = Router(
        hf["n_routed_experts"],
        hf["num_experts_per_tok"],
        score="sigmoid",
        correction_bias=True,
        groups=hf["n_group"],
        topk_groups=hf["topk_group"],
        group_score="top2",
        renormalize=bool(hf["norm_topk_prob"]),
        scale=float(hf["routed_scaling_factor"]),
    )
    inner = activation(hf, "mlp_hidden_act")
    shared = Mlp(hf["moe_shared_expert_intermediate_size"], inner, gated=False)
    return Moe(
        router,
        hf["moe_intermediate_size"],
        shared=shared,
        activation=inner,
        gated=False,
        latent=hf["moe_latent_size"],
    )
