"""Parts of a decoder that no Hugging Face configuration describes. They stand in its config.json under the key `duet`, which
transformers passes over, one section each, and can be added to any family.

A section's keys are the fields of a dataclass: `hyper_connections` of that field of DecoderConfig, `engram` of the one in
policy/ngrams.py. Free of jax.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

from policy import ngrams
from policy.config import DecoderConfig, HyperConnections
from policy.hf import UnsupportedModel
from policy.names import Stored, Table

KEY = "duet"


def _mapping(module: str, stored: str) -> Table:
    """Of a mapping of hyper-connections: one matrix, as transformers stores those of DeepSeek-V4."""
    return {
        f"{module}.weight": Stored(f"{stored}fn", "k (g e) -> g e k"),
        f"{module}.bias": Stored(f"{stored}base"),
        f"{module}.scale": Stored(f"{stored}scale"),
        f"{module}.norm": Stored(f"{stored}norm", "(g e) -> g e"),
    }


# How the weights of these parts are stored: inside layers by the end of their path, outside by the whole path.
NAMES: Table = {
    **_mapping("mixer_residual.mapping", "attn_hc."),
    **_mapping("feed_forward_residual.mapping", "ffn_hc."),
    **_mapping("streams.head", "model.hc_head.hc_"),
    # As the released demo of Engram calls them.
    "memory.table": Stored("engram.multi_head_embedding.embedding.weight"),
    "memory.key_proj": Stored("engram.key_projs.{e}.weight", "o i -> i o"),
    "memory.key_bias": Stored("engram.key_projs.{e}.bias"),
    "memory.value_proj": Stored("engram.value_proj.weight", "o i -> i o"),
    "memory.value_bias": Stored("engram.value_proj.bias"),
    "memory.key_norm": Stored("engram.norm1.{e}.weight"),
    "memory.query_norm": Stored("engram.norm2.{e}.weight"),
    "memory.conv_norm": Stored("engram.short_conv.norms.{e}.weight"),
    "memory.conv": Stored("engram.short_conv.conv.weight", "(g e) 1 w -> w g e"),
    "memory.outer_norm.weight": Stored("engram.outer_norm.weight"),
    "memory.classes": Stored("engram.classes"),
}


def extend(config: DecoderConfig, hf: dict) -> DecoderConfig:
    """`config` with the parts that `hf` has under KEY. Raises UnsupportedModel for a section or key that is unknown."""
    sections = dict(hf.get(KEY, {}))
    if (section := sections.pop("hyper_connections", None)) is not None:
        config = replace(config, hyper_connections=_read("hyper_connections", section, HyperConnections))
    if (section := sections.pop("engram", None)) is not None:
        config = _memory(config, section)
    if sections:
        raise UnsupportedModel(f"{KEY}: unknown sections {', '.join(sorted(sections))}")
    return config


def _memory(config: DecoderConfig, section: dict) -> DecoderConfig:
    listed = {key: tuple(section[key]) for key in ("layers", "vocab_bases") if key in section}
    memory = _read("engram", section | listed, ngrams.EngramSection)
    try:
        return ngrams.extended(config, memory)
    except ValueError as error:
        raise UnsupportedModel(f"{KEY}.engram: {error}") from None


def _read(name: str, section: dict, kind: type):
    """The section `name` as the dataclass `kind`."""
    if unknown := set(section) - {field.name for field in fields(kind)}:
        raise UnsupportedModel(f"{KEY}.{name}: unknown keys {', '.join(sorted(unknown))}")
    for key, hint in get_type_hints(kind).items():
        if get_origin(hint) is Literal and section.get(key, get_args(hint)[0]) not in get_args(hint):
            raise UnsupportedModel(f"{KEY}.{name}.{key}: {section[key]!r} is none of {', '.join(get_args(hint))}")
    try:
        return kind(**section)
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(f"{KEY}.{name}: {error}") from None
