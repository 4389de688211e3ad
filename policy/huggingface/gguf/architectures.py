"""The architectures of GGUF that Duet reads and writes: those that both the name maps of the
package gguf and the reader of transformers know, and whose files say all that a decoder needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policy.huggingface.file_error import ModelFileError
from policy.huggingface.gguf.derived import Derived, Gpt2, Lfm2, MiniMaxM2, Qwen35

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


def _with_epsilon(name: str) -> Keys:
    """Returns COMMON for a model type that calls the epsilon of norms `name`."""
    return tuple((key, name if old == "rms_norm_eps" else old) for key, old in COMMON)


EXPERTS: Keys = (
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
)
GEMMA: Keys = (("attention.sliding_window", "sliding_window"),)
FLOATS = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys of GGUF whose numbers are float32, also where config.json has an integer."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    name: in files. model_type: of config.json. keys: numbers of the configuration. constants: keys
    of config.json that follow from the architecture. permuted: whether files have the rows of the
    q and k projections in another order than Hugging Face. offset: what files add to the weights of
    norms. rotary: the key of config.json for the rotated share of a head; None: all of it is
    rotated. largest: with so many layers llama.cpp scales products of queries and keys by the root
    of hidden_size / num_attention_heads, else by that of head_dim; None: always by head_dim.
    derived: what else the metadata say; None: nothing. transposed: ends of the names of matrices
    that Hugging Face has as [inputs, outputs], and files as [outputs, inputs].
    """

    name: str
    model_type: str
    keys: Keys = COMMON
    constants: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    offset: float = 0.0
    rotary: str | None = None
    largest: int | None = None
    derived: Derived | None = None
    transposed: tuple[str, ...] = ()


_PARTIAL = "partial_rotary_factor"
_NAMES_OF_GPT2 = (
    *("max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "vocab_size",
)
_GATED_DELTA_NETS: Keys = (
    ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ("ssm.state_size", "linear_key_head_dim"),
    ("ssm.group_count", "linear_num_key_heads"),
    ("ssm.time_step_rank", "linear_num_value_heads"),
    ("full_attention_interval", "full_attention_interval"),
)
_SHARED_EXPERT: Keys = (("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),)
ARCHITECTURES = (
    Architecture("llama", "llama", permuted=True),
    Architecture("qwen2", "qwen2"),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        COMMON + EXPERTS + _SHARED_EXPERT,
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
        largest=46,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        COMMON + GEMMA,
        {"rope_local_base_freq": 10000.0},
        offset=1.0,
        largest=62,
    ),
    Architecture("phi3", "phi3", rotary=_PARTIAL),
    Architecture(
        "gpt2",
        "gpt2",
        (
            *(each for each in COMMON if each[1] in _NAMES_OF_GPT2),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ),
        derived=Gpt2(),
        transposed=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
    ),
    Architecture(
        "lfm2",
        "lfm2",
        _with_epsilon("norm_eps") + (("shortconv.l_cache", "conv_L_cache"),),
        derived=Lfm2(),
    ),
    Architecture(
        "qwen35",
        "qwen3_5_text",
        COMMON + _GATED_DELTA_NETS,
        offset=1.0,
        rotary=_PARTIAL,
        derived=Qwen35(),
    ),
    Architecture(
        "qwen35moe",
        "qwen3_5_moe_text",
        COMMON + _GATED_DELTA_NETS + EXPERTS + _SHARED_EXPERT,
        {"architectures": ["Qwen3_5MoeForCausalLM"]},
        offset=1.0,
        rotary=_PARTIAL,
        derived=Qwen35(),
    ),
    Architecture(
        "minimax-m2",
        "minimax_m2",
        COMMON
        + (
            ("expert_count", "num_local_experts"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "intermediate_size"),
        ),
        rotary=_PARTIAL,
        derived=MiniMaxM2(),
    ),
)
# Model types that are written under the name of another.
_SAME_AS = {"mistral": "llama", "gemma3": "gemma3_text"}
_READ_OTHERWISE = {
    "gpt_oss": "transformers does not find the experts of such a file",
    "gemma4_text": "transformers does not find the scales of layers in such a file",
    "stablelm": "the norms of StableLM, which the file describes, subtract the mean",
    "mixtral": "transformers takes no experts from files of the architecture llama",
}
"""Why files of a model type that the package gguf knows cannot be proven."""


def known() -> str:
    """Returns the model types that are written, as a list for messages."""
    return ", ".join(sorted({*(each.model_type for each in ARCHITECTURES), *_SAME_AS}))


def of_model_type(model_type: str) -> Architecture:
    """Returns the architecture of the files of a model type. Raises ModelFileError for others."""
    name = _SAME_AS.get(model_type, model_type)
    for each in ARCHITECTURES:
        if each.model_type == name:
            return each
    reason = _READ_OTHERWISE.get(model_type)
    raise ModelFileError(
        f"model type {model_type}: not written as GGUF{'' if reason is None else f' ({reason})'}; "
        f"the package gguf and transformers both read {known()}"
    )


def of_file(name: str, path: object) -> Architecture:
    """Returns the architecture of a file by its name there. Raises ModelFileError for others."""
    for each in ARCHITECTURES:
        if each.name == name:
            return each
    names = ", ".join(sorted(each.name for each in ARCHITECTURES))
    raise ModelFileError(f"{path}: GGUF of the architecture {name}; Duet reads {names}")
