"""Adapters of tiny models, made by `peft` or by us, for the tests of their files."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from oracles import oracle, saved
from tiny import KINDS, VOCAB

SEQUENCE = np.random.default_rng(7).integers(0, VOCAB, (2, 9))


def base_model(kind: str, **keys):
    """The model of transformers for the short configuration of a kind, with weights that are drawn
    by their names, so that every version of torch makes the same."""
    import torch

    model = oracle(kind, **KINDS[kind].standard | KINDS[kind].short | keys)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if not weight.is_floating_point() or "inv_freq" in name:
                continue
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            noise = rng.normal(0, 0.3 if weight.dim() == 1 else 0.2, weight.shape)
            is_norm = weight.dim() == 1 and "norm" in name and name.endswith("weight")
            weight.copy_(torch.tensor((noise + is_norm).astype(np.float32)))
    return model


@dataclass(frozen=True)
class Base:
    """A base model: its directory, and ours that was read from there."""

    directory: Path
    ours: Any

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {path: np.asarray(array) for path, array in self.ours.params.items()}

    def logits(self, params) -> np.ndarray:
        """The logits of SEQUENCE with other weights."""
        model = copy.copy(self.ours)
        model.params = params
        return np.asarray(model.logits(SEQUENCE))


@functools.cache
def _base(kind: str, keys: str) -> Base:
    import policy

    directory = saved(base_model(kind, **json.loads(keys)), Path(tempfile.mkdtemp()) / "base")
    ours = policy.load(directory)
    ours.logits(SEQUENCE)  # compiles what copies share
    return Base(directory, ours)


def base(kind: str, **keys) -> Base:
    """The base of a kind, made once in a process."""
    return _base(kind, json.dumps(keys))


def adapted(model, seed: int = 0, **options):
    """The PeftModel of a base, with random factors; `options` are those of LoraConfig."""
    import torch
    from peft import LoraConfig, get_peft_model

    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in sorted(peft_model.named_parameters()):
            if "lora_magnitude" in name:
                weight.mul_(torch.tensor(rng.uniform(0.7, 1.4, weight.shape).astype(np.float32)))
            elif "lora_" in name:
                weight.copy_(torch.tensor(rng.normal(0, 0.3, weight.shape).astype(np.float32)))
            elif "modules_to_save" in name:
                weight.add_(torch.tensor(rng.normal(0, 0.1, weight.shape).astype(np.float32)))
    return peft_model.eval()


def logits(model) -> np.ndarray:
    """The logits of SEQUENCE by a model of transformers or peft."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(SEQUENCE), use_cache=False).logits.numpy()


def random_params(base: Base, spec, seed: int = 3) -> dict[str, np.ndarray]:
    """Random arrays of an adapter, and of the weights that it trains in full."""
    from policy.huggingface.peft.factors import factor_shapes
    from policy.huggingface.peft.targets import targets

    rng = np.random.default_rng(seed)
    graph = base.ours.graph
    params = {}
    for path, target in targets(graph, spec).items():
        shapes = factor_shapes(graph, path, target.rank)
        a = rng.normal(0, 0.3, shapes.a).astype(np.float32)
        b = rng.normal(0, 0.3, shapes.b).astype(np.float32)
        if spec.experts == "shared" and "expert_" in path:
            a, b = (a, b[:, 0]) if "down" in path else (a[:, 0], b)
        params |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
        if spec.dora:
            norms = np.sqrt(np.square(base.weights[path]).sum(graph.product_dims(path).rows))
            lengths = norms * rng.uniform(0.7, 1.4, norms.shape)
            params[f"{path}.magnitude"] = lengths.astype(np.float32)
    for path in spec.train:
        noise = rng.normal(0, 0.1, base.weights[path].shape)
        params[path] = base.weights[path] + noise.astype(np.float32)
    return params


def merged_by_hand(directory: Path, adapter: Path, model_class):
    """The model of transformers with an adapter merged into its files: W + alpha / r B A, for
    adapters whose modules have a tensor each in the files."""
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key, a in factors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            change = factors[key.replace("lora_A", "lora_B")] @ a
            weights[name] = weights[name] + config["lora_alpha"] / config["r"] * change
    out = Path(tempfile.mkdtemp()) / "merged"
    shutil.copytree(directory, out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return model_class.from_pretrained(out, attn_implementation="eager").eval()
