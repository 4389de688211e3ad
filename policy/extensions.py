"""Parts of a decoder that no Hugging Face configuration describes. They stand in its config.json under the key `duet`, which
transformers passes over, one section each, and can be added to any family.

A section's name is a field of DecoderConfig, and its keys are the fields of the dataclass there. Free of jax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from policy.config import DecoderConfig, MultiTokenPrediction
from policy.hf import UnsupportedModel
from policy.names import Stored, Table

KEY = "duet"
# How the weights of these parts are stored: inside layers by the end of their path, outside by the whole path. Prediction
# module d is stored as layer number num_hidden_layers + d - 1, under the names of DeepSeek-V3's files.
NAMES: Table = {
    "eh_proj": Stored("eh_proj.weight", "o i -> i o"),
    **{f"{norm}.{part}": Stored(f"{norm}.{part}") for norm in ("enorm", "hnorm") for part in ("weight", "bias")},
    **{f"post_norm.{part}": Stored(f"shared_head.norm.{part}") for part in ("weight", "bias")},
}


def extend(config: DecoderConfig, hf: dict) -> DecoderConfig:
    """`config` with the parts that `hf` has under KEY. Raises UnsupportedModel for a section or key that is unknown."""
    sections = hf.get(KEY, {})
    if unknown := set(sections) - set(PARTS):
        raise UnsupportedModel(f"{KEY}: unknown sections {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    for name, part in PARTS.items():
        if name in sections:
            config = part(config, sections[name])
    return config


def _multi_token_prediction(config: DecoderConfig, section: dict) -> DecoderConfig:
    """The layer of the prediction modules is the decoder's last one."""
    known = [field.name for field in fields(MultiTokenPrediction) if field.name != "layer"]
    if unknown := set(section) - set(known):
        raise UnsupportedModel(
            f"{KEY}.multi_token_prediction: unknown keys {', '.join(sorted(unknown))}; known: {', '.join(known)}"
        )
    try:
        part = MultiTokenPrediction(layer=config.layers[-1], **section)
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(f"{KEY}.multi_token_prediction: {error}") from None
    return replace(config, multi_token_prediction=part)


PARTS: dict[str, Callable[[DecoderConfig, dict], DecoderConfig]] = {"multi_token_prediction": _multi_token_prediction}
