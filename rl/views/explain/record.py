"""Reads the folder of a run for the rules: configuration, metrics, a part of the samples, memory of
programs.

It takes what is there and does without the rest, so that folders of older versions and of runs that
go on are read too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from policy.json_types import JsonObject, JsonValue, as_object, as_objects
from rl.config.stage_names import stage_names
from rl.errors import ConfigError
from rl.records.messages import identity
from rl.records.run_files import (
    Damage,
    attempts,
    check_run,
    read_config,
    read_json,
    sample_files,
    steps,
)
from rl.views.explain.series import Series

SAMPLE_BYTES = 2 * 2**20
"""Bytes of samples that are read, from the end of the newest file."""

_SOURCE_EPOCH = re.compile("source/(.+)/epoch")


@dataclass(frozen=True)
class StageRecord:
    """One stage of a run.

    index: its number in `stages`. options: its section of config.yml. rows: (step, metrics) of each
    step from 1 on. evaluations: (step, metrics) of the steps with an evaluation, step 0 included.
    run: the run that it belongs to.
    """

    name: str
    index: int
    options: JsonObject
    rows: list[tuple[int, JsonObject]]
    evaluations: list[tuple[int, JsonObject]]
    run: RunRecord

    def series(self, metric: str) -> Series:
        """Returns the finite values of a metric, without the evaluation before the first step."""
        return _series(self.rows, metric)

    def evaluated(self, metric: str) -> Series:
        """Returns the finite values of a metric of evaluations, the one before the first step
        included."""
        return _series(self.evaluations, metric)

    @property
    def algorithm(self) -> JsonObject:
        """Returns name and options of the algorithm."""
        value = self.options.get("algorithm") or {}
        return value if isinstance(value, Mapping) else {"name": str(value)}

    @property
    def trains_on_rollouts(self) -> bool:
        """Whether steps of the stage sampled completions, as far as events say."""
        return any("completion/mean_length" in metrics for _, metrics in self.rows)

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher graded tokens of the stage, as far as events say."""
        return any(name.startswith("distill/") for _, metrics in self.rows for name in metrics)

    @property
    def trains_adapter(self) -> bool:
        """Whether the stage trained the adapter of the model, and no weights."""
        has_adapter = lookup(self.run.config, "model.adapter", None) is not None
        return has_adapter and self.option("trains", "adapter") == "adapter"

    @property
    def completions_per_step(self) -> int:
        """Completions that are trained on in a step."""
        return int(self.option("prompts_per_step", 32)) * int(self.option("samples_per_prompt", 8))

    @property
    def steps(self) -> int:
        """How many steps of the stage have an event."""
        return len(self.rows)

    def option(self, dotted: str, default: JsonValue) -> Any:
        """Returns an option of the stage by its dotted key, or `default` where it is absent or
        null."""
        return lookup(self.options, dotted, default)

    def key(self, dotted: str) -> str:
        """Returns the dotted key of an option of this stage in a configuration."""
        return f"stages.{self.index}.{dotted}"

    def named(self, dotted: str) -> str:
        """Returns the key of an option with the value that the run had, and whether that is the
        default."""
        value = self.option(dotted, None)
        if not isinstance(value, (bool, int, float, str)):
            return self.key(dotted)
        shown = (
            f"{value:g}"
            if isinstance(value, float)
            else str(value).lower()
            if value in (True, False)
            else value
        )
        is_default = self.run.changed is not None and self.key(dotted) not in self.run.changed
        return f"{self.key(dotted)} ({'by default ' if is_default else 'now '}{shown})"

    def setting(self, section: str) -> tuple[JsonObject, str]:
        """Returns (section of the stage, or else of the run; its dotted key): `data` or `rewards`.
        The section is {} for several datasets."""
        own = self.options.get(section)
        key = section if own is None else self.key(section)
        value = self.run.config.get(section) if own is None else own
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        return (value if isinstance(value, Mapping) else {}), key

    @cached_property
    def samples(self) -> list[JsonObject]:
        """The newest training samples of the stage that are read."""
        return [
            row for row in self.run.samples if row.get("stage") == self.name and not row.get("eval")
        ]

    @property
    def improved(self) -> bool | None:
        """Whether the evaluation got better over the stage, by more than its sampling error; None
        without two of them.
        """
        accuracy = self.evaluated("eval/greedy_accuracy")
        if len(accuracy) < 2:
            return None
        return accuracy.values[-1] - accuracy.values[0] > 2 * self._accuracy_error(
            accuracy.values[-1]
        )

    @property
    def improving(self) -> bool:
        """Whether the evaluation still got better in the last third of the stage."""
        accuracy = self.evaluated("eval/greedy_accuracy")
        if len(accuracy) < 4:
            return False
        before = accuracy.values[2 * len(accuracy) // 3 - 1]
        return accuracy.values[-1] - before > 2 * self._accuracy_error(before)

    @property
    def reward_rose(self) -> bool:
        """Whether the mean reward rose by more than four standard errors."""
        reward = self.series("reward/mean")
        spread = self.series("reward/std")
        if not reward or not spread:
            return False
        return (
            reward.last - reward.first
            > 4 * spread.typical / max(1, self.completions_per_step) ** 0.5
        )

    @property
    def memorised(self) -> bool:
        """Whether the reward rose while the accuracy on held-out problems fell."""
        accuracy = self.evaluated("eval/greedy_accuracy")
        if len(accuracy) < 2 or not self.reward_rose:
            return False
        return accuracy.values[0] - accuracy.values[-1] > 2 * self._accuracy_error(
            accuracy.values[0]
        )

    @property
    def solved(self) -> bool:
        """Whether most problems are solved: an accuracy, or a reward, of at least 0.8 of what
        counts as correct."""
        top = float(lookup(self.run.config, "evaluation.correct_at", 1.0))
        reward = self.series("reward/mean")
        accuracy = self.evaluated("eval/greedy_accuracy")
        if accuracy:
            return accuracy.values[-1] >= 0.8
        return bool(reward) and top > 0 and reward.last >= 0.8 * top

    @property
    def epochs(self) -> float:
        """How often the stage has gone over its data, or over the one of several datasets that it
        repeats most, at least; 0 where the number of rows is unknown.

        Rows that repeat each other count once, as far as the samples show it; `data/epoch` counts
        them all.
        """
        return max(self._epochs.values(), default=0.0)

    @property
    def repeated_dataset(self) -> str | None:
        """The name of the dataset that `epochs` is about; None: all data of the stage."""
        return max(self._epochs, key=self._epochs.__getitem__, default=None)

    @cached_property
    def _epochs(self) -> dict[str | None, float]:
        """Passes over each of several datasets, by name, and over all data (None)."""
        rows = self._rows_of_data()
        distinct = self.steps * int(self.option("prompts_per_step", 32)) / rows if rows else 0.0
        epochs: dict[str | None, float] = {
            None: max([distinct, *self.series("data/epoch").values[-1:]])
        }
        for metric in self.rows[-1][1] if self.rows else ():
            values = self.series(metric).values
            if values and (of_source := _SOURCE_EPOCH.fullmatch(metric)):
                epochs[of_source[1]] = values[-1]
        return epochs

    def step_of_epoch(self, epochs: float) -> int | None:
        """Returns the step at which the stage had gone over its data `epochs` times."""
        return (
            min(self.steps, int(self.steps * epochs / self.epochs) + 1)
            if self.epochs > epochs
            else None
        )

    def _rows_of_data(self) -> int:
        """Returns the most rows that the data can have: `limit`, or the prompts of the samples if
        they occur twice."""
        prompts = {sample.get("prompt_id"): identity(sample) for sample in self.samples}
        distinct = len(set(prompts.values()))
        limit = self.setting("data")[0].get("limit")
        known: list[int] = [limit] if isinstance(limit, int) else []
        if distinct and len(prompts) >= 3 * distinct:
            known.append(distinct)
        return min(known, default=0)

    def _accuracy_error(self, share: float) -> float:
        """Returns the standard error of an accuracy, sqrt(p (1 - p) / n), with one problem at least
        on either side."""
        n = self.run.evaluation_problems
        p = min(max(share, 1 / n), 1 - 1 / n) if n > 1 else 0.5
        return math.sqrt(p * (1 - p) / n)


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder shows it.

    config: config.yml as plain values; {} if it cannot be read. damaged: numbers of the lines of
    events.jsonl that cannot be read. ends: exit codes of the attempts that ended, as far as they
    are recorded. inspection: findings of the checks at the start of the run. probed: the probe
    before the first step.
    changed: dotted keys whose values differ from the defaults; None for a run of an older version,
    which records none.
    """

    path: Path
    config: JsonObject
    stages: list[StageRecord] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    inspection: list[JsonObject] = field(default_factory=list)
    probed: JsonObject = field(default_factory=dict)
    changed: frozenset[str] | None = None

    @cached_property
    def samples(self) -> list[JsonObject]:
        """Samples at the end of the newest file of samples."""
        return list(_newest_samples(self.path))

    @property
    def evaluation_problems(self) -> int:
        """Number of held-out problems of an evaluation, at most."""
        data = lookup(self.config, "evaluation.data", None)
        datasets = len(data) if isinstance(data, list) else 1
        return max(1, datasets * int(lookup(self.config, "evaluation.problems", 256)))

    @property
    def float32(self) -> bool:
        """Whether the model computes in float32."""
        return lookup(self.config, "model.dtype", "float32") == "float32"


def read(directory: str | Path) -> RunRecord:
    """Reads the folder of a run. Raises ConfigError if there is no run, or no event of it."""
    path = Path(directory)
    damage = list[Damage]()
    check_run(path)
    read_steps = steps(path, damage)
    if not read_steps:
        raise ConfigError(f"{path}: the run has no event yet; wait for its first step")
    last = attempts(path, [])[-1:]
    recorded = [changed for each in last if isinstance(changed := each.facts.get("changed"), list)]
    record = RunRecord(
        path,
        read_config(path, []),
        damaged=[each.line for each in damage],
        inspection=as_objects(read_json(path / "inspection.json", []).get("findings")),
        probed=read_json(path / "probe.json", []),
        changed=frozenset(map(str, recorded[0])) if recorded else None,
    )
    record.ends.extend(each.code for each in last if each.code is not None)
    by_stage: dict[str, list[tuple[int, JsonObject]]] = {}
    for (stage, number), step in read_steps.items():
        by_stage.setdefault(stage, []).append((number, step.metrics))
    names = stage_names(record.config)
    sections = record.config.get("stages")
    for name, rows in by_stage.items():
        index = names.index(name) if name in names else len(record.stages)
        options = as_object(sections[index]) if isinstance(sections, list) and name in names else {}
        evaluations = [each for each in rows if any(key.startswith("eval/") for key in each[1])]
        record.stages.append(
            StageRecord(name, index, options, [r for r in rows if r[0] > 0], evaluations, record)
        )
    return record


def _newest_samples(path: Path) -> Iterator[JsonObject]:
    """Yields the samples at the end of the newest file: samples.jsonl, or the last segment
    samples/*.jsonl before it.
    """
    files = [file for file in sample_files(path) if file.stat().st_size]
    if not files:
        return
    with files[-1].open("rb") as file:
        skipped = max(0, files[-1].stat().st_size - SAMPLE_BYTES)
        file.seek(skipped)
        if skipped:
            file.readline()
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def _series(rows: list[tuple[int, JsonObject]], metric: str) -> Series:
    pairs = [
        (step, float(value))
        for step, metrics in rows
        if isinstance(value := metrics.get(metric), (int, float))
        and abs(value) <= sys.float_info.max  # an integer may be larger than any float
    ]
    return Series([step for step, _ in pairs], [value for _, value in pairs])


def lookup(tree: JsonObject, dotted: str, default: JsonValue) -> Any:
    value: JsonValue = tree
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return default if value is None else value
