"""Hugging Face directories in and out: config.json and safetensors, a slice of one layer at a time, by the family's name
table."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from policy import families
from policy.config import DecoderConfig, LayerSpec
from policy.huggingface import extensions, names, sources
from policy.huggingface.quantized import Scheme
from policy.huggingface.tensorfiles import INDEX, SINGLE, ModelFileError, TensorFiles
from policy.mesh import processes
from policy.mesh.host_memory import HOST

if TYPE_CHECKING:
    from policy.model import Graph

SHARD_BYTES = 5 * 10**9
PIECE = 2**24  # numbers that are dequantised at once: 64 MB
# The prediction modules' part of the tree of weights, and a file for them beside those that transformers reads: it takes layers
# past num_hidden_layers for a mistake, unless the family's PASSED_OVER says otherwise.
MTP, MTP_FILE = "mtp", "multi_token_prediction.safetensors"
# What to do where the files lack prediction modules that they should hold.
Missing = Literal["refuse", "fresh"]
# Starts of stored names -> those of the tables, for text models inside multimodal ones. A family's PREFIXES go before these.
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# Tensors that a text model does without: the towers of other modalities, heads that predict further tokens, copies of embedding and
# head in prediction modules, and tables of old files that follow from the configuration.
SKIP = (
    r"(model\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*",
    r"mtp\..*",
    r".*\.\d+\.(embed_tokens|shared_head\.head)\.weight",
    r".*rotary_emb\.inv_freq",
)


@dataclass(frozen=True)
class Place:
    """Where the weight `path` is stored: in which form, before which prefix, and the numbers of the layers that it stacks (None
    outside the layers)."""

    graph: Graph
    path: str
    stored: names.Stored
    layers: tuple[int, ...] | None
    prefix: str = ""

    def name(self, stored: names.Stored, layer: int | None, expert: int = 0) -> str:
        """The tensor of a file that holds that layer and expert."""
        return self.prefix.format(n=layer) + stored.name.format(e=expert)

    def parts(self, stored: names.Stored) -> tuple[str, ...]:
        """The paths of ours that share a tensor in that form, in order; this one is among them."""
        module = self.path.rpartition(".")[0]
        return tuple(f"{module}.{part}" for part in stored.parts) or (self.path,)

    def shape(self, path: str, stored: names.Stored) -> names.Shape:
        """That of ours which one stored tensor holds: without the axis of layers, nor that of numbered tensors."""
        return self.graph.shapes[path].shape[(self.layers is not None) + stored.numbered :]

    def read(self, files: TensorFiles, layer: int | None, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Writes `index` of ours, of one layer, to `out`."""
        stored = next((s for s in (self.stored, *self.stored.also) if self.name(s, layer) in files), self.stored)
        parts = self.parts(stored)
        shapes, part = [self.shape(path, stored) for path in parts], parts.index(self.path)
        if stored.numbered:
            first, *index = index
            blocks = ((e, tuple(index), out[i, ...]) for i, e in enumerate(range(first.start, first.stop)))
        else:
            blocks = ((0, piece, target) for piece, target in _pieces(index, out, stored.same_rows))
        for expert, wanted, target in blocks:
            block = stored.block(shapes, part, wanted)
            whole = np.issubdtype(out.dtype, np.integer)
            target[...] = block.finish(files.read(self.name(stored, layer, expert), block.shape, block.index, whole))


def _pieces(index: tuple[slice, ...], out: np.ndarray, split: bool) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """`index` and `out` in pieces along axis 0 of at most PIECE numbers, so that a dequantised piece stays small."""
    step = max(1, PIECE * len(out) // max(1, out.size)) if split and out.ndim else 0
    if not step or step >= len(out):
        yield index, out
        return
    for start in range(0, len(out), step):
        target = out[start : start + step]
        low = index[0].start + start
        yield (slice(low, low + len(target)), *index[1:]), target


def places(graph: Graph) -> Iterator[Place]:
    """Where each weight of `graph` is stored."""
    config = graph.config
    family = families.get(config.family)
    top, prefix = getattr(family, "TOP", names.TOP), getattr(family, "LAYER_PREFIX", names.LAYER_PREFIX)
    start = np.cumsum([0, *(len(stack.pattern) * stack.repeats for stack in config.stacks)])
    for path in graph.paths:
        if found := re.fullmatch(rf"{MTP}\.(.+)", path):
            part, count = config.multi_token_prediction, len(config.layers)
            stored = _entry(config, family.NAMES, found[1].removeprefix("layer."), part.layer)
            yield Place(graph, path, stored, tuple(range(count, count + part.depth)), prefix)
            continue
        if not (found := re.fullmatch(r"stacks\.(\d+)\.layers\.(\d+)\.(.+)", path)):
            yield Place(graph, path, _entry(config, top, path), None)
            continue
        s, i, end = int(found[1]), int(found[2]), found[3]
        stack = config.stacks[s]
        numbers = tuple(int(start[s]) + r * len(stack.pattern) + i for r in range(stack.repeats))
        yield Place(graph, path, _entry(config, family.NAMES, end, stack.pattern[i]), numbers, prefix)


def _entry(config: DecoderConfig, table: names.Table, end: str, layer: LayerSpec | None = None) -> names.Stored:
    module, _, rest = end.partition(".")
    kind = type(getattr(layer, module, None)).__name__
    if (found := table.get(f"{kind}.{rest}", table.get(end, extensions.NAMES.get(end)))) is None:
        raise LookupError(
            f"policy/families/{config.family}.py: no entry for {end} in {'TOP' if layer is None else 'NAMES'}"
        )
    return found


def read_weights(
    directory, graph: Graph, apart: tuple[str, ...] = (), missing: Missing = "refuse", seed: int = 0
) -> tuple[dict[str, jax.Array], frozenset[str]]:
    """Reads the weights of `graph` from the safetensors of `directory`, each shard straight to its place on the mesh. Returns them
    with the paths of those that begin, at least in part, as the random numbers of `seed`: prediction modules that the files lack
    (`_absent_modules`, which `missing` is for). `apart` are tensors that others read.

    The host holds no more than the shards of one weight at a time beside those that live there. Raises ModelFileError.
    """
    scheme = sources.scheme(directory)
    beside = [MTP_FILE] if graph.config.multi_token_prediction and (Path(directory) / MTP_FILE).exists() else []
    files = TensorFiles(directory, _renamed(families.get(graph.config.family)), scheme, beside)
    absent = _absent_modules(graph.config, files, missing)
    fresh = frozenset(path for path in graph.paths if absent and path.startswith(f"{MTP}."))
    start = graph.init(seed, fresh) if fresh else {}
    params = {place.path: _on_mesh(graph, place, files, start.get(place.path), absent) for place in places(graph)}
    files.unread.difference_update(apart)
    _refuse_unread(files, graph.config, scheme)
    return params, fresh


def _absent_modules(config: DecoderConfig, files: TensorFiles, missing: Missing) -> set[int]:
    """Returns the numbers of the layers of prediction modules that the files hold no tensor of, and that are to start fresh: all of
    them where neither config.json nor a file knows of modules; else only with `missing` "fresh". Raises ModelFileError."""
    if (part := config.multi_token_prediction) is None:
        return set()
    layers = range(len(config.layers), len(config.layers) + part.depth)
    stored = {number for name in files.unread if (number := _extra_layer(config, name)) is not None}
    announced = extensions.announced_modules(families.text_model(sources.read_hf(files.directory)))
    absent = set(layers) - stored
    if not absent or missing == "fresh" or not (stored or announced):
        return absent
    prefix = getattr(families.get(config.family), "LAYER_PREFIX", names.LAYER_PREFIX)
    held = [number for number in layers if number in stored]
    where = ", ".join(prefix.format(n=number) + "*" for number in held)
    says = f"config.json says {announced}" if announced else "config.json announces none"
    raise ModelFileError(
        f"{files.directory}: missing tensor {prefix.format(n=min(absent))}eh_proj.weight: multi_token_prediction has depth "
        f"{part.depth}, and of its {part.depth} modules the files hold {len(held)}{where and f' ({where})'}; {says}. To start the "
        f"missing ones from random weights, set `model.multi_token_prediction: {{depth: {part.depth}, missing: fresh}}`"
    )


def _on_mesh(graph: Graph, place: Place, files: TensorFiles, start: jax.Array | None, absent: set[int]) -> jax.Array:
    """The weight, shard by shard; devices that hold the same shard share one reading of it. Layers with numbers in `absent` are
    those of `start`."""
    if start is not None and place.layers is not None and absent.issuperset(place.layers):
        return start
    begun = {} if start is None else {shard.device: shard.data for shard in start.addressable_shards}
    shape, dtype, sharding = graph.shapes[place.path].shape, graph.shapes[place.path].dtype, graph.sharding(place.path)
    devices: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)), []).append(device)
    arrays = []
    for bounds, holders in devices.items():
        index = tuple(slice(*each) for each in bounds)
        shard = _aligned([high - low for low, high in bounds], dtype)
        if begun:
            shard[...] = np.asarray(begun[holders[0]])
        if place.layers is None:
            place.read(files, None, index, shard)
        else:
            for i, layer in enumerate(place.layers[index[0]]):
                if layer not in absent:
                    place.read(files, layer, index[1:], shard[i, ...])
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in holders]
        arrays += jax.block_until_ready([jax.device_put(shard, place) for place in places])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _aligned(shape: list[int], dtype) -> np.ndarray:
    """An empty array that starts at a multiple of 64 bytes: such a one jax takes over on CPU, any other it copies."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _renamed(family: ModuleType) -> Callable[[str], str]:
    """Stored names -> those of the tables: the prefixes of multimodal wrappers, and the family's own."""
    prefixes = (*getattr(family, "PREFIXES", ()), *PREFIXES)

    def rename(name: str) -> str:
        old, new = next(((old, new) for old, new in prefixes if name.startswith(old)), ("", ""))
        return new + name.removeprefix(old)

    return rename


def _refuse_unread(files: TensorFiles, config: DecoderConfig, scheme: Scheme | None) -> None:
    family = families.get(config.family)
    skip = [*SKIP, *getattr(family, "SKIP", ()), *(scheme.skip if scheme else ())]
    if config.tied_head:
        skip.append(re.escape(names.TOP["lm_head"].name))  # accepted, whatever the family calls its own top

    def skipped(name: str) -> bool:
        past = getattr(family, "SKIP_EXTRA_LAYERS", False) and _extra_layer(config, name) is not None
        return past or any(re.fullmatch(pattern, name) for pattern in skip)

    extra = sorted(files.own_name(name) for name in files.unread if not skipped(name) and not files.empty(name))
    if extra:
        more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
        raise ModelFileError(
            f"{files.directory}: unexpected tensors {', '.join(extra[:5])}{more}: the configuration has no place for them"
        )


def _extra_layer(config: DecoderConfig, name: str) -> int | None:
    """Returns the number of the tensor's layer if that is past the last one, else None."""
    prefix = getattr(families.get(config.family), "LAYER_PREFIX", names.LAYER_PREFIX)
    found = re.match(re.escape(prefix).replace(r"\{n\}", r"(\d+)"), name)
    return int(found[1]) if found is not None and int(found[1]) >= len(config.layers) else None


@jax.jit
def _layer(array: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, number, 0, keepdims=False)


def _on_host(array, number: int | None) -> np.ndarray:
    """The whole weight, or one of those that it stacks."""
    if number is None:
        return processes.on_host(array)
    on_device = isinstance(array, jax.Array) and array.sharding.memory_kind != HOST
    return processes.on_host(_layer(array, number)) if on_device else processes.on_host(array)[number]


def _stored(graph: Graph, params) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor as it is stored, by stored name, layer by layer; those without elements last."""
    work = []
    for place in places(graph):
        if place.path == place.parts(place.stored)[0]:
            work += [(-1, None, place)] if place.layers is None else [(n, r, place) for r, n in enumerate(place.layers)]
    for layer, number, place in sorted(work, key=lambda each: each[0]):
        arrays = [_on_host(params[path], number) for path in place.parts(place.stored)]
        if not place.stored.numbered:
            yield place.name(place.stored, layer), place.stored.join(arrays)
            continue
        for e, experts in enumerate(zip(*arrays, strict=True)):
            yield place.name(place.stored, layer, e), place.stored.join(experts)
    expected = getattr(families.get(graph.config.family), "empty_tensors", None)
    for name, shape in expected(json.loads(graph.config.hf)).items() if expected else ():
        yield name, np.zeros(shape, np.dtype(graph.runtime.param_dtype))


def write(directory, graph, params, tensors: dict[str, np.ndarray] | None = None, keys: dict | None = None) -> None:
    """config.json and safetensors shards of at most 5 GB (with an index if there are several) in `directory`; with further
    `tensors` by stored name, and further `keys` of the configuration. Of several processes all give their parts of the weights,
    and the first writes."""
    from safetensors.numpy import save_file

    config = graph.config
    hf = json.loads(config.hf)
    if families.read(hf) != config:
        raise ValueError(
            "this DecoderConfig no longer matches its Hugging Face configuration; change keys there instead"
        )
    every = itertools.chain(_stored(graph, params), (tensors or {}).items())
    if not processes.first():
        for _ in every:  # each is gathered by all processes
            pass
        return
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for old in (*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")):
        old.unlink()
    shards: list[dict[str, np.ndarray]] = [{}]
    sizes, where, beside = [0], {}, {}
    passed_over = getattr(families.get(config.family), "PASSED_OVER", "$.")
    for name, array in every:
        if _extra_layer(config, name) is not None and not re.match(passed_over, name):
            beside[name] = array
            continue
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
    if beside:
        save_file(beside, directory / MTP_FILE, metadata={"format": "pt"})
    hf["dtype"] = graph.runtime.param_dtype
    hf.pop("torch_dtype", None)
    hf |= keys or {}
    (directory / "config.json").write_text(json.dumps(hf, indent=2))
