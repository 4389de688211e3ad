"""Reads the directory of an adapter that PEFT 0.17 to 0.21 wrote (`adapter_config.json` and
`adapter_model.safetensors`) into an `AdapterSpec` and arrays by our paths.

One factor `spec.scale` multiplies all products B A: where the files have several, the others are
multiplied into b. Factors of a smaller rank than the spec's are padded with zeros, as are layers
that have no adapter; such zeros have no gradient, so that training leaves them as they are.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policy.adapter_spec import LORA_A, LORA_B, MAGNITUDE, AdapterSpec
from policy.huggingface.peft import coverage
from policy.huggingface.peft.adapter_config import (
    PICKLE,
    TENSORS,
    AdapterConfig,
    read_adapter_config,
)
from policy.huggingface.peft.factors import FactorPair, factor_shapes
from policy.huggingface.peft.merge import product
from policy.huggingface.peft.targets import (
    EMBEDDING,
    adaptable,
    resolved,
    routed,
)
from policy.huggingface.peft.tensors import AdaptedTensor, AdapterTensors, FullTensor, resolve
from policy.huggingface.tensorfiles import ModelFileError, TensorFiles
from policy.mesh import processes
from policy.model import Graph
from policy.ops.parameter import MatrixDims
from policy.ops.quantization import floats


class Adapter(NamedTuple):
    """An adapter as it was read: its description, its arrays by path ("P.lora_a", "P.lora_b",
    "P.magnitude", and "P" itself for weights in `spec.train`), the name of its base model, as the
    files give it, and the tensors of no weight that the caller asked for, by stored name."""

    spec: AdapterSpec
    params: dict[str, np.ndarray]
    base: str
    others: dict[str, np.ndarray]


class _Piece(NamedTuple):
    """The factors of one of our weights, or of a layer or an expert of it."""

    path: str
    index: tuple[int, ...]
    pair: FactorPair
    scale: float


def read_adapter(
    directory: str | os.PathLike,
    graph: Graph,
    base: Mapping[str, Any] | None = None,
    others: tuple[str, ...] = (),
) -> Adapter:
    """Reads the adapter in `directory` of a model of `graph`.

    `base` are the weights of the model. They are needed where the files have a part of an array
    only (full weights or magnitudes of some layers), and for adapters of weights that have none in
    Duet, such as routers: with their adapter merged, these are returned as full weights. `others`
    names tensors that are no weights of `graph` and are read too, such as the score of a reward
    model. Raises ModelFileError for files that are missing or damaged, tensors that are missing or
    unexpected, and adapters that Duet does not compute, before `base` is read.
    """
    config = read_adapter_config(directory)
    files = TensorFiles(directory, only=_tensor_file(Path(directory)))
    tensors = resolve(os.fspath(directory), graph, config, files, others)
    coverage.check(os.fspath(directory), graph, config, tensors)
    return _Assembly(os.fspath(directory), graph, config, tensors, base).adapter()


def _tensor_file(directory: Path) -> str:
    if (directory / TENSORS).exists():
        return TENSORS
    if (directory / PICKLE).exists():
        raise ModelFileError(
            f"{directory / PICKLE}: a pickle, which Duet never reads, since it may run code. If "
            'you trust it, convert it: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{PICKLE}', weights_only=True), '{TENSORS}')\""
        )
    raise ModelFileError(f"{directory / TENSORS}: no such file")


class _Assembly:
    """Builds the arrays of an adapter from the tensors of its file."""

    def __init__(
        self,
        directory: str,
        graph: Graph,
        config: AdapterConfig,
        tensors: AdapterTensors,
        base: Mapping[str, Any] | None,
    ):
        self._directory = directory
        self._graph = graph
        self._config = config
        self._tensors = tensors
        self._base = base
        self._adaptable = {place.path: place for place in adaptable(graph)}

    def adapter(self) -> Adapter:
        pieces = [piece for tensor in self._tensors.adapted for piece in self._pieces(tensor)]
        own = [piece for piece in pieces if piece.path in self._adaptable]
        others = [piece for piece in pieces if piece.path not in self._adaptable]
        full = self._full()
        self._check_tied(own, full)
        full |= self._merged(others, full)
        spec = self._spec(own, tuple(sorted(full)))
        params = self._arrays(own, spec) | full
        return Adapter(spec, params, self._config.base, self._tensors.others)

    def _pieces(self, tensor: AdaptedTensor) -> list[_Piece]:
        """Returns the factors of each part of a stored tensor. Two factors of zeros are none, as
        are those of a part whose rows of B are all 0 next to others that are not."""
        pairs = tensor.form.split(tensor.stored)
        if len(pairs) > 1:
            outputs = len(self._graph.product_dims(tensor.place.weight.path).columns)
            pairs = _without_zero_blocks(pairs, outputs, tensor.rank, self._config.rank)
        weight = tensor.place.weight
        learns = [bool(pair.b.any()) for pair in pairs]
        return [
            _Piece(path, tensor.place.index, pair, tensor.scale)
            for path, pair, is_used in zip(
                weight.parts(tensor.place.stored), pairs, learns, strict=True
            )
            if is_used or (not any(learns) and pair.a.any())
        ]

    def _spec(self, pieces: list[_Piece], train: tuple[str, ...]) -> AdapterSpec:
        """Returns the description of the adapter, with the scale that most of its tensors have."""
        config = self._config
        ranks: dict[bool, list[int]] = {True: [], False: []}
        for piece in pieces:
            ranks[routed(self._graph, piece.path)].append(piece.pair.a.shape[-1])
        rank = max(ranks[False] or ranks[True] or [config.rank])
        scales = Counter(piece.scale for piece in pieces)
        scale = scales.most_common(1)[0][0] if scales else config.scale(config.alpha, config.rank)
        alpha = scale * rank
        if config.rank_stabilised:
            alpha = scale * rank**0.5
        if rank == config.rank and scale == config.scale(config.alpha, config.rank):
            alpha = config.alpha
        spec = AdapterSpec(
            rank=rank,
            alpha=alpha,
            targets=(),
            experts="each" if ranks[True] else "none",
            expert_rank=max(ranks[True]) if ranks[True] else None,
            rank_stabilised=config.rank_stabilised,
            dora=config.dora,
            train=train,
        )
        layers = _layers_by_path(self._graph, pieces)
        return resolved(self._graph, coverage.with_targets(self._graph, spec, layers))

    def _arrays(self, pieces: list[_Piece], spec: AdapterSpec) -> dict[str, np.ndarray]:
        """Returns the arrays of the adapted weights, zeros where the files have no adapter."""
        by_path: dict[str, list[_Piece]] = defaultdict(list)
        for piece in pieces:
            by_path[piece.path].append(piece)
        params = {}
        for path, rank in ((target.path, target.rank) for target in spec.adapted):
            shapes = factor_shapes(self._graph, path, rank)
            a = np.zeros(shapes.a, np.float32)
            b = np.zeros(shapes.b, np.float32)
            outputs = (slice(None),) * len(self._graph.product_dims(path).columns)
            for piece in by_path[path]:
                own = slice(0, piece.pair.a.shape[-1])
                a[piece.index][..., own] = piece.pair.a
                factor = np.float32(piece.scale / spec.scale)
                b[piece.index][(..., own, *outputs)] = piece.pair.b * factor
            params |= {f"{path}{LORA_A}": a, f"{path}{LORA_B}": b}
            if spec.dora:
                params[f"{path}{MAGNITUDE}"] = self._magnitude(path, by_path[path])
        return params

    def _magnitude(self, path: str, pieces: list[_Piece]) -> np.ndarray:
        """Returns DoRA's magnitude of a weight; where the files have none, those of the base."""
        shape = factor_shapes(self._graph, path, 1).magnitude
        magnitude = np.full(shape, np.nan, np.float32)
        for piece in pieces:
            magnitude[piece.index] = piece.pair.magnitude
        if np.isnan(magnitude).any():
            base = np.asarray(self._base_weight(path, "magnitude (DoRA)"), np.float32)
            norms = np.sqrt(np.square(base).sum(self._graph.product_dims(path).rows))
            magnitude = np.where(np.isnan(magnitude), norms, magnitude)
        return magnitude

    def _full(self) -> dict[str, np.ndarray]:
        """Returns the weights that the files hold in full."""
        result: dict[str, np.ndarray] = {}
        covered: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for tensor in self._tensors.full:
            for path, array in _full_parts(tensor):
                if path not in result:
                    result[path] = np.zeros(self._graph.shapes[path].shape, np.float32)
                result[path][tensor.place.index] = array
                covered[path].add(tensor.place.index)
        for path, indices in covered.items():
            if gaps := self._gaps(path, indices):
                base = np.asarray(self._base_weight(path, "full weights"), np.float32)
                for index in gaps:
                    result[path][index] = base[index]
        return result

    def _gaps(self, path: str, indices: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the layers and experts of a weight that are not among `indices`."""
        axes = len(next(iter(indices)))
        every = np.ndindex(self._graph.shapes[path].shape[:axes])
        return [index for index in every if index not in indices]

    def _merged(self, pieces: list[_Piece], full: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the weights that have no adapter in Duet, with those of the files merged."""
        result: dict[str, np.ndarray] = {}
        for piece in pieces:
            path = piece.path
            if path not in result:
                start = full[path] if path in full else self._base_weight(path, "an adapter")
                result[path] = np.array(start, np.float32)
            skipped = len(piece.index)
            rows, columns = self._graph.product_dims(path)
            dims = MatrixDims(
                tuple(dim - skipped for dim in rows), tuple(dim - skipped for dim in columns)
            )
            change = product(piece.pair.a, piece.pair.b, dims, np.einsum)
            total = result[path][piece.index] + piece.scale * change
            if piece.pair.magnitude is not None:
                norms = np.sqrt(np.square(total).sum(dims.rows, keepdims=True))
                total *= np.expand_dims(piece.pair.magnitude, dims.rows) / norms
            result[path][piece.index] = total
        return result

    def _base_weight(self, path: str, what: str) -> np.ndarray:
        if self._base is None:
            raise ModelFileError(
                f"{self._directory}: the files have {what} of {path} that Duet can only read "
                "together with the base model"
            )
        return processes.on_host(floats(self._base[path]))

    def _check_tied(self, pieces: list[_Piece], full: dict[str, np.ndarray]) -> None:
        """Raises ModelFileError for an adapter that gives the embedding and the head of a model
        different weights, where they are one."""
        if not self._graph.config.tied_head:
            return
        adapted = [*self._tensors.head, *(p.path for p in pieces if p.path == EMBEDDING)]
        if adapted:
            raise ModelFileError(
                f"{self._directory}: an adapter of {adapted[0]}: in this model embedding and head "
                "are one table, which PEFT adapts in one of its two uses only. Untie them in the "
                "base model (tie_word_embeddings: false, with a copy as lm_head.weight), or train "
                "the table in full (modules_to_save)"
            )
        head = self._tensors.head_weight
        table = full.get(EMBEDDING)
        if head is None and (table is None or self._config.tied_embedding):
            return
        if head is None or table is None:
            only = EMBEDDING if head is None else "lm_head"
            raise ModelFileError(
                f"{self._directory}: modules_to_save has {only} alone, and in this model embedding "
                "and head are one table: PEFT left its other use as it was. Untie them in the base "
                "model (tie_word_embeddings: false, with a copy as lm_head.weight)"
            )
        if not np.array_equal(head, table):
            raise ModelFileError(
                f"{self._directory}: modules_to_save has different weights for embed_tokens and "
                "lm_head, and in this model they are one table. Untie them in the base model "
                "(tie_word_embeddings: false, with a copy as lm_head.weight)"
            )


def _full_parts(tensor: FullTensor) -> list[tuple[str, np.ndarray]]:
    """Returns the parts of a stored tensor by path, in our layout."""
    weight = tensor.place.weight
    stored = tensor.place.stored
    paths = weight.parts(stored)
    shapes = [weight.shape(path, stored) for path in paths]
    result = []
    for part, path in enumerate(paths):
        block = stored.block(shapes, part, (slice(None),) * len(shapes[part]))
        result.append((path, block.finish(tensor.array[block.index]).astype(np.float32)))
    return result


def _without_zero_blocks(
    pairs: list[FactorPair], outputs: int, rank: int, base_rank: int
) -> list[FactorPair]:
    """Returns the factors of parts without what each lacks, if their B is block-diagonal: PEFT
    converts adapters of n weights to one of their fused tensor with n times the rank. `outputs` is
    the number of dimensions of the outputs of a part."""
    parts = len(pairs)
    width = rank // parts
    if rank % parts or not width:
        return pairs
    blocks = [np.split(pair.b, parts, axis=-1 - outputs) for pair in pairs]
    diagonal = [row[part] for part, row in enumerate(blocks)]
    nonzero = sum(int(block.any()) for row in blocks for block in row)
    on_diagonal = sum(int(block.any()) for block in diagonal)
    if nonzero != on_diagonal or (not nonzero and rank != parts * base_rank):
        return pairs
    return [
        FactorPair(pair.a[..., part * width : (part + 1) * width], diagonal[part], pair.magnitude)
        for part, pair in enumerate(pairs)
    ]


def _layers_by_path(graph: Graph, pieces: list[_Piece]) -> dict[str, set[int]]:
    """Returns the numbers of the layers of each weight that have an adapter, {0} outside the
    layers."""
    layers = {place.path: place.layers for place in adaptable(graph)}
    result: dict[str, set[int]] = defaultdict(set)
    for piece in pieces:
        numbers = layers[piece.path]
        result[piece.path].add(0 if numbers is None else numbers[piece.index[0]])
    return result
