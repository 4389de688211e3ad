"""The start of a run and of a stage, before their first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rl.config import files
from rl.config.run import RunConfig
from rl.records.manifest import Manifest, devices
from rl.run.compilation import compile_generator
from rl.run.health import probe
from rl.run.prepare import Prepared, prepare, with_date
from rl.run.resume import remat
from rl.run.resume.continued import continued_on_all, has_known_steps, with_saved_choices
from rl.run.state import Run
from rl.stages.stage import StageKind

if TYPE_CHECKING:
    from rl.stages.stage import StageState


@contextmanager
def prepared_run(config: RunConfig) -> Iterator[Prepared]:
    """Reads the data of a run. The configuration of the result has all that the run decides at its
    first start: the date of prompts, the steps of `epochs`, and what follows from the memory of a
    device (rl/run/resume/remat.py).

    Raises what `prepare` and `continued` raise. Ends the workers of rewards at the end.
    """
    asked = config.model
    config = continued_on_all(with_saved_choices(with_date(config)))
    with closing(prepare(config)) as prepared:
        # A stage with `epochs` has its number of steps once its rows are read. Only then is the
        # configuration compared with that of the folder.
        known_steps = has_known_steps(config)
        config = prepared.config if known_steps else continued_on_all(prepared.config)
        config, remarks = remat.resolved(config, asked)
        yield replace(prepared, config=config, notes=[*prepared.notes, *remarks])


def start_run(run: Run, prepared: Prepared, manifest: Manifest) -> None:
    """Shows the remarks on the configuration and the warnings on the data, and writes into run.json
    and the timeline what the run started from."""
    run.timeline.past("reading the data", prepared.began, prepared.seconds)
    for note in prepared.notes:
        run.events.note(note)
    run.note_inspection(prepared.faults)
    manifest.note(
        devices=devices(),
        weights=run.weights,
        data=prepared.fingerprints,
        changed=files.changed_keys(run.config),
    )


def start_stage(run: Run, stage: StageKind, checkpoint: dict | None) -> StageState:
    """Starts a stage, or restores it from a checkpoint, with the settings of its next step. Returns
    its state.

    checkpoint: its host.json, which holds all but the arrays; None: the stage is new. At the start
    of the first stage that samples, the probes of rl/run/health/probe.py run.
    """
    state = run.start(stage, checkpoint)
    ended = checkpoint is not None and checkpoint["ended"]
    is_last = stage.index == len(run.stages) - 1
    run.folder.begin(steps_follow=not (ended and is_last))
    compile_generator(run)
    if checkpoint is None:
        probe.before_first_step(run, stage)
    run.use(stage, 1 if checkpoint is None else checkpoint["step"] + 1)
    return state


def steps_left(checkpoint: dict | None, steps: int) -> range:
    """Returns the numbers of the steps, counted from 1, that a stage of so many steps has left
    after a checkpoint with this host.json; None: all. A stage that ended has none."""
    if checkpoint is None:
        return range(1, steps + 1)
    done = checkpoint["step"]
    return range(done + 1, done + 1 if checkpoint["ended"] else steps + 1)
