"""LFM2 (Lfm2ForCausalLM, arXiv 2511.23404): short convolutions, between them attention with a norm
on each head."""

from __future__ import annotations

from policy.config import Attention, DecoderConfig, LayerSpec, Mlp, Norm, ShortConv
from policy.fields import names
from policy.fields.config_fields import attention, decoder, first, head_dim, layer_types, rope
from policy.fields.names import Stored

ARCHITECTURES = ("Lfm2ForCausalLM",)
MODEL_TYPES = ("lfm2",)
_INPUTS = ("b", "c", "x")
_CONVOLUTION = {
    **names.joined(
        "", tuple(f"{part}_proj" for part in _INPUTS), "conv.in_proj.weight", "f+ e -> e f"
    ),
    **names.joined("", tuple(f"{part}_bias" for part in _INPUTS), "conv.in_proj.bias", "f+"),
    "conv": Stored("conv.conv.weight", "e 1 w -> e w"),
    "conv_bias": Stored("conv.conv.bias"),
    "o_proj": Stored("conv.out_proj.weight", "o i -> i o"),
    "o_bias": Stored("conv.out_proj.bias"),
}
NAMES = (
    names.ATTENTION
    | {
        "input_layernorm.weight": Stored("operator_norm.weight"),
        "pre_feedforward_layernorm.weight": Stored("ffn_norm.weight"),
        "mixer.o_proj": Stored("self_attn.out_proj.weight", "e (h d) -> h d e"),
        "mixer.q_norm.weight": Stored("self_attn.q_layernorm.weight"),
        "mixer.k_norm.weight": Stored("self_attn.k_layernorm.weight"),
        "feed_forward.gate_proj": Stored("feed_forward.w1.weight", "f e -> e f"),
        "feed_forward.up_proj": Stored("feed_forward.w3.weight", "f e -> e f"),
        "feed_forward.down_proj": Stored("feed_forward.w2.weight", "e f -> f e"),
    }
    | {f"ShortConv.{path}": stored for path, stored in _CONVOLUTION.items()}
)
TOP = names.TOP | {"norm.weight": Stored("model.embedding_norm.weight")}

# The values of absent keys, by the class of transformers.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "initializer_range": 0.02,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "layer_types": None,
    "full_attn_idxs": None,
    "conv_bias": False,
    "conv_L_cache": 3,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
CONV = "conv"
FULL = "full_attention"


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = complete(DEFAULTS, stored)
    full = first(hf, "full_attn_idxs", default=range(hf["num_hidden_layers"]))
    derived = [FULL if i in full else CONV for i in range(hf["num_hidden_layers"])]
    mlp = Mlp(width(hf))
    layers = [LayerSpec(mixer, mlp) for mixer in mixers(hf, derived)]
    return decoder("lfm2", stored, hf, layers, norm=Norm(hf["norm_eps"]))


def complete(defaults: dict, stored: dict) -> dict:
    """Returns a configuration with its defaults. Released files call the tied head
    `tie_embedding`."""
    tied = {"tie_word_embeddings": stored["tie_embedding"]} if "tie_embedding" in stored else {}
    return defaults | stored | tied


def mixers(hf: dict, derived: list[str]) -> list[Attention | ShortConv]:
    """Returns the mixer of each layer: by `layer_types`, else by the kinds `derived`."""
    kinds = {
        CONV: ShortConv(hf["conv_L_cache"], bias=bool(hf["conv_bias"])),
        FULL: attention(
            hf,
            rope=rope(hf, head_dim(hf)),
            qk_norm=Norm(hf["norm_eps"]),
            bias=False,
            out_bias=False,
        ),
    }
    return [kinds[kind] for kind in layer_types(hf, (CONV, FULL), derived)]


def width(hf: dict) -> int:
    """Returns the width of the feed-forwards: the stored one, or two thirds of it times a factor,
    rounded up to a multiple."""
    width = first(hf, "block_ff_dim", default=hf["intermediate_size"])
    if not hf["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    factor = hf["block_ffn_dim_multiplier"]
    multiple = hf["block_multiple_of"]
    return width if factor is None else -(-int(factor * width) // multiple) * multiple
