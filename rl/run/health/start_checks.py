"""Applies the checks of `rl inspect` to the rows that a run has read, before a model is built."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl.config.run import RunConfig
from rl.data.datasets import Example
from rl.data.encoded import Pair, Problem, Row
from rl.data.inspect import Encoded, Refused, StageRows, check_stages, listing
from rl.data.inspect.source import ENCODED, length_faults, random_weights, stage_rows
from rl.data.reader import DataReader
from rl.data.shard import Shard
from rl.errors import Fault
from rl.stages.stage import StageKind

FILE = "inspection.json"


def start_checks(config: RunConfig, data: DataReader, stages: Sequence[StageKind]) -> list[Fault]:
    """Returns the warnings and notes of all checks but the one that scores demonstrations.

    Raises Refused, a DataError, with every refusal.
    """
    described = [_described(config, data, stage) for stage in stages]
    faults = check_stages(described, random_weights(config)) + length_faults(config)
    # Ids outside the vocabulary and too many positions are errors of the configuration; the build
    # of the model raises them.
    refusals = [each for each in faults if each.level == "refuse" and each.check not in (9, 16)]
    if refusals:
        lines = [listing.line(each).removeprefix("refuse") for each in refusals]
        raise Refused(
            "\n".join(
                [
                    *(f"check{line}" for line in lines),
                    "see each token with `rl inspect`, same arguments",
                ]
            )
        )
    return faults


def write(faults: Sequence[Fault], directory: Path) -> None:
    """Writes the faults to inspection.json in the folder of the run, where `rl explain` reads
    them."""
    text = json.dumps(
        {"findings": [listing.to_json(each) for each in faults]}, indent=1, ensure_ascii=False
    )
    (directory / FILE).write_text(text + "\n", encoding="utf-8")


def _described(config: RunConfig, data: DataReader, stage: StageKind) -> StageRows:
    described = stage_rows(config, stage.index, data.tokenizer, data.stop_ids)
    shard = getattr(stage, "rows", None)
    if not isinstance(shard, Shard):
        return described
    chosen = range(len(shard.own))
    if len(shard.own) > ENCODED:
        chosen = sorted(random.Random(config.seed).sample(chosen, ENCODED))
    rows = [
        row
        for n in chosen
        for row in _encoded(shard.own[n], shard.examples[n] if shard.examples else Example(""))
    ]
    evaluated = [problem.example for problem in data.evaluation_problems]
    measured = () if stage.held_out_rows is None else stage.held_out_rows.examples
    return replace(
        described,
        rows=rows,
        total=shard.total,
        held_out=evaluated,
        measured=measured,
        effect=shard.effect,
    )


def _encoded(each: Problem | Row | Pair | list, example: Example) -> list[Encoded]:
    """Returns the sequences of one entry of a Shard: a problem, a row, a pair, or labelled
    answers."""
    if isinstance(each, Problem):
        return [Encoded(each.example, each.ids, [0] * len(each.ids), each.expanded)]
    if isinstance(each, Pair):
        return [Encoded(example, *each.chosen), Encoded(example, *each.rejected)]
    if isinstance(each, list):
        return [Encoded(example, *row) for row, _ in each]
    return [Encoded(example, *each)]
