"""Samples and scores completions for the stages of a configuration, without training: `rl rollout`.

    rollout -> _sample_stages -> _sample_stage:
        producer of the stage -> generator -> rewards -> events, samples

The producer of a stage (rl/stages/producers/interface.py) makes the groups, as for a step that
trains on them. Nothing trains here: there is no optimizer, no critic, no reference model and no
checkpoint, and the weights stay those of the configuration, version 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import rl.stages
from rewards.registry import REWARD_MODEL
from rewards.text import quoted
from rl.accounting.flops import Operations
from rl.accounting.program_memory import ProgramMemoryLog
from rl.config.changes import differences, stage_of
from rl.config.run import RunConfig
from rl.errors import ConfigError, Interrupted, ResourceError, disk_room, reward_errors
from rl.records.events import Events
from rl.records.manifest import Manifest
from rl.records.run_files import EVENTS, ROLLOUTS
from rl.records.timeline import Timeline
from rl.run import build
from rl.run.checkpoint import Checkpoints
from rl.run.compilation import compile_generator
from rl.run.folder import RunFolder
from rl.run.health import devices
from rl.run.manifest import CHECKPOINT_FOLDER
from rl.run.prepare import Prepared, prepare, with_date
from rl.run.resume.continued import saved
from rl.run.signals import StopSignal
from rl.run.state import Run
from rl.run.steps.start import start_run
from rl.run.steps.step_metrics import step_metrics
from rl.stages.context import Progress
from rl.stages.online import Stage
from rl.stages.sampling.metrics import generator_flops, sampled_metrics
from rl.stages.sampling.records import write_samples
from rl.stages.sharing import sharing_of
from rl.stages.stage import StageKind
from rl.training.trainer import RunState
from rl.training.updates.optimizer_step import ParamState


@dataclass(frozen=True)
class LastStep:
    """The last complete step of the rollouts in a folder: step `step` of the stage with this index,
    0 before the first one. progress: what later steps depend on."""

    stage: int
    step: int
    progress: Progress

    def write(self, folder: Path) -> None:
        """Writes the file in one step. Raises ResourceError."""
        values = {"stage": self.stage, "step": self.step, "progress": self.progress.to_json()}
        temporary = folder / f"{ROLLOUTS}.tmp"
        try:
            temporary.write_text(json.dumps(values) + "\n", encoding="utf-8")
            temporary.replace(folder / ROLLOUTS)
        except OSError as error:
            raise ResourceError(
                f"{folder / ROLLOUTS} cannot be written: {error.strerror}. Make room, then "
                f"continue with `rl rollout {quoted(folder)}` ({disk_room(folder)})"
            ) from None

    @classmethod
    def read(cls, folder: Path) -> LastStep | None:
        """Returns that of a folder; None if it has no rollouts. Raises ResourceError for a file
        that cannot be read, ModelError for one that another version of Duet wrote."""
        try:
            values = json.loads((folder / ROLLOUTS).read_text(encoding="utf-8"))
            progress = Progress.from_json(values["progress"], place=str(folder / ROLLOUTS))
            return cls(values["stage"], values["step"], progress)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResourceError(
                f"{folder / ROLLOUTS} cannot be read ({error}); choose another run.dir"
            ) from None

    def is_over(self, stages: Sequence[Stage]) -> bool:
        """Whether no step of these stages is left."""
        final = stages[-1]
        return self.stage == final.index and self.step >= final.options.total_steps


def check(config: RunConfig) -> None:
    """Checks what `rl rollout` asks of a configuration and of its folder. Raises ConfigError.

    The folder is a new one, or has rollouts of the same configuration; the last stage may have more
    steps.
    """
    stages = sampling_stages(rl.stages.create(config))
    if not stages:
        names = ", ".join(config.stage_names)
        raise ConfigError(f"rl rollout: no stage samples new completions; the stages are: {names}")
    for stage in stages:
        for function in stage.rewards.functions if stage.rewards else ():
            source = function.options.get("source")
            if function.name == REWARD_MODEL and source in config.stage_names:
                raise ConfigError(
                    f"{stage.name}: its reward model is the one of stage {source}, and "
                    "`rl rollout` trains none; set `source` to the folder of a reward model"
                )
    if config.run.remote is not None:
        raise ConfigError(
            "run.remote: `rl rollout` keeps no copy of its samples elsewhere; set run.remote=null"
        )
    folder = config.directory
    if (last := LastStep.read(folder)) is None:
        if (folder / EVENTS).exists() or (folder / CHECKPOINT_FOLDER).exists():
            raise ConfigError(
                f"run.dir: {folder} is the folder of a training run; choose another one for the "
                f"rollouts: run.dir={quoted(f'{folder}-rollouts')}"
            )
        return
    before = saved(folder)
    for key in differences(before, config) if before is not None else ():
        stage = stage_of(key)
        if key.endswith(".steps") and stage is not None and stage < last.stage:
            raise ConfigError(
                f"{key}: the rollouts in {folder} are past this stage; choose another run.dir"
            )


def sampling_stages(stages: Sequence[StageKind]) -> list[Stage]:
    """Returns the stages that sample new completions to train on."""
    return [
        stage for stage in stages if isinstance(stage, Stage) and stage.producer.calls_generator
    ]


def rollout(config: RunConfig) -> None:
    """Samples and scores the steps of all stages that sample, or those that the folder lacks.

    config: one that `check` accepts. Raises one of rl.errors, and `Interrupted` after SIGTERM or
    Ctrl-C, once the step is written.
    """
    devices.check_and_show(config.platform)
    with closing(prepare(with_date(config))) as prepared:
        config = prepared.config
        stages = sampling_stages(prepared.stages)
        with RunFolder(config) as folder, StopSignal() as signal:
            last = LastStep.read(folder.path) or LastStep(stages[0].index, 0, Progress())
            if last.is_over(stages):
                print(f"{folder.path} is finished: its samples are in {folder.path}/samples.jsonl")
                return
            last.write(folder.path)  # first: it tells the folder from that of a training run
            with (
                Manifest(folder.path) as manifest,
                reward_errors(),
                closing(Timeline(folder.path, config.profile)) as timeline,
                _opened(config, prepared, folder, signal, timeline, last.progress) as run,
            ):
                _begin(run, prepared, manifest, last)
                _sample_stages(run, stages, last)


@contextmanager
def _opened(
    config: RunConfig,
    prepared: Prepared,
    folder: RunFolder,
    signal: StopSignal,
    timeline: Timeline,
    progress: Progress,
) -> Iterator[Run]:
    """Builds what the stages share, without anything that only training reads, such as values and
    experts of completions. Closes the events at the end."""
    has_media = prepared.data.has_media
    with timeline.span("loading the model"):
        model = build.first_model(config, prepared)
    options = replace(
        build.generator_options(config), record_values=False, record_routes=False, record_kept=0
    )
    generator = build.generator(config, model, prepared.tokenizer, options)
    events = Events(config, folder.path)
    try:
        yield Run(
            config=config,
            tokenizer=prepared.tokenizer,
            stop_ids=prepared.stop_ids,
            model=model,
            generator=generator,
            events=events,
            progress=progress,
            timeline=timeline,
            tables=build.media_tables(config, prepared, model.graph) if has_media else None,
            stages=prepared.stages,
            evaluation_problems=prepared.evaluation_problems,
            folder=folder,
            checkpoints=Checkpoints(folder.path / CHECKPOINT_FOLDER, 1),  # never saved
            stop=signal,
            programs=ProgramMemoryLog(folder.path),
            saved=None,
        )
    finally:
        generator.engine.runner.stop_compiling()
        events.close()


def _begin(run: Run, prepared: Prepared, manifest: Manifest, last: LastStep) -> None:
    """Writes the files of the start, and removes the records of a step that is not complete."""
    folder = run.folder
    folder.begin()
    start_run(run, prepared, manifest)
    manifest.note(rollouts=True)
    names = run.config.stage_names
    run.events.truncate_after(names, names[last.stage], last.step)
    if last.step:
        run.events.note(f"continuing {folder.path} after step {last.step} of {names[last.stage]}")
    if run.weights == "random":
        run.events.note(
            f"model {run.config.model.source} names an architecture without weights: the weights "
            f"are random (seed {run.config.seed})"
        )
    compile_generator(run)


def _sample_stages(run: Run, stages: Sequence[Stage], last: LastStep) -> None:
    """Samples the steps after `last`."""
    sampling = [stage.index for stage in stages]
    for stage in run.stages:
        if stage.index not in sampling:
            run.events.note(f"{stage.name} samples nothing: left out")
    for stage in stages:
        if stage.index >= last.stage:
            _sample_stage(run, stage, last.step if stage.index == last.stage else 0)
    path = run.folder.path
    if not run.events.sync():
        raise ResourceError(
            f"{path}: the last samples have no room; make some, and continue with the same command "
            f"({disk_room(path)})"
        )
    word = quoted(path)
    run.events.note(
        f"samples in {path}/samples.jsonl; see them: rl report {word}, rl explain {word}; train on "
        f"them: stages.N.rollouts={word} (docs/sampling.md)"
    )


def _sample_stage(run: Run, stage: Stage, done: int) -> None:
    """Samples the steps of a stage after the first `done` ones."""
    _start_stage(run, stage, new=done == 0)
    steps = stage.options.total_steps
    run.events.start_stage(stage.name, steps, done)
    for step in range(done + 1, steps + 1):
        with run.timeline.step(stage.name, step) as span:
            metrics = _sample(run, stage, step)
        metrics |= step_metrics(metrics, span.seconds, run.model.graph.layout)
        run.events.step(stage.name, step, metrics)
        written = run.events.sync()
        if written:
            run.progress.producer = stage.producer_state()
            LastStep(stage.index, step, run.progress).write(run.folder.path)
            run.events.rotate()
        _stop_if_asked(run, stage, step, written)
    stage.scorers = {}


def _start_stage(run: Run, stage: Stage, new: bool) -> None:
    """Prepares the producer of a stage and loads its reward models. new: whether the stage has no
    steps yet."""
    if new:
        run.progress.start_stage(stage.algorithm.adaptive_coefs)
    stage.restore_curriculum(run.progress.producer)
    policy = ParamState(run.model.params, optimizer=None)
    stage.start(run, RunState(policy, reference=None, critic=None))
    stage.load_reward_models(run, sharing_of(stage, run.model.graph))


def _sample(run: Run, stage: Stage, step: int) -> dict[str, float]:
    """Takes the groups of a step and writes them. Returns their metrics."""
    with run.resharded() as metrics, run.timeline.span("sampling"):
        rollouts = stage.take_groups()
    scores, waited = stage.wait_for_scores(rollouts)
    if run.config.run.samples.keeps_step(step):
        with run.timeline.span("writing samples"):
            no_advantages = np.full(len(rollouts.trajectories), np.nan)
            write_samples(run.events, stage.name, step, rollouts, scores, no_advantages)
    drafted = run.config.generator.speculative > 0
    operations = Operations(run.model.graph)
    assert rollouts.counts is not None
    return (
        metrics
        | sampled_metrics(
            rollouts, scores, run.generator, operations, run.model.graph.layout, drafted=drafted
        )
        | stage.data_metrics()
        | ({} if run.tables is None else run.tables.metrics())
        | {
            "perf/step_tflop": generator_flops(rollouts, operations) / 1e12,
            "perf/step_tokens": float(rollouts.counts["tokens"]),
        }
        | waited
    )


def _stop_if_asked(run: Run, stage: Stage, step: int, written: bool) -> None:
    """Raises Interrupted after a signal, unless this was the last step of all; ResourceError, if
    the step is not written."""
    request = run.stop.received
    if request and not written:
        raise ResourceError(
            f"{request}: NOT written (see above) after step {step} of {stage.name}; make room, "
            f"then continue with `rl rollout {quoted(run.folder.path)}`"
        )
    is_over = LastStep(stage.index, step, run.progress).is_over(sampling_stages(run.stages))
    if request and not is_over:
        raise Interrupted(
            f"{request}: the samples up to step {step} of {stage.name} are written; continue with "
            f"`rl rollout {quoted(run.folder.path)}`"
        )
