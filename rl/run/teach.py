"""Writes the likeliest tokens of a teacher for the rows of a stage, so that later runs load no
teacher.

N rows, T tokens, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

import rl.stages
from rl.config.run import RunConfig
from rl.data import models
from rl.data import teacher as teachers
from rl.data.encoded import Row
from rl.data.reader import DataReader
from rl.data.teacher_files import TeacherFacts, TeacherWriter, model_sha256, vocabulary_sha256
from rl.errors import ConfigError, DataError
from rl.run import checks
from rl.stages.scorers import abstract_teacher
from rl.stages.supervised import Stage

if TYPE_CHECKING:
    from rl.training.teachers.teacher import LikeliestTokens, ModelTeacher


@dataclass(frozen=True)
class TeachOptions:
    """What `rl teach` writes.

    stage: name of the stage whose rows and teacher are taken; None: the only one with a teacher. k:
    tokens in each place. dtype: of the log-probabilities. rows_per_part: rows of a file.
    """

    output: Path
    k: int
    stage: str | None = None
    dtype: Literal["float16", "float32"] = "float16"
    rows_per_part: int = 256


def teach(config: RunConfig, options: TeachOptions) -> None:
    """Writes the files, or the parts that an earlier call did not write. Prints a line for each
    part.

    Raises ConfigError, DataError or ModelError for a teacher, data or a directory that cannot be
    used, before the teacher is loaded.
    """
    stage = _stage(config, options.stage)
    teacher_options = stage.teacher
    reader = DataReader(config)
    stops = tuple(sorted({*reader.stop_ids, *stage.options.sampling.stop_token_ids}))
    used = models.ids_in_use(reader.tokenizer, config.model)
    teachers.check_teacher(teacher_options, reader.tokenizer, stops, used)
    stage.read_rows(reader)
    rows = stage.rows.own
    if (seen := next((row for row in rows if row.expanded is not None), None)) is not None:
        raise DataError(
            f"{seen.expanded.references[0].where}: `rl teach` reads texts only; set "
            "model.media: never"
        )
    decoder = teachers.decoder_of(teacher_options)
    policy = checks.decoder_of(config.model)
    vocab = min(decoder.vocab_size, decoder.vocab_size if policy is None else policy.vocab_size)
    if options.k > vocab:
        raise ConfigError(f"--top {options.k}: teacher and policy share {vocab} tokens")
    directory = teachers.directory_of(teacher_options, weights=True)
    changes = teacher_options.model_dump_json()
    facts = TeacherFacts(
        source=str(teacher_options.source),
        model_sha256=f"random: {changes}, seed {config.seed}"
        if directory is None
        else model_sha256(directory),
        vocabulary_sha256=vocabulary_sha256(reader.tokenizer),
        stops=list(stops),
        k=options.k,
        vocab=vocab,
        dtype=options.dtype,
        rows=len(rows),
        rows_per_part=options.rows_per_part,
    )
    writer = TeacherWriter(options.output, facts)
    missing = list(writer.missing(rows))
    if missing:
        _write(config, stage, writer, missing)
    writer.finish()
    print(
        f"{len(rows)} rows, {options.k} tokens in each place: {options.output}; set teacher.files "
        "to this directory"
    )


def _stage(config: RunConfig, name: str | None) -> Stage:
    """Returns the stage whose teacher is asked. Raises ConfigError."""
    able = [
        each
        for each in rl.stages.create(config)
        if each.teacher is not None
        and each.teacher.source is not None
        and not each.trains_on_rollouts
    ]
    chosen = [each for each in able if name in (None, each.name)]
    if len(chosen) == 1 and isinstance(chosen[0], Stage):
        return chosen[0]
    names = ", ".join(each.name for each in able) or "none"
    raise ConfigError(
        f"name one stage with `teacher.source` by --stage; the configuration has: {names}"
    )


def _write(
    config: RunConfig,
    stage: Stage,
    writer: TeacherWriter,
    missing: Sequence[tuple[int, Sequence[Row]]],
) -> None:
    """Loads the teacher and writes these parts."""
    from rl.run import build
    from rl.training.teachers.teacher import ModelTeacher

    teacher = abstract_teacher(config, stage.teacher, stage.algorithm, build.on_mesh(config))
    assert isinstance(teacher, ModelTeacher)  # it has a source
    teacher.read()
    facts = writer.facts
    parts = -(-facts.rows // facts.rows_per_part)
    for number, rows in missing:
        arrays = top(teacher, rows, facts.k, facts.vocab, config.max_length)
        columns = [np.flatnonzero(row.mask) for row in rows]
        writer.write(
            number, rows, *([array[row, at] for row, at in enumerate(columns)] for array in arrays)
        )
        print(f"part {number + 1} of {parts}: {len(rows)} rows", flush=True)


def top(
    teacher: ModelTeacher, rows: Sequence[Row], k: int, vocab: int, limit: int
) -> LikeliestTokens:
    """Returns the k likeliest tokens in place of each token of rows, on the host.

    vocab: the distribution is over the first so many tokens. limit: tokens of the longest row.
    """
    from rl.training.batch import padded_batch
    from rl.training.batch_updates import by_micro_batch
    from rl.training.packing.packing import plan_packing
    from rl.training.reward_model import rows_at_a_time
    from rl.training.teachers.teacher import LikeliestTokens

    layout = teacher.graph.layout
    batch = padded_batch(rows, limit)
    N, T = batch.tokens.shape
    R = rows_at_a_time(layout, T)
    packing = plan_packing(batch.segments, -(-N // R) * R)
    program = partial(teacher.top(k, vocab), teacher.params)
    return LikeliestTokens(*by_micro_batch(program, batch, packing, R, layout))
