"""Tiny models for the tests of the decoder: Hugging Face configurations, and the models of `transformers` that are
their oracle.

Every constant tensor of an oracle (norm weights, biases, the correction bias of a router) is moved by N(0, 0.3): on a
fresh model a norm that is skipped or swapped with another changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

VOCAB = 160
_BASE = {
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
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
# Class of transformers without its suffix -> the keys of a tiny configuration.
TINY = {
    "Llama": _BASE,
    "Qwen3": _BASE | {"head_dim": 10},
    "Qwen3Moe": _BASE | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 10},
    "DeepseekV2": _BASE | _LATENT | {"n_shared_experts": 2, "routed_scaling_factor": 2.0},
    "DeepseekV3": _BASE | _LATENT | {"n_shared_experts": 1},
}
# One of each kind, with the switches that a default would hide.
STANDARD = {
    "Llama": {
        "head_dim": 12,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "DeepseekV2": {"topk_method": "group_limited_greedy"},
    "DeepseekV3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
_MODEL_TYPE = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
}


def configuration(kind: str, **keys) -> dict:
    """The Hugging Face configuration of a tiny model, as in config.json. Needs no torch."""
    named = {"architectures": [f"{kind}ForCausalLM"], "model_type": _MODEL_TYPE[kind]}
    return named | TINY[kind] | keys


def oracle(kind: str, seed: int = 0, **keys):
    """The model of transformers for `configuration(kind, **keys)`, float32, eager attention, perturbed. Needs torch."""
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**(TINY[kind] | keys))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model


def saved(model, directory) -> Path:
    """The directory, after `model.save_pretrained`."""
    model.save_pretrained(directory)
    return Path(directory)


def edit_config(directory, change) -> None:
    """Rewrites config.json by `change(dict) -> None`."""
    path = Path(directory) / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length))


def reference_logits(model, tokens_BT: np.ndarray, **inputs) -> np.ndarray:
    """float32[B, T, V] of the oracle."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens_BT), use_cache=False, **inputs).logits.numpy()


def random_model(config, seed: int = 0, runtime=None, mesh=None):
    """A model of ours with weights drawn by numpy (compiles nothing): matrices N(0, 0.2), norms N(1, 0.3), biases N(0,
    0.3)."""
    import jax

    from policy.config import Runtime
    from policy.model import Graph, Model
    from policy.sharding import layout

    graph = Graph(config, runtime or Runtime(), mesh or layout({"fsdp": 1}, devices=jax.devices()[:1]))
    rng, params = np.random.default_rng(seed), {}
    for path in sorted(graph.paths):
        mean, std = (1.0, 0.3) if path.endswith("norm.weight") else (0.0, 0.3 if path.endswith("bias") else 0.2)
        array = rng.normal(mean, std, graph.shapes[path].shape).astype(graph.shapes[path].dtype)
        params[path] = jax.device_put(array, graph.sharding(path))
    return Model(graph, params)
