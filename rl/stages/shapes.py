"""Batches and updates as shapes, for a plan, which compiles the programs of a step without data.

A row of a batch is one sequence, or the two answers of a pair, until the trainer packs several into
one row (rl/training/packing/packing.py). The batches of this module have the shapes after packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from rl.accounting.program_names import ProgramName
from rl.stages.sharing import describe, full_rows
from rl.stages.stage import Program, StageKind
from rl.training.packing.row_shapes import Sizes, choose_shape

if TYPE_CHECKING:
    import jax

    from policy.adapters.learning import Adapters
    from rl.stages.stage import StageState
    from rl.training.batch import Batch
    from rl.training.updater import UpdateCall
    from rl.training.updates.optimizer_step import ParamState
    from rl.training.weights import WeightGroup


class PackedRows(NamedTuple):
    """The packed rows of one update, with sequences of full length, in the largest micro-batches
    that a run may have; with trees, if the stage shares beginnings.

    shape: (rows, tokens of a row) of the program, which may have room for more. micro_rows: rows of
    a micro-batch. trip_count: micro-batches that hold a token; others are skipped.
    """

    shape: tuple[int, int]
    micro_rows: int
    trip_count: int


def abstract_rows(stage: StageKind, updates: int) -> PackedRows:
    """Returns the packed rows of one of the `updates` equal parts of a step."""
    sharing = stage.trainer.sharing
    N = stage.rows_per_update * stage.options.updates_per_step // updates
    bounds = stage.trainer.row_bounds(N, stage.row_length, sharing)
    full = full_rows(stage, sharing, N)

    def filled_rows(length: int) -> int:
        return -(-full // (length // bounds.limit))

    if bounds.micro_tokens is None:
        sizes = Sizes(full, full * bounds.limit, bounds.limit)
        shape = choose_shape(bounds, sizes, filled_rows)
    else:
        shape = bounds.largest(full)
    filled = filled_rows(shape.length)
    passes = -(-filled // shape.micro_rows)
    return PackedRows((bounds.program_rows(shape, filled), shape.length), shape.micro_rows, passes)


_TOWERS = (
    "the stage trains towers: their forward and backward passes are not in this program, since a "
    "plan does not know the pictures and sounds of an update"
)


def update_notes(stage: StageKind, call: UpdateCall | None = None) -> tuple[str, ...]:
    """Returns what a plan says of the programs that compute the loss of a stage, in lines.

    call: of the update, as shapes; None: the program trains nothing.
    """
    from rl.training.media.tables import trains_towers
    from rl.training.trainable import frozen_weights

    graph = stage.trainer.graph
    notes = [describe(stage, graph, stage.trainer.sharing)]
    if call is not None:
        frozen = frozen_weights(call.update.main_step.model, stage.options)
        notes.append(frozen.note(call.learners[call.update.main].optimizer))
        if stage.trains_policy and trains_towers(graph, stage.options):
            notes.append(_TOWERS)
    return tuple(note for note in notes if note is not None)


def _adapters(call: UpdateCall) -> Adapters | None:
    """Returns the adapter whose gradient an update takes; None: it takes that of the weights."""
    from policy.adapters.learning import Adapters
    from rl.training.critic import Critic

    model = call.update.main_step.model
    if isinstance(model, Critic):
        return model.adapters
    return model if isinstance(model, Adapters) else None


def update_programs(
    stage: StageKind, state: StageState, batch: Batch, times: float, **options: Any
) -> Iterator[Program]:
    """Yields the Programs of an update, as `Trainer.update_calls` lists them.

    state: of the stage, as shapes. batch: that of one update, from `abstract_batch`. times: as in
    Program. options: for `Trainer.update_calls`.
    """
    import jax

    from rl.training.updater import UpdateArguments
    from rl.training.weights import Weights

    trainer = stage.trainer
    batch = with_structure(stage, batch)
    rows = abstract_rows(stage, stage.options.updates_per_step)
    coefs = {name: jax.ShapeDtypeStruct((), np.float32) for name in stage.algorithm.adaptive_coefs}
    arguments = UpdateArguments(
        batch,
        jax.eval_shape(trainer.loss_inputs, batch, coefs or None),
        Weights(media_table=stage.table_shapes),
        number=jax.ShapeDtypeStruct((), np.int32),
    )
    for call in trainer.update_calls(state, arguments, rows.micro_rows, **options):
        teacher = trainer.teacher if call.name == ProgramName.UPDATE else None
        yield Program(
            call.name,
            batch.tokens.shape,
            call.lower,
            trainer.graph,
            resident=(call.learners, call.arguments.frozen),
            times=times,
            trip_count=rows.trip_count,
            micro_rows=rows.micro_rows,
            teacher=teacher and teacher.model,
            adapters=_adapters(call),
            gradient=_gradient_bytes(call),
            stepped=_stepped_bytes(call),
            optimizer_operations=sum(
                step.operations for step in call.update.optimizer_steps.values()
            ),
            notes=update_notes(stage, call),
        )


def _gradient_bytes(call: UpdateCall) -> int:
    """Counts the bytes per device of the gradient of an update, in float32."""
    arrays = [
        array
        for group in call.update.optimizer_steps
        for array in _with_gradient(call, group).values()
    ]
    return sum(4 * math.prod(each.sharding.shard_shape(each.shape)) for each in arrays)


def _stepped_bytes(call: UpdateCall) -> int:
    """Counts the bytes per device of the weights and moments that an update changes, also of those
    that stay in host memory. Tables in host memory, which the host changes, count nothing."""
    import jax

    from policy.ops.host_memory import shard_bytes

    result = 0
    for group, step in call.update.optimizer_steps.items():
        weights = _with_gradient(call, group)
        moments = jax.tree_util.tree_leaves_with_path(call.learners[group].optimizer)
        result += sum(map(shard_bytes, weights.values()))
        result += sum(
            shard_bytes(moment)
            for keys, moment in moments
            if not any(getattr(key, "key", None) in step.host_tables for key in keys)
        )
    return result


def _with_gradient(call: UpdateCall, group: WeightGroup) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the weights of a group with a gradient on the device, by path."""
    step = call.update.optimizer_steps[group]
    weights, _ = step.split(call.learners[group].params)
    return {path: cast(Any, a) for path, a in weights.items() if path not in step.host_tables}


def held_out_program(
    stage: StageKind, state: StageState, batch: Batch, resident: ParamState
) -> Iterator[Program]:
    """Yields the Program of the loss on held-out rows, if the stage has such rows.

    state: of the stage, as shapes. batch: that of an update, from `abstract_batch`. resident: as in
    Program.
    """
    import jax

    if (options := stage.options.held_out) is None:
        return
    trainer = stage.trainer
    table = stage.table_shapes
    batch = with_structure(stage, batch)
    rows = abstract_rows(stage, stage.options.updates_per_step)
    inputs = jax.eval_shape(trainer.loss_inputs, batch, None)
    call = trainer.held_out_call(state, batch, inputs, table, rows.micro_rows)
    yield Program(
        ProgramName.HELD_OUT,
        batch.tokens.shape,
        call.lower,
        trainer.graph,
        resident=(resident, table),
        # blocks of rows in each measurement: a plan reads no rows
        times=1.0 / options.every if options.every else 0.0,
        trip_count=rows.trip_count,
        micro_rows=rows.micro_rows,
        notes=update_notes(stage),
    )


def with_structure(stage: StageKind, batch: Batch) -> Batch:
    """Returns a batch of shapes with its trees, if sequences share beginnings, with the ids that
    filters leave, and with the places of pictures and sounds, if the plan of the stage has them."""
    import jax

    from policy.cache.media import Media
    from policy.cache.paths import Tree

    ids = batch.tokens
    config = stage.trainer.graph.config
    if stage.trainer.sharing is not None:
        batch = replace(batch, tree=Tree.of_shapes(ids))
    if most := min(stage.max_kept, config.vocab_size):
        batch = replace(batch, kept=jax.ShapeDtypeStruct((*ids.shape, most), ids.dtype))
    if stage.table_shapes is None:
        return batch
    turns = jax.ShapeDtypeStruct((*ids.shape, 3), ids.dtype) if config.has_sections else None
    media = Media(index=ids, turns=turns, until=ids if config.looks_ahead else None)
    return replace(batch, media=media)


def abstract_batch(
    shape: tuple[int, int], routes: dict | None, *names: str, extra: tuple[str, ...] = ()
) -> Batch:
    """Returns a packed batch of `shape` (N, T) as shapes.

    routes: the routes of one token (the experts that computed it), as shapes; None: the batch has
    none. names: fields of Batch that are float32[N,T]. extra: names in `Batch.extra`, numbers that
    only this kind of stage has.
    """
    import jax
    import jax.numpy as jnp

    from rl.training.batch import Batch

    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    floats: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = Batch(tokens=ids, segments=ids, mask=floats, prompt=ids, **dict.fromkeys(names, floats))
    if extra:
        batch = replace(batch, extra=dict.fromkeys(extra, floats))
    if routes is not None:
        routes = {
            path: jax.ShapeDtypeStruct((*shape, *a.shape), a.dtype) for path, a in routes.items()
        }
    return replace(batch, routes=routes)
