"""Reads the parts of a decoder that no Hugging Face configuration describes. Each has a section in
config.json under the key `duet`, which transformers ignores, and can be added to any family.

A section's keys are the fields of a dataclass: HyperConnections or MultiTokenPrediction
(policy/config.py), or EngramSection (policy/fields/ngrams.py). Free of jax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

from policy.config import (
    Attention,
    DecoderConfig,
    HyperConnections,
    Indexer,
    LatentAttention,
    MultiTokenPrediction,
)
from policy.fields import ngrams
from policy.fields.config_fields import UnsupportedModel
from policy.fields.names import Stored, Table

KEY = "duet"


def _mapping(module: str, stored: str) -> Table:
    """Returns the names of a mapping of hyper-connections: one matrix, as transformers stores
    DeepSeek-V4."""
    return {
        f"{module}.weight": Stored(f"{stored}fn", "k (g e) -> g e k"),
        f"{module}.bias": Stored(f"{stored}base"),
        f"{module}.scale": Stored(f"{stored}scale"),
        f"{module}.norm": Stored(f"{stored}norm", "(g e) -> g e"),
    }


# How the weights of these parts are stored: inside layers by the end of their path, outside by the
# full path.
NAMES: Table = {
    **_mapping("mixer_residual.mapping", "attn_hc."),
    **_mapping("feed_forward_residual.mapping", "ffn_hc."),
    **_mapping("streams.head", "model.hc_head.hc_"),
    # The names of the released demo of Engram.
    "lookup.table": Stored("engram.multi_head_embedding.embedding.weight"),
    "lookup.key_proj": Stored("engram.key_projs.{e}.weight", "o i -> i o"),
    "lookup.key_bias": Stored("engram.key_projs.{e}.bias"),
    "lookup.value_proj": Stored("engram.value_proj.weight", "o i -> i o"),
    "lookup.value_bias": Stored("engram.value_proj.bias"),
    "lookup.key_norm": Stored("engram.norm1.{e}.weight"),
    "lookup.query_norm": Stored("engram.norm2.{e}.weight"),
    "lookup.conv_norm": Stored("engram.short_conv.norms.{e}.weight"),
    "lookup.conv": Stored("engram.short_conv.conv.weight", "(g e) 1 w -> w g e"),
    "lookup.outer_norm.weight": Stored("engram.outer_norm.weight"),
    "lookup.classes": Stored("engram.classes"),
    # Prediction module d is stored as layer number num_hidden_layers + d - 1, under the names of
    # DeepSeek-V3's files.
    "eh_proj": Stored("eh_proj.weight", "o i -> i o"),
    **{
        f"{norm}.{part}": Stored(f"{norm}.{part}")
        for norm in ("enorm", "hnorm")
        for part in ("weight", "bias")
    },
    **{f"post_norm.{part}": Stored(f"shared_head.norm.{part}") for part in ("weight", "bias")},
}


# Keys of Hugging Face configurations that say how many prediction modules the files hold:
# DeepSeek's files, transformers' own name for it, Qwen3.5's files.
_COUNTS_OF_MODULES = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def announced_modules(hf: dict) -> str | None:
    """Returns the key and value by which the configuration `hf` of a text model announces
    prediction modules, None if it announces none."""
    if "multi_token_prediction" in hf.get(KEY, {}):
        return f"{KEY}.multi_token_prediction: {hf[KEY]['multi_token_prediction']}"
    return next((f"{key}: {hf[key]}" for key in _COUNTS_OF_MODULES if hf.get(key)), None)


def extend(config: DecoderConfig, hf: dict) -> DecoderConfig:
    """Adds the parts that `hf` has under KEY to `config`. Raises UnsupportedModel for an unknown
    section or key."""
    sections = hf.get(KEY, {})
    if unknown := set(sections) - set(PARTS):
        raise UnsupportedModel(
            f"{KEY}: unknown sections {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}"
        )
    for name, part in PARTS.items():
        if name in sections:
            config = part(config, sections[name])
    return config


def _hyper_connections(config: DecoderConfig, section: dict) -> DecoderConfig:
    if config.hyper_connections is not None:
        raise UnsupportedModel(
            f"{KEY}.hyper_connections: this model has residual streams of its own"
        )
    return replace(config, hyper_connections=_read("hyper_connections", section, HyperConnections))


def _engram(config: DecoderConfig, section: dict) -> DecoderConfig:
    listed = {key: tuple(section[key]) for key in ("layers", "vocab_bases") if key in section}
    tables = _read("engram", section | listed, ngrams.EngramSection)
    try:
        return ngrams.add_engram(config, tables)
    except ValueError as error:
        raise UnsupportedModel(f"{KEY}.engram: {error}") from None


def _multi_token_prediction(config: DecoderConfig, section: dict) -> DecoderConfig:
    """Adds prediction modules whose layer is the decoder's last one, without an n-gram table and
    without embeddings of its own, and with keys of its own."""
    last = config.layers[-1]
    mixer = last.mixer
    if isinstance(mixer, Attention):
        mixer = replace(mixer, keeps=None, shares=None)
    elif isinstance(mixer, LatentAttention):
        mixer = replace(mixer, indexer=_last_indexer(config))
    layer = replace(last, mixer=mixer, engram=None, layer_embedding=None)
    return replace(
        config,
        multi_token_prediction=_read(
            "multi_token_prediction", section, MultiTokenPrediction, layer=layer
        ),
    )


def _last_indexer(config: DecoderConfig) -> Indexer | None:
    """Returns the indexer of the last layer that has one of its own."""
    for spec in reversed(config.layers):
        if isinstance(spec.mixer, LatentAttention) and isinstance(spec.mixer.indexer, Indexer):
            return replace(spec.mixer.indexer, keeps=False)
    return None


def _read(name: str, section: dict, kind: type, **rest):
    """Reads the section `name` as the dataclass `kind`; the fields `rest` cannot be set by a
    section."""
    known = {field.name for field in fields(kind)} - set(rest)
    if unknown := set(section) - known:
        raise UnsupportedModel(
            f"{KEY}.{name}: unknown keys {', '.join(sorted(unknown))}; known: "
            f"{', '.join(sorted(known))}"
        )
    for key, hint in get_type_hints(kind).items():
        if get_origin(hint) is Literal and section.get(key, get_args(hint)[0]) not in get_args(
            hint
        ):
            raise UnsupportedModel(
                f"{KEY}.{name}.{key}: {section[key]!r} is none of {', '.join(get_args(hint))}"
            )
    try:
        return kind(**section, **rest)
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(f"{KEY}.{name}: {error}") from None


PARTS: dict[str, Callable[[DecoderConfig, dict], DecoderConfig]] = {
    "hyper_connections": _hyper_connections,
    "engram": _engram,
    "multi_token_prediction": _multi_token_prediction,
}
