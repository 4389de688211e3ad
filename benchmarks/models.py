"""The two models of the benchmarks: Qwen3-shaped, dense, random weights, as Duet and as
transformers hold them; and the same adapter over a model, as Duet and as peft make it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import LoraConfig

    from policy.model import Model

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

MODELS = {
    # 1.12M weights
    "1m": _COMMON
    | {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    # 26.2M weights
    "25m": _COMMON
    | {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
"""Keys of a Hugging Face configuration by the name of the size."""


@contextlib.contextmanager
def pair(name: str, *, remat: str = "none", scan: bool = False) -> Iterator[tuple]:
    """Returns (model of Duet, model of transformers) with the same float32 weights, `MODELS[name]`.

    `remat` and `scan` say how Duet trains it. transformers recomputes nothing, so the equal work is
    `none`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    import policy
    from policy import families
    from policy.config import Runtime

    ours = policy.create(families.read(MODELS[name]), runtime=Runtime(remat=remat, scan=scan))
    with tempfile.TemporaryDirectory() as directory:
        policy.save(ours, directory)
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        yield ours, theirs


def add_adapter(model: Model, rank: int) -> None:
    """Gives a model of Duet a new adapter of all linear layers, as a run with `model.adapter`."""
    from policy.adapter_spec import AdapterSpec
    from policy.adapters.learning import Adapters
    from policy.huggingface.peft.targets import resolved

    spec = resolved(model.graph, AdapterSpec(rank=rank))
    model.graph = model.graph.with_runtime(adapter=spec)
    model.params = {**model.params, **Adapters(model.graph).init(model.params, seed=0)}


def peft_adapter(rank: int | None) -> LoraConfig | None:
    """Returns the same adapter in the words of peft. None: no adapter."""
    from peft import LoraConfig

    if rank is None:
        return None
    return LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
