"""Granite 3 with experts (GraniteMoeForCausalLM)."""

from __future__ import annotations

from policy.config import DecoderConfig, Mlp, Moe, Router
from policy.families import granite
from policy.fields import names
from policy.fields.config_fields import activation
from policy.fields.names import Stored

ARCHITECTURES = ("GraniteMoeForCausalLM",)
MODEL_TYPES = ("granitemoe",)
NAMES = (
    names.ATTENTION
    | names.joined(
        "feed_forward.",
        ("expert_gate_proj", "expert_up_proj"),
        "block_sparse_moe.input_linear.weight",
        "x f+ e -> x e f",
    )
    | {
        "feed_forward.expert_down_proj": Stored(
            "block_sparse_moe.output_linear.weight", "x e f -> x f e"
        ),
        "feed_forward.router.weight": Stored("block_sparse_moe.router.layer.weight", "x e -> e x"),
    }
)

# The values of absent keys, by the class of transformers.
DEFAULTS = granite.DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    return granite.build("granitemoe", stored, hf, experts(hf))


def experts(hf: dict, shared: Mlp | None = None) -> Moe:
    """Creates the experts of a layer, next to a feed-forward `shared` that every token passes."""
    # A softmax over the chosen logits is the softmax over all, divided by the sum of the chosen.
    router = Router(hf["num_local_experts"], hf["num_experts_per_tok"])
    return Moe(router, hf["intermediate_size"], shared=shared, activation=activation(hf))
