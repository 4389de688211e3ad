"""The run: its stages, one after the other.

    run -> _run_stages -> _run_stage -> stage.step (rl/stages/)

A step of a stage that samples:

    prompts -> generator -> rewards -> advantages -> updates, in place -> events

The configuration determines every number but the timings, unless a reward is random or exceeds its
deadline, or a stage ends by `until` on a metric of time. A row of data follows from (seed, stage,
number of rows drawn before); with a curriculum from its state, which the rewards before changed;
with `rollouts` from the samples of the earlier run. Dynamic sampling draws as many rows as the
rewards ask for. The random number of a token follows from (seed, prompt id, sample, position).
"""

from __future__ import annotations

from contextlib import closing

from rl.config import changes
from rl.config.run import RunConfig
from rl.errors import reward_errors
from rl.records.manifest import Manifest
from rl.records.timeline import Timeline
from rl.run import build
from rl.run.folder import RunFolder
from rl.run.health import devices
from rl.run.mirror.mirrored import OpenMirror, mirrored
from rl.run.prepare import Prepared
from rl.run.resume.continued import folder_state
from rl.run.signals import StopSignal
from rl.run.state import Run, is_finished
from rl.run.steps.held_out import HeldOutMetrics
from rl.run.steps.notes import StepNotes
from rl.run.steps.start import prepared_run, start_run, start_stage, steps_left
from rl.run.steps.step_metrics import step_metrics
from rl.run.unfinished.stop import StoppedAt
from rl.stages.export.weight_checks import check_weights
from rl.stages.stage import StageKind


def run(config: RunConfig) -> int:
    """Runs all stages, or the remaining ones of an existing run directory, and exports the final
    weights. Returns 0.

    After `rl stop` it exports the weights of the step, and the next call goes on. A finished run is
    left as it is. The first line that is printed names the devices. Raises one of rl.errors;
    `Interrupted` after SIGTERM or Ctrl-C, once the state is saved.
    """
    devices.check_and_show(config.platform)
    with mirrored(config) as mirror:
        _run(config, mirror)
    return 0


def _run(config: RunConfig, mirror: OpenMirror) -> None:
    state_before = folder_state(config.directory)
    with (
        prepared_run(config) as prepared,
        RunFolder(prepared.config, state_before, mirror.lock, mirror.parts) as folder,
        StopSignal() as stop,
    ):
        if is_finished(folder):
            return
        with (
            Manifest(folder.path) as manifest,
            reward_errors(),
            closing(Timeline(folder.path, config.profile)) as timeline,
            build.run(prepared, folder, stop, timeline, mirror.checkpoint_written) as open_run,
        ):
            _run_stages(open_run, prepared, manifest)


def _run_stages(run: Run, prepared: Prepared, manifest: Manifest) -> None:
    """Runs the remaining stages, and exports the final weights unless `rl stop` stopped the run.
    run.json says where it stopped, or which best steps it went on with."""
    start_run(run, prepared, manifest)
    for stage, checkpoint in run.remaining():
        stopped = _run_stage(run, stage, checkpoint)
        if stopped is not None:
            manifest.note(stopped=stopped._asdict())
            return
        if run.chosen_steps:
            manifest.note(best=run.chosen_steps)
    run.export()


def _run_stage(run: Run, stage: StageKind, checkpoint: dict | None) -> StoppedAt | None:
    """Runs all steps of a stage, or the steps after a checkpoint.

    checkpoint: its host.json, which holds all but the arrays; None: the stage is new.
    Returns where the run stopped, with its weights exported, if `rl stop` asked for it.
    """
    state = start_stage(run, stage, checkpoint)
    held_out = HeldOutMetrics(run, stage)
    notes = StepNotes(run, stage, resumed=checkpoint is not None)
    if checkpoint is None:
        held_out.before_first_step(state)
    steps = run.config.stages[stage.index].total_steps
    remaining = steps_left(checkpoint, steps)
    done = remaining.start - 1
    new_settings_after = changes.boundaries(run.config, stage.index)

    for step in remaining:
        with run.timeline.step(stage.name, step) as span:
            state, metrics = stage.step(state, step)
        metrics |= step_metrics(metrics, span.seconds, run.model.graph.layout)
        until_reached = held_out.after_step(state, step, metrics)
        notes.after_step(metrics, left=0 if until_reached else steps - step)
        ended = until_reached or step == steps
        run.events.step(stage.name, step, metrics)  # a line of events.jsonl
        run.note_programs(stage)
        check_weights(stage, state, metrics, last=ended)
        stopping = run.save(stage, state, step, ended, metrics, until=until_reached)
        if stopping:
            return run.export_stopped(stage, state, step)
        done = step
        if ended:
            break
        if step in new_settings_after:
            run.use(stage, step + 1)

    state = run.best_state(stage, state, done)
    stage.finish(state, run.folder.write_once)
    return None
