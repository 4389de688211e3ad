"""The folder of an evaluation, which has the files of a run's folder and three more:

    eval.json       model, settings and results
    problems.jsonl  a line for each problem of a task that is complete, for paired comparisons
    samples.jsonl, tokens.bin, events.jsonl, run.json   as of a run; a task is a stage of one step

The lines of a problem are appended when all of its samples are scored. So a process that is killed
loses only problems that were not yet scored, and the same command continues after the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

from policy.json_types import JsonObject, JsonValue
from rewards import Scores
from rewards.text import quoted
from rl.errors import ConfigError, DataError, ResourceError, disk_room
from rl.evaluation.files import PROBLEMS, RESULTS, TaskEntry, results
from rl.evaluation.prepare import PreparedTask
from rl.evaluation.results import RecordedSamples, TaskResult
from rl.records import samples
from rl.records.events import EventLog
from rl.records.run_files import EVENTS, SAMPLES
from rl.records.schema import RecordedLine, SampleRecord
from rl.records.thumbnails import Thumbnails
from rl.stages.sampling.records import references, sample_lines, token_records
from rollout.collect import ReadyScores, Rollouts
from rollout.types import Group

_FORMAT = 1
_LOCK = ".lock"


class EvaluationFolder:
    """Holds the lock of a folder while it is entered. model: what identifies the weights."""

    def __init__(self, path: Path, model: JsonObject, tasks: list[PreparedTask]):
        """Reads what the folder holds. Raises ConfigError if it holds something else than this
        evaluation, DataError for files that cannot be read."""
        self.path = path
        self._tasks = {task.name: task for task in tasks}
        self._model = model
        self._lock: int | None = None
        self._entries: dict[str, dict[str, JsonValue]] = {}
        self._check()

    def _check(self) -> None:
        """Raises ConfigError where the folder is of another evaluation."""
        file = self.path / RESULTS
        if not file.is_file():
            if (self.path / EVENTS).exists() or (self.path / SAMPLES).exists():
                raise ConfigError(f"{self.path}: the folder of a run; choose another with -o")
            return
        try:
            stored = json.loads(file.read_bytes())
            entries = {name: dict(task) for name, task in stored["tasks"].items()}
            settings = {name: dict(entry["settings"]) for name, entry in entries.items()}
            model = dict(stored["model"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{file}: cannot be read ({error}); choose another folder with -o"
            ) from None
        changes = _changes("model", model, self._model)
        for name, task in self._tasks.items():
            if name in settings:
                changes += _changes(name, settings[name], task.settings)
        if changes:
            shown = "\n".join(f"  {each}" for each in changes[:10])
            raise ConfigError(
                f"{self.path}: holds another evaluation; choose another folder with -o:\n{shown}"
            )
        self._entries = entries

    def __enter__(self) -> EvaluationFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ResourceError(
                f"-o {self.path}: cannot be written: {error.strerror} ({disk_room(self.path)})"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ResourceError(
                f"{self.path}: another process evaluates into it; wait for it, or choose another "
                "folder with -o"
            ) from None
        self._check()
        self._log = EventLog(self.path)
        self._thumbnails = Thumbnails(self.path, partial(print, file=sys.stderr))
        for name, task in self._tasks.items():
            entry = {"about": task.task.about, "settings": task.settings}
            self._entries.setdefault(name, entry)
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        self._thumbnails.close()
        self._log.close()
        assert self._lock is not None
        os.close(self._lock)

    def complete(self, name: str) -> bool:
        """Whether the results of a task are here."""
        return "scores" in self._entries.get(name, {})

    def done(self) -> dict[str, set[int]]:
        """Returns the numbers of the complete problems of each task, those with all of their
        samples. Removes the lines of an incomplete problem at the end of the files. Raises
        DataError for damaged files."""
        self._problem_lines()
        counts: Counter[tuple[str, int]] = Counter()
        try:
            for record in samples.read(self.path):
                counts[record["stage"], record["prompt_id"]] += 1
            expected = {name: task.params.n for name, task in self._tasks.items()}

            def keep(row: RecordedLine) -> bool:
                record = cast(SampleRecord, row)
                place = record["stage"], record["prompt_id"]
                return counts[place] == expected.get(place[0], counts[place])

            self._log.keep_samples(keep)
        except (ValueError, KeyError) as error:
            raise DataError(
                f"{self.path}: damaged ({error}); choose another folder with -o"
            ) from None
        result: dict[str, set[int]] = {name: set() for name in self._tasks}
        for (name, number), count in counts.items():
            if name in expected and count == expected[name]:
                result[name].add(number)
        return result

    def write(self, task: PreparedTask, group: Group, scores: Scores) -> None:
        """Appends the scored samples of a problem."""
        rollouts = Rollouts([group], ReadyScores(scores), None, 0.0)
        lines = sample_lines(rollouts, scores, task.name, 0)
        self._log.samples(lines, token_records(rollouts))
        self._thumbnails.write(references(rollouts))

    def finish(self, task: PreparedTask) -> TaskResult:
        """Computes the results of a task from its samples, and writes them."""
        result = TaskResult.of(task, RecordedSamples.read(task, self._records()))
        if not self.complete(task.name):
            self._log.step(task.name, 0, result.metrics())
        if not self._log.sync():
            raise ResourceError(f"{self.path}: samples have no room; make some, and repeat")
        self._entries[task.name] |= result.to_json()
        self._write_problems(task, result)
        self._write()
        return result

    def sync(self) -> None:
        """Waits until the samples are on the disk, or says that there is no room."""
        self._log.sync()

    @property
    def results(self) -> dict[str, TaskEntry]:
        """Returns the results of the tasks that are complete, by name, as eval.json has them."""
        return results(self.content)

    @property
    def content(self) -> JsonObject:
        """Returns what eval.json holds."""
        return {"format": _FORMAT, "model": self._model, "tasks": self._entries}

    def _records(self) -> Iterator[SampleRecord]:
        return samples.read(self.path)

    def _write_problems(self, task: PreparedTask, result: TaskResult) -> None:
        """Replaces the lines of a task in problems.jsonl."""
        file = self.path / PROBLEMS
        others = [line for name, line in self._problem_lines() if name != task.name]
        own = [json.dumps(line) for line in result.lines(task.keys)]
        self._replace(file, "\n".join([*others, *own]) + "\n")

    def _problem_lines(self) -> list[tuple[str, str]]:
        """Returns (name of the task, line) of problems.jsonl. Raises DataError for a damaged
        line."""
        file = self.path / PROBLEMS
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        result = []
        for number, line in enumerate(lines, 1):
            try:
                result.append((json.loads(line)["task"], line))
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"{file}:{number}: damaged; remove the file, and repeat the command of each "
                    "task: it is written again from the samples"
                ) from None
        return result

    def _write(self) -> None:
        text = json.dumps(self.content, indent=1, ensure_ascii=False)
        self._replace(self.path / RESULTS, text + "\n")

    def _replace(self, file: Path, text: str) -> None:
        temporary = file.with_name(f"{file.name}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            temporary.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise ResourceError(
                f"{file}: cannot be written: {error.strerror} ({disk_room(self.path)}). Make room, "
                f"and repeat the command with -o {quoted(self.path)}"
            ) from None


def _changes(name: str, before: JsonObject, after: JsonObject) -> list[str]:
    """Returns `name.key: before -> after` of each value that differs."""
    result = []
    for key in dict.fromkeys((*before, *after)):
        was = before.get(key)
        now = after.get(key)
        if was != now:
            result.append(f"{name}.{key}: {_short(was)} there, {_short(now)} now")
    return result


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
