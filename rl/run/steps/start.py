"""The start of a run and of a stage, before their first step."""

from __future__ import annotations

from typing import Any

from rl.config import files
from rl.records.manifest import Manifest, devices
from rl.run.compilation import compile_generator
from rl.run.health import probe
from rl.run.prepare import Prepared
from rl.run.state import Run
from rl.stages.stage import StageKind


def start_run(run: Run, prepared: Prepared, manifest: Manifest) -> None:
    """Notes what the configuration and the data give rise to, and writes facts about the run into
    run.json."""
    for note in prepared.notes:
        run.events.note(note)
    run.note_inspection(prepared.faults)
    manifest.note(
        devices=devices(),
        weights=run.weights,
        data=prepared.fingerprints,
        changed=files.changed_keys(run.config),
    )


def start_stage(run: Run, stage: StageKind, checkpoint: dict | None) -> Any:
    """Starts a stage, or restores it from a checkpoint, with the settings of its next step. Returns
    its state.

    checkpoint: the JSON part of the checkpoint (host.json); None: the stage is
    new. At the start of the first stage that samples, the probes of rl/run/health/probe.py run.
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
