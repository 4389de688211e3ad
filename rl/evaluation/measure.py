"""Completes the problems of a task and scores them, in worker processes, while others are being
decoded."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rewards import Runner, RunnerOptions
from rewards.runner import Handle
from rewards.text import in_form_of
from rewards.workers.rounding import at_least
from rl.errors import reward_errors
from rl.evaluation.folder import EvaluationFolder
from rl.evaluation.prepare import PreparedTask
from rl.stages.sampling.completing import completions
from rollout.types import Group, Trajectory

if TYPE_CHECKING:
    from rollout.generator import Generator
    from rollout.media.processors import Processors

_WORKERS = 2
_PROGRESS_S = 10.0


@dataclass
class _Progress:
    """Says on standard error how far a task is, every _PROGRESS_S seconds."""

    name: str
    total: int
    finished: int
    shares: list[float] = field(default_factory=list)
    timed: int = 0
    began: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)

    def add(self, share: float) -> None:
        """Counts a problem, of whose samples this share is right; NaN without a score."""
        self.shares += [share] if np.isfinite(share) else []
        self.finished += 1
        now = time.monotonic()
        if not self.timed:
            self.began = now  # programs were compiled before
        self.timed += 1
        if now - self.shown >= _PROGRESS_S and self.timed > 1:
            self.shown = now
            left = (now - self.began) / (self.timed - 1) * (self.total - self.finished)
            accuracy = f", accuracy {np.mean(self.shares):.3f}" if self.shares else ""
            print(
                f"{self.name}: {self.finished:,} of {self.total:,} problems{accuracy}, about "
                f"{math.ceil(left / 60)} min left",
                file=sys.stderr,
                flush=True,
            )


def measure(
    generator: Generator,
    task: PreparedTask,
    folder: EvaluationFolder,
    done: set[int],
    processors: Processors | None,
) -> None:
    """Samples and scores the problems that are not done, and writes each when it is scored.

    processors: of a model that reads pictures or sounds. An interruption leaves the problems whose
    samples are complete in the folder. Raises DataError for a prompt that cannot be read.
    """
    left = [number for number in range(len(task.problems)) if number not in done]
    progress = _Progress(task.name, len(task.problems), len(done))
    waiting: deque[tuple[Group, Handle]] = deque()

    def write(count: int) -> None:
        """Waits for the scores of the first `count` groups and writes these, then the groups
        after them until the first whose scores are not complete."""
        while waiting and (count > 0 or waiting[0][1].done()):
            group, handle = waiting.popleft()
            with reward_errors():
                scores = replace(handle.result(), names=tuple(task.task.scores))
            folder.write(task, group, scores)
            first = next(iter(task.task.scores.values()))
            known = scores.rewards[np.isfinite(scores.rewards[:, 0]), 0]
            right = at_least(known, first.correct_at)
            progress.add(float(np.mean(right)) if len(known) else np.nan)
            count -= 1

    with _runner(task) as runner, reward_errors():
        try:
            for group in _groups(generator, task, left, processors):
                waiting.append((group, _score(runner, task, group)))
                write(0)
        finally:
            write(len(waiting))
            folder.sync()


def _groups(
    generator: Generator, task: PreparedTask, numbers: Sequence[int], processors: Processors | None
) -> Iterator[Group]:
    """Yields the completed groups of problems, in the order in which they are complete."""
    problems = [task.problems[number] for number in numbers]
    made: dict[int, dict[int, Trajectory]] = {}
    for place, sample, completion in completions(
        generator, problems, task.params, processors, numbers
    ):
        own = made.setdefault(place, {})
        own[sample] = Trajectory.of_completion(problems[place].ids, completion)
        if len(own) == task.params.n:
            del made[place]
            trajectories = [own[each] for each in range(task.params.n)]
            yield Group(problems[place], numbers[place], trajectories)


def _score(runner: Runner, task: PreparedTask, group: Group) -> Handle:
    """Starts to score the completions of a problem."""
    example = group.problem.example
    count = len(group.trajectories)
    columns: dict[str, object] = {name: [value] * count for name, value in example.columns.items()}
    columns |= {
        "completion_lengths": [each.length for each in group.trajectories],
        "truncated": [each.truncated for each in group.trajectories],
        "raw": [each.text if each.raw is None else each.raw for each in group.trajectories],
        "max_new_tokens": task.params.max_new_tokens,
    }
    texts = [in_form_of(example.prompt, each.text or "") for each in group.trajectories]
    return runner.start([example.prompt] * count, texts, columns, [0] * count)


@contextmanager
def _runner(task: PreparedTask) -> Iterator[Runner]:
    """Opens the workers of a task. The total of a completion is its first score."""
    functions = tuple(
        (score.reward, float(number == 0), dict(score.options))
        for number, score in enumerate(task.task.scores.values())
    )
    options = RunnerOptions(
        functions, workers=_WORKERS, timeout_s=task.task.timeout_s, timeout_key="timeout_s"
    )
    with Runner(options) as runner:
        yield runner
