"""Batches and updates as shapes, for a plan, which compiles the programs of a step without data.

A row of a batch is one sequence, or the two answers of a pair, until the trainer packs several into
one row (rl/training/packing/packing.py). The batches of this module have the shapes after packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl.stages.sharing import describe, full_rows
from rl.stages.stage import Program, StageKind

if TYPE_CHECKING:
    from rl.training.batch import Batch


class PackedRows(NamedTuple):
    """The packed rows of one update, with sequences of full length; with trees, if the stage shares
    beginnings.

    shape: (rows, tokens of a row) of the program, which may have room for more. micro_rows: rows of
    a micro-batch. trip_count: micro-batches that hold a token; others are skipped.
    """

    shape: tuple[int, int]
    micro_rows: int
    trip_count: int


def abstract_rows(stage: StageKind, updates: int) -> PackedRows:
    """Returns the packed rows of one of the `updates` equal parts of a step."""
    T = stage.row_length
    sharing = stage.trainer.sharing
    multiple = stage.trainer.length_multiple
    N = stage.rows_per_update * stage.options.updates_per_step // updates
    counts, R = stage.trainer.row_counts(N, T, sharing)
    full = full_rows(stage, sharing, N)
    rows = min(count for count in counts if count >= full)
    length = T if sharing is None else sharing.packed_length(T)
    R = R or rows
    return PackedRows((rows, -(-length // multiple) * multiple), R, -(-full // R))


def update_notes(stage: StageKind, learner: Any = None) -> tuple[str, ...]:
    """Returns what a plan says of the programs that compute the loss of a stage, in lines.

    learner: the ParamState that the program trains; None: it trains nothing.
    """
    from policy.modes import VALUE_HEAD
    from rl.training.trainable import frozen_weights

    graph = stage.trainer.graph
    notes = [describe(stage, graph, stage.trainer.sharing)]
    if learner is not None and not (stage.trains_policy and VALUE_HEAD in learner.params):
        notes.append(frozen_weights(graph, stage.options).note(learner.optimizer))
    return tuple(note for note in notes if note is not None)


def update_program(
    stage: StageKind,
    kind: str,
    batch: Batch,
    learner: Any,
    rest: tuple,
    resident: Any,
    times: float,
) -> Program:
    """Returns the Program of an update, which takes (learner, batch, PolicyInputs, *rest).

    learner: the ParamState that is trained. batch: the batch of one update, from `abstract_batch`.
    rest: (extra_params, companion), as OptimizerStep takes them; a companion is other weights that
    learn in the same program. resident, times: as in Program.
    """
    import jax

    trainer = stage.trainer
    table = stage.media_params
    batch = with_structure(stage, batch)
    frozen, *companions = rest
    rows = abstract_rows(stage, stage.options.updates_per_step)
    coefs = {name: jax.ShapeDtypeStruct((), np.float32) for name in stage.algorithm.adaptive_coefs}
    loss_inputs = jax.eval_shape(trainer.loss_inputs, batch, coefs or None)

    def lower():
        number = jax.ShapeDtypeStruct((), np.int32)
        arguments = (
            learner,
            batch,
            loss_inputs,
            frozen | table,
            *(*companions, None, None)[:2],
            number,
        )
        return trainer.executables[kind].lower(*arguments, micro_rows=rows.micro_rows)

    teacher = None if kind != "update" or trainer.teacher is None else trainer.teacher.model
    loop = {"trip_count": rows.trip_count, "micro_rows": rows.micro_rows}
    more = {"teacher": teacher, "notes": update_notes(stage, learner)}
    return Program(
        kind, batch.tokens.shape, lower, trainer.graph, (resident, table), times, **loop, **more
    )


def held_out_program(
    stage: StageKind, batch: Batch, params: dict, resident: Any
) -> Iterator[Program]:
    """Yields the Program of the loss on held-out rows, if the stage has such rows.

    batch: that of an update, from `abstract_batch`. params: the weights that it reads, as shapes.
    resident: as in Program.
    """
    import jax

    from rl.training.batch_updates import HELD_OUT

    if (options := stage.options.held_out) is None:
        return
    trainer = stage.trainer
    table = stage.media_params
    batch = with_structure(stage, batch)
    rows = abstract_rows(stage, stage.options.updates_per_step)
    loss_inputs = jax.eval_shape(trainer.loss_inputs, batch, None)

    def lower():
        executable = trainer.executables[HELD_OUT]
        return executable.lower(params, batch, loss_inputs, table, micro_rows=rows.micro_rows)

    loop = {"trip_count": rows.trip_count, "micro_rows": rows.micro_rows}
    more: Any = {"notes": update_notes(stage)}
    times = (
        1.0 / options.every if options.every else 0.0
    )  # blocks of rows in each measurement: a plan reads no rows
    yield Program(
        HELD_OUT, batch.tokens.shape, lower, trainer.graph, (resident, table), times, **loop, **more
    )


def policy_update(stage: StageKind, batch: Batch, state: Any, times: float) -> Program:
    """Returns the Program of an update of the policy, with the other weights that it trains and its
    teacher.

    state: the RunState of the stage, as shapes.
    """
    trainer = stage.trainer
    frozen = {} if trainer.teacher is None else dict(trainer.teacher.abstract)
    companion = trainer.companion and getattr(state, trainer.companion)
    resident = state.policy, companion, frozen
    return update_program(
        stage, "update", batch, state.policy, (frozen, companion), resident, times
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
