"""Hugging Face directories in and out: config.json and safetensors, one parameter at a time, by the family's name table."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import yaml

from policy import families, names
from policy.config import DecoderConfig
from policy.hf import UnsupportedModel

SHARD_BYTES = 5 * 10**9


class ModelFileError(ValueError):
    """A model directory that cannot be read: a file or tensor that is missing, extra or of the wrong shape, by name."""


def presets() -> list[str]:
    """Names of the architectures in configs/models/."""
    folder = importlib.resources.files("configs") / "models"
    return sorted(entry.name.removesuffix(".yml") for entry in folder.iterdir() if entry.name.endswith(".yml"))


def preset(name: str, overrides: dict | None = None) -> DecoderConfig:
    """The architecture in configs/models/NAME.yml (the keys of a Hugging Face configuration), with some keys replaced."""
    if name not in presets():
        raise UnsupportedModel(f"no model preset {name!r}; there are {', '.join(presets())}")
    text = (importlib.resources.files("configs") / "models" / f"{name}.yml").read_text()
    return families.read(yaml.safe_load(text) | (overrides or {}))


def read_hf(directory) -> dict:
    """config.json of a model directory."""
    path = Path(directory) / "config.json"
    try:
        hf = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from None
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    if hf.get("quantization_config"):
        raise UnsupportedModel(f"{path}: quantised weights are not supported; dequantise them first")
    return hf


def read_config(directory) -> DecoderConfig:
    return families.read(read_hf(directory))


class _Files:
    """The tensors of a directory by name, opened lazily."""

    def __init__(self, directory):
        from safetensors import safe_open

        paths = sorted(Path(directory).glob("*.safetensors"))
        if not paths:
            raise ModelFileError(f"{directory}: no *.safetensors file")
        self._owner = {}
        for path in paths:
            try:
                handle = safe_open(path, framework="numpy")
            except Exception as error:
                raise ModelFileError(f"{path}: not a safetensors file: {error}") from None
            self._owner |= dict.fromkeys(handle.keys(), handle)  # noqa: SIM118 (not a dict)
        self.unread = set(self._owner)

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def read(self, name: str, shape: tuple[int, ...], part: slice | None = None) -> np.ndarray:
        """The whole tensor, checked against `shape`, or `part` of its second dimension."""
        if name not in self._owner:
            raise ModelFileError(f"missing tensor {name}, expected with shape {list(shape)}")
        self.unread.discard(name)
        view = self._owner[name].get_slice(name)
        if tuple(view.get_shape()) != tuple(shape):
            raise ModelFileError(f"tensor {name} has shape {view.get_shape()}, expected {list(shape)}")
        return view[:] if part is None else view[:, part]


def places(graph) -> Iterator[tuple[str, object, list[int] | None]]:
    """For each path of ours: how it is stored, and the numbers of the layers that it stacks (None outside the layers)."""
    config = graph.config
    table = families.get(config.family).NAMES
    start = np.cumsum([0, *(len(stack.pattern) * stack.repeats for stack in config.stacks)])
    for path in graph.paths:
        if not (found := re.fullmatch(r"stacks\.(\d+)\.layers\.(\d+)\.(.+)", path)):
            yield path, names.TOP[path], None
            continue
        s, i, end = int(found[1]), int(found[2]), found[3]
        stack = config.stacks[s]
        yield path, table[end], [int(start[s]) + r * len(stack.pattern) + i for r in range(stack.repeats)]


def read_weights(directory, graph) -> dict[str, jax.Array]:
    """All weights of `graph` from the safetensors of `directory`, each placed on the mesh before the next one is read."""
    files = _Files(directory)
    params = {}
    for path, place, layers in places(graph):
        want = graph.shapes[path]
        if layers is None:
            array = place.read(files.read(place.name, place.stored_shape(want.shape)), want.shape)
        else:
            array = np.stack([_read_layer(files, place, n, want.shape[1:]) for n in layers])
        array = np.asarray(array, want.dtype)
        params[path] = jax.make_array_from_callback(want.shape, graph.sharding(path), lambda index, a=array: a[index])
    _refuse_unread(files, graph.config)
    return params


def _read_layer(files: _Files, place, n: int, shape: tuple[int, ...]) -> np.ndarray:
    prefix = names.LAYER_PREFIX.format(n=n)
    if not isinstance(place, names.Experts):
        return place.read(files.read(prefix + place.name, place.stored_shape(shape)), shape)
    experts, inputs, outputs = shape
    if prefix + place.fused in files:
        part = slice(place.part * outputs, (place.part + 1) * outputs)
        return files.read(prefix + place.fused, (experts, outputs * place.parts, inputs), part).swapaxes(1, 2)
    return np.stack([files.read(prefix + place.name.format(e=e), (outputs, inputs)).T for e in range(experts)])


def _refuse_unread(files: _Files, config: DecoderConfig) -> None:
    hf = json.loads(config.hf)
    skip = [
        p.replace("{num_hidden_layers}", str(hf["num_hidden_layers"])) for p in getattr(families.get(config.family), "SKIP", ())
    ]
    if config.tied_head:
        skip.append(re.escape(names.TOP["lm_head"].name))
    extra = sorted(name for name in files.unread if not any(re.fullmatch(pattern, name) for pattern in skip))
    if extra:
        more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
        raise ModelFileError(f"unexpected tensors {', '.join(extra[:5])}{more}: the configuration has no place for them")


def _stored(graph, params) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor as it is stored, by stored name."""
    for path, place, layers in places(graph):
        array = np.asarray(params[path])
        if layers is None:
            yield place.name, place.write(array)
            continue
        for n, layer in zip(layers, array, strict=True):
            prefix = names.LAYER_PREFIX.format(n=n)
            if isinstance(place, names.Experts):
                for e, expert in enumerate(layer):
                    yield prefix + place.name.format(e=e), np.ascontiguousarray(expert.T)
            else:
                yield prefix + place.name, place.write(layer)


def write(directory, graph, params) -> None:
    """config.json and safetensors shards of at most 5 GB (with an index if there are several) in `directory`."""
    from safetensors.numpy import save_file

    config = graph.config
    hf = json.loads(config.hf)
    if families.read(hf) != config:
        raise ValueError("this DecoderConfig no longer matches its Hugging Face configuration; change keys there instead")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for old in (*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")):
        old.unlink()
    shards: list[dict[str, np.ndarray]] = [{}]
    sizes, where = [0], {}
    for name, array in _stored(graph, params):
        if sizes[-1] and sizes[-1] + array.nbytes > SHARD_BYTES:
            save_file(shards[-1], directory / f"part-{len(shards):05d}", metadata={"format": "pt"})
            shards[-1] = {}
            shards.append({})
            sizes.append(0)
        shards[-1][name] = array
        sizes[-1] += array.nbytes
        where[name] = len(shards)
    save_file(shards[-1], directory / f"part-{len(shards):05d}", metadata={"format": "pt"})
    count = len(shards)
    files = {i: "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    for i, name in files.items():
        (directory / f"part-{i:05d}").rename(directory / name)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": {name: files[i] for name, i in where.items()}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    hf["dtype"] = graph.runtime.param_dtype
    hf.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps(hf, indent=2))
