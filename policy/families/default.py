"""The default block (ParallelRMS): attention and feed-forward read the same norm of x and are added
together.

It is stored like StableLM with a parallel residual and root-mean-square norms. Scores are divided
by sqrt(head_dim) at run time.
"""

from __future__ import annotations

from policy.config import DecoderConfig, LayerSpec, LearnedPositions, Mlp, Norm, SinusoidPositions
from policy.fields import names
from policy.fields.config_fields import (
    ACTIVATIONS,
    UnsupportedModel,
    activation,
    attention,
    decoder,
    head_dim,
    rope_from_settings,
    rope_parameters,
)

ARCHITECTURES = ("ParallelRMS",)
MODEL_TYPES = ("stablelm",)
NAMES = names.ATTENTION | names.MLP
TOP = names.TOP | {"embed_positions": names.Stored("model.embed_positions.weight")}

# The values of absent keys, by the class of transformers; the last three are this family's own,
# named as in MaxText.
DEFAULTS = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "mlp_activations": None,
    "trainable_position_size": 0,
    "use_untrainable_positional_embedding": False,
}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    if "StableLmForCausalLM" in (stored.get("architectures") or ()):
        raise UnsupportedModel(
            "architectures: StableLmForCausalLM has mean-subtracting norms; this family is "
            "ParallelRMS"
        )
    if not hf["use_parallel_residual"]:
        raise UnsupportedModel(
            "use_parallel_residual: must be true, the block of this family is parallel"
        )
    if hf["qk_layernorm"]:
        raise UnsupportedModel("qk_layernorm: not supported by this family")
    bias = bool(hf["use_qkv_bias"])
    mixer = attention(
        hf, rope=rope_from_settings(rope_parameters(hf), head_dim(hf)), bias=bias, out_bias=False
    )
    layer = LayerSpec(mixer, _feed_forward(hf), norms=("input_layernorm",), parallel=True)
    positions = (
        (LearnedPositions(hf["trainable_position_size"]),)
        if hf["trainable_position_size"] > 0
        else ()
    )
    if hf["use_untrainable_positional_embedding"]:
        positions += (SinusoidPositions(),)
    norm = Norm(eps=hf["layer_norm_eps"])
    return decoder(
        "default", stored, hf, [layer] * hf["num_hidden_layers"], norm=norm, positions=positions
    )


def _feed_forward(hf: dict) -> Mlp:
    """Creates the feed-forward. `mlp_activations` is [act], ungated, or [act, "linear"], gated."""
    match hf["mlp_activations"]:
        case None:
            return Mlp(hf["intermediate_size"], activation(hf))
        case [str(name)] | [str(name), "linear"] if name in ACTIVATIONS:
            return Mlp(
                hf["intermediate_size"], ACTIVATIONS[name], gated=len(hf["mlp_activations"]) == 2
            )
        case other:
            raise UnsupportedModel(
                f"mlp_activations: {other}; expected [act] or [act, linear], act one of "
                f"{', '.join(ACTIVATIONS)}"
            )
