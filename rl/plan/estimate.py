"""Estimates the needs of programs from a configuration, without compiling, to choose the
configurations to compile.

Resident bytes per device are exact: they follow from the shapes of arrays and their sharding.
Temporaries and seconds are a model of a few terms, good for a comparison of configurations:

- Temporaries of an update: float32 gradients; for each token and layer, its input and the share of
  product outputs that `remat` keeps; all outputs of the largest layer and its full weights, or the
  logits that the head keeps (policy/heads/head.py), whichever are more; and a chunk of logits.
  Other passes: outputs and weights of the largest layer, and a chunk of logits.
- Operations (rl/accounting/flops.py): three times the forward pass for a gradient, of weights under
  an adapter twice, and once more for recomputation.
- HBM traffic: all weights in each pass, activations, and in an update each trained weight with the
  state of its optimizer, read and written once. Factors of an adapter count in updates only.
- The products of an optimizer, as Muon has them, once an update. Its other operations are left out.
- The pass of a teacher in an update is one more forward pass, of its own weights.
- Communication: an all-gather of weights over the axes that shard them but not the products, a
  reduce-scatter of their gradients, and two activations per layer where products are sharded.

A program takes the longest of operations, HBM traffic and communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from policy.adapters.learning import Adapters
from policy.layers.layer_embeddings import TABLE
from policy.media import is_tower
from policy.mesh.sharding import axes_of
from policy.model import Graph
from policy.ops.host_memory import shard_bytes
from rl.accounting import chips
from rl.accounting.activations import kept_logits
from rl.accounting.flops import Operations
from rl.accounting.program_names import UPDATES, ProgramName
from rl.config.run import RunConfig
from rl.plan.programs import Planned, PlannedStage, Sampling, planned, stages
from rl.run import build
from rollout.engine.exact import CHECKS

# Kept numbers by remat policy, over the product outputs of a layer.
_KEPT = {
    "none": 1.2,
    "minimal": 1.0,
    "minimal_with_context": 1.1,
    "minimal_flash": 1.1,
    "full": 0.0,
    "custom": 0.0,
}
_QKV = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
_LOGITS = 2**24


@dataclass(frozen=True)
class Cost:
    """Costs of a program on one device.

    resident: bytes that the run keeps, exact. temporaries: bytes. seconds: of all its runs in a
    step.
    """

    resident: int
    temporaries: float
    seconds: float


class WeightSizes:
    """Sizes of a graph per device, in numbers.

    local: stored weights; largest: the largest stored array.
    assembled: weights as its products read them, after the all-gather; layer: the same of the
    largest layer. read: the bytes of `assembled`, of weights that are stored quantised as they are
    stored. outputs: product outputs per token in all layers; widest: in the largest layer;
    qkv: for attention. parts: shards of the tokens; the other mesh axes shard products. Tables in
    host memory count nothing, and of a table on the device only rows are read.
    """

    def __init__(self, graph: Graph):
        mesh, self.graph, rules = graph.layout.mesh.shape, graph, dict(graph.layout.rules)
        rows = {*rules["batch"], *rules["length"]}
        self.parts, self.operations = math.prod(mesh[axis] for axis in rows), Operations(graph)
        self.local = self.largest = self.assembled = self.read = self.outputs = self.qkv = 0.0
        layers = {}
        outputs = {}
        for path, shape in graph.shapes.items():
            if path in graph.host_tables or is_tower(path):
                continue
            axes = graph.axes[path]
            sizes = shape.shape
            spec = [axes_of(dims) for dims in graph.layout.spec(axes, sizes)]
            parts = [math.prod(mesh[axis] for axis in dims) for dims in spec]
            cut = math.prod(
                mesh[a]
                for axis, dims in zip(axes, spec, strict=True)
                for a in dims
                if a not in rows or axis == "exp"
            )
            numbers = math.prod(sizes)
            repeats = sizes[0] if axes[0] == "layers" else 1
            self.local += numbers / math.prod(parts)
            self.largest = max(self.largest, numbers / math.prod(parts))
            assembled = numbers / (math.prod(parts) if path == TABLE else cut)
            self.assembled += assembled
            self.read += assembled * self._bytes_of(path)
            layer = ".".join(path.split(".")[:4])
            if axes[0] == "layers":
                layers[layer] = layers.get(layer, 0.0) + numbers / cut / repeats
            if path not in graph.inputs:
                continue
            kept = [
                i
                for i, axis in enumerate(axes)
                if i not in graph.inputs[path] and axis not in ("layers", "exp")
            ]
            made = math.prod(sizes[i] for i in kept) / math.prod(
                mesh[a] for i in kept for a in spec[i] if a not in rows
            )
            if "exp" in axes:
                made *= max(
                    spec.moe.router.experts_per_token for spec in graph.config.layers if spec.moe
                )
            self.outputs += repeats * made
            self.qkv += repeats * made * any(f".{name}" in path for name in _QKV)
            outputs[layer] = outputs.get(layer, 0.0) + made
        self.layer, self.widest = (
            max(layers.values(), default=0.0),
            max(outputs.values(), default=0.0),
        )

    def _bytes_of(self, path: str) -> float:
        """Returns the bytes of a number of a weight that a product reads."""
        if path not in self.graph.quantized:
            return self.bytes
        stored = self.graph.quantized_weight(path).abstract
        return sum(map(shard_bytes, jax.tree.leaves(stored))) / math.prod(
            stored.qvalue.sharding.shard_shape(stored.shape)
        )

    @cached_property
    def bytes(self) -> int:
        """Returns the bytes of a number in a product."""
        return jnp.dtype(self.graph.runtime.dtype).itemsize

    def forward(self, sequences: int, length: int) -> tuple[float, float]:
        """Returns (operations, bytes of HBM traffic) per device of a forward pass over so many
        sequences."""
        size = self.graph.layout.mesh.size
        numbers = sequences * length
        tokens = numbers / min(self.parts, max(1, numbers))
        work = self.operations.forward([length] * sequences) / size
        return work, self.read + self.bytes * 4 * tokens * self.outputs

    def gradient(
        self, adapters: Adapters | None, sequences: int, length: int
    ) -> tuple[float, float]:
        """Returns (operations, bytes of HBM traffic) per device of a forward pass and of the
        gradient of what learns: the adapter, or the weights."""
        _, moved = self.forward(sequences, length)
        operations = Operations(self.graph, adapters=adapters)
        work = operations.with_gradient([length] * sequences) / self.graph.layout.mesh.size
        return work, (3.0 if adapters is None else 2.0) * moved

    def kept(self, remat: str) -> float:
        """Returns the product outputs per token, in all layers, that a remat policy keeps for the
        backward pass."""
        if remat in _KEPT:
            return _KEPT[remat] * self.outputs
        return 0.0 if "offloaded" in remat else self.qkv if "qkv" in remat else 0.5 * self.outputs


class AdapterSizes:
    """Sizes of the arrays of an adapter per device, in numbers: as they are stored, and as products
    read them."""

    def __init__(self, adapters: Adapters):
        layout = adapters.trunk.layout
        rules = dict(layout.rules)
        rows = {*rules["batch"], *rules["length"]}
        self.local = self.assembled = 0.0
        for path, size in adapters.sizes.items():
            axes = adapters.axes[path]
            numbers = math.prod(size)
            spec = [axes_of(dims) for dims in layout.spec(axes, size)]
            parts = [
                (mesh_axis, axis)
                for axis, dims in zip(axes, spec, strict=True)
                for mesh_axis in dims
            ]
            shape = layout.mesh.shape
            self.local += numbers / math.prod(shape[each] for each, _ in parts)
            cut = math.prod(
                shape[each] for each, axis in parts if each not in rows or axis == "exp"
            )
            self.assembled += numbers / cut


class Estimator:
    """Estimates configurations on given devices. Those that differ only in remat and micro_batch
    share work."""

    def __init__(self, devices: list, chip: chips.Chip | None, memory: float | None):
        self._devices = devices
        self._chip = chip or chips.CPU
        self._memory = memory
        self._parts: dict[
            str,
            tuple[
                WeightSizes,
                list[tuple[PlannedStage, Sampling | None, list[tuple[Planned, WeightSizes]]]],
            ],
        ] = {}
        self._programs: dict[str, list[tuple[Planned, WeightSizes]]] = {}
        self._teachers: dict[int, WeightSizes] = {}

    def __call__(self, config: RunConfig) -> dict[str, Cost]:
        """Returns the cost of each program by name. Raises the errors of rl.run.build."""
        plain = config.model_copy(
            update={"model": config.model.model_copy(update={"remat": "full", "remat_tensors": {}})}
        )
        key = plain.model_dump_json()
        if key not in self._programs:
            self._programs[key] = list(self._listed(plain))
        return {
            each.name: self._cost(each, weights, config.model.remat)
            for each, weights in self._programs[key]
        }

    def _listed(self, config: RunConfig) -> Iterator[tuple[Planned, WeightSizes]]:
        weights, parts = self._on_mesh(config)
        for (stage, sampling, generating), options in zip(parts, config.stages, strict=True):
            # Only the shape of a batch depends on the rows of a micro-batch.
            for each in planned(stage.with_options(options), sampling):
                assert each.graph is not None  # programs of a stage name their model
                yield each, weights if each.graph is stage.graph else WeightSizes(each.graph)
            yield from generating

    def _on_mesh(self, config: RunConfig) -> tuple[WeightSizes, list]:
        """Returns (weights, [(stage, generator, programs of the generator with their weights)]).

        Ignores the micro-batches of the configuration.
        """
        plain = config.model_copy(
            update={
                "stages": [each.model_copy(update={"micro_batch": None}) for each in config.stages]
            }
        )
        key = plain.model_dump_json()
        if key not in self._parts:
            pairs = list(stages(plain, build.on_mesh(plain, self._devices), self._memory))
            weights = WeightSizes(pairs[0][0].graph)
            decoding = {}
            for sampling in {each for _, each in pairs if each}:
                decoding[sampling] = WeightSizes(sampling.decoding)
            parts = [
                (stage, each, list(_generating(stage, each, weights, decoding.get(each))))
                for stage, each in pairs
            ]
            self._parts[key] = weights, parts
        return self._parts[key]

    def _teacher(self, graph: Graph) -> WeightSizes:
        if id(graph) not in self._teachers:
            self._teachers[id(graph)] = WeightSizes(graph)
        return self._teachers[id(graph)]

    def _cost(self, planned: Planned, weights: WeightSizes, remat: str) -> Cost:
        graph = weights.graph
        kind = planned.kind
        item = weights.bytes
        mesh = graph.layout.mesh
        config = graph.config
        chip = self._chip
        length = (*planned.shape, 1)[1]
        update = kind in UPDATES
        if kind == ProgramName.DECODE:
            length = 1
            numbers = planned.shape[0]
        else:
            numbers = planned.rows_at_once * length
        tokens = numbers / min(weights.parts, max(1, numbers))
        layers = len(config.layers)
        E = config.hidden_size
        if kind == ProgramName.QUANTISED_COPY:
            return Cost(
                planned.resident,
                4 * weights.layer,
                planned.times * weights.local * 8 / (chip.bandwidth * 1e9),
            )
        if kind == ProgramName.RESHARD:  # sends full arrays and assembles them from parts
            slowest = min(chip.bandwidth, chip.links or chip.bandwidth)
            return Cost(
                planned.resident,
                2 * item * weights.largest,
                planned.times * item * weights.local / (slowest * 1e9),
            )
        if kind == ProgramName.ENCODING:
            return self._encoding(planned, weights)
        if kind in CHECKS[1:]:
            numbers = config.vocab_size * E / mesh.size
            read = max(
                2.0 * tokens * numbers / (chip.tflops * 1e12),
                item * numbers / (chip.bandwidth * 1e9),
            )
            return Cost(
                planned.resident,
                8.0 * min(_LOGITS, tokens * config.vocab_size),
                planned.times * read,
            )
        kept = weights.kept(remat) if update else 0.0
        again = 1.0 - min(1.0, kept / max(1.0, weights.outputs)) if update else 0.0
        logits = 8.0 * min(_LOGITS, tokens * config.vocab_size / mesh.shape["tensor"])
        temporaries = item * (3 * tokens * weights.widest + 2 * weights.layer) + logits
        if update:
            kept_of_head = kept_logits(graph, tokens)
            if planned.teacher is not None:
                kept_of_head += kept_logits(graph, tokens, sides=2)
            temporaries = max(temporaries, logits + kept_of_head)
            temporaries += planned.gradient + item * tokens * (E * layers + kept)
        passes = 3.0 + again if update else 1.0
        rows = numbers // length
        work, moved = weights.forward(rows, length)
        if update:
            of_gradient = weights.gradient(planned.adapters, rows, length)
            work = again * work + of_gradient[0]
            moved = again * moved + of_gradient[1]
        moved += 2 * planned.stepped / planned.trip_count
        work += planned.optimizer_operations / mesh.size / planned.trip_count
        exchanged = (2 + (again > 0) if update else 1) * item * (weights.assembled - weights.local)
        learned = weights if planned.adapters is None else AdapterSizes(planned.adapters)
        exchanged += planned.gradient / learned.local * (learned.assembled - learned.local)
        if planned.teacher is not None:
            teacher = self._teacher(planned.teacher)
            further = teacher.forward(rows, length)
            work = work + further[0]
            moved = moved + further[1]
            exchanged += teacher.bytes * (teacher.assembled - teacher.local)
            temporaries += teacher.bytes * (3 * tokens * teacher.widest + 2 * teacher.layer)
        t = mesh.size / weights.parts
        x = mesh.shape["expert"]
        exchanged += (
            passes
            * layers
            * tokens
            * E
            * item
            * (4 * (1 - 1 / t) + (x - 1) * any(spec.moe for spec in config.layers))
        )
        links = exchanged / (chip.links * 1e9) if chip.links else 0.0
        seconds = max(work / (chip.tflops * 1e12), moved / (chip.bandwidth * 1e9), links)
        return Cost(planned.resident, temporaries, planned.times * planned.trip_count * seconds)

    def _encoding(self, planned: Planned, weights: WeightSizes) -> Cost:
        """Returns the cost of encoding pictures: the products with the weights of towers, and the
        scores of one block, cut to 512 queries."""
        graph = weights.graph
        chip = self._chip
        (R, N), numbers = (
            planned.shape,
            sum(math.prod(s.shape) for path, s in graph.shapes.items() if is_tower(path)),
        )
        work = 2.0 * numbers * R * N / graph.layout.mesh.size
        seconds = max(work / (chip.tflops * 1e12), weights.bytes * numbers / (chip.bandwidth * 1e9))
        scores = 4.0 * 16 * min(N, 512) * N * max(1, R // weights.parts)
        return Cost(planned.resident, scores, planned.times * seconds)


def teacher_work(planned: Planned) -> list[float] | None:
    """Returns [operations, bytes of HBM traffic] per device of the passes of a teacher in one run
    of an update."""
    if planned.teacher is None:
        return None
    each = WeightSizes(planned.teacher).forward(planned.rows_at_once, planned.shape[1])
    return [planned.trip_count * number for number in each]


def _generating(
    stage: PlannedStage,
    sampling: Sampling | None,
    weights: WeightSizes,
    decoding: WeightSizes | None,
) -> Iterator[tuple[Planned, WeightSizes]]:
    """Yields the programs of the generator with their weights.

    Checks compute with the trained weights, other rollouts with the weights in the layout of
    rollouts.
    """
    if sampling and sampling.used_by(stage):
        assert decoding is not None  # the weights of this generator
        for each in sampling.programs(stage):
            yield each, weights if each.kind in CHECKS else decoding
