"""Reads and writes Hugging Face directories: config.json and safetensors, one slice of one layer at
a time, by the family's name table."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import qwix

from policy import families
from policy.config import DecoderConfig, LayerSpec, Runtime
from policy.fields import extensions, names, tower_files
from policy.fields.stored_names import different_prefixes, renamed
from policy.huggingface import sources
from policy.huggingface.quantized import Scheme
from policy.huggingface.tensorfiles import INDEX, SINGLE, ModelFileError, TensorFiles
from policy.mesh import processes
from policy.mesh.sharding import layout
from policy.mesh.shards import Shard, assembled, shards_of
from policy.model import Graph
from policy.ops.host_memory import HOST, fetch
from policy.ops.quantization import dequantised

SHARD_BYTES = 5 * 10**9
PIECE = 2**24  # how many numbers are dequantised at once: 64 MB
# The path of prediction modules in the tree of weights, and a file of their own: transformers warns
# about layers past num_hidden_layers in the files that it reads, unless the family's PASSED_OVER
# matches them.
MTP = "mtp"
MTP_FILE = "multi_token_prediction.safetensors"
# What to do if the files lack prediction modules that they should hold.
Missing = Literal["refuse", "fresh"]
Change = Callable[[jax.Array], jax.Array]
# Tensors that a text model does not need: the towers of other modalities (unless they are read),
# heads that predict further tokens, copies of embedding and head in prediction modules, and tables
# of old files that follow from the configuration.
TOWERS = rf"(model\.)?({'|'.join(tower_files.ROOTS)})\..*"
HEADS = r"mtp\..*"
COPIES = r".*\.\d+\.(embed_tokens|shared_head\.head)\.weight"
TABLES = r".*rotary_emb\.inv_freq"


@dataclass(frozen=True)
class StoredWeight:
    """The place of the weight `path` in the files: the form in which it is stored, the prefix of
    its names, and the numbers of the layers that it stacks (None outside the layers)."""

    graph: Graph
    path: str
    stored: names.Stored
    layers: tuple[int, ...] | None
    prefix: str = ""

    def name(self, stored: names.Stored, layer: int | None, number: int = 0) -> str:
        """Returns the name of the stored tensor that holds a layer, and of it an expert or a
        shard."""
        return (self.prefix + stored.name).format(n=layer, e=number, s=number)

    def names(self, files: TensorFiles, layer: int | None) -> list[str]:
        """Returns the names of the tensors of `files` that hold a layer of the weight."""
        stored = self._spelling(files, layer)
        if stored.sharded:
            every = (self.name(stored, layer, shard) for shard in itertools.count())
            return list(itertools.takewhile(files.__contains__, every)) or [
                self.name(stored, layer)
            ]
        experts = (
            self.graph.shapes[self.path].shape[self.layers is not None] if stored.numbered else 1
        )
        return [self.name(stored, layer, expert) for expert in range(experts)]

    def parts(self, stored: names.Stored) -> tuple[str, ...]:
        """Returns the paths of our weights that share the stored tensor, in order, this one
        included."""
        module = self.path.rpartition(".")[0]
        return tuple(f"{module}.{part}" for part in stored.parts) or (self.path,)

    def shape(self, path: str, stored: names.Stored) -> names.Shape:
        """Returns the shape of our weight that one stored tensor holds, without the axis of layers
        or of numbered tensors."""
        return self.graph.shapes[path].shape[(self.layers is not None) + stored.numbered :]

    def check(self, files: TensorFiles, layer: int | None) -> None:
        """Checks the tensors of a layer of the weight, without reading their numbers. Raises
        ModelFileError for one that is missing or of another shape or kind of numbers."""
        stored = self._spelling(files, layer)
        shape = self.stored_shape(stored)
        integers = np.issubdtype(self.graph.shapes[self.path].dtype, np.integer)
        tensors = self.names(files, layer)
        if stored.sharded and tensors[0] in files:
            self._check_shards(files, tensors, shape, integers)
            return
        for name in tensors:
            files.checked(name, shape, integers)

    def _check_shards(
        self, files: TensorFiles, tensors: list[str], shape: names.Shape, integers: bool
    ) -> None:
        """Checks the tensors that hold the rows of a weight of `shape`, as `check`."""
        count = 0
        for name in tensors:
            rows = files.tensor(name).shape[:1]
            files.checked(name, (*rows, *shape[1:]), integers)
            count += sum(rows)
        if count != shape[0]:
            first = files.own_name(tensors[0])
            last = files.own_name(tensors[-1])
            raise ModelFileError(
                f"{files.directory}: tensors {first} to {last} have {count} rows together, "
                f"expected {shape[0]} by config.json"
            )

    def stored_shape(self, stored: names.Stored) -> names.Shape:
        """Returns the shape of a stored tensor."""
        parts = self.parts(stored)
        shapes = [self.shape(path, stored) for path in parts]
        part = parts.index(self.path)
        return stored.block(shapes, part, tuple(slice(0, n) for n in shapes[part])).shape

    def read(
        self, files: TensorFiles, layer: int | None, index: tuple[slice, ...], out: np.ndarray
    ) -> None:
        """Reads `index` of one layer of our weight into `out`."""
        stored = self._spelling(files, layer)
        if stored.sharded:
            self._read_shards(files, layer, index, out)
            return
        parts = self.parts(stored)
        shapes = [self.shape(path, stored) for path in parts]
        part = parts.index(self.path)
        if stored.numbered:
            first = index[0]
            inner = index[1:]
            blocks = ((e, inner, out[i, ...]) for i, e in enumerate(range(first.start, first.stop)))
        else:
            blocks = ((0, piece, target) for piece, target in _pieces(index, out, stored.same_rows))
        for expert, piece, target in blocks:
            block = stored.block(shapes, part, piece)
            integers = np.issubdtype(out.dtype, np.integer)
            target[...] = block.finish(
                files.read(self.name(stored, layer, expert), block.shape, block.index, integers)
            )

    def _read_shards(
        self, files: TensorFiles, layer: int | None, index: tuple[slice, ...], out: np.ndarray
    ) -> None:
        """Reads `index` of a weight whose rows are in several tensors into `out`."""
        low = index[0].start
        high = index[0].stop
        start = 0
        integers = np.issubdtype(out.dtype, np.integer)
        for name in self.names(files, layer):
            shape = files.tensor(name).shape
            stop = start + shape[0]
            first = max(low, start)
            last = min(high, stop)
            if first < last:
                inside = (slice(first - start, last - start), *index[1:])
                for piece, target in _pieces(inside, out[first - low : last - low], True):
                    target[...] = files.read(name, shape, piece, integers)
            start = stop

    def _spelling(self, files: TensorFiles, layer: int | None) -> names.Stored:
        """Returns the spelling of which the files have the tensor. Of several with one name, the
        first whose shape is that of the tensor."""
        present = [s for s in (self.stored, *self.stored.also) if self.name(s, layer) in files]
        same_name = [s for s in present if s.name == present[0].name]
        if len(same_name) < 2:
            return (present or [self.stored])[0]

        def fits(stored: names.Stored) -> bool:
            return self.stored_shape(stored) == files.shape(self.name(stored, layer))

        return next(filter(fits, same_name), same_name[0])


def _pieces(
    index: tuple[slice, ...], out: np.ndarray, split: bool
) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Splits `index` and `out` along axis 0 into pieces of at most PIECE numbers, so that a
    dequantised piece is small."""
    step = max(1, PIECE * len(out) // max(1, out.size)) if split and out.ndim else 0
    if not step or step >= len(out):
        yield index, out
        return
    for start in range(0, len(out), step):
        target = out[start : start + step]
        low = index[0].start + start
        yield (slice(low, low + len(target)), *index[1:]), target


def places(graph: Graph) -> Iterator[StoredWeight]:
    """Yields the place of each weight of `graph` in the files."""
    config = graph.config
    family = families.get(config.family)
    top = getattr(family, "TOP", names.TOP)
    prefix = getattr(family, "LAYER_PREFIX", names.LAYER_PREFIX)
    start = np.cumsum([0, *(len(stack.pattern) * stack.repeats for stack in config.stacks)])
    for path in graph.paths:
        if match := re.fullmatch(r"(image|audio)\.(.+)", path):
            stacked = (
                range(graph.shapes[path].shape[0]) if graph.axes[path][:1] == ("layers",) else None
            )
            yield StoredWeight(
                graph,
                path,
                family.TOWERS[match[1]][match[2]],
                None if stacked is None else tuple(stacked),
            )
            continue
        if match := re.fullmatch(rf"{MTP}\.(.+)", path):
            part = config.multi_token_prediction
            count = len(config.layers)
            assert part is not None  # a graph has such weights only with prediction modules
            stored = _entry(config, family.NAMES, match[1].removeprefix("layer."), part.layer)
            yield StoredWeight(graph, path, stored, tuple(range(count, count + part.depth)), prefix)
            continue
        if not (match := re.fullmatch(r"stacks\.(\d+)\.layers\.(\d+)\.(.+)", path)):
            yield StoredWeight(graph, path, _entry(config, top, path), None)
            continue
        s = int(match[1])
        i = int(match[2])
        end = match[3]
        stack = config.stacks[s]
        numbers = tuple(int(start[s]) + r * len(stack.pattern) + i for r in range(stack.repeats))
        yield StoredWeight(
            graph, path, _entry(config, family.NAMES, end, stack.pattern[i]), numbers, prefix
        )


def _entry(
    config: DecoderConfig, table: names.Table, end: str, layer: LayerSpec | None = None
) -> names.Stored:
    module, _, rest = end.partition(".")
    kind = type(getattr(layer, module, None)).__name__
    if (stored := table.get(f"{kind}.{rest}", table.get(end, extensions.NAMES.get(end)))) is None:
        raise LookupError(
            f"policy/families/{config.family}.py: no entry for {end} in "
            f"{'TOP' if layer is None else 'NAMES'}"
        )
    return stored


def read_weights(
    directory: str | os.PathLike,
    graph: Graph,
    ignore: tuple[str, ...] = (),
    missing: Missing = "refuse",
    seed: int = 0,
    changes: Mapping[str, Change] | None = None,
) -> tuple[dict[str, jax.Array], frozenset[str]]:
    """Reads the weights of `graph` from the safetensors of `directory`, each shard straight to its
    place on the mesh.

    Returns them with the paths of the weights that start, at least in part, as the random numbers
    of `seed`: prediction modules that the files lack and that `missing` lets start fresh. `ignore`
    names tensors that the caller reads. `changes` are made to weights by path, before they are
    stored quantised. The host holds the shards of one weight at a time, and the
    weights that live in host memory. Of a weight that is stored quantised (`Graph.quantized`) host
    and devices hold the floats of one layer at a time. Raises ModelFileError for tensors that are
    missing, unexpected or of the wrong shape.
    """
    files, fresh, absent_layers = _checked_files(directory, graph, ignore, missing)
    start = graph.init(seed, fresh) if fresh else {}
    params = {}
    for place in places(graph):
        gaps = absent_layers if place.path in fresh else set()
        change = (changes or {}).get(place.path)
        is_quantized = place.path in graph.quantized
        read = _quantized if is_quantized and change is None else _on_mesh
        weight = read(graph, place, files, start.get(place.path), gaps)
        if change is not None:
            weight = change(weight)
            weight = graph.quantized_weight(place.path).of(weight) if is_quantized else weight
        params[place.path] = weight
    return params, fresh


class StoredWeights(Mapping[str, np.ndarray]):
    """The weights of a graph in a model directory, each read to the host when it is asked for."""

    def __init__(self, directory: str | os.PathLike, graph: Graph):
        self._graph = graph
        self._places = {place.path: place for place in places(graph)}
        table = renamed(families.get(graph.config.family))
        self._files = TensorFiles(directory, table, sources.scheme(directory))

    def __getitem__(self, path: str) -> np.ndarray:
        place = self._places[path]
        shape = self._graph.shapes[path]
        array = np.empty(shape.shape, shape.dtype)
        every = tuple(slice(0, size) for size in shape.shape)
        if place.layers is None:
            place.read(self._files, None, every, array)
            return array
        for number, layer in enumerate(place.layers):
            place.read(self._files, layer, every[1:], array[number, ...])
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def check(
    directory: str | os.PathLike,
    sections: dict | None = None,
    missing: Missing = "refuse",
    media: bool = False,
) -> None:
    """Compares names, shapes and dtypes of the tensors of a model directory with its config.json.
    Reads headers only.

    The arguments are as for policy.load, which refuses the same directories. Raises ModelFileError
    and UnsupportedModel.
    """
    check_files(directory, sources.read_config(directory, sections, media=media), missing=missing)


def check_files(
    directory: str | os.PathLike,
    config: DecoderConfig,
    ignore: tuple[str, ...] = (),
    missing: Missing = "refuse",
) -> None:
    """Compares the tensors of `directory` with those of a decoder, as `read_weights` does before it
    reads a number."""
    graph = Graph(config, Runtime(), layout({"fsdp": 1}, devices=jax.local_devices()[:1]))
    _checked_files(sources.base_of(directory), graph, ignore, missing)


class CheckedFiles(NamedTuple):
    """Files that hold the weights of a graph, but for the paths that start `fresh`, at least in
    part: in the layers with these numbers."""

    files: TensorFiles
    fresh: frozenset[str]
    absent_layers: set[int]


def _checked_files(
    directory: str | os.PathLike, graph: Graph, ignore: tuple[str, ...], missing: Missing
) -> CheckedFiles:
    """Raises ModelFileError for tensors of `graph` that are missing, unexpected or of the wrong
    shape."""
    scheme = sources.scheme(directory)
    extra_files = (
        [MTP_FILE]
        if graph.config.multi_token_prediction and (Path(directory) / MTP_FILE).exists()
        else []
    )
    files = TensorFiles(directory, renamed(families.get(graph.config.family)), scheme, extra_files)
    absent = _absent_modules(graph.config, files, missing)
    fresh = frozenset(path for path in graph.paths if absent and path.startswith(f"{MTP}."))
    for place in places(graph):
        for layer in (None,) if place.layers is None else place.layers:
            if layer not in absent or place.path not in fresh:
                place.check(files, layer)
    for name, numbers in _derived(graph.config).items():
        if name in files and not np.array_equal(
            np.asarray(files.checked(name, numbers.shape, True)), numbers
        ):
            raise ModelFileError(
                f"{directory}: tensor {files.own_name(name)} has other numbers than config.json "
                "gives"
            )
    files.unread.difference_update(ignore)
    _refuse_unread(files, graph.config, scheme)
    return CheckedFiles(files, fresh, absent)


def _absent_modules(config: DecoderConfig, files: TensorFiles, missing: Missing) -> set[int]:
    """Returns the layer numbers of the prediction modules that the files lack and that start fresh:
    all of them if neither config.json nor a file mentions modules, otherwise only with `missing`
    "fresh". Raises ModelFileError."""
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
        f"{files.directory}: missing tensor {prefix.format(n=min(absent))}eh_proj.weight: "
        f"multi_token_prediction has depth {part.depth}, and of its {part.depth} modules the "
        f"files hold {len(held)}{where and f' ({where})'}; {says}. To start the missing ones from "
        f"random weights, set `model.multi_token_prediction: {{depth: {part.depth}, missing: "
        f"fresh}}`"
    )


def _on_mesh(
    graph: Graph, place: StoredWeight, files: TensorFiles, start: jax.Array | None, absent: set[int]
) -> jax.Array:
    """Reads a weight shard by shard. Layers with numbers in `absent` are taken from `start`."""
    if start is not None and place.layers is not None and absent.issuperset(place.layers):
        return start
    initial = (
        {} if start is None else {shard.device: shard.data for shard in start.addressable_shards}
    )

    def fill(numbers: np.ndarray, shard: Shard) -> None:
        if initial:
            numbers[...] = np.asarray(initial[shard.devices[0]])
        if place.layers is None:
            place.read(files, None, shard.index, numbers)
            return
        for i, layer in enumerate(place.layers[shard.index[0]]):
            if layer not in absent:
                place.read(files, layer, shard.index[1:], numbers[i, ...])

    return _filled(graph.shapes[place.path], graph.sharding(place.path), fill)


def _quantized(
    graph: Graph, place: StoredWeight, files: TensorFiles, start: Any, absent: set[int]
) -> Any:
    """Reads a weight that is stored quantised, as `_on_mesh`: one layer at a time, which is
    quantised before the next is read."""
    weight = graph.quantized_weight(place.path)
    if place.layers is None:
        return weight.of(_on_mesh(graph, place, files, None, set()))
    shape = graph.shapes[place.path]
    of_layer = jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype)

    def read(layer: int) -> jax.Array:
        return _filled(
            of_layer,
            weight.layer_sharding,
            lambda numbers, shard: place.read(files, layer, shard.index, numbers),
        )

    layers = {
        number: partial(read, layer)
        for number, layer in enumerate(place.layers)
        if layer not in absent
    }
    return weight.of_layers(layers, start)


def _filled(
    shape: jax.ShapeDtypeStruct,
    sharding: jax.sharding.NamedSharding,
    fill: Callable[[np.ndarray, Shard], None],
) -> jax.Array:
    """Makes an array shard by shard. fill: writes the numbers of a shard into an empty array."""
    arrays = []
    for shard in shards_of(shape.shape, sharding):
        numbers = shard.empty(shape.dtype)
        fill(numbers, shard)
        arrays += shard.put(numbers, sharding)
    return assembled(shape.shape, sharding, arrays)


def _refuse_unread(files: TensorFiles, config: DecoderConfig, scheme: Scheme | None) -> None:
    family = families.get(config.family)
    skip = [HEADS, COPIES, *getattr(family, "SKIP", ()), *_unneeded(config, scheme)]
    skip += [] if has_towers(config) else [TOWERS]

    def skipped(name: str) -> bool:
        past = (
            getattr(family, "SKIP_EXTRA_LAYERS", False) and _extra_layer(config, name) is not None
        )
        return past or any(re.fullmatch(pattern, name) for pattern in skip)

    extra = sorted(
        files.own_name(name) for name in files.unread if not skipped(name) and not files.empty(name)
    )
    if extra:
        more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
        raise ModelFileError(
            f"{files.directory}: unexpected tensors {', '.join(extra[:5])}{more}: the "
            "configuration has no such weights"
        )


def _unneeded(config: DecoderConfig, scheme: Scheme | None) -> list[str]:
    """Returns patterns of stored tensors that no part of the model needs."""
    unread = getattr(families.get(config.family), "unread", lambda config: ())(config)
    # A tied head is accepted, under the family's name, too.
    tops = (names.TOP, getattr(families.get(config.family), "TOP", names.TOP))
    head = [re.escape(top["lm_head"].name) for top in tops if config.tied_head and "lm_head" in top]
    return [TABLES, *unread, *(scheme.skip if scheme else ()), *head]


def _extra_layer(config: DecoderConfig, name: str) -> int | None:
    """Returns the number of a tensor's layer if it is past the last one, else None."""
    prefix = getattr(families.get(config.family), "LAYER_PREFIX", names.LAYER_PREFIX)
    match = re.match(re.escape(prefix).replace(r"\{n\}", r"(\d+)"), name)
    return int(match[1]) if match is not None and int(match[1]) >= len(config.layers) else None


@jax.jit
def _layer(array, number: jax.Array):
    return jax.tree.map(
        lambda a: jax.lax.dynamic_index_in_dim(fetch(a), number, 0, keepdims=False), array
    )


_dequantised = jax.jit(lambda weight: dequantised(fetch(weight)))


def _on_host(array, number: int | None) -> np.ndarray:
    """Returns a full weight, or one of the weights that it stacks; the floats of a quantised
    one."""
    if isinstance(array, qwix.QArray):
        part = array if number is None else _layer(array, number)
        return processes.on_host(_dequantised(part))
    if number is None:
        return processes.on_host(array)
    on_device = isinstance(array, jax.Array) and array.sharding.memory_kind != HOST
    return (
        processes.on_host(_layer(array, number)) if on_device else processes.on_host(array)[number]
    )


def stored_tensors(graph: Graph, params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor as it is stored, by stored name, layer by layer; tensors without elements
    last."""
    work = []
    for place in places(graph):
        if place.path == place.parts(place.stored)[0]:
            work += (
                [(-1, None, place)]
                if place.layers is None
                else [(n, r, place) for r, n in enumerate(place.layers)]
            )
    for layer, number, place in sorted(work, key=lambda each: each[0]):
        arrays = [_on_host(params[path], number) for path in place.parts(place.stored)]
        if place.stored.sharded:
            for number, rows in enumerate(_shards(graph.config, arrays[0])):
                yield place.name(place.stored, layer, number), rows
            continue
        if not place.stored.numbered:
            yield place.name(place.stored, layer), place.stored.join(arrays)
            continue
        for e, experts in enumerate(zip(*arrays, strict=True)):
            yield place.name(place.stored, layer, e), place.stored.join(experts)
    expected = getattr(families.get(graph.config.family), "empty_tensors", None)
    for name, shape in expected(json.loads(graph.config.hf)).items() if expected else ():
        yield name, np.zeros(shape, np.dtype(graph.runtime.param_dtype))
    yield from _derived(graph.config).items()


def _shards(config: DecoderConfig, array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the rows of the shards of a weight. All but the last have equally many, as of
    torch.chunk, which makes fewer shards where rows are few."""
    count = families.get(config.family).table_shards(families.text_model(json.loads(config.hf)))
    rows = -(-len(array) // count)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _derived(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Returns the tensors of integers that follow from the configuration, by stored name."""
    derived = getattr(families.get(config.family), "derived_tensors", None)
    return derived(config) if derived else {}


def write(
    directory: str | os.PathLike,
    graph: Graph,
    params: dict[str, jax.Array],
    tensors: dict[str, np.ndarray] | None = None,
    keys: dict | None = None,
    source: str | os.PathLike | None = None,
) -> None:
    """Writes config.json and safetensors shards of at most 5 GB (with an index if there are
    several) to `directory`.

    `tensors` are further tensors by stored name, `keys` further keys of the configuration.
    `source`: the directory of a model of which `graph` is all or a part; the keys and tensors that
    `graph` does not have are copied. `source` and `directory` may be the same. All processes take
    part, since each holds parts of the weights; the first one writes. Raises ValueError for a
    config that was changed, or that is not the one of `source`.
    """
    config = graph.config
    source = None if source is None else sources.base_of(source)
    hf = json.loads(config.hf) if source is None else sources.complete(source, config)
    if families.read(hf, media=has_towers(config)) != config:
        raise ValueError(
            "this DecoderConfig no longer matches its Hugging Face configuration; change keys "
            "there instead"
            if source is None
            else f"{source}: its config.json describes another model than the one to write"
        )
    every = itertools.chain(stored_tensors(graph, params), (tensors or {}).items())
    if source is None:
        every = _wrapped(config, hf, every)
    else:
        is_part = "text_config" in families.single_model(hf)
        hf = hf if is_part else json.loads(config.hf)
        others = _OtherTensors(source, graph, is_part)
        every = itertools.chain(others.spelled(every), others.read(params))
    if not processes.first():
        for _ in every:  # all processes take part in the all-gather of each tensor
            pass
        return
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _save_tensors(directory, config, every)
    hf = _portable(hf, graph.runtime.param_dtype) | {"dtype": graph.runtime.param_dtype}
    (directory / "config.json").write_text(json.dumps(hf | (keys or {}), indent=2))


def has_towers(config: DecoderConfig) -> bool:
    return config.image is not None or config.audio is not None


def _portable(hf: dict, dtype: str) -> dict:
    """Returns a configuration with `dtype` as that of each section that has one, and without
    `auto_map`: the Python files that it names are not written."""
    result = {}
    for key, value in hf.items():
        if key in ("dtype", "torch_dtype"):
            result["dtype"] = value and dtype
        elif key != "auto_map":
            result[key] = _portable(value, dtype) if isinstance(value, dict) else value
    return result


def _wrapped(
    config: DecoderConfig, hf: dict, tensors: Iterable[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors under the names that they have in the files of the model that `hf`
    describes."""
    family = families.get(config.family)
    pairs = (
        family.MULTIMODAL
        if has_towers(config)
        else [family.WRAPPED]
        if hasattr(family, "WRAPPED")
        else []
    )
    for name, array in tensors:
        fits = (pair for pair in pairs if "text_config" in hf and name.startswith(pair[0]))
        inner, outer = next(fits, ("", ""))
        yield outer + name.removeprefix(inner), array


class _OtherTensors:
    """The tensors of `directory` that `graph` does not have: those of towers, prediction modules
    and other models.

    `is_part`: the directory holds a multimodal model, whose own names are kept.
    """

    def __init__(self, directory: str | os.PathLike, graph: Graph, is_part: bool):
        self._graph = graph
        self._is_part = is_part
        self._family, self._scheme = families.get(graph.config.family), sources.scheme(directory)
        extra_files = [MTP_FILE] if (Path(directory) / MTP_FILE).exists() else []
        self._files = TensorFiles(directory, renamed(self._family), self._scheme, extra_files)
        for place in places(graph):
            for layer in place.layers or (None,):
                for name in place.names(self._files, layer):
                    if name in self._files:
                        self._files.tensor(name)
        self._files.unread.difference_update(_derived(graph.config))

    def _name(self, name: str) -> str:
        return self._files.own_name(name) if self._is_part else name

    def spelled(
        self, tensors: Iterable[tuple[str, np.ndarray]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields tensors of `graph` under the names that they have in the directory. A tensor that
        the directory lacks gets the prefix of its embedding."""
        embedding = getattr(self._family, "TOP", names.TOP)["embed_tokens"].name
        ours, theirs = different_prefixes(embedding, self._name(embedding))
        for name, array in tensors:
            lacking = name not in self._files and name.startswith(ours)
            yield theirs + name.removeprefix(ours) if lacking else self._name(name), array

    def read(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors by name, quantised ones as floats. Copies of embedding and head in
        prediction modules are made of `params`."""
        skip = _unneeded(self._graph.config, self._scheme)
        # Weights come first, since scales are read with them.
        for stored in sorted(
            self._files.unread, key=lambda name: (not name.endswith(".weight"), name)
        ):
            if stored not in self._files.unread or any(
                re.fullmatch(pattern, stored) for pattern in skip
            ):
                continue
            name = stored.removesuffix(self._scheme.values) if self._scheme else stored
            tensor = self._files.tensor(name)
            if re.fullmatch(COPIES, name):
                yield self._name(name), self._copy(name, params)
            elif isinstance(tensor, np.ndarray):
                yield self._name(name), tensor
            else:
                floats = tensor[tuple(slice(0, n) for n in tensor.shape)]
                yield self._name(name), floats.astype(self._graph.runtime.param_dtype)

    def _copy(self, name: str, params: dict[str, jax.Array]) -> np.ndarray:
        """Returns what a prediction module holds of the embedding or of the head."""
        of_embedding = name.endswith("embed_tokens.weight") or self._graph.config.tied_head
        path = "embed_tokens" if of_embedding else "lm_head"
        place = next(place for place in places(self._graph) if place.path == path)
        return place.stored.join([_on_host(params[path], None)])


def _save_tensors(
    directory: Path, config: DecoderConfig, tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Replaces the weights in `directory` by `tensors`, in shards of at most SHARD_BYTES, with an
    index if there are several, and layers past the last one in MTP_FILE. Old files are removed
    after the new ones are complete."""
    from safetensors.numpy import save_file

    family = families.get(config.family)
    passed_over = getattr(family, "PASSED_OVER", "$.")
    table_name = renamed(family)
    shards: list[dict[str, np.ndarray]] = [{}]
    sizes = [0]
    shard_of = {}
    extra_layers = {}
    for unfinished in directory.glob("part-*"):
        unfinished.unlink()
    for name, array in tensors:
        if _extra_layer(config, table_name(name)) is not None and not re.match(passed_over, name):
            extra_layers[name] = array
            continue
        if sizes[-1] and sizes[-1] + array.nbytes > SHARD_BYTES:
            save_file(shards[-1], directory / f"part-{len(shards):05d}", metadata={"format": "pt"})
            shards[-1] = {}
            shards.append({})
            sizes.append(0)
        shards[-1][name] = array
        sizes[-1] += array.nbytes
        shard_of[name] = len(shards)
    save_file(shards[-1], directory / f"part-{len(shards):05d}", metadata={"format": "pt"})
    if extra_layers:
        save_file(extra_layers, directory / "part-extra", metadata={"format": "pt"})
    for old in (*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")):
        old.unlink()
    count = len(shards)
    files = {
        i: SINGLE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        for i in range(1, count + 1)
    }
    for i, name in files.items():
        (directory / f"part-{i:05d}").rename(directory / name)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {name: files[i] for name, i in shard_of.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    if extra_layers:
        (directory / "part-extra").rename(directory / MTP_FILE)
