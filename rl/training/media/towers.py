"""Pictures and sounds in updates: the table that a loss reads, and the gradients of trained towers.

The table of frozen towers is a constant of the update. If a tower is trained, the update encodes
the items itself; the gradient of the table is summed over the micro-batches, and then goes backward
through the towers a few items at a time. So the activations of a few items are on the device at a
time, whatever the size of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from policy.cache.media import Media, MediaTable
from policy.execution.encoding import MediaEncoder, PaddedInputs, tower_params
from policy.model import Graph
from rl.training.weights import Weights


def in_table(media: Media | None, table: MediaTable | None) -> Media | None:
    """Returns the pictures and sounds of a forward pass. table: their rows; None without them."""
    if media is None:
        return None
    assert table is not None  # a batch with media comes with its table
    return media.in_table(table)


class TowerGradients:
    """Gradients of an update, through the towers that it trains.

    trained: what the loss is differentiated by. without_gradient: what else it reads. If towers are
    trained, a float32 table is among the first, and their weights, which the loss does not read,
    are among the second: a decoder needs all its weights.
    """

    def __init__(
        self,
        graph: Graph,
        trained: Weights,
        without_gradient: Weights,
        inputs: Sequence[PaddedInputs] | None,
    ):
        """Encodes the `inputs`, while the update is traced; None: it trains no tower, and nothing
        changes."""
        self._inputs = inputs
        self.trained = trained
        self.without_gradient = without_gradient
        if inputs is None:
            return
        self._encoder = MediaEncoder(graph)
        self._towers = tower_params(trained.policy)
        self._others = tower_params(without_gradient.policy)
        table = jax.tree.map(
            lambda a: jnp.zeros(a.shape, jnp.float32), without_gradient.media_table
        )
        for each in inputs:
            table = self._encoder.encoded_into(self._towers | self._others, table, each)
        rest = {path: array for path, array in trained.policy.items() if path not in self._towers}
        self.trained = replace(trained, policy=rest, media_table=table)
        self.without_gradient = replace(
            without_gradient, policy=without_gradient.policy | self._towers, media_table=None
        )

    def gradients(self, grads: Weights) -> Weights:
        """Returns the gradients, with those of the towers in the place of that of the table."""
        if self._inputs is None:
            return grads
        assert grads.media_table is not None  # it is among `trained`
        towers = {path: jnp.zeros(a.shape, jnp.float32) for path, a in self._towers.items()}
        for each in self._inputs:
            more = self._encoder.gradients(self._towers, self._others, grads.media_table, each)
            towers = jax.tree.map(jnp.add, towers, more)
        return replace(grads, policy=grads.policy | towers, media_table=None)
