"""Granite with experts and a feed-forward that every token passes (GraniteMoeSharedForCausalLM)."""

from __future__ import annotations

from policy.config import DecoderConfig, Mlp
from policy.families import granite, granitemoe
from policy.fields import names
from policy.fields.config_fields import activation
from policy.fields.names import Stored

ARCHITECTURES = ("GraniteMoeSharedForCausalLM",)
MODEL_TYPES = ("granitemoeshared",)


def shared_names(module: str) -> names.Table:
    """Returns the entries of a feed-forward that is stored as shared_mlp. module: the prefix of our
    paths."""
    gate_and_up = names.joined(
        module, ("gate_proj", "up_proj"), "shared_mlp.input_linear.weight", "f+ e -> e f"
    )
    return gate_and_up | {
        f"{module}down_proj": Stored("shared_mlp.output_linear.weight", "e f -> f e")
    }


NAMES = granitemoe.NAMES | shared_names("feed_forward.shared.")

# The values of absent keys, by the class of transformers.
DEFAULTS = granitemoe.DEFAULTS | {"shared_intermediate_size": 0}


def read(stored: dict) -> DecoderConfig:
    """Reads the decoder of a stored configuration; raises UnsupportedModel for what the decoder
    does not compute."""
    hf = DEFAULTS | stored
    shared = (
        Mlp(hf["shared_intermediate_size"], activation(hf))
        if hf["shared_intermediate_size"]
        else None
    )
    return granite.build("granitemoeshared", stored, hf, granitemoe.experts(hf, shared))
