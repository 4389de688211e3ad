"""The run: its stages one after the other. The second line of the diagram is a step of a stage that
samples.

    run -> _run_stage -> stage.step (rl/stages/):
        prompts -> generator -> rewards -> advantages -> updates, in place -> events

The configuration determines every number but the timings, unless a reward is random or exceeds its
deadline, or a stage ends by `until` on a metric of time. A prompt follows from (seed, stage, number
of prompts drawn before). The random number of a token follows from (seed, prompt id, sample,
position).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from policy.mesh import processes
from rl.config import changes, files
from rl.config.run import RunConfig
from rl.config.stage import UntilOptions
from rl.errors import reward_errors
from rl.records.manifest import Manifest
from rl.records.manifest import devices as device_facts
from rl.records.timeline import Timeline
from rl.run import build
from rl.run.compilation import BackgroundNotes, compile_generator
from rl.run.folder import RunFolder
from rl.run.health import devices, probe
from rl.run.health.equal_rewards import EqualRewards
from rl.run.outlook import Outlook, step_metrics
from rl.run.prepare import prepare, with_date
from rl.run.resume.continued import is_counted, on_all, seen
from rl.run.signals import StopSignal
from rl.run.state import Run, is_finished
from rl.run.unfinished.stop import StoppedAt
from rl.stages.held_out.loss import HeldOutLoss
from rl.stages.sampling.evaluation import Evaluation
from rl.stages.stage import StageKind


def run(config: RunConfig) -> int:
    """Runs all stages, or the remaining ones of an existing run directory, and exports the final
    weights. Returns 0.

    After `rl stop` it exports the weights of the step, and the next call goes on. A finished run is
    left as it is. The first line that is printed names the devices. Raises one of rl.errors;
    `Interrupted` after SIGTERM or Ctrl-C, once the state is saved.
    """
    devices.check(config.platform)
    if processes.first():
        print(devices.line(), flush=True)
    before = seen(config.directory)
    config = on_all(with_date(config))
    counted = is_counted(config)
    began = time.time()
    prepared = prepare(config)
    took = time.time() - began
    try:
        config = prepared.config if counted else on_all(prepared.config)
        with RunFolder(config, before) as folder, StopSignal() as stop:
            if is_finished(folder):
                return 0
            open_timeline = contextlib.closing(Timeline(folder.path, config.profile))
            with Manifest(folder.path) as manifest, reward_errors(), open_timeline as timeline:
                timeline.past("reading the data", began, took)
                with build.run(config, prepared, folder, stop, timeline) as open_run:
                    for note in prepared.notes:
                        open_run.events.note(note)
                    open_run.note_inspection(prepared.faults)
                    facts = {
                        "devices": device_facts(),
                        "weights": open_run.weights,
                        "data": prepared.fingerprints,
                    }
                    manifest.note(**facts, changed=files.changed_keys(config))  # into run.json
                    for stage, checkpoint in open_run.remaining():
                        stopped = _run_stage(open_run, stage, checkpoint)
                        if stopped is not None:
                            manifest.note(stopped=stopped._asdict())
                            break
                        if open_run.taken:
                            manifest.note(best=open_run.taken)
                    else:
                        open_run.export()
    finally:
        prepared.close()
    return 0


def _run_stage(run: Run, stage: StageKind, checkpoint: dict | None) -> StoppedAt | None:
    """Runs all steps of a stage, or the steps after `checkpoint`, the host part (JSON) of a
    checkpoint.

    Returns where the run stopped, with its weights exported, if `rl stop` asked for it.
    """
    state = run.start(stage, checkpoint)
    over = checkpoint is not None and checkpoint["ended"] and stage.index == len(run.stages) - 1
    run.folder.begin(over)
    compile_generator(run)
    if checkpoint is None:
        probe.before_first_step(run, stage)
    steps = run.config.stages[stage.index].total_steps
    changed = changes.boundaries(run.config, stage.index)
    steps_done = checkpoint["step"] if checkpoint else 0
    run.use(stage, steps_done + 1)
    evaluation = stage.evaluation(run.held_out)
    measures = [each for each in (evaluation, HeldOutLoss.of(stage)) if each]
    if checkpoint is None and measures:
        first: dict[str, float] = {}
        for each in measures:
            _measure(run, stage, each, state, 0, first)
        run.events.step(stage.name, 0, first)
    # Notes for the console.
    outlook = Outlook()
    equal = EqualRewards(stage, fresh=checkpoint is None)
    compilation = BackgroundNotes()
    last = steps_done if checkpoint and checkpoint["ended"] else steps
    for step in range(steps_done + 1, last + 1):
        with run.timeline.step(stage.name, step) as span:
            state, metrics = stage.step(state, step)
        metrics |= step_metrics(metrics, span.seconds, run.model.graph.layout)
        reached = _reached(stage.options.until, metrics)
        ended = reached or step == steps
        if (estimate := outlook.after(metrics, steps - step)) and not ended:
            run.events.note(estimate)
        for text in (
            equal.after(metrics),
            compilation.after_step(run.generator.engine.runner.programs_left),
        ):
            if text:
                run.events.note(text)
        left = measures
        # A stage that got other steps after this one was measured where it was to end.
        while due := [
            each for each in left if reached or step == stage.options.steps or each.due(step)
        ]:
            for each in due:
                _measure(run, stage, each, state, step, metrics)
            left = [each for each in left if each not in due]
            reached = reached or _reached(stage.options.until, metrics)
            ended = ended or reached
        run.events.step(stage.name, step, metrics)  # a line of events.jsonl
        stage.check_update(metrics)
        run.note_programs(stage)
        if ended:
            stage.check_learned(state, metrics)
        if run.save(stage, state, step, ended, metrics, until=reached):
            return run.export_stopped(stage, state, step)
        steps_done = step
        if ended:
            break
        if step in changed:
            run.use(stage, step + 1)
            if evaluation and stage.config.evaluation:
                evaluation.options = stage.config.evaluation
    state = run.best_state(stage, state, steps_done)
    stage.finish(state, run.folder.write_once)
    return None


def _measure(
    run: Run,
    stage: StageKind,
    measure: Evaluation | HeldOutLoss,
    state: Any,
    step: int,
    metrics: dict[str, float],
) -> None:
    """Adds the metrics of an evaluation, or of the loss on held-out rows, after a step."""
    if isinstance(measure, HeldOutLoss):
        metrics |= measure.run(state)
        return
    with run.resharded() as sync, run.timeline.span("evaluation", stage=stage.name, step=step):
        evaluated = measure.run(step) | sync
    if "time/sync" in evaluated:  # the evaluation copied the weights for rollouts again
        evaluated["time/sync"] += metrics.get("time/sync", 0.0)
    metrics |= evaluated


def _reached(until: UntilOptions | None, metrics: dict[str, float]) -> bool:
    """Returns whether the metrics of a step end the stage early.

    A metric may be absent on a process or differ there (time, a server), so the first process
    decides for all.
    """
    if until is None:
        return False
    value = metrics.get(until.metric)
    value = processes.broadcast(None if value is None else float(value))
    if value is None:
        return False
    above = until.at_least is not None and value >= until.at_least
    below = until.at_most is not None and value <= until.at_most
    return bool(above or below)
