"""The run: its stages one after the other, each step from prompts to new weights.

    run -> _run_stage -> steps.supervised, or steps.rollout:
        prompts -> generator -> rewards -> advantages -> updates, in place -> events

Every number is a function of the configuration: prompts of (seed, stage, step), draws of (seed, prompt id, sample, position).
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import policy
from policy.execution.compiled_cache import CompiledCache
from policy.mesh import processes
from rewards import RewardError, RewardFailed
from rl.config.run import RunConfig, UntilOptions
from rl.data.prepare import Prepared, Stage, prepare
from rl.errors import ConfigError, DataError, Interrupted, ResourceError, RewardStop
from rl.reporting.events import Events
from rl.reporting.program_memory import FILE, ProgramMemoryLog, reward_model_program
from rl.reporting.timeline import CHECKPOINTS, Timeline
from rl.run import build
from rl.run.checkpoint import Checkpoints
from rl.run.folder import RunFolder, StopWish, reward_model_of
from rl.run.state import Progress, Run
from rl.stages import rollout, rollouts, supervised
from rl.stages.evaluation import Evaluation
from rl.training.flops import rates
from rl.training.reward_model import RewardModelScorer, RewardModelTrainer
from rl.training.trainer import RunState, Trainer
from rollout import Generator, SamplingParams

_FINISHED = """\
{0} is finished: its final weights are in {0}/export. Choose another `run.dir` to run again;
to train those weights further, give them to a new run as `model: {0}/export`."""

# The first steps of a stage compile; from this one on they take as long as the others.
_SETTLED = 3
# Of a step, by their metrics time/<part>; the devices wait in what is left.
_PARTS = ("sync", "sample", "reward_models", "logprob", "reward", "update")


def run(config: RunConfig) -> int:
    """Runs all stages, or what is left of them in an existing run directory, and exports the final weights. Returns 0.
    A run that is finished is left as it is.

    Raises one of rl.errors; `Interrupted` after SIGTERM or Ctrl-C, once the state is saved.
    """
    began = time.time()
    prepared = prepare(config)
    took = time.time() - began
    try:
        with RunFolder(config) as folder, StopWish() as stop:
            if folder.finished:
                if processes.first():
                    print(_FINISHED.format(folder.path))
                return 0
            with contextlib.closing(Timeline(folder.path, config.profile)) as timeline:
                timeline.past("reading the data", began, took)
                _run_in(folder, config, prepared, stop, timeline)
    except RewardFailed as error:
        raise RewardStop(str(error)) from None
    except RewardError as error:
        raise DataError(f"rewards: {error}") from None
    finally:
        prepared.close()
    return 0


def _run_in(folder: RunFolder, config: RunConfig, prepared: Prepared, stop: StopWish, timeline: Timeline) -> None:
    """Builds what the stages share, or reads it from the newest checkpoint, and runs them."""
    writing = partial(timeline.span, "writing a checkpoint", CHECKPOINTS)
    checkpoints = Checkpoints(folder.path / "checkpoints", config.run.keep_checkpoints, writing)
    with timeline.span("looking for a checkpoint"):
        saved = checkpoints.host()
    progress = Progress.read(saved[1].get("progress")) if saved else Progress()
    with timeline.span("loading the model"):
        model = build.model(config, prepared, with_weights=saved is None)
    generator = Generator(
        model,
        max_length=config.max_length,
        slots=config.generator.slots,
        seed=config.seed,
        tokenizer=prepared.tokenizer,
        options=build.generator_options(config),
    )
    events = Events(config, folder.path)
    try:
        _run_stages(
            Run(config, prepared, model, generator, events, checkpoints, stop, progress, timeline), saved, folder
        )
    finally:
        checkpoints.close()
        events.close()


def _run_stages(run: Run, saved: tuple[int, dict] | None, folder: RunFolder) -> None:
    names, first = run.config.stage_names, 0
    if saved is None:
        run.events.truncate_after(names, names[0], -1)
        if run.model.fresh:
            source, seed = run.config.model.source, run.config.seed
            run.events.note(
                f"{source} lacks modules that predict further tokens: they start from random weights, seed {seed}"
            )
    else:
        host = saved[1]
        first = host["stage"]
        run.events.truncate_after(names, names[first], host["step"])
        run.events.note(f"continuing {folder.path} after step {host['step']} of {names[first]}")
    for stage in run.prepared.stages[first:]:
        _run_stage(run, stage, saved[1] if saved is not None and stage.index == first else None, folder)
    if not run.events.sync():
        raise ResourceError(
            f"{folder.path}: the last events have no room; make some, and continue with `rl-train {folder.path}`"
        )
    with run.timeline.span("export"):
        exported = folder.export(partial(_export, run))
    run.events.note(f"final weights in {exported}")


def _export(run: Run, directory: Path) -> None:
    """The policy, or what the last stage has trained in its place."""
    last, first = run.prepared.stages[-1], processes.first()
    if not last.algorithm.needs_scores:
        policy.save(run.model, directory)
    if first and last.algorithm.needs_scores:
        shutil.copytree(reward_model_of(run.config, last.name), directory)
    elif first:
        run.prepared.tokenizer.save_pretrained(directory)


def _run_stage(run: Run, stage: Stage, saved: dict | None, folder: RunFolder) -> None:
    """All steps of a stage; those that are left if the newest checkpoint is one of this stage and `saved` is its host part."""
    options = stage.options
    kind = RewardModelTrainer if stage.algorithm.needs_scores else Trainer
    trainer = kind(run.model.graph, options, stage.algorithm, run.config.seed)
    evaluation = None
    programs = trainer.executables | (_connect(run, stage) if stage.runner else {})
    if run.prepared.evaluation and not stage.algorithm.needs_scores:  # which leaves the policy as it is
        evaluation = Evaluation(run.prepared.evaluation, run.prepared.held_out, stage.runner)
    params = rollouts.sampling_params(options.sampling, run.prepared.stop_ids)
    after, executed = saved["step"] if saved else 0, ProgramMemoryLog(folder.path)
    run.events.start_stage(stage.name, options.steps, after)
    with run.timeline.span("starting the stage" if saved is None else "reading a checkpoint", stage=stage.name):
        if saved is None:
            run.progress.start_stage(getattr(stage.algorithm, "controls", {}))
            state = trainer.start(run.model.params, run.config.seed + stage.index)
        else:
            state = run.checkpoints.restore(trainer.abstract())[1]
            run.model.params = state.policy.params
    _compile_ahead(run)
    if saved is None and evaluation:
        run.events.step(stage.name, 0, _evaluated(run, evaluation, params, stage=stage.name, step=0))
    take = rollout.rollout if stage.algorithm.needs_rollouts else supervised.supervised
    last = after if saved and saved["ended"] else options.steps
    for step in range(after + 1, last + 1):
        with run.timeline.step(stage.name, step) as whole:
            state, metrics = take(run, stage, trainer, state, step)
        metrics["time/step"] = whole.seconds
        metrics["time/idle"] = max(0.0, whole.seconds - sum(metrics.get(f"time/{part}", 0.0) for part in _PARTS))
        work = metrics["perf/step_tflop"] * 1e12, metrics["perf/step_tokens"]
        metrics |= rates("step", *work, whole.seconds, run.model.graph.layout)
        ended = step == options.steps or _reached(options.until, metrics)
        if step - after == _SETTLED and not ended:
            run.events.note(_outlook(metrics, options.steps - step))
        if evaluation and (ended or evaluation.due(step)):
            found = _evaluated(run, evaluation, params, stage=stage.name, step=step)
            if "time/sync" in found:
                found["time/sync"] += metrics.get("time/sync", 0.0)
            metrics |= found
            ended = ended or _reached(options.until, metrics)
        run.events.step(stage.name, step, metrics)
        _note_programs(run, executed, stage.name, programs)
        if ended:
            trainer.check_updates(state, metrics)
        _save_and_stop(run, stage, state, step, ended)
        if ended:
            break
    if stage.runner:
        stage.runner.judges = {}
    if stage.algorithm.needs_scores:
        with run.timeline.span("export", stage=stage.name):
            folder.export_reward_model(stage.name, partial(trainer.export, state, run.prepared.tokenizer))


def _connect(run: Run, stage: Stage) -> dict[str, CompiledCache]:
    """Gives the rewards of a stage the reward models that they ask, whose programs are returned by name, and lets the timeline hear
    of their calls."""
    stage.runner.heard = run.timeline.calls
    if not stage.runner.sources:
        return {}
    with run.timeline.span("loading reward models", stage=stage.name):
        judges = build.reward_model_scorers(run.config, stage, run.model.graph.layout)
    stage.runner.judges = {source: partial(_judged, run, source, judge) for source, judge in judges.items()}
    return {reward_model_program(source): judge.program for source, judge in judges.items()}


def _judged(run: Run, source: str, judge: RewardModelScorer, sequences: list[list[int]]) -> list[float]:
    """What a reward model says of them."""
    with run.timeline.span("reward model", source=source, completions=len(sequences)):
        return judge(sequences)


def _evaluated(run: Run, evaluation: Evaluation, params: SamplingParams, **at) -> dict[str, float]:
    """The metrics of an evaluation."""
    with rollout.laid_out(run) as laid, run.timeline.span("evaluation", **at):
        return evaluation.run(run.generator, params) | laid


def _note_programs(run: Run, executed: ProgramMemoryLog, stage: str, programs: Mapping[str, CompiledCache]) -> None:
    if not processes.first():
        return
    try:
        largest = executed.look(stage, programs, run.generator)
    except OSError as error:
        run.events.note(f"{FILE} cannot be written: {error.strerror}")
        return
    if largest:
        what = f"{largest['name']} ({' x '.join(map(str, largest['shape']))})"
        run.events.note(
            f"{FILE}: of the programs new there {what} takes most, {largest['peak'] / 2**20:,.1f} MiB a device"
        )


def _outlook(metrics: dict, left: int) -> str:
    """Where the seconds of a step go, and how many are left at most."""
    whole = metrics["time/step"]
    parts = {name: metrics.get(f"time/{name}", 0.0) / whole for name in _PARTS}
    shown = ", ".join(
        f"{name} {share:.0%}" for name, share in sorted(parts.items(), key=lambda part: -part[1]) if share >= 0.01
    )
    used = f", {metrics['perf/mfu_step']:.0%} of the devices' rate" if "perf/mfu_step" in metrics else ""
    tokens, operations = metrics["perf/step_tokens_per_s"], metrics["perf/step_tflops_per_s"] * 1000
    rate = f"{tokens:.3g} tokens/s and {operations:.3g} GFLOP/s a device{used}"
    return f"a step takes {whole:.2g} s ({shown}; {rate}); {left} more: about {timedelta(seconds=round(left * whole))}"


def _compile_ahead(run: Run) -> None:
    """Compiles the generator's programs for all prompts and parameters of the run, once."""
    prepared, generator = run.prepared, run.generator
    problems = [p for stage in prepared.stages if stage.problems for p in stage.problems.own] + list(prepared.held_out)
    longest = max(processes.all_gather_object(max((len(p.ids) for p in problems), default=0)))
    if not longest or generator.compiled_ahead:
        return
    try:
        pool = generator.engine.programs.pool
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if pool is not None:
        run.events.note(f"the generator's cache: {pool}")
    every = [rollouts.sampling_params(stage.options.sampling, prepared.stop_ids) for stage in prepared.stages]
    strict = run.config.generator.strict_shapes
    with run.timeline.span("compiling the generator") as compiling:
        count = generator.compile_ahead(longest, every, strict=strict)
    run.events.note(f"the generator has {count} programs; they were compiled in {compiling.seconds:.1f} s")


def _reached(until: UntilOptions | None, metrics: dict) -> bool:
    """Whether a step's metrics end the stage early; those that measure time differ between processes, and the first decides."""
    value = metrics.get(until.metric) if until else None
    if value is None:
        return False
    return processes.broadcast(bool(value >= until.at_least if until.at_most is None else value <= until.at_most))


def _save_and_stop(run: Run, stage: Stage, state: RunState, step: int, ended: bool) -> None:
    """Writes a checkpoint where one is due, and stops the run if that is wanted."""
    options, stages = run.config.run, run.prepared.stages
    wanted = next(
        filter(None, processes.all_gather_object(run.stop.wanted)), None
    )  # a signal to one process is one to all
    if ended or wanted or (options.checkpoint_every and step % options.checkpoint_every == 0):
        number = sum(s.options.steps + 1 for s in stages[: stage.index]) + step
        if run.events.sync():
            host = {"stage": stage.index, "step": step, "ended": ended, "progress": run.progress.plain()}
            with run.timeline.span("checkpoint", stage=stage.name, step=step):
                run.checkpoints.save(number, state, host, wait=bool(wanted))
    if wanted:
        newest = run.checkpoints.host()
        where = f"after step {step} of {stage.name}"
        if newest is None or newest[0] != number:
            raise ResourceError(
                f"{wanted}: NOT saved (see above) {where}; make room, then continue with `rl-train {options.dir}`"
            )
        raise Interrupted(f"{wanted}: saved {where}; continue with `rl-train {options.dir}`")
