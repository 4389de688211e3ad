"""Parts of a decoder that no Hugging Face configuration describes. They stand in its config.json under the key `duet`, which
transformers passes over, one section each, and can be added to any family.

A section's name is a field of DecoderConfig, and its keys are the fields of the dataclass there. Free of jax.
"""

from __future__ import annotations

from policy.config import DecoderConfig
from policy.hf import UnsupportedModel
from policy.names import Table

KEY = "duet"
# How the weights of these parts are stored: inside layers by the end of their path, outside by the whole path.
NAMES: Table = {}


def extend(config: DecoderConfig, hf: dict) -> DecoderConfig:
    """`config` with the parts that `hf` has under KEY. Raises UnsupportedModel for a section or key that is unknown."""
    sections = hf.get(KEY, {})
    if unknown := set(sections):
        raise UnsupportedModel(f"{KEY}: unknown sections {', '.join(sorted(unknown))}")
    return config
