"""Log-probabilities of the tokens of a batch under a teacher, before the updates of a step.

N rows of a batch, R packed rows of a micro-batch, T tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.mesh.sharding import constrain
from policy.model import Graph
from policy.programs.compiled_cache import CompiledCache
from rl.accounting.flops import Operations
from rl.training.batch import Batch
from rl.training.batch_updates import by_micro_batch, step_of
from rl.training.packing.packing import Packing
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.vocabulary import known_ids

LACKING = -20.0
"""The log-probability, in nats, of an id that the teacher lacks."""


class TeacherScorer:
    """A frozen model that scores what the policy wrote.

    It gives one number a token, so that no logits of it are kept. Its softmax is over the first
    min(V, U) ids, of V that the policy and U that the teacher has.
    """

    def __init__(self, source: str, frozen: FrozenModel, temperature: float, vocabulary: int):
        """Reads nothing yet.

        source: its name in the configuration. temperature: the logits are divided by it.
        vocabulary: ids of the policy.
        """
        self.source = source
        self.graph = frozen.graph
        self.flops = Operations(frozen.graph)
        self.params: dict[str, Any] = {}
        self._frozen = frozen
        self._temperature = np.float32(temperature)
        self._vocabulary = vocabulary
        self.executable = CompiledCache(jax.jit(self._logprobs), frozen.graph.layout.platform)

    @property
    def abstract(self) -> dict[str, Any]:
        """Returns the shapes and shardings of the weights."""
        return dict(self._frozen.abstract)

    def vocabulary(self, graph: Graph) -> int:
        """Returns the number of its ids. graph: of the policy."""
        return self.graph.config.vocab_size

    def read(self) -> None:
        """Reads the weights onto the mesh. Raises ModelError if they cannot be read."""
        self.params = self._frozen.read()

    def __call__(self, batch: Batch, packing: Packing, micro_rows: int) -> np.ndarray:
        """Returns float32[N, T] on the host: the log-probability of each token after those before
        it; 0 at the first token of a sequence and on padding.

        packing: of the batch. micro_rows: packed rows of a micro-batch.
        """
        read = batch.replace(routes=None, kept=None)
        program = partial(self.executable, self.params)
        (logp,) = by_micro_batch(program, read, packing, micro_rows, self.graph.layout)
        return logp

    def _logprobs(self, params: dict[str, Any], micro: Batch) -> tuple[jax.Array]:
        tokens = constrain(micro.tokens, ("batch", None), self.graph.layout)
        own = self.graph.config.vocab_size
        read = known_ids(tokens, self.graph)
        step = step_of(None, micro.replace(tokens=read))
        left_out = None
        if own > self._vocabulary:
            ids = -2 - jnp.arange(self._vocabulary, own, dtype=jnp.int32)
            left_out = jnp.broadcast_to(ids, (*tokens.shape, own - self._vocabulary))
        logp = self.graph.logprobs(params, read, step, self._temperature, left_out).logp
        return (jnp.where(tokens < own, logp, jnp.float32(LACKING)),)
