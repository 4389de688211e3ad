"""Finds the checkpoints of a run by stage and step."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewards.suggest import nearest
from rl.config.run import RunConfig
from rl.errors import ConfigError, ModelError
from rl.records.run_files import attempts
from rl.run.manifest import CHECKPOINT_FOLDER, HOST, complete
from rl.run.unfinished import stop

_TRIES = 5
_PAUSE_S = 0.05


@dataclass(frozen=True)
class StoredCheckpoint:
    """A finished checkpoint, after step `step` of the `steps` of stage number `stage`; all are -1
    where host.json cannot be read."""

    number: int
    path: Path
    stage: int = -1
    step: int = -1
    steps: int = -1


def stored(directory: Path) -> list[StoredCheckpoint]:
    """Returns the checkpoints in the folder `checkpoints` of a run, newest first. One that the run
    removes meanwhile is left out."""
    for _ in range(_TRIES):
        result = [
            each
            for number, path in complete(directory)
            if (each := _read(number, path)) is not None
        ]
        if result or not directory.is_dir():
            break
        time.sleep(_PAUSE_S)  # the run may have replaced its only one while the folder was listed
    return result


def _read(number: int, path: Path) -> StoredCheckpoint | None:
    try:
        host = json.loads((path / HOST).read_text(encoding="utf-8"))
        step = int(host["step"])
        return StoredCheckpoint(
            number, path, int(host["stage"]), step, int(host.get("steps", step))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return StoredCheckpoint(number, path) if path.is_dir() else None


def chosen(run: Path, config: RunConfig, step: str | None) -> list[StoredCheckpoint]:
    """Returns the checkpoints of a run that may be read, the best first: all of them without a
    step, else those after this step, `N` (of the last stage that has one) or `STAGE:N`.

    Raises ConfigError for a step without a checkpoint, with those that there are, ModelError if
    there are none.
    """
    every = stored(run / CHECKPOINT_FOLDER)
    if step is None and not every:
        raise ModelError(
            f"{run}: no export and no checkpoint yet. The run writes a checkpoint every "
            f"{config.run.checkpoint_every} steps (run.checkpoint_every), after the last step of "
            "a stage, and when it is stopped"
        )
    if step is None:
        return every
    stage, number = _parsed(step, config.stage_names)
    fitting = [each for each in every if each.step == number and stage in (None, each.stage)]
    if not fitting:
        raise ConfigError(f"--step {step}: {_absent(run, config, every, stage, number)}")
    return [each for each in fitting if each.number == fitting[0].number]


def _parsed(text: str, names: Sequence[str]) -> tuple[int | None, int]:
    """Returns (number of the stage or None, step). Raises ConfigError."""
    name, _, digits = text.rpartition(":")
    if not digits.isdecimal():
        raise ConfigError(
            f"--step {text}: write a number of steps, N, or STAGE:N such as {names[-1]}:10"
        )
    if name and name not in names:
        raise ConfigError(f"--step {text}: the run has no stage {name}{nearest(name, names)}")
    return names.index(name) if name else None, int(digits)


def _absent(
    run: Path, config: RunConfig, every: Sequence[StoredCheckpoint], stage: int | None, step: int
) -> str:
    """Says which weights there are in place of those after a step."""
    names = config.stage_names
    known = [each for each in every if each.stage >= 0]
    of = range(len(names)) if stage is None else [stage]
    kept = [
        run / f"export-{names[index]}-{step}"
        for index in of
        if _holds_step(run, config, index, step)
    ]
    if held := [str(folder) for folder in kept if folder.is_dir()]:
        return f"no checkpoint, but {held[-1]} holds these weights: name that folder as MODEL"
    if not known:
        return f"{run} has no checkpoint"
    near = min(
        known,
        key=lambda each: (stage not in (None, each.stage), abs(each.step - step), -each.number),
    )
    listed = ", ".join(f"{names[each.stage]}:{each.step}" for each in reversed(known))
    text = (
        f"{run} has no checkpoint after this step. There are {listed} (nearest: "
        f"{names[near.stage]}:{near.step})"
    )
    exported = (
        " Without --step, the weights are read from export/." if (run / "export").is_dir() else ""
    )
    return f"{text}; run.keep_checkpoints says how many a run keeps.{exported}"


def _holds_step(run: Path, config: RunConfig, stage: int, step: int) -> bool:
    """Whether export-STAGE-STEP has the weights after this step. Where a stage ended with `best`,
    it has those of its best step, unless `rl stop` ended it there."""
    best = config.stages[stage].best
    if best is None or best.take == "last":
        return True
    place = stop.StoppedAt(config.stage_names[stage], step)._asdict()
    return any(attempt.facts.get("stopped") == place for attempt in attempts(run, []))
