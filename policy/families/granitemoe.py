"""Granite 3 with experts (GraniteMoeForCausalLM)."""

from __future__ import annotations

from policy.config import DecoderConfig, Mlp, Moe, Router
from policy.families import granite
from policy.fields import names
from policy.fields.config_fields import activation
from policy.fields.names import Stored

ARCHITECTURES = ("GraniteMoeForCausalLM",)
MODEL_TYPES = ("granitemoe",)
# transformers 5 holds the experts under other names, which adapters have.
_PARTS = ("expert_gate_proj", "expert_up_proj")
NAMES = names.ATTENTION | {
    **{
        f"feed_forward.{part}": Stored(
            "block_sparse_moe.input_linear.weight",
            "x f+ e -> x e f",
            _PARTS,
            also=(Stored("block_sparse_moe.experts.gate_up_proj", "x f+ e -> x e f", _PARTS),),
        )
        for part in _PARTS
    },
    "feed_forward.expert_down_proj": Stored(
        "block_sparse_moe.output_linear.weight",
        "x e f -> x f e",
        also=(Stored("block_sparse_moe.experts.down_proj", "x e f -> x f e"),),
    ),
    "feed_forward.router.weight": Stored(
        "block_sparse_moe.router.layer.weight",
        "x e -> e x",
        also=(Stored("block_sparse_moe.router.weight", "x e -> e x"),),
    ),
}

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
