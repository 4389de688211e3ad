"""OLMo Hybrid (OlmoHybridForCausalLM): gated delta nets with norms on the inputs of a layer's
parts; between them the attention of OLMo 2, with norms on the outputs."""

from __future__ import annotations

from policy.config import (
    POST_NORM,
    PRE_NORM,
    Attention,
    DecoderConfig,
    GatedDeltaNet,
    LayerSpec,
    Mlp,
    Norm,
)
from policy.fields import names
from policy.fields.config_fields import (
    activation,
    attention,
    decoder,
    first,
    head_dim,
    layer_types,
    rope,
)
from policy.fields.names import Stored

ARCHITECTURES = ("OlmoHybridForCausalLM",)
MODEL_TYPES = ("olmo_hybrid",)
_DELTA_NET = {
    "q_proj": Stored("linear_attn.q_proj.weight", "(k d) e -> e k d"),
    "k_proj": Stored("linear_attn.k_proj.weight", "(k d) e -> e k d"),
    "v_proj": Stored("linear_attn.v_proj.weight", "(k d) e -> e k d"),
    "z_proj": Stored("linear_attn.g_proj.weight", "(k d) e -> e k d"),
    "b_proj": Stored("linear_attn.b_proj.weight", "(k g) e -> e k g"),
    "a_proj": Stored("linear_attn.a_proj.weight", "(k g) e -> e k g"),
    "q_conv": Stored("linear_attn.q_conv1d.weight", "(k d) 1 w -> k d w"),
    "k_conv": Stored("linear_attn.k_conv1d.weight", "(k d) 1 w -> k d w"),
    "v_conv": Stored("linear_attn.v_conv1d.weight", "(k d) 1 w -> k d w"),
    "norm.weight": Stored("linear_attn.o_norm.weight"),
    "o_proj": Stored("linear_attn.o_proj.weight", "e (k v) -> k v e"),
}
# transformers 5.24 writes the first norm of an attention layer's outputs under the name of another
# one.
_MISNAMED = Stored("feedforward_layer_norm.weight")
NAMES = (
    names.ATTENTION
    | names.MLP
    | names.DELTA_NET
    | {f"GatedDeltaNet.{path}": stored for path, stored in _DELTA_NET.items()}
    | {
        "input_layernorm.weight": Stored("attention_layer_norm.weight"),
        "pre_feedforward_layernorm.weight": Stored("feedforward_layer_norm.weight"),
        "post_attention_layernorm.weight": Stored(
            "post_attention_layernorm.weight", also=(_MISNAMED,)
        ),
        "post_feedforward_layernorm.weight": Stored("post_feedforward_layernorm.weight"),
    }
)

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
LINEAR = "linear_attention"
FULL = "full_attention"
GATED_NORM_EPS = 1e-5  # of the class, whatever rms_norm_eps says


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    norm = Norm(hf["rms_norm_eps"], "before_cast")
    settings = hf.get("rope_parameters") or {}
    rotates = (
        settings.get("rope_theta", hf["rope_theta"]) is not None
    )  # null, as in the release: no positions
    rotary = rope(hf, head_dim(hf)) if rotates else None
    full = attention(hf, rope=rotary, qk_norm=norm, qk_norm_over="all_heads")
    mixers: dict[str, Attention | GatedDeltaNet] = {LINEAR: _delta_net(hf), FULL: full}
    norms = {LINEAR: PRE_NORM, FULL: POST_NORM}
    mlp = Mlp(hf["intermediate_size"], activation(hf))
    derived = [LINEAR if (number + 1) % 4 else FULL for number in range(hf["num_hidden_layers"])]
    if FULL not in derived:
        derived[-1:] = [FULL]
    kinds = layer_types(hf, (LINEAR, FULL), derived)
    layers = [LayerSpec(mixers[kind], mlp, norms=norms[kind]) for kind in kinds]
    return decoder("olmo_hybrid", stored, hf, layers, norm=norm)


def _delta_net(hf: dict) -> GatedDeltaNet:
    heads = hf["num_attention_heads"]
    key_heads = first(hf, "linear_num_key_heads", default=heads)
    key_dim = first(hf, "linear_key_head_dim", default=int(0.75 * hf["hidden_size"] / key_heads))
    return GatedDeltaNet(
        key_heads=key_heads,
        value_heads=first(hf, "linear_num_value_heads", default=heads),
        key_dim=key_dim,
        value_dim=first(hf, "linear_value_head_dim", default=2 * key_dim),
        conv_width=hf["linear_conv_kernel_dim"],
        norm=Norm(GATED_NORM_EPS),
        beta_scale=2.0 if hf["linear_allow_neg_eigval"] else 1.0,
    )
