"""GPT-3 in the form of GPT-2 (GPT2LMHeadModel): learned positions, layer norms, biases everywhere.

The dropout rates of a configuration are not read; the training stage sets dropout.
"""

from __future__ import annotations

from policy.config import Attention, DecoderConfig, LayerNorm, LayerSpec, LearnedPositions, Mlp
from policy.fields import names
from policy.fields.config_fields import UnsupportedModel, activation, decoder, first

ARCHITECTURES = ("GPT2LMHeadModel",)
MODEL_TYPES = ("gpt2",)
LAYER_PREFIX = "transformer.h.{n}."
PREFIXES = tuple(
    (name, f"transformer.{name}") for name in ("wte.", "wpe.", "h.", "ln_f.")
)  # as the Hub holds gpt2 itself
TOP = {
    "embed_tokens": names.Stored("transformer.wte.weight"),
    "embed_positions": names.Stored("transformer.wpe.weight"),
    "norm.weight": names.Stored("transformer.ln_f.weight"),
    "norm.bias": names.Stored("transformer.ln_f.bias"),
    "lm_head": names.Stored("lm_head.weight"),
}
NAMES = {
    f"{ours}.{part}": names.Stored(f"{stored}.{part}")
    for ours, stored in (("input_layernorm", "ln_1"), ("pre_feedforward_layernorm", "ln_2"))
    for part in ("weight", "bias")
}
# Conv1D stores [inputs, outputs].
NAMES |= names.joined(
    "mixer.", ("q_proj", "k_proj", "v_proj"), "attn.c_attn.weight", "e (h d)+ -> e h d"
)
NAMES |= names.joined("mixer.", ("q_bias", "k_bias", "v_bias"), "attn.c_attn.bias", "(h d)+ -> h d")
NAMES |= {
    "mixer.o_proj": names.Stored("attn.c_proj.weight", "(h d) e -> h d e"),
    "mixer.o_bias": names.Stored("attn.c_proj.bias"),
    "feed_forward.up_proj": names.Stored("mlp.c_fc.weight"),
    "feed_forward.up_bias": names.Stored("mlp.c_fc.bias"),
    "feed_forward.down_proj": names.Stored("mlp.c_proj.weight"),
    "feed_forward.down_bias": names.Stored("mlp.c_proj.bias"),
}

# The values of absent keys, by the class of transformers. `reductions_in_fp32` is MaxText's name;
# transformers computes the mean and the variance of a norm in float32.
DEFAULTS = {
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "reductions_in_fp32": True,
}
# Our name -> the name in files; the class of transformers reads both.
ALIASES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def unread(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the pattern of the causal masks that old files hold."""
    return (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = (
        DEFAULTS
        | stored
        | {name: stored[name] if name in stored else stored[old] for name, old in ALIASES.items()}
    )
    if hf["add_cross_attention"]:
        raise UnsupportedModel("add_cross_attention: there is no encoder to attend to")
    width = hf["hidden_size"]
    heads = hf["num_attention_heads"]
    layers = hf["num_hidden_layers"]
    head_dim = width // heads
    mlp = Mlp(
        first(hf, "n_inner", default=4 * width),
        activation(hf, "activation_function"),
        gated=False,
        bias=True,
    )

    def layer(i: int) -> LayerSpec:
        scale = head_dim**-0.5 if hf["scale_attn_weights"] else 1.0
        scale /= i + 1 if hf["scale_attn_by_inverse_layer_idx"] else 1
        return LayerSpec(Attention(heads, heads, head_dim, scale, bias=True, out_bias=True), mlp)

    norm = LayerNorm(
        hf["layer_norm_epsilon"], "float32" if hf["reductions_in_fp32"] else "activation"
    )
    positions = (LearnedPositions(hf["max_position_embeddings"]),)
    return decoder(
        "gpt3", stored, hf, [layer(i) for i in range(layers)], norm=norm, positions=positions
    )
