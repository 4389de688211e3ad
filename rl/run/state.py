"""A run while it goes on: what its stages share, its checkpoints, and the wish to stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy.adapters.learning import has_adapter
from policy.mesh import processes
from rewards.text import quoted
from rl.accounting.program_memory import FILE, ProgramMemoryLog
from rl.cluster.launch import on_first
from rl.config import changes
from rl.data import models
from rl.data import teacher as teachers
from rl.data.inspect import listing
from rl.errors import Fault, Interrupted, ModelError, ResourceError, disk_room
from rl.records.run_files import CURRICULUM, read_json
from rl.run.checkpoint import Checkpoints
from rl.run.folder import RunFolder
from rl.run.health import start_checks
from rl.run.resume import adapters, base
from rl.run.resume.base import BaseIdentity
from rl.run.resume.best import BestSteps
from rl.run.resume.continued import PlaceOfRun
from rl.run.signals import StopSignal
from rl.run.steps.until import first_process_value
from rl.run.unfinished import stop
from rl.stages.context import Context
from rl.stages.export.weight_checks import check_finite
from rl.stages.sharing import describe
from rl.stages.stage import StageKind

if TYPE_CHECKING:
    from rl.stages.stage import StageState

_FINISHED = """\
{0} is finished: its final weights are in {0}/export. Choose another `run.dir` to run again;
to train those weights further, give them to a new run: model={1}/export"""

_STOP = "rl stop"
_RANDOM = (
    "model {0} names an architecture without weights: the weights are random (seed {1}). To train "
    "from weights, set model=org/name (a model on the Hugging Face hub) or model=DIRECTORY (a "
    "directory with config.json and safetensors)"
)


@dataclass
class Run(Context):
    """The context of the stages, and further objects of the loop.

    evaluation_problems: of all stages. programs: the log of the memory of compiled programs.
    saved: (number, host.json) of the checkpoint that the run goes on from, or None. teacher:
    identity of the teacher of the current stage. base: what is under the adapter that the current
    stage trains. best: the best steps of the current stage.
    chosen_steps: the best steps that the run went on with, by stage, for run.json.
    """

    stages: Sequence[StageKind]
    evaluation_problems: list
    folder: RunFolder
    checkpoints: Checkpoints
    stop: StopSignal
    programs: ProgramMemoryLog
    saved: tuple[int, dict] | None
    teacher: str | None = None
    base: BaseIdentity | None = None
    best: BestSteps = field(default_factory=lambda: BestSteps(None, None))
    chosen_steps: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """Where the weights of this attempt come from."""
        if self.saved is not None:
            return f"checkpoint {self.saved[0]}"
        directory = models.directory(self.config.model.source)
        return "random" if directory is None else f"read from {directory}"

    def remaining(self) -> list[tuple[StageKind, dict | None]]:
        """Returns the remaining stages, the first with the host.json of its checkpoint. Removes the
        events after it."""
        names = self.config.stage_names
        events = self.events
        if self.saved is not None:
            host = self.saved[1]
            first = host["stage"]
            events.truncate_after(names, names[first], host["step"])
            events.note(
                f"continuing {self.folder.path} after step {host['step']} of {names[first]}"
            )
            host["ended"] = stage_ended(host, self.stages[first])
            return [
                (stage, host if stage.index == first else None) for stage in self.stages[first:]
            ]
        events.truncate_after(names, names[0], -1)
        self._note_random_weights()
        return [(stage, None) for stage in self.stages]

    def _note_random_weights(self) -> None:
        """Says which weights of a new run are random: all, or those of prediction modules."""
        source = self.config.model.source
        seed = self.config.seed
        if models.directory(source) is None:
            self.events.note(_RANDOM.format(source, seed))
        if self.model.newly_initialized:
            self.events.note(
                f"{source} lacks modules that predict further tokens: they start from random "
                f"weights, seed {seed}"
            )

    def start(self, stage: StageKind, checkpoint: dict | None) -> StageState:
        """Returns the state of a stage: a new one, or the restored one of the checkpoint with this
        host.json."""
        self._identify_teacher(stage, checkpoint)
        self.base = (
            self._begin_adapter() if adapters.trains_adapter(self.config, stage.index) else None
        )
        self.best = BestSteps(stage.options.best, checkpoint)
        stage.bind(self.model.graph)
        stage.load_scorers(self)
        self.events.start_stage(
            stage.name, stage.options.total_steps, checkpoint["step"] if checkpoint else 0
        )
        if shared := describe(stage, stage.trainer.graph, stage.trainer.sharing):
            self.events.note(f"{stage.name}: {shared}")
        with self.timeline.span(
            "starting the stage" if checkpoint is None else "reading a checkpoint", stage=stage.name
        ):
            if checkpoint is None:
                state = stage.start(self)
                self.model.params = stage.trainer.policy_params(state)
                self._note_curriculum(stage)
                return state
            restored = self.checkpoints.restore(stage.abstract())
            assert restored is not None
            state = stage.start(self, restored[1])
        if not checkpoint["ended"]:
            self._note_curriculum(stage)
        self.model.params = stage.trainer.policy_params(state)
        return state

    def _begin_adapter(self) -> BaseIdentity:
        """Gives the policy its adapter, unless it has one, and returns what is under it."""
        if not has_adapter(self.model.params):
            base.write(self, self.folder)
            adapters.begin(self.model, self.config)
            self.generator.engine.runner.forget_programs()
        with self.timeline.span("hashing the base"):
            return base.identity(self.config, self.model.graph)

    def _note_curriculum(self, stage: StageKind) -> None:
        """Writes curriculum.json: the histogram of each stage with a curriculum, for the report."""
        shown = None if stage.curriculum is None else stage.curriculum.histogram()
        if shown is None or not processes.first():
            return
        file = self.folder.path / CURRICULUM
        try:
            stages = read_json(file, []) | {stage.name: asdict(shown)}
            file.write_text(json.dumps(stages, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self.events.note(f"{CURRICULUM} cannot be written: {error.strerror}")

    def use(self, stage: StageKind, step: int) -> None:
        """Takes the settings that hold from this step of the stage on, and shows those that
        change."""
        config = changes.in_force(self.config, stage.index, step)
        stage.use(config)
        self.events.use(config.run)
        if step - 1 in changes.boundaries(self.config, stage.index):
            for text in changes.notes(self.config, stage.index, step - 1):
                self.events.note(text)

    def _identify_teacher(self, stage: StageKind, checkpoint: dict | None) -> None:
        """Raises ModelError if the teacher of the stage is another one than the steps before this
        checkpoint had."""
        options = stage.teacher
        self.teacher = None if options is None else on_first(partial(teachers.identity, options))
        if (
            options is not None
            and checkpoint is not None
            and checkpoint.get("teacher", self.teacher) != self.teacher
        ):
            raise ModelError(
                f"teacher {options.label}: its files have changed since the "
                f"first steps of {stage.name} (config.json, or the weights). Restore them, or "
                "start a new run in another run.dir"
            )

    def save(
        self,
        stage: StageKind,
        state: StageState,
        step: int,
        ended: bool,
        metrics: dict[str, float],
        until: bool = False,
    ) -> bool:
        """Writes a checkpoint where one is due. Returns whether the run stops here, since `rl stop`
        asked for it.

        metrics: of the step, of which one may make it the best. until: whether `until` ended the
        stage. Raises Interrupted, once the checkpoint is written, after a signal to stop.
        """
        options = stage.config.run
        request = self._request_to_stop()
        due = (
            ended or request or (options.checkpoint_every and step % options.checkpoint_every == 0)
        )
        stages = self.config.stages
        number = sum(each.total_steps + 1 for each in stages[: stage.index]) + step
        best = stage.options.best
        if best is not None:
            value = first_process_value(metrics, best.metric)
            if due or value is not None:
                self.best.keep(self.checkpoints.numbers())
                due = self.best.improved(number, step, value) or due
        if due and self.events.sync():
            host = self._host(stage, step, ended, until)
            with self.timeline.span("checkpoint", stage=stage.name, step=step):
                self.checkpoints.save(number, state, host, wait=bool(request))
            self.events.rotate()
        if not request:
            return False
        self._check_saved(number, request, f"after step {step} of {stage.name}", options.dir)
        return not (ended and stage.index == len(stages) - 1)

    def _host(self, stage: StageKind, step: int, ended: bool, until: bool) -> dict[str, Any]:
        """Returns the host.json of a checkpoint after this step. Arguments as in `save`."""
        host: dict[str, Any] = {
            "stage": stage.index,
            "step": step,
            "steps": self.config.stages[stage.index].total_steps,
            "ended": ended,
        }
        if until:
            host["until"] = True
        self.progress.producer = stage.producer_state()
        self.progress.packed_rows = stage.trainer.row_history.to_json()
        host["progress"] = self.progress.to_json()
        if self.teacher:
            host["teacher"] = self.teacher
        if self.base:
            host[base.KEY] = asdict(self.base)
        return host | self.best.to_host()

    def _check_saved(self, number: int, request: str, where: str, directory: str | None) -> None:
        """Raises ResourceError if the newest checkpoint has another number; else Interrupted, if
        the request is a signal and not `rl stop`."""
        newest = self.checkpoints.host()
        if newest is None or newest[0] != number:
            raise ResourceError(
                f"{request}: NOT saved (see above) {where}; make room, then continue with "
                f"`rl-train {quoted(directory)}`"
            )
        if request != _STOP:
            raise Interrupted(
                f"{request}: saved {where}; continue with `rl-train {quoted(directory)}`"
            )

    def best_state(self, stage: StageKind, state: StageState, step: int) -> StageState:
        """Returns the state that the run goes on with after the last step of a stage: that of its
        best step, if the stage has `best` with `take: best`. The arrays of `state` are then gone.
        """
        import jax

        options = stage.options.best
        if options is None or options.take == "last":
            return state
        if self.best.newest is None or self.best.newest.step != step:
            self.best.keep(self.checkpoints.numbers())
        if (newest := self.best.newest) is None:
            self.events.note(
                f"{stage.name}: no step has a finite {options.metric}: the weights of the last "
                "step go on"
            )
            return state
        what = (
            f"{stage.name}: {options.metric} is best after step {newest.step} ({newest.value:.6g})"
        )
        if newest.step != step:
            saved = self.checkpoints.find(newest.number)
            if saved is None:
                self.events.note(
                    f"{what}, but its checkpoint is damaged: the weights of the last step go on"
                )
                return state
            template = stage.abstract()
            jax.tree.map(lambda array: array.delete(), state)  # there is room for one state
            with self.timeline.span("reading a checkpoint", stage=stage.name):
                state = self.checkpoints.read(saved, template)
            self.model.params = stage.trainer.policy_params(state)
            if self.tables is not None:
                self.tables.forget()
        self.chosen_steps[stage.name] = {
            "step": newest.step,
            "metric": options.metric,
            "value": newest.value,
        }
        self.events.note(f"{what}: its weights go on")
        return state

    def _request_to_stop(self) -> str | None:
        """Returns the signal that a process got, else `rl stop` if the first process sees its
        request, else None: one answer for all processes."""
        asked = processes.first() and stop.is_asked(self.folder.path)
        requests = processes.all_gather_object(self.stop.received or (_STOP if asked else None))
        return min(filter(None, requests), key=lambda request: request == _STOP, default=None)

    def note_inspection(self, faults: Sequence[Fault]) -> None:
        """Writes inspection.json, and shows remarks on settings and the warnings of the checks of
        the data (`events.note`)."""
        if not processes.first():
            return
        for stage in self.stages:
            for remark in stage.remarks():
                self.events.note(remark)
        try:
            start_checks.write(faults, self.folder.path)
        except OSError as error:
            self.events.note(f"{start_checks.FILE} cannot be written: {error.strerror}")
        for each in faults:
            if each.level == "warn":
                self.events.note(listing.line(each))

    def note_programs(self, stage: StageKind) -> None:
        """Records the memory of programs that were compiled since the last call, and shows the
        largest (`events.note`)."""
        if not processes.first():
            return
        try:
            largest = self.programs.look(stage.name, stage.executables(), self.generator)
        except OSError as error:
            self.events.note(f"{FILE} cannot be written: {error.strerror}")
            return
        if largest:
            what = f"{largest['name']} ({' x '.join(map(str, largest['shape']))})"
            self.events.note(
                f"the largest new program ({what}) needs {largest['peak'] / 2**20:,.1f} MiB per "
                f"device; details: {FILE}"
            )

    def export(self) -> None:
        """Writes the weights of the last stage to `export/`, which ends the run."""
        last = self.stages[-1]
        last.context = self
        exported = self._export(last, last.export)
        path = self.folder.path
        word = quoted(self.folder.path)
        self.events.note(
            f"samples in {path}/samples.jsonl; see the run: rl report {word}, rl explain {word}"
        )
        self.events.note(
            f"final weights in {exported}; use them: rl chat {word}, rl generate {word} --prompts "
            "FILE"
        )

    def export_stopped(self, stage: StageKind, state: StageState, step: int) -> stop.StoppedAt:
        """Writes the weights after this step, in a stage with `best` too, and returns the place."""
        place = stop.StoppedAt(stage.name, step)
        exported = self._export(stage, partial(stage.export_at, state), place)
        self.events.note(
            f"stopped after step {step} of {stage.name}, as `rl stop` asked; weights in "
            f"{exported}; continue with `rl-train {quoted(self.folder.path)}`"
        )
        return place

    def _export(
        self, stage: StageKind, write: Callable[[Path], None], stopped: stop.StoppedAt | None = None
    ) -> Path:
        import jax

        if not self.events.sync():
            path = self.folder.path
            raise ResourceError(
                f"{path}: the last events have no room; make some, and continue with `rl-train "
                f"{quoted(path)}` ({disk_room(path)})"
            )
        check_finite(stage, self.model.params)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.model.params))
        with self.timeline.span("export"):
            return self.folder.export(write, size, stopped)


def stage_ended(host: dict, stage: StageKind) -> bool:
    """Whether the stage of a checkpoint is over: it may have got more steps since, unless `until`
    ended it."""
    return PlaceOfRun.of(host).is_over(stage.options.total_steps)


def is_finished(folder: RunFolder) -> bool:
    """Returns whether the run in this folder is finished. If it is, prints how to go on."""
    if folder.finished and processes.first():
        print(_FINISHED.format(folder.path, quoted(folder.path)))
    return folder.finished
