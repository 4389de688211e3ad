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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from policy import modes
from policy.attention.sequence_shards import FlatRows
from policy.cache.paths import before, scored
from policy.cache.step import Step
from policy.decoder import Decoder
from policy.heads import head
from policy.heads.divergence import DivergenceOutputs, top_divergence
from policy.heads.features import by_number, feature_loss, pairs_of
from policy.intermediates import Aux
from policy.mesh.sharding import constrain
from policy.model import Graph
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.flops import Operations
from rl.algorithms import PolicyInputs
from rl.algorithms._protocols import TeacherLoss
from rl.training.batch import Batch
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.projections import FeatureProjections
from rl.training.teachers.vocabulary import known_ids
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


class LikeliestTokens(NamedTuple):
    """The likeliest tokens of a teacher in place of each token, at temperature 1: their
    log-probabilities float32[R, T, K] and ids int32[R, T, K], and the logarithm of the probability
    of all others float32[R, T]."""

    logp: Any
    ids: Any
    rest: Any


class TeacherPass(NamedTuple):
    """A pass of a teacher without its head: the decoder that has the head, the final states
    [R, T, D], and what layers reported."""

    decoder: Decoder
    hidden: jax.Array
    aux: Aux


@dataclass(frozen=True)
class Student:
    """The policy of a micro-batch: its graph, its weights, the outputs of its pass, and the
    temperature of its log-probabilities."""

    graph: Graph
    params: dict[str, jax.Array]
    aux: Aux
    temperature: ArrayLike = 1.0


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
            name: jax.lax.stop_gradient(jnp.where(predicted, array, 0.0))
            for name in COMPARED
            if (array := getattr(outputs, name)) is not None
        }
        divergence = jnp.where(predicted, outputs.divergence, 0.0)
        return replace(inputs, divergence=divergence, teacher=numbers, **more)


class ModelTeacher(Teacher):
    """A frozen model of any family on the mesh of the run."""

    def __init__(self, frozen: FrozenModel, algorithm: TeacherLoss):
        """Reads nothing yet."""
        super().__init__(algorithm)
        self.frozen = frozen
        graph = frozen.graph
        self.graph = graph.with_runtime(record=("mixed",)) if algorithm.has_features else graph
        self._flops = Operations(graph)

    @property
    def abstract(self) -> Mapping[str, Any]:
        return self.frozen.abstract

    def _read(self) -> dict[str, Any]:
        return self.frozen.read()

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
        pairs = pairs_of(mine.mixer_layers, theirs.mixer_layers, self._pairs)
        return FeatureProjections(graph, theirs.hidden_size, pairs)

    @property
    def _pairs(self) -> list[tuple[int, int]] | None:
        pairs = self.algorithm.features_layers
        return None if pairs is None else [(n, m) for n, m in pairs]

    def forward(self, params: dict[str, jax.Array], tokens: jax.Array, step: Step) -> TeacherPass:
        """Runs the teacher over tokens [R, T], without its head."""
        decoder = self.graph.decoder(params)
        hidden, _, aux = decoder(tokens, step, None, self.graph.runtime)
        return TeacherPass(decoder, hidden, aux)

    @functools.cache  # noqa: B019 - a teacher is made once for a stage
    def top(self, k: int, vocab: int) -> CompiledCache:
        """Returns the program (params, micro-batch) -> LikeliestTokens: the `k` likeliest of the
        first `vocab` tokens."""

        def run(params: dict[str, jax.Array], micro: Batch) -> LikeliestTokens:
            tokens = constrain(micro.tokens, ("batch", None), self.graph.layout)
            rows = FlatRows(self.graph.layout, *tokens.shape)
            with self.graph.precision():
                step = modes.make_step(tokens, segments=micro.segments)
                decoder, hidden, _ = self.forward(params, tokens, step)
                states = rows.flat(before(hidden))
                tiling = head.Tiling(None, rows.layout)
                weight = decoder.head_weight
                scaling = decoder.config.logit_scaling
                top = head.top_and_rest(states, weight, k, 1.0, scaling, tiling, vocab)
                return LikeliestTokens(rows.back(top.logp), rows.back(top.ids), rows.back(top.rest))

        return CompiledCache(jax.jit(run), self.graph.layout.platform)

    def compare(
        self, student: Student, micro: Batch, inputs: PolicyInputs, weights: Weights
    ) -> PolicyInputs:
        # The teacher chooses its own experts, and has no dropout.
        tokens = known_ids(micro.tokens, self.graph)
        step = modes.make_step(tokens, segments=micro.segments, tree=micro.tree)
        with self.graph.precision():
            decoder, hidden, aux = self.forward(weights.teacher, tokens, step)
        temperature = self.algorithm.temperature_of(inputs)
        with student.graph.precision():
            assert student.aux.states is not None  # log-probabilities were computed from them
            outputs = modes.compare(
                student.graph.decoder(student.params),
                before(student.aux.states, micro.tree),
                decoder,
                before(hidden, micro.tree),
                self.algorithm.divergence_spec,
                student.temperature if temperature is None else temperature,
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


class StoredTeacher(Teacher):
    """The likeliest tokens of a teacher, which `rl teach` wrote and the batch holds."""

    def compare(
        self, student: Student, micro: Batch, inputs: PolicyInputs, weights: Weights
    ) -> PolicyInputs:
        graph = student.graph
        temperature = self.algorithm.temperature_of(inputs)
        temperature = student.temperature if temperature is None else temperature
        rows = FlatRows(graph.runtime.layout, *micro.tokens.shape)
        ids = micro.teacher_ids
        top = micro.teacher_top
        rest = micro.teacher_rest
        assert ids is not None and top is not None and rest is not None  # the stage adds them
        with graph.precision():
            assert student.aux.states is not None  # log-probabilities were computed from them
            decoder = graph.decoder(student.params)
            states = before(student.aux.states, micro.tree)
            mine, entropy = modes.logprobs_of_states(
                decoder, states, ids, temperature, graph.runtime
            )
        # At another temperature than 1 this is not normalised, which only `renormalise` allows.
        teacher = rows.flat(top) / temperature
        outputs = top_divergence(
            rows.flat(mine), teacher, rows.flat(rest), self.algorithm.divergence_spec
        )
        outputs = replace(jax.tree.map(rows.back, outputs), student_entropy=entropy)
        return self._with_comparison(inputs, outputs, micro)
