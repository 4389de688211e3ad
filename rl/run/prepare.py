"""Reads what a run needs before its model is built: tokenizer, data of every stage, rewards."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import rl.stages
from policy.mesh import processes
from rl.cluster.launch import on_first, raise_on_all
from rl.config import files
from rl.config.data import DataOptions, datasets_of
from rl.config.model import TokenizerOptions
from rl.config.run import RunConfig
from rl.data.encoded import Problem
from rl.data.inspect import weights
from rl.data.reader import DataReader
from rl.data.rows.sources import is_downloaded
from rl.data.tokenizer import reads_date
from rl.errors import DataError, Fault, ModelError
from rl.records.run_files import EVENTS
from rl.run.health.changed_rows import Fingerprints, fingerprints
from rl.run.health.start_checks import start_checks
from rl.run.load import load
from rl.run.manifest import CHECKPOINT_FOLDER
from rl.run.resume.continued import places, stages_of_run
from rl.stages.stage import StageKind


@dataclass(frozen=True)
class Prepared:
    """The configuration with the steps of every stage, the stages with their data, the problems of
    evaluations, and what the checks of the data say (faults). notes: how the steps follow from
    `epochs`. began, seconds: when reading began (time.time()), and how long it took."""

    config: RunConfig
    data: DataReader
    stages: Sequence[StageKind]
    notes: Sequence[str] = ()
    faults: Sequence[Fault] = ()
    began: float = 0.0
    seconds: float = 0.0

    @property
    def tokenizer(self) -> Any:
        """Returns the tokenizer of the run."""
        return self.data.tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Returns the token ids that end a completion."""
        return self.data.stop_ids

    @cached_property
    def fingerprints(self) -> Fingerprints:
        """Returns the fingerprints of the rows, for run.json. All processes ask for them at the
        same time."""
        return fingerprints(self.stages, self.evaluation_problems)

    @property
    def evaluation_problems(self) -> list[Problem]:
        return self.data.evaluation_problems

    def close(self) -> None:
        """Ends the workers of the rewards that the data started."""
        self.data.close()


def with_date(config: RunConfig) -> RunConfig:
    """Returns the configuration with `tokenizer.date` set, if the chat template may write the date
    of today: a run that is continued on another day then reads the same prompts."""
    options = config.tokenizer or TokenizerOptions()
    if options.date is not None or not reads_date(config):
        return config
    file = config.directory / files.RESOLVED
    events = config.directory / EVENTS
    if file.exists() and events.exists():
        before = load([file]).tokenizer
        date = before and before.date
    else:
        date = datetime.date.today().isoformat()
    date = processes.broadcast(date)
    return (
        config
        if date is None
        else config.model_copy(update={"tokenizer": options.model_copy(update={"date": date})})
    )


def prepare(config: RunConfig) -> Prepared:
    """Reads tokenizer and data and checks every length.

    Each process reads the rows that it holds; an error of one process is raised on all. Raises
    ConfigError for a tokenizer or reward that cannot be used, DataError for data that is malformed,
    empty, too long, or refused by a check, ModelError for files of a model, teacher or reward model
    that the run could not read.
    """
    began = time.time()
    prepared = raise_on_all(lambda: _prepared(config))
    return replace(prepared, began=began, seconds=time.time() - began)


def _prepared(config: RunConfig) -> Prepared:
    data = DataReader(config)
    stages = _created(config)
    evaluated = [stage.options for stage in stages if stage.trains_policy]
    if config.evaluation and evaluated:
        data.read_evaluation(config.evaluation, evaluated)
    for stage in stages:
        stage.prepare(data)
    try:
        for stage in stages:
            if not stage.is_over:
                stage.check_groups()
        faults = start_checks(config, data, stages)
        # Checkpoints bring the weights of the policy.
        weights.check(config, data.has_media, policy=not _has_checkpoints(config))
        counted, notes = _with_steps(config, stages)
        for stage in stages:
            stage.config = counted
            stage.options = counted.stages[stage.index]
        notes += [*_effects(stages), *_curricula(stages)]
        return Prepared(counted, data, stages, notes, faults)
    except (DataError, ModelError):
        data.close()
        raise


def with_steps(config: RunConfig, *, hub: bool = True) -> tuple[RunConfig, list[str]]:
    """Reads the data of stages with `epochs` or a curriculum.

    hub: whether datasets of the hub are read, which may be downloaded. Returns (the configuration
    with the steps of those stages, notes about them). Raises what `prepare` raises for data.
    """
    stages = [
        stage
        for stage in _created(config)
        if stage.options.epochs is not None or stage.options.curriculum is not None
    ]
    if not hub:
        stages = [stage for stage in stages if not any(map(_on_hub, stage.datasets))]
    if not stages:
        return config, []
    data = DataReader(config)
    try:
        for stage in stages:
            stage.prepare(data)
        config, notes = _with_steps(config, stages)
        return config, [*notes, *_curricula(stages)]
    finally:
        data.close()


def read_held_out(config: RunConfig, *, first: int | None = None, hub: bool = True) -> list[str]:
    """Reads the rows of `held_out` of all stages, to check them.

    first: the most rows of each; None: all. hub: as in `with_steps`. Returns notes about rows that
    do not fit, or that were not read. Raises what `prepare` raises for data.
    """
    notes = []
    stages = list(config.stages)
    chosen = []
    for index, options in enumerate(config.stages):
        if (held_out := options.held_out) is None:
            continue
        sources = []
        for each in datasets_of(held_out.data):
            if not hub and _on_hub(each):
                notes.append(
                    f"{each.path} is a dataset of the hub, or at a URL: its rows were not read "
                    "(rl inspect reads them)"
                )
            elif first is None:
                sources.append(each)
            else:
                sources.append(each.model_copy(update={"limit": min(first, each.limit or first)}))
        if not sources:
            continue
        chosen.append(index)
        if first is not None:
            data = sources if isinstance(held_out.data, list) else sources[0]
            held_out = held_out.model_copy(update={"data": data})
            stages[index] = options.model_copy(update={"held_out": held_out})
    if not chosen:
        return notes
    config = config.model_copy(update={"stages": stages})
    made = [stage for stage in rl.stages.create(config) if stage.index in chosen]
    data = DataReader(config)
    try:
        for stage in made:
            stage.read_held_out(data)
        return [*notes, *_effects(made)]
    finally:
        data.close()


def _created(config: RunConfig) -> list[StageKind]:
    """Returns the stages. The first process reads which ones are over."""
    return stages_of_run(config, on_first(lambda: places(config)))


def _on_hub(source: DataOptions) -> bool:
    return source.path is not None and is_downloaded(source.path)


def _effects(stages: Sequence[StageKind]) -> list[str]:
    """Returns what happened to held-out rows that are too long."""
    shards = {stage.name: stage.held_out_rows for stage in stages}
    return [
        f"{name}: of the held-out rows {shard.effect}"
        for name, shard in shards.items()
        if shard and shard.effect
    ]


def _curricula(stages: Sequence[StageKind]) -> list[str]:
    """Returns what curricula say about the rows."""
    curricula = {stage.name: stage.curriculum for stage in stages}
    return [f"{name}: {each.note}" for name, each in curricula.items() if each and each.note]


def _with_steps(config: RunConfig, stages: Sequence[StageKind]) -> tuple[RunConfig, list[str]]:
    """Returns (the configuration with `steps` in place of the `epochs` of these stages, a note for
    each of them)."""
    options = list(config.stages)
    notes = []
    for stage in stages:
        if (epochs := stage.options.epochs) is None:
            continue
        steps = stage.steps_of(epochs)
        rows = stage.examples_of_pass
        options[stage.index] = stage.options.model_copy(update={"steps": steps, "epochs": None})
        made = f"{steps:,} step{'s' * (steps != 1)} of {stage.options.prompts_per_step:,}"
        notes.append(
            f"{stage.name}: {made}, for {epochs:g} epoch{'s' * (epochs != 1)} of {rows:,} rows"
        )
    return config.model_copy(update={"stages": options}), notes


def _has_checkpoints(config: RunConfig) -> bool:
    return config.run.dir is not None and (Path(config.run.dir) / CHECKPOINT_FOLDER).exists()
