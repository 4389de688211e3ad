"""Hugging Face directories in and out: config.json and safetensors, one parameter at a time, by the family's name
table."""

from __future__ import annotations

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

# Beside this package, in a checkout as in an installed copy (importlib.resources fails on editable installs of Python 3.11).
PRESETS = Path(__file__).resolve().parents[1] / "configs" / "models"
SHARD_BYTES = 5 * 10**9
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class ModelFileError(ValueError):
    """A model directory that cannot be read: a file or tensor that is missing, extra or of the wrong shape, by name."""


class _Loader(yaml.SafeLoader):
    """Also reads 1e-6 as a number; YAML 1.1 wants 1.0e-6."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def presets() -> list[str]:
    """Names of the architectures in configs/models/."""
    return sorted(entry.name.removesuffix(".yml") for entry in PRESETS.iterdir() if entry.name.endswith(".yml"))


def preset(name: str, overrides: dict | None = None) -> DecoderConfig:
    """The architecture in configs/models/NAME.yml (the keys of a Hugging Face configuration), with some keys
    replaced."""
    if name not in presets():
        raise UnsupportedModel(f"no model preset {name!r}; there are {', '.join(presets())}")
    text = (PRESETS / f"{name}.yml").read_text()
    return families.read(yaml.load(text, _Loader) | (overrides or {}))


def read_hf(directory) -> dict:
    """config.json of a model directory."""
    path = Path(directory) / "config.json"
    try:
        hf = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from None
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not UTF-8 text: {error}") from None
    if not isinstance(hf, dict):
        raise ModelFileError(f"{path}: expected an object with the keys of a configuration, found {type(hf).__name__}")
    if hf.get("quantization_config"):
        raise UnsupportedModel(f"{path}: quantization_config: quantised weights are not supported; dequantise them first")
    return hf


def read_config(directory) -> DecoderConfig:
    return families.read(read_hf(directory))


class _Files:
    """The tensors of a directory by name, opened lazily. Which files: model.safetensors, or those that the index lists,
    or all."""

    def __init__(self, directory):
        from safetensors import SafetensorError, safe_open

        self.directory = Path(directory)
        self._owner = {}
        for path in self._paths():
            try:
                handle = safe_open(path, framework="numpy")
            except FileNotFoundError:
                raise ModelFileError(f"{path}: no such file, but {INDEX} lists it") from None
            except SafetensorError as error:
                raise ModelFileError(f"{path}: not a whole safetensors file: {error}") from None
            self._owner |= dict.fromkeys(handle.keys(), handle)  # noqa: SIM118 (not a dict)
        self.unread = set(self._owner)

    def _paths(self) -> list[Path]:
        if (single := self.directory / SINGLE).exists():
            return [single]
        if (index := self.directory / INDEX).exists():
            try:
                return [self.directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelFileError(f"{index}: not an index with a weight_map: {error}") from None
        if paths := sorted(self.directory.glob("*.safetensors")):
            return paths
        raise ModelFileError(f"{self.directory}: no *.safetensors file")

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def empty(self, name: str) -> bool:
        """Whether the tensor has no elements."""
        return 0 in self._owner[name].get_slice(name).get_shape()

    def read(self, name: str, shape: tuple[int, ...], part: slice | None = None) -> np.ndarray:
        """The whole tensor, checked against `shape`, or `part` of its second dimension."""
        if name not in self._owner:
            raise ModelFileError(f"{self.directory}: missing tensor {name}, expected with shape {list(shape)}")
        self.unread.discard(name)
        view = self._owner[name].get_slice(name)
        if tuple(view.get_shape()) != tuple(shape):
            raise ModelFileError(f"{self.directory}: tensor {name} has shape {view.get_shape()}, expected {list(shape)}")
        if view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise ModelFileError(f"{self.directory}: tensor {name} is {view.get_dtype()}: quantised weights are not supported")
        return view[:] if part is None else view[:, part]


def places(graph) -> Iterator[tuple[str, object, list[int] | None]]:
    """For each path of ours: how it is stored, and the numbers of the layers that it stacks (None outside the
    layers)."""
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
    """All weights of `graph` from the safetensors of `directory`, each placed on the mesh before the next one is
    read."""
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
    family = families.get(config.family)
    skip = list(getattr(family, "SKIP", ()))
    if config.tied_head:
        skip.append(re.escape(names.TOP["lm_head"].name))
    layer = re.compile(names.LAYER_PREFIX.replace(".", r"\.").format(n=r"(\d+)"))

    def skipped(name: str) -> bool:
        past = getattr(family, "SKIP_EXTRA_LAYERS", False) and (found := layer.match(name))
        return (past and int(found[1]) >= len(config.layers)) or any(re.fullmatch(pattern, name) for pattern in skip)

    extra = sorted(name for name in files.unread if not skipped(name) and not files.empty(name))
    if extra:
        more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
        raise ModelFileError(
            f"{files.directory}: unexpected tensors {', '.join(extra[:5])}{more}: the configuration has no place for them"
        )


def _stored(graph, params) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor as it is stored, by stored name; those without elements last."""
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
    expected = getattr(families.get(graph.config.family), "empty_tensors", None)
    for name, shape in expected(json.loads(graph.config.hf)).items() if expected else ():
        yield name, np.zeros(shape, np.dtype(graph.runtime.param_dtype))


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
    files = {i: SINGLE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    for i, name in files.items():
        (directory / f"part-{i:05d}").rename(directory / name)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": {name: files[i] for name, i in where.items()}}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    hf["dtype"] = graph.runtime.param_dtype
    hf.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps(hf, indent=2))
