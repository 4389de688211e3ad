"""The architectures of GGUF that Duet reads and writes: those that both the name maps of the
package gguf and the reader of transformers know, and whose files say all that a decoder needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policy.huggingface.file_error import ModelFileError

Keys = tuple[tuple[str, str], ...]
"""Pairs (key of GGUF after "ARCHITECTURE.", key of config.json)."""
COMMON: Keys = (
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("vocab_size", "vocab_size"),
)
EXPERTS: Keys = (
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
)
GEMMA: Keys = (("attention.sliding_window", "sliding_window"),)
FLOATS = (
    "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys of GGUF whose numbers are float32, also where config.json has an integer."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    name: in files. model_type: of config.json. keys: numbers of the configuration. constants: keys
    of config.json that follow from the architecture. permuted: whether files have the rows of the
    q and k projections in another order than Hugging Face (`permuted_rows`). offset: what files
    add to the weights of norms. rotary: the key of config.json for the rotated share of a head;
    None: all of it is rotated.
    """

    name: str
    model_type: str
    keys: Keys = COMMON
    constants: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    offset: float = 0.0
    rotary: str | None = None


ARCHITECTURES = (
    Architecture("llama", "llama", permuted=True),
    Architecture("qwen2", "qwen2"),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        COMMON
        + EXPERTS
        + (("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),),
    ),
    Architecture("qwen3", "qwen3"),
    Architecture("qwen3moe", "qwen3_moe", COMMON + EXPERTS, {"norm_topk_prob": True}),
    Architecture(
        "gemma2",
        "gemma2",
        COMMON
        + GEMMA
        + (
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ),
        offset=1.0,
    ),
    Architecture(
        "gemma3", "gemma3_text", COMMON + GEMMA, {"rope_local_base_freq": 10000.0}, offset=1.0
    ),
    Architecture("phi3", "phi3", rotary="partial_rotary_factor"),
)
# Model types that are written under the name of another.
_SAME_AS = {"mistral": "llama", "gemma3": "gemma3_text"}


def known() -> str:
    """Returns the model types that are written, as a list for messages."""
    return ", ".join(sorted({*(each.model_type for each in ARCHITECTURES), *_SAME_AS}))


def of_model_type(model_type: str) -> Architecture:
    """Returns the architecture of the files of a model type. Raises ModelFileError for others."""
    name = _SAME_AS.get(model_type, model_type)
    for each in ARCHITECTURES:
        if each.model_type == name:
            return each
    raise ModelFileError(
        f"model type {model_type}: not written as GGUF; the package gguf and transformers both read "
        f"{known()}"
    )


def of_file(name: str, path: object) -> Architecture:
    """Returns the architecture of a file by its name there. Raises ModelFileError for others."""
    for each in ARCHITECTURES:
        if each.name == name:
            return each
    names = ", ".join(sorted(each.name for each in ARCHITECTURES))
    raise ModelFileError(f"{path}: GGUF of the architecture {name}; Duet reads {names}")


Transform = Callable[[np.ndarray], np.ndarray]


def permuted_rows(rows: int, heads: int) -> np.ndarray:
    """Returns int[O]: the row of a projection in Hugging Face's order that each stored row is.

    A head rotates pairs of numbers. Hugging Face's order pairs row i with row i + D/2, the stored
    order neighbours.
    """
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def is_norm(name: str) -> bool:
    """Whether a tensor of GGUF is the weight of a norm."""
    return name.endswith("norm.weight")


def heads_of(architecture: Architecture, name: str, hf: Mapping[str, Any]) -> int | None:
    """Returns the heads of a tensor whose rows are permuted; None for all others."""
    if not architecture.permuted:
        return None
    if ".attn_q." in name:
        return int(hf["num_attention_heads"])
    if ".attn_k." in name:
        return int(hf.get("num_key_value_heads") or hf["num_attention_heads"])
    return None
