"""Ids of a policy that a teacher lacks, where both pad the ids of one tokenizer to other widths.

N rows, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from policy import modes
from policy.cache.paths import before
from policy.mesh import processes
from policy.mesh.sharding import block_on_cpu_mesh
from policy.model import Graph
from rl.training.batch import Batch


def known_ids(tokens: jax.Array, graph: Graph) -> jax.Array:
    """Returns ids that a model can look up: those beyond its vocabulary, which no text has, as its
    last one."""
    return jnp.minimum(tokens, graph.config.vocab_size - 1)


def probability_outside(
    graph: Graph, params: dict[str, jax.Array], batch: Batch, vocabulary: int
) -> float:
    """Returns the probability that a policy gives to ids from `vocabulary` on, the mean over the
    tokens of a batch [N, T] that are trained on."""

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
