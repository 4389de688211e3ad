"""Pictures and sounds in updates: the table among the arguments of a loss, and the gradients of
trained towers.

The table of frozen towers is a constant of the update. If a tower is trained, the update encodes
the items itself; the gradient of the table is summed over the micro-batches, and then goes backward
through the towers a few items at a time. So the activations of a few items are on the device at a time,
whatever the size of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from policy.cache.media import Media, MediaTable
from policy.execution.encoding import MediaEncoder, PaddedInputs, tower_params
from policy.model import Graph

ROWS = "media.rows"
DEEP = "media.deep"
"""Names of the arrays of a table next to the paths of weights."""


def as_params(table: MediaTable | None) -> dict[str, Any]:
    """Returns the arrays of a table by name; None: there is no table."""
    arrays = {} if table is None else {ROWS: table.rows, DEEP: table.deep}
    return {name: array for name, array in arrays.items() if array is not None}


def in_table(media: Media | None, params: dict[str, jax.Array]) -> Media | None:
    """Returns the pictures and sounds of a forward pass, with the table among `params`."""
    return None if media is None else media.in_table(MediaTable(params[ROWS], params.get(DEEP)))


class TowerGradients:
    """Gradients of an update, through the towers that it trains.

    arguments: (what the loss is differentiated by, its constants), by path. If towers are trained,
    a float32 table is among the first, and their weights, which the loss does not read, are among
    the second: a decoder needs all its weights.
    """

    def __init__(
        self, graph: Graph, trained: dict, constants: dict, inputs: Sequence[PaddedInputs] | None
    ):
        """Encodes the `inputs`, while the update is traced; None: it trains no tower, and nothing
        changes."""
        self._inputs = inputs
        self.arguments = (trained, constants)
        if inputs is None:
            return
        self._encoder = MediaEncoder(graph)
        self._trained, self._others = tower_params(trained), tower_params(constants)
        table = MediaTable(constants[ROWS], constants.get(DEEP))
        table = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), table)
        for each in inputs:
            table = self._encoder.encoded_into(self._trained | self._others, table, each)
        rest = {path: array for path, array in trained.items() if path not in self._trained}
        kept = {path: array for path, array in constants.items() if path not in (ROWS, DEEP)}
        self.arguments = rest | as_params(table), kept | self._trained

    def gradients(self, grads: dict) -> dict:
        """Returns the gradients by path, with those of the towers in the place of those of the
        table."""
        if self._inputs is None:
            return grads
        towers = {path: jnp.zeros(a.shape, jnp.float32) for path, a in self._trained.items()}
        table = MediaTable(grads[ROWS], grads.get(DEEP))
        for each in self._inputs:
            towers = jax.tree.map(
                jnp.add, towers, self._encoder.gradients(self._trained, self._others, table, each)
            )
        return {path: grad for path, grad in grads.items() if path not in (ROWS, DEEP)} | towers
