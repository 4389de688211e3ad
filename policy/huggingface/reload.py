"""Reads a written directory back and compares its log-probabilities with those of the model that
was written."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.adapters.learning import Adapters
from policy.cache.step import Step
from policy.compatibility import Conflict
from policy.config import DecoderConfig
from policy.huggingface import classification, model_directory, sources
from policy.huggingface.classification import Classifier
from policy.huggingface.gguf import writer
from policy.huggingface.gguf.directory import directory_of
from policy.huggingface.gguf.package import gguf
from policy.huggingface.gguf.tensors import opened
from policy.huggingface.gguf.writer import GgufType
from policy.huggingface.peft.reader import read_adapter
from policy.mesh import processes
from policy.mesh.sharding import block_on_cpu_mesh
from policy.model import Graph, Model
from policy.modes import make_step
from policy.ops.quantization import floats

_LOG = logging.getLogger("duet.model")
TOLERANCE = 1e-4
"""Largest difference between the log-probabilities of a token, both computed in float32."""
SHORTEST = 64
"""Tokens of a row of the program that is compiled, at least."""
Rows = Sequence[Sequence[int]]
"""Token ids of the sequences that are compared, of at least two tokens each."""


class NotReloaded(ValueError):
    """Raised for a directory whose weights are other ones than those that were written to it."""


Values = Callable[[Graph, Any, jax.Array, Step], jax.Array]
"""Computes a number at each token, float32[B, T], from weights; its docstring says which."""


@dataclass(frozen=True)
class Proof:
    """What a comparison measured: the largest difference over so many tokens."""

    difference: float
    tokens: int


@dataclass(frozen=True)
class _Batch:
    """Rows as int32[B, T]; segments are 0 on padding."""

    tokens: np.ndarray
    segments: np.ndarray


class WeightsOnHost(Mapping[str, np.ndarray]):
    """The weights of a graph, each brought to the host when it is asked for; of quantised ones
    their floats."""

    def __init__(self, graph: Graph, params: Mapping[str, Any]):
        self._graph = graph
        self._params = params

    def __getitem__(self, path: str) -> np.ndarray:
        return processes.on_host(floats(self._params[path]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.paths)

    def __len__(self) -> int:
        return len(self._graph.paths)


def check_model(written: Model, directory: str | os.PathLike, rows: Rows) -> Proof:
    """Reads the model in `directory` and compares it with the one that was written there.

    Log-probabilities of `rows` are computed in float32 from weights in the type in which both are
    stored. Weights that no text reaches, of towers and of prediction modules, must be equal. All
    processes take part. Raises NotReloaded for a difference above TOLERANCE, and what reading a
    directory raises.
    """
    source = _of_floats(_in_float32(written.graph))
    config = sources.read_config(directory, media=model_directory.has_towers(written.config))
    graph = source
    if not _same(config, source.config):
        graph = Graph(config, source.runtime, source.layout)
    if other := graph.shapes.keys() ^ source.shapes.keys():
        raise NotReloaded(f"{directory}: has other weights than were written: {min(other)}")
    params = model_directory.read_weights(directory, graph)[0]
    for path in _outside_text(source):
        if not _equal(written.params[path], params[path]):
            raise NotReloaded(f"{directory}: {path} is not what was written")
    both = Model(source, written.params), Model(graph, params)
    return _compare(both, _token_logprobs, directory, rows)


def check_classifier(written: Classifier, directory: str | os.PathLike, rows: Rows) -> Proof:
    """Reads the sequence classification model in `directory` and compares its scores after each
    token with those of the one that was written, as `check_model` does log-probabilities."""
    source = _of_floats(_in_float32(written.graph))
    read = classification.read(directory, source.runtime, source.layout)
    score = written.score.astype(read.graph.shapes["embed_tokens"].dtype)
    both = (
        Model(source, _with_score(written.params, score)),
        Model(read.graph, _with_score(read.params, read.score)),
    )
    return _compare(both, _scores, directory, rows)


def check_gguf(written: Model, file: Path, kind: GgufType, rows: Rows) -> Proof:
    """Reads a GGUF file and compares it with the model that was written to it.

    Every tensor must be the one that was written, in the type of the file. Returns the largest
    difference between the log-probabilities of the model and of the file, which may be of any size:
    the type makes it. That the metadata describe the decoder was checked before the file was
    written. Raises NotReloaded.
    """
    source = _of_floats(_in_float32(written.graph))
    stored = opened(file).tensors
    for name, array in writer.gguf_tensors(written):
        tensor = stored[name]
        numbers = gguf("--gguf").dequantize(tensor.data, tensor.tensor_type)
        if not np.array_equal(numbers, writer.rounded(name, array, kind)):
            raise NotReloaded(f"{file}: {name} is not what was written")
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        directory = directory_of(file, Path(folder))
        graph = Graph(sources.read_config(directory), source.runtime, source.layout)
        read = Model(graph, model_directory.read_weights(directory, graph)[0])
    both = Model(source, written.params), read
    return _compare(both, _token_logprobs, file, rows, tolerance=np.inf)


def check_adapter(written: Model, directory: str | os.PathLike, rows: Rows) -> Proof:
    """Reads the adapter in `directory`, over the base of the model whose adapter was written there,
    and compares it as `check_model`. The base is read in the form in which the model has it, which
    may be quantised: its arrays are shared, and its directory must be the one that
    adapter_config.json names."""
    sources.base_of(directory)
    source = _in_float32(written.graph)
    adapter = read_adapter(directory, source, WeightsOnHost(source, written.params))
    assert source.runtime.adapter is not None  # the model has an adapter
    dtype = source.runtime.adapter.dtype
    graph = source.with_runtime(adapter=replace(adapter.spec, dtype=dtype))
    adapters = Adapters(graph)
    arrays = {
        path: processes.device_put_global(
            adapter.params[path].astype(adapters.shapes[path].dtype), adapters.shardings[path]
        )
        for path in adapters.sizes
    }
    base = {path: written.params[path] for path in source.paths}
    both = Model(source, written.params), Model(graph, {**base, **arrays})
    return _compare(both, _token_logprobs, directory, rows)


def _in_float32(graph: Graph) -> Graph:
    """Returns the graph with products in float32, where its runtime has these."""
    try:
        return graph.with_runtime(dtype="float32")
    except Conflict as error:
        _LOG.info("log-probabilities are compared in %s: %s", graph.runtime.dtype, error)
        return graph


def _with_score(params: dict[str, jax.Array], score: np.ndarray) -> dict[str, jax.Array]:
    return {**params, classification.SCORE: jnp.asarray(score, jnp.float32)}


def _of_floats(graph: Graph) -> Graph:
    """Returns the graph for weights none of which is stored quantised."""
    if graph.runtime.base_weights is None:
        return graph
    return Graph(graph.config, replace(graph.runtime, base_weights=None), graph.layout)


def _same(config: DecoderConfig, other: DecoderConfig) -> bool:
    """Whether two decoders compute the same, whatever else their files say."""
    return replace(config, hf=other.hf) == other


def _outside_text(graph: Graph) -> list[str]:
    """Returns the paths of weights that no log-probability of a text depends on."""
    ends = ("image.", "audio.", f"{model_directory.MTP}.")
    return [path for path in graph.paths if path.startswith(ends)]


@jax.jit
def _equal_arrays(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.array_equal(first, second, equal_nan=jnp.issubdtype(first.dtype, jnp.floating))


def _equal(first: Any, second: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(bool(_equal_arrays(a, b)) for a, b in pairs)


def _compare(
    both: tuple[Model, Model],
    values: Values,
    directory: str | os.PathLike,
    rows: Rows,
    tolerance: float = TOLERANCE,
) -> Proof:
    written, read = both
    batch = _padded(rows, written.graph)
    program = _program(written.graph, values)
    before = _on_rows(written, program, batch)
    if read.graph.runtime != written.graph.runtime or not _same(read.config, written.config):
        program = _program(read.graph, values)
    after = _on_rows(read, program, batch)
    difference = np.where(before == after, 0.0, np.abs(before - after))
    difference = np.where(np.isnan(difference), np.inf, difference)
    row, token = np.unravel_index(np.argmax(difference), difference.shape)
    largest = float(difference[row, token])
    if largest > tolerance or not np.isfinite(largest):
        raise NotReloaded(
            f"{directory}: read back, the weights give another {values.__doc__} than those that "
            f"were written: {before[row, token]:.6f} became {after[row, token]:.6f} at token "
            f"{token} of prompt {row + 1} of {len(rows)}; the largest difference allowed is "
            f"{tolerance:g}"
        )
    return Proof(largest, sum(map(len, rows)) - len(rows))


def _token_logprobs(graph: Graph, params: Any, tokens_BT: jax.Array, step: Step) -> jax.Array:
    """log-probability"""
    return graph.logprobs(params, tokens_BT, step, 1.0).logp


def _scores(graph: Graph, params: Any, tokens_BT: jax.Array, step: Step) -> jax.Array:
    """score"""
    with graph.precision():
        hidden = graph.decoder(params)(tokens_BT, step, None, graph.runtime).hidden
        return jnp.einsum("bte,e->bt", hidden.astype(jnp.float32), params[classification.SCORE])


def _program(graph: Graph, values: Values) -> Any:
    """Compiles values of a batch, (params, tokens, segments) -> float32[B, T], for weights of the
    graph."""

    def run(params, tokens_BT, segments_BT):
        return values(graph, params, tokens_BT, make_step(tokens_BT, segments=segments_BT))

    # The program runs twice: on CPU this level compiles it in less time.
    options = {"xla_backend_optimization_level": 1} if graph.layout.platform == "cpu" else None
    return jax.jit(run, out_shardings=graph.layout.replicated, compiler_options=options)


def _on_rows(model: Model, program: Any, batch: _Batch) -> np.ndarray:
    """Returns float32[B, T] on the host, 0 at the first token of a row and on padding."""
    result = program(model.params, batch.tokens, batch.segments)
    numbers = np.asarray(block_on_cpu_mesh(result, model.graph.layout))
    follows = np.pad(batch.segments, ((0, 0), (1, 0)))[:, :-1] * batch.segments
    return np.where(follows, numbers, 0.0)


def _padded(rows: Rows, graph: Graph) -> _Batch:
    """Returns the rows in a shape that every mesh can cut: a power of two of tokens."""
    shards = graph.layout.num_row_shards
    length = 1 << max(SHORTEST - 1, max(map(len, rows)) - 1).bit_length()
    tokens = np.zeros((-(-len(rows) // shards) * shards, length), np.int32)
    segments = np.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        segments[number, : len(row)] = 1
    return _Batch(tokens, segments)
