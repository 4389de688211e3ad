"""Tables of pictures and sounds: towers in programs of fixed sizes.

An item (a picture, a tile or a clip) is computed with others of its size: its inputs are padded to
one of few numbers (`padded_inputs`: 64, 128, 256, ... unless its tower has one size), and a program
takes a fixed number of items. The same item always meets the same program, so the bits of its rows
depend on no other item. Programs write into a table of a fixed number of rows.

I items of a call, G calls of a program, N inputs of an item after padding, K numbers of an input, m
rows of an item after padding, M rows of the table, E hidden, L layers with deepstack features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from policy.cache.media import MediaTable
from policy.media import Item, Kind, Tower, is_tower
from policy.mesh.sharding import block_on_cpu_mesh, constrain
from policy.model import Graph
from policy.programs.compiled_cache import CompiledCache

Params = Mapping[str, jax.Array]

INPUTS = 4096
"""Inputs of all items of a program, unless one item has more or the mesh has more shards of
rows."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PaddedInputs:
    """Items of one kind and size, padded, for G calls of one program.

    values: float32[G, I, N, K]. shapes: int32[G, I, 2]. targets: int32[G, I, m], the row of the
    table that each row of an item goes to; M: none.
    """

    kind: Kind = field(metadata={"static": True})
    values: Any
    shapes: Any
    targets: Any


class MediaEncoder:
    """The towers of a model.

    encoded: how many items have been encoded.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.encoded = 0
        self._rows: dict[tuple[Kind, int], int] = {}
        config = graph.config
        self._features = sum(spec.deepstack for spec in config.layers)
        self._layout = graph.layout

    def items_per_call(self, N: int) -> int:
        """Returns I, a multiple of the parts into which the mesh cuts a batch."""
        shards = self._layout.num_row_shards
        return -(-max(1, INPUTS // N) // shards) * shards

    def spec(self, kind: Kind) -> Tower:
        """Returns the tower of a kind. Raises ValueError if the model has none."""
        spec = getattr(self.graph.config, kind)
        if spec is None:
            raise ValueError(f"this model has no tower for {kind}")
        return spec

    def abstract(self, M: int) -> MediaTable:
        """Returns the shapes of a table."""
        dtype = jnp.dtype(self.graph.runtime.dtype)
        E = self.graph.config.hidden_size
        replicated = self._layout.replicated
        rows = jax.ShapeDtypeStruct((M, E), dtype, sharding=replicated)
        deep = jax.ShapeDtypeStruct((self._features, M, E), dtype, sharding=replicated)
        return MediaTable(rows, deep if self._features else None)

    def padded(
        self,
        inputs: Mapping[Item, np.ndarray],
        first: Mapping[Item, int],
        M: int,
        *,
        round_up: bool = False,
    ) -> list[PaddedInputs]:
        """Returns the inputs of items, float32[n, K] each, as arguments of `write`.

        first: the first row of each item in a table of M rows. round_up: the calls of a program
        are 1, 2, 4, 8, ..., so that few numbers of them occur.
        """
        groups: dict[tuple[Kind, int], list[Item]] = defaultdict(list)
        for item, values in inputs.items():
            N = self.spec(item.kind).padded_inputs(len(values))
            groups[item.kind, N].append(item)
        result = []
        for (kind, N), items in sorted(groups.items()):
            G = -(-len(items) // self.items_per_call(N))
            padded = self._no_inputs(kind, N, 1 << (G - 1).bit_length() if round_up else G, M)
            values, shapes, targets = (
                a.reshape(-1, *a.shape[2:]) for a in (padded.values, padded.shapes, padded.targets)
            )
            for i, item in enumerate(items):
                values[i, : len(inputs[item])] = inputs[item]
                shapes[i] = item.shape
                targets[i, : item.rows] = np.arange(first[item], first[item] + item.rows)
            result.append(padded)
        return result

    def _no_inputs(self, kind: Kind, N: int, G: int, M: int) -> PaddedInputs:
        """Returns inputs of G calls without an item, each with room for as many items of N inputs
        as a call takes. M: as a target, no row of the table."""
        I = self.items_per_call(N)
        return PaddedInputs(
            kind,
            np.zeros((G, I, N, self.spec(kind).input_width), np.float32),
            np.ones((G, I, 2), np.int32),
            np.full((G, I, self._padded_rows(kind, N)), M, np.int32),
        )

    def _padded_rows(self, kind: Kind, N: int) -> int:
        """Returns m, the rows that the tower makes of N inputs."""
        if (kind, N) not in self._rows:
            inputs = jax.ShapeDtypeStruct((1, N, self.spec(kind).input_width), jnp.float32)
            shapes = jax.ShapeDtypeStruct((1, 2), jnp.int32)
            rows, _ = jax.eval_shape(
                lambda p, v, s: self.graph.encode(p, kind, v, s), self.graph.shapes, inputs, shapes
            )
            self._rows[kind, N] = rows.shape[1]
        return self._rows[kind, N]

    def empty(self, M: int) -> MediaTable:
        """Returns a table of M rows that no item has written."""
        return block_on_cpu_mesh(self._empty(M), self._layout)

    def write(
        self, params: Params, table: MediaTable, padded: Iterable[PaddedInputs]
    ) -> MediaTable:
        """Encodes items into the table, whose arrays are donated."""
        towers = tower_params(params)
        for inputs in padded:
            for i in range(len(inputs.values)):
                call = jax.tree.map(lambda a, i=i: a[i : i + 1], inputs)
                table = block_on_cpu_mesh(self.executable(towers, table, call), self._layout)
                self.encoded += int(np.count_nonzero(call.targets[0, :, 0] < len(table.rows)))
        return table

    def copied(self, table: MediaTable, sources_M: np.ndarray) -> MediaTable:
        """Returns a table of M rows, those of `table` at `sources`, int32[M]; -1: zeros."""
        return block_on_cpu_mesh(self._copied(table, np.asarray(sources_M, np.int32)), self._layout)

    def compile_ahead(self, params: Params, sizes: Iterable[tuple[Kind, int]], M: int) -> int:
        """Compiles the programs of these kinds and numbers of inputs after padding. Returns their
        number."""
        towers = tower_params(params)
        distinct = sorted(set(sizes))
        for kind, N in distinct:
            self.executable.compile(towers, self.abstract(M), self._abstract_inputs(kind, N))
        return len(distinct)

    def lower(self, params: Params, table: MediaTable, kind: Kind, N: int) -> jax.stages.Lowered:
        """Traces the program that encodes items of this size. The arguments may be abstract."""
        return self.executable.lower(tower_params(params), table, self._abstract_inputs(kind, N))

    def _abstract_inputs(self, kind: Kind, N: int) -> PaddedInputs:
        I = self.items_per_call(N)
        m = self._padded_rows(kind, N)
        values = jax.ShapeDtypeStruct((1, I, N, self.spec(kind).input_width), jnp.float32)
        return PaddedInputs(
            kind, values, *(jax.ShapeDtypeStruct((1, I, n), jnp.int32) for n in (2, m))
        )

    def encoded_into(self, params: Params, table: MediaTable, inputs: PaddedInputs) -> MediaTable:
        """Encodes items, one call after the other. Rows are rounded to the table's dtype. Traced
        by a caller's program."""

        def call(table, xs):
            values, shapes, targets = xs
            rows, deep = self._encode(params, inputs.kind, values, shapes)
            return _written(table, rows, deep, targets), None

        return jax.lax.scan(call, table, (inputs.values, inputs.shapes, inputs.targets))[0]

    def gradients(
        self, trained: Params, others: Params, grads: MediaTable, inputs: PaddedInputs
    ) -> dict[str, jax.Array]:
        """Returns the float32 gradients of the weights `trained` of towers, given those of the
        table.
        Only the activations of one call are in memory at a time. Traced by a caller's program."""
        zeros = {path: jnp.zeros(array.shape, jnp.float32) for path, array in trained.items()}

        def call(total, xs):
            values, shapes, targets = xs
            outputs, pull = jax.vjp(
                lambda own: self._encode(own | dict(others), inputs.kind, values, shapes), trained
            )
            back = jax.tree.map(
                lambda out, grad: grad.astype(out.dtype), outputs, _taken(grads, targets, outputs)
            )
            return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, pull(back)[0]), None

        return jax.lax.scan(call, zeros, (inputs.values, inputs.shapes, inputs.targets))[0]

    def _encode(self, params: Params, kind: Kind, values_INK, shapes_I2):
        values = constrain(values_INK, ("batch", None, None), self._layout)
        return self.graph.encode(self._complete(params), kind, values, shapes_I2)

    def _complete(self, params: Params) -> dict[str, jax.Array]:
        """Returns the weights of towers with zeros for all others, which no tower reads: in a
        compiled program they take no memory."""
        return {
            path: params[path] if path in params else jnp.zeros(shape.shape, shape.dtype)
            for path, shape in self.graph.shapes.items()
        }

    @cached_property
    def executable(self) -> CompiledCache:
        """Returns the compiled programs of `write`."""
        jitted = jax.jit(self.encoded_into, donate_argnums=1, out_shardings=self._layout.replicated)
        return CompiledCache(
            jitted,
            self._layout.platform,
            shape_of=lambda _, table, inputs: inputs.values.shape[1:3],
        )

    @cached_property
    def _copied(self):
        def copied(table, sources_M):
            known = sources_M >= 0
            return MediaTable(
                *(
                    None if a is None else jnp.where(known[:, None], a[..., sources_M, :], 0)
                    for a in table
                )
            )

        return jax.jit(copied, out_shardings=self._layout.replicated)

    @cached_property
    def _empty(self):
        def empty(M):
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.abstract(M))

        return jax.jit(empty, static_argnums=0, out_shardings=self._layout.replicated)


T = TypeVar("T")


def tower_params(params: Mapping[str, T]) -> dict[str, T]:
    """Returns the weights of towers among these."""
    return {path: array for path, array in params.items() if is_tower(path)}


def _written(table: MediaTable, rows_ImE, deep_LImE, targets_Im) -> MediaTable:
    rows = table.rows.at[targets_Im].set(rows_ImE.astype(table.rows.dtype), mode="drop")
    if table.deep is None or deep_LImE is None:  # sounds have no features: their rows stay 0
        return MediaTable(rows, table.deep)
    return MediaTable(
        rows, table.deep.at[:, targets_Im].set(deep_LImE.astype(table.deep.dtype), mode="drop")
    )


def _taken(grads: MediaTable, targets_Im, outputs) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of these rows, 0 where there is none, for each output of a tower."""
    take = partial(jnp.take, indices=targets_Im, mode="fill", fill_value=0)
    return take(grads.rows, axis=0), None if outputs[1] is None else take(grads.deep, axis=1)
