"""Teachers: the update of a policy compares its next-token distributions with those of a frozen
model.

`ModelTeacher` runs that model in the same program, on one micro-batch at a time, so that no states
of it are kept and its logits exist for a chunk of tokens only. `StoredTeacher` reads the teacher's
likeliest tokens from the batch.

R rows of a micro-batch, T tokens, E hidden of the policy, D of the teacher, K likeliest tokens of
the teacher.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import qwix

from policy import modes
from policy.attention.sequence_shards import FlatRows
from policy.cache.paths import before, scored
from policy.cache.step import Step
from policy.config import StoredType
from policy.decoder import Decoder
from policy.fields.config_fields import UnsupportedModel
from policy.heads import head
from policy.heads.divergence import DivergenceOutputs, top_divergence
from policy.heads.features import by_number, feature_loss, pairs_of
from policy.huggingface import model_directory
from policy.huggingface.tensorfiles import ModelFileError
from policy.intermediates import Aux
from policy.mesh import processes
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.ops.host_memory import fetch, in_host_memory
from policy.ops.parameter import MatrixDims
from policy.ops.quantization import TYPES, quantize
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.flops import Operations
from rl.algorithms import PolicyInputs
from rl.algorithms._protocols import TeacherLoss
from rl.errors import ModelError
from rl.training.batch import Batch
from rl.training.weights import Weights

COMPARED = (
    "student_entropy",
    "teacher_entropy",
    "agreement",
    "outside",
    "student_mass",
    "teacher_mass",
)
"""Fields of DivergenceOutputs that are metrics of an update, as distill/<name>."""


@dataclass(frozen=True)
class Student:
    """The policy of a micro-batch: its graph, its weights, and the outputs of its pass."""

    graph: Graph
    params: dict[str, jax.Array]
    aux: Aux


class Teacher(ABC):
    """What an update compares the policy with.

    params: its weights, by path, which no update donates; there after `read`.
    """

    def __init__(self, algorithm: TeacherLoss):
        self.algorithm = algorithm
        self.params: dict[str, Any] = {}

    @property
    def abstract(self) -> Mapping[str, Any]:
        """Returns the shapes and shardings of the weights."""
        return {}

    @property
    def weights(self) -> Mapping[str, Any]:
        """Returns the weights; their shapes before they are read."""
        return self.params or self.abstract

    def read(self) -> None:
        """Reads the weights of the teacher onto its mesh. Raises ModelError if they cannot be
        read."""
        self.params = self._read()

    def _read(self) -> dict[str, Any]:
        return {}

    def with_recorded_outputs(self, graph: Graph) -> Graph:
        """Returns the graph of the policy with the outputs that the comparison reads."""
        return graph

    @property
    def model(self) -> Graph | None:
        """Returns the model whose forward pass an update contains; None: it contains none."""
        return None

    @property
    def compares_vocabulary(self) -> bool:
        """Returns whether an update compares the probabilities of all tokens of the vocabulary."""
        return False

    def operations(self, graph: Graph, lengths: Sequence[int] | np.ndarray) -> float:
        """Returns the operations that an update of the policy of `graph` has in addition, over
        sequences of these lengths."""
        return 0.0

    def projections(self, graph: Graph) -> FeatureProjections | None:
        """Returns the projections of the features of the policy of `graph`; None: they are compared
        as they are."""
        return None

    def vocabulary(self, graph: Graph) -> int:
        """Returns the number of ids that are compared with those of the policy: by default the
        policy's own."""
        return graph.config.vocab_size

    def probability_outside(
        self, graph: Graph, params: dict[str, jax.Array], batch: Batch
    ) -> float:
        """Returns the probability that the policy gives to ids beyond `vocabulary`, the mean over
        the tokens that are trained on."""
        vocabulary = self.vocabulary(graph)

        @jax.jit
        def run(params, tokens, segments):
            step = modes.make_step(tokens, segments=segments)
            with graph.precision():
                decoder = graph.decoder(params)
                states = before(decoder(tokens, step, None, graph.runtime)[0])
                logits = modes.logits(decoder, states, graph.runtime)
                return 1.0 - jnp.exp(
                    jax.nn.logsumexp(logits[..., :vocabulary], -1) - jax.nn.logsumexp(logits, -1)
                )

        total = 0.0
        for row in range(len(batch.tokens)):  # one at a time: its logits are all there
            arrays = batch.tokens[row : row + 1], batch.segments[row : row + 1]
            mass = processes.on_host(block_on_cpu_mesh(run(params, *arrays), graph.layout))
            total += float((mass * batch.mask[row]).sum())
        return total / max(1, np.count_nonzero(batch.mask))

    @abstractmethod
    def compare(
        self, student: Student, micro: Batch, inputs: PolicyInputs, weights: Weights
    ) -> PolicyInputs:
        """Returns the inputs with `divergence`, `features` and `teacher`. weights: of the teacher,
        and of projections, which have a gradient."""

    def _with_comparison(
        self, inputs: PolicyInputs, outputs: DivergenceOutputs, micro: Batch, **more: Any
    ) -> PolicyInputs:
        """Adds numbers per token, 0 at the first token of a sequence and on padding, which nothing
        predicts."""
        predicted = scored(micro.segments, micro.tree)
        numbers = {
            name: array for name in COMPARED if (array := getattr(outputs, name)) is not None
        }
        numbers = {
            name: jax.lax.stop_gradient(jnp.where(predicted, array, 0.0))
            for name, array in numbers.items()
        }
        divergence = jnp.where(predicted, outputs.divergence, 0.0)
        return replace(inputs, divergence=divergence, teacher=numbers, **more)


class ModelTeacher(Teacher):
    """A frozen model of any family on the mesh of the run."""

    def __init__(
        self,
        graph: Graph,
        algorithm: TeacherLoss,
        directory: Path | None = None,
        seed: int = 0,
        weights: StoredType | None = None,
    ):
        """Reads nothing yet.

        directory: of the weights; None: they are drawn from `seed`. weights: the type in which
        weights of products are stored; None: the type of the graph.
        """
        super().__init__(algorithm)
        self.graph = graph.with_runtime(record=("mixed",)) if algorithm.has_features else graph
        self._flops = Operations(graph)
        self._directory = directory
        self._seed = seed
        self._stored_type = weights

    @functools.cached_property
    def abstract(self) -> Mapping[str, Any]:
        return {path: self._abstract(path) for path in self.graph.paths}

    def _abstract(self, path: str) -> Any:
        shape = self.graph.shapes[path]
        sharding = self.graph.sharding(path)
        axes = self.graph.axes[path]
        array = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        if self._stored_type is None or path not in self.graph.inputs:
            return array
        inputs = self.graph.inputs[path]
        qtype = TYPES[self._stored_type]
        made = jax.eval_shape(lambda a: quantize(a, qtype, inputs), shape)
        # A scale has length 1, and so no axis, in the dimensions that products sum over. It is
        # small: it stays on the device where the values live in host memory.
        scale_axes = tuple(None if dim in inputs else axis for dim, axis in enumerate(axes))
        values = self.graph.layout.sharding(axes, made.qvalue.shape)
        values = in_host_memory(values) if path in self.graph.hosted else values
        scale = self.graph.layout.sharding(scale_axes, made.scale.shape)
        return replace(
            made,
            qvalue=jax.ShapeDtypeStruct(made.qvalue.shape, made.qvalue.dtype, sharding=values),
            scale=jax.ShapeDtypeStruct(made.scale.shape, made.scale.dtype, sharding=scale),
        )

    def _read(self) -> dict[str, Any]:
        if self._directory is None:
            drawn = self.graph.init(self._seed)
            params = {path: self._stored(path, drawn.pop(path)) for path in self.graph.paths}
        else:
            try:
                params, _ = model_directory.read_weights(
                    self._directory, self.graph, convert=self._stored
                )
            except (ModelFileError, UnsupportedModel) as error:
                raise ModelError(f"teacher {self._directory}: {error}") from None
        return block_on_cpu_mesh(params, self.graph.layout)

    def _stored(self, path: str, array: jax.Array) -> Any:
        """Returns a weight in the form in which it is kept, so that only one is there as floats
        too."""
        abstract = self.abstract[path]
        if not isinstance(abstract, qwix.QArray):
            return array
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        qtype = TYPES[cast(StoredType, self._stored_type)]
        inputs = self.graph.inputs[path]
        return jax.jit(lambda a: quantize(fetch(a), qtype, inputs), out_shardings=shardings)(array)

    def with_recorded_outputs(self, graph: Graph) -> Graph:
        return (
            graph.with_runtime(record=(*graph.runtime.record, "mixed"))
            if self.algorithm.has_features
            else graph
        )

    @property
    def model(self) -> Graph:
        return self.graph

    @property
    def compares_vocabulary(self) -> bool:
        return self.algorithm.divergence_spec.top_k is None

    def operations(self, graph: Graph, lengths: Sequence[int] | np.ndarray) -> float:
        projections = self.projections(graph)
        learned = 0.0 if projections is None else projections.operations(lengths)
        return self._flops.forward(lengths) + learned

    def projections(self, graph: Graph) -> FeatureProjections | None:
        mine = graph.config
        theirs = self.graph.config
        if not self.algorithm.has_features or mine.hidden_size == theirs.hidden_size:
            return None
        mixing = [
            {n: n for n, layer in enumerate(config.layers) if layer.mixer is not None}
            for config in (mine, theirs)
        ]
        return FeatureProjections(
            graph, theirs.hidden_size, pairs_of(mixing[0], mixing[1], self._pairs)
        )

    @property
    def _pairs(self) -> list[tuple[int, int]] | None:
        pairs = self.algorithm.features_layers
        return None if pairs is None else [(n, m) for n, m in pairs]

    def states(
        self, params: dict[str, jax.Array], tokens: jax.Array, step: Step
    ) -> tuple[Decoder, jax.Array, Aux]:
        """Returns (decoder, final states [R, T, D], Aux) of a pass without a head."""
        decoder = self.graph.decoder(params)
        hidden, _, aux = decoder(tokens, step, None, self.graph.runtime)
        return decoder, hidden, aux

    @functools.cache  # noqa: B019 - a teacher is made once for a stage
    def top(self, k: int, vocab: int) -> CompiledCache:
        """Returns the program (params, micro-batch) -> (log-probabilities float32[R, T, k], ids
        int32[R, T, k], logarithm of the probability of all others float32[R, T]) of the likeliest
        of the first `vocab` tokens in place of each token, at temperature 1."""

        def run(params, micro: Batch):
            tokens = constrain(micro.tokens, ("batch", None), self.graph.layout)
            rows = FlatRows(self.graph.layout, *tokens.shape)
            with self.graph.precision():
                step = modes.make_step(tokens, segments=micro.segments)
                decoder, hidden, _ = self.states(params, tokens, step)
                states = rows.flat(before(hidden))
                tiling = head.Tiling(None, rows.layout)
                weight = decoder.head_weight
                scaling = decoder.config.logit_scaling
                return jax.tree.map(
                    rows.back, head.top_and_rest(states, weight, k, 1.0, scaling, tiling, vocab)
                )

        return CompiledCache(jax.jit(run), self.graph.layout.platform)

    def compare(
        self, student: Student, micro: Batch, inputs: PolicyInputs, weights: Weights
    ) -> PolicyInputs:
        # its own routes, and no dropout
        step = modes.make_step(micro.tokens, segments=micro.segments, tree=micro.tree)
        with self.graph.precision():
            decoder, hidden, aux = self.states(weights.teacher, micro.tokens, step)
        with student.graph.precision():
            assert student.aux.states is not None  # log-probabilities were computed from them
            outputs = modes.compare(
                student.graph.decoder(student.params),
                before(student.aux.states, micro.tree),
                decoder,
                before(hidden, micro.tree),
                self.algorithm.divergence_spec,
                self.algorithm.temperature_of(inputs),
                student.graph.runtime,
            )
        if student.graph.config.vocab_size <= self.graph.config.vocab_size:
            outputs = replace(outputs, outside=None)
        features = (
            self._features(student, aux, micro, weights.projections)
            if self.algorithm.has_features
            else None
        )
        return self._with_comparison(inputs, outputs, micro, features=features)

    def _features(
        self, student: Student, aux: Aux, micro: Batch, params: dict[str, jax.Array]
    ) -> jax.Array:
        """Returns the distance of the layers [R, T], at each token that of the state that predicts
        it. params: of the projections."""
        mine = by_number(student.aux, student.graph.config, "mixed")
        theirs = by_number(aux, self.graph.config, "mixed")
        projections = self.projections(student.graph)
        maps = None if projections is None else projections.maps(params)
        distance = feature_loss(
            mine, theirs, micro.filled, self.algorithm.features_loss, self._pairs, maps
        )
        return jnp.where(scored(micro.segments, micro.tree), before(distance, micro.tree), 0.0)

    def vocabulary(self, graph: Graph) -> int:
        return self.graph.config.vocab_size


class FeatureProjections:
    """Matrices that map features of the policy to the width of a teacher, one for each pair of
    layers.

    They learn with the policy by the same loss. They are a part of the state of a stage, and no
    part of the policy.

    paths: of each matrix float32[E, D], in the order of the pairs. The other attributes are those
    of a LearningModel.
    """

    def __init__(self, policy: Graph, width: int, pairs: Sequence[tuple[int, int]]):
        """Defines the matrices. width: of the teacher. pairs: (layer of the policy, layer of the
        teacher)."""
        self.paths = [f"teacher.projection.{n}.{m}" for n, m in pairs]  # as checkpoints have them
        shape = (policy.config.hidden_size, width)
        axes = ("embed", None)
        self.trunk = policy
        self.runtime = replace(policy.runtime, param_dtype="float32")
        self.untrained = frozenset()
        self.hosted = frozenset()
        self.host_tables = frozenset()
        self.axes = dict.fromkeys(self.paths, axes)
        self.sizes = dict.fromkeys(self.paths, shape)
        self.matrices = dict.fromkeys(self.paths, MatrixDims(rows=(0,), columns=(1,)))
        self.shardings = dict.fromkeys(self.paths, policy.layout.sharding(axes, shape))

    def init(self, seed: int) -> dict[str, jax.Array]:
        """Draws the matrices, normally distributed with variance 1 / E: a projected feature keeps
        its size."""

        def create(key):
            keys = jax.random.split(key, len(self.paths))
            scale = {path: size[0] ** -0.5 for path, size in self.sizes.items()}
            return {
                path: scale[path] * jax.random.normal(each, self.sizes[path], jnp.float32)
                for path, each in zip(self.paths, keys, strict=True)
            }

        return jax.jit(create, out_shardings=self.shardings)(jax.random.key(seed))

    def maps(self, params: dict[str, jax.Array]) -> list[jax.Array]:
        """Returns the matrices in the order of the pairs."""
        return [params[path] for path in self.paths]

    def operations(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Returns the operations of the products and of their gradients over sequences of these
        lengths."""
        return 6.0 * sum(E * D for E, D in self.sizes.values()) * float(np.sum(lengths))


class StoredTeacher(Teacher):
    """The likeliest tokens of a teacher, which `rl teach` wrote and the batch holds."""

    def compare(
        self, student: Student, micro: Batch, inputs: PolicyInputs, weights: Weights
    ) -> PolicyInputs:
        graph = student.graph
        temperature = self.algorithm.temperature_of(inputs)
        rows = FlatRows(graph.runtime.layout, *micro.tokens.shape)
        ids = micro.teacher_ids
        top = micro.teacher_top
        assert (
            ids is not None and top is not None and micro.teacher_rest is not None
        )  # the stage adds them
        with graph.precision():
            assert student.aux.states is not None  # log-probabilities were computed from them
            decoder = graph.decoder(student.params)
            states = before(student.aux.states, micro.tree)
            mine, entropy = modes.logprobs_of_states(
                decoder, states, ids, temperature, graph.runtime
            )
        teacher = (
            rows.flat(top) / temperature
        )  # not normalised at this temperature, which only `renormalise` allows
        outputs = top_divergence(
            rows.flat(mine), teacher, rows.flat(micro.teacher_rest), self.algorithm.divergence_spec
        )
        outputs = replace(jax.tree.map(rows.back, outputs), student_entropy=entropy)
        return self._with_comparison(inputs, outputs, micro)
