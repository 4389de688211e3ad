"""Metadata of architectures whose layers are of several kinds, and the keys of config.json that
follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from policy.families import lfm2, qwen3_5
from policy.huggingface.file_error import ModelFileError

Numbers = Mapping[str, Any]
"""Metadata of a file, by key after "ARCHITECTURE."."""


class Derived(Protocol):
    """What an architecture says otherwise than number by number."""

    def numbers(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """Returns metadata for a complete configuration. Raises ModelFileError for one that
        programs compute otherwise."""
        ...

    def config(self, numbers: Numbers) -> dict[str, Any]:
        """Returns keys of config.json for the metadata of a file."""
        ...


@dataclass(frozen=True)
class Lfm2:
    """LFM2: layers without heads of keys are short convolutions."""

    def numbers(self, full: Mapping[str, Any]) -> dict[str, Any]:
        heads = full["num_key_value_heads"]
        kinds = full["layer_types"]
        return {
            "attention.head_count_kv": [heads if kind == lfm2.FULL else 0 for kind in kinds],
            "feed_forward_length": lfm2.width(dict(full)),
        }

    def config(self, numbers: Numbers) -> dict[str, Any]:
        heads = numbers["attention.head_count_kv"]
        return {
            "num_key_value_heads": max(heads),
            "layer_types": [lfm2.FULL if count else lfm2.CONV for count in heads],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": False,
        }


@dataclass(frozen=True)
class Gpt2:
    """GPT-2: config.json names the width of the feed-forwards if it is not four times that of the
    model."""

    def numbers(self, full: Mapping[str, Any]) -> dict[str, Any]:
        return {"feed_forward_length": full.get("n_inner") or 4 * full["hidden_size"]}

    def config(self, numbers: Numbers) -> dict[str, Any]:
        names = {
            "n_embd": "embedding_length",
            "n_head": "attention.head_count",
            "n_layer": "block_count",
            "n_positions": "context_length",
            "n_inner": "feed_forward_length",
        }
        return {name: numbers[key] for name, key in names.items()}


@dataclass(frozen=True)
class Qwen35:
    """Qwen3.5: gated delta nets, and attention in every n-th layer."""

    def numbers(self, full: Mapping[str, Any]) -> dict[str, Any]:
        sections = full["rope_parameters"].get("mrope_section") or qwen3_5.SECTIONS
        heads = full["linear_num_value_heads"]
        values = full["linear_value_head_dim"]
        keys = full["linear_key_head_dim"]
        if values != keys:
            raise ModelFileError(
                f"linear_value_head_dim {values}: not written as GGUF; llama.cpp takes "
                f"linear_key_head_dim, {keys}, for both"
            )
        return {
            "full_attention_interval": _interval(full["layer_types"]),
            "ssm.inner_size": values * heads,
            "rope.dimension_sections": [*sections, 0],
        }

    def config(self, numbers: Numbers) -> dict[str, Any]:
        head_dim = numbers["attention.key_length"]
        values = numbers["ssm.inner_size"] // numbers["ssm.time_step_rank"]
        rope = {
            "rope_type": "default",
            "rope_theta": float(numbers["rope.freq_base"]),
            "partial_rotary_factor": numbers["rope.dimension_count"] / head_dim,
            "mrope_section": list(numbers["rope.dimension_sections"][:3]),
            "mrope_interleaved": True,
        }
        return {"linear_value_head_dim": values, "rope_parameters": rope}


@dataclass(frozen=True)
class MiniMaxM2:
    """MiniMax M2: the router's scores are sigmoids."""

    def numbers(self, full: Mapping[str, Any]) -> dict[str, Any]:
        return {"expert_gating_func": 2}

    def config(self, numbers: Numbers) -> dict[str, Any]:
        functions = {0: "none", 1: "softmax", 2: "sigmoid"}
        function = numbers.get("expert_gating_func", 2)
        return {"scoring_func": functions.get(function, str(function))}


def _interval(kinds: list[str]) -> int:
    """Returns n if every n-th layer attends. Of layers in another order it returns a number that
    does not describe them."""
    full = "full_attention"
    return kinds.index(full) + 1 if full in kinds else len(kinds) + 1
