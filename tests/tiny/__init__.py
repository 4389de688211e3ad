"""Tiny models of every family, one file each, listed from this folder.

A file holds KINDS: class of `transformers` without its suffix -> Kind; VARIANTS: shapes and
switches that the standard model leaves at one value, name -> (kind, keys); WIDE: more of them, too
many for every run; and GENERATED and GENERATED_WIDE, the same for the tests of the generator.
PUBLISHED: preset in configs/models/ -> parameters of the released model, as its paper or model card
gives them. Needs no torch to be imported.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field

VOCAB = 160
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_THETA = {"rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0} | _THETA
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8} | _THETA
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
} | _THETA


@dataclass(frozen=True)
class Kind:
    """A tiny model: `base` its configuration, `standard` the switches that a default would hide,
    `short` the keys that leave as few layers as hold every kind of layer. `config` and `model` name
    the classes of transformers where they are not {kind}Config and {kind}ForCausalLM;
    `oracle_class()` makes the model's class where transformers has none. `logits` and `generator`
    are the tolerances of logits against the oracle and of the generator against the trainer.
    `required` are keys that have no default, `given` those whose default in transformers works
    nowhere;
    `padded`: switches without which transformers gives a row that is padded on the left other
    logits than the row alone."""

    model_type: str
    base: dict
    standard: dict = field(default_factory=dict)
    short: dict = field(default_factory=lambda: {"num_hidden_layers": 2})
    config: str | None = None
    model: str | None = None
    oracle_class: Callable | None = None
    logits: float = 2e-5
    generator: float = 1e-5
    required: tuple[str, ...] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    given: dict = field(default_factory=dict)
    padded: dict = field(default_factory=dict)


def _collect(name: str) -> dict:
    """The entries of one table over all files of this folder."""
    result = {}
    for module in sorted(entry.name for entry in pkgutil.iter_modules(__path__)):
        table = getattr(importlib.import_module(f"{__name__}.{module}"), name, {})
        assert not result.keys() & table.keys(), (
            f"tests/tiny: {name}: {result.keys() & table.keys()} stands in two files"
        )
        result |= table
    return result


def __getattr__(name: str):
    if name in ("KINDS", "VARIANTS", "WIDE", "GENERATED", "GENERATED_WIDE", "PUBLISHED"):
        return _collect(name)
    raise AttributeError(name)
