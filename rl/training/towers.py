"""Pictures and sounds in updates: the table among the arguments of a loss, and the gradients of trained towers.

The table of frozen towers is a constant of the update. If a tower is trained, the update encodes the items itself; the
gradient of the table is summed over the micro-batches, and then goes backward through the towers in pieces. So the
activations of a few items are on the device at a time, whatever the size of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from policy.cache.media import MediaInputs, MediaTable
from policy.execution.encoding import MediaEncoder, Piece, is_tower
from policy.model import Graph
from rl.training.batch import Places

ROWS, DEEP = "media.rows", "media.deep"
"""Names of the arrays of a table beside the paths of weights."""


@dataclass(frozen=True)
class UpdateMedia:
    """The pictures and sounds of a mini-batch.

    table: its rows, by the weights before the step. pieces: the items for the towers that the update trains; None: it
    trains none.
    """

    table: MediaTable
    pieces: Sequence[Piece] | None = None


def as_params(table: MediaTable | None) -> dict[str, Any]:
    """Returns the arrays of a table by name; None: there is no table."""
    arrays = {} if table is None else {ROWS: table.rows, DEEP: table.deep}
    return {name: array for name, array in arrays.items() if array is not None}


def inputs_of(params: dict[str, jax.Array], places: Places | None) -> MediaInputs | None:
    """Returns the pictures and sounds of a forward pass, with the table among `params`."""
    return None if places is None else places.inputs(MediaTable(params[ROWS], params.get(DEEP)))


class TrainedTowers:
    """The towers in an update that trains weights of them."""

    def __init__(self, graph: Graph):
        self._encoder = MediaEncoder(graph)

    def with_table(self, trained: dict, constants: dict, pieces: Sequence[Piece]) -> tuple[dict, dict]:
        """Returns (what the loss is differentiated by, constants): a float32 table takes the place of the towers."""
        towers = {path: array for path, array in trained.items() if is_tower(path)}
        table = MediaTable(
            *(jnp.zeros(constants[name].shape, jnp.float32) if name in constants else None for name in (ROWS, DEEP))
        )
        for piece in pieces:
            table = self._encoder.encoded_into(_towers(trained | constants), table, piece)
        others = {path: array for path, array in trained.items() if path not in towers}
        rest = {name: array for name, array in constants.items() if name not in (ROWS, DEEP)}
        return others | as_params(table), rest | towers

    def gradients(self, trained: dict, constants: dict, grads: dict, pieces: Sequence[Piece]) -> dict:
        """Returns the gradients with those of the towers in the place of those of the table."""
        towers = {path: jnp.zeros(a.shape, jnp.float32) for path, a in trained.items() if is_tower(path)}
        weights, others = _towers(trained), _towers(constants)
        table = MediaTable(grads[ROWS], grads.get(DEEP))
        for piece in pieces:
            towers = jax.tree.map(jnp.add, towers, self._encoder.gradients(weights, others, table, piece))
        return {path: grad for path, grad in grads.items() if path not in (ROWS, DEEP)} | towers


def _towers(params: dict) -> dict:
    return {path: array for path, array in params.items() if is_tower(path)}
