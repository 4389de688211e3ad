"""Tiny models for the tests of the decoder: Hugging Face configurations, and the models of
`transformers` that are their oracle.

Every constant tensor of an oracle (norm weights, biases, the correction bias of a router) is moved
by N(0, 0.3): on a fresh model a norm that is skipped or swapped with another changes nothing.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tiny
from tiny import VOCAB

KINDS = tiny.KINDS
TINY = {kind: entry.base for kind, entry in KINDS.items()}
STANDARD = {kind: entry.standard for kind, entry in KINDS.items()}
# Kinds that share least: grouped heads, windows between norms, latent attention with experts, a
# recurrent state.
REPRESENTATIVE = ("Llama", "Gemma3", "DeepseekV3", "Qwen3Next")


def by_kind(kinds=tuple(KINDS), always=REPRESENTATIVE) -> list:
    """Parameters of a test: these kinds, those that are not run `always` marked `every_family`."""
    return [
        pytest.param(kind, marks=() if kind in always else pytest.mark.every_family)
        for kind in kinds
    ]


def configuration(kind: str, **keys) -> dict:
    """The Hugging Face configuration of a tiny model, as in config.json. Needs no torch."""
    named = {
        "architectures": [KINDS[kind].model or f"{kind}ForCausalLM"],
        "model_type": KINDS[kind].model_type,
    }
    return named | TINY[kind] | keys


def short(kind: str, **keys) -> dict:
    """The standard configuration with as few layers as hold every kind of layer."""
    return configuration(kind, **KINDS[kind].standard | KINDS[kind].short | keys)


def oracle(kind: str, seed: int = 0, **keys):
    """The model of transformers for `configuration(kind, **keys)`, float32, eager attention,
    perturbed. Needs torch."""
    import torch

    torch.manual_seed(seed)
    model = _build(kind, TINY[kind] | keys).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (
                (tensor.dim() == 1 or name.endswith(("_bias", "bias", "ple.conv1d.weight")))
                and tensor.is_floating_point()
                and "inv_freq" not in name
                and "softcap" not in name
            ):
                tensor.add_(torch.randn_like(tensor) * 0.3)
            if name.endswith("tid2eid"):  # the experts of each token id, all 0 in a fresh model
                tensor.copy_(
                    torch.rand(len(tensor), model.config.n_routed_experts).argsort(-1)[
                        :, : tensor.shape[1]
                    ]
                )
    return model


def classes(kind: str):
    """(configuration class, model class) of transformers."""
    import transformers

    entry = KINDS[kind]
    config = getattr(transformers, entry.config or f"{kind}Config")
    return config, entry.oracle_class() if entry.oracle_class else getattr(
        transformers, entry.model or f"{kind}ForCausalLM"
    )


def _build(kind: str, keys: dict):
    config_class, model_class = classes(kind)
    config = config_class(
        **copy.deepcopy(keys)
    )  # it writes defaults of its own into the rotary settings
    config._attn_implementation = config._experts_implementation = "eager"
    return model_class(config)


def saved(model, directory) -> Path:
    """The directory, after `model.save_pretrained`."""
    model.save_pretrained(directory)
    if model.config.model_type == "olmo_hybrid":
        _split_convolutions(model, Path(directory) / "model.safetensors")
    return Path(directory)


def _split_convolutions(model, file: Path) -> None:
    """Writes the convolutions of OLMo Hybrid as released: transformers 5.24 splits them into three
    equal parts."""
    from safetensors.torch import load_file, save_file

    state = load_file(file)
    for number, layer in enumerate(model.base_model.layers):
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            parts = mixer.conv1d.weight.detach().split(
                [mixer.key_dim, mixer.key_dim, mixer.value_dim]
            )
            names = (f"model.layers.{number}.linear_attn.{part}_conv1d.weight" for part in "qkv")
            state |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(state, file, metadata={"format": "pt"})


def reload(kind: str, directory, **kwargs):
    """What transformers makes of a directory; it must not miss a tensor or find one too many."""
    model, info = classes(kind)[1].from_pretrained(
        directory,
        output_loading_info=True,
        **{"dtype": "auto", "attn_implementation": "eager"} | kwargs,
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


def floats_and_integers(params: dict) -> tuple[dict, dict]:
    """The weights that have a gradient, and tables of integers."""
    integers = {path: array for path, array in params.items() if array.dtype == "int32"}
    return {path: array for path, array in params.items() if path not in integers}, integers


def write_weight_file(directory) -> None:
    """Writes weights of zeros into a directory with a config.json: enough where only headers are
    read."""
    import jax

    from policy.config import Runtime
    from policy.huggingface import model_directory, sources
    from policy.mesh.sharding import layout
    from policy.model import Graph

    config = sources.read_config(directory, media="vision_config" in sources.read_hf(directory))
    graph = Graph(config, Runtime(), layout({"fsdp": 1}, devices=jax.devices()[:1]))
    zeros: dict = {path: np.zeros(shape.shape, shape.dtype) for path, shape in graph.shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        model_directory.write(folder, graph, zeros)
        shutil.copy(Path(folder) / "model.safetensors", directory)


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


def torch_logprobs(logits, row, temperature):
    """(logp, entropy) of the tokens after the first, by torch."""
    import torch

    log_p = torch.log_softmax(logits[:, :-1] / temperature, -1)
    logp = log_p.gather(-1, torch.as_tensor(row[:, 1:, None]))[..., 0]
    return logp, -(log_p.exp() * log_p).sum(-1)


def _mean_and_std(path: str, config) -> tuple[float, float]:
    """Those of a weight of `random_model`; where norms are zero-centred, 0 stands for the factor
    1."""
    if path == "norm.weight" or path.endswith(
        ("layernorm.weight", "q_norm.weight", "k_norm.weight")
    ):
        return float(getattr(config.norm, "scale", None) != "zero_centred"), 0.3
    if path.endswith(("norm.weight", ".scalar", ".expert_scale")):
        return 1.0, 0.3
    return 0.0, 0.3 if path.endswith("bias") else config.initializer_range


def random_model(config, seed: int = 0, runtime=None, mesh=None):
    """A model of ours with weights drawn by numpy (compiles nothing): matrices N(0,
    initializer_range), biases N(0, 0.3), norms and other factors N(1, 0.3)."""
    import jax

    from policy.config import Runtime
    from policy.mesh.sharding import layout
    from policy.model import Graph, Model

    graph = Graph(
        config, runtime or Runtime(), mesh or layout({"fsdp": 1}, devices=jax.devices()[:1])
    )
    rng, params = np.random.default_rng(seed), {}
    for path in sorted(graph.paths):
        if path.endswith("token_experts"):
            experts = next(spec.moe.router.experts for spec in config.layers if spec.moe)
            shape = graph.shapes[path].shape
            table = rng.random((*shape[:-1], experts)).argsort(-1)[..., : shape[-1]]
            params[path] = jax.device_put(table.astype(np.int32), graph.sharding(path))
            continue
        if graph.shapes[path].dtype == np.int32:  # the classes of tokens
            params[path] = jax.device_put(
                np.arange(config.vocab_size, dtype=np.int32)[None], graph.sharding(path)
            )
            continue
        array = rng.normal(*_mean_and_std(path, config), graph.shapes[path].shape).astype(
            graph.shapes[path].dtype
        )
        params[path] = jax.device_put(array, graph.sharding(path))
    return Model(graph, params)
