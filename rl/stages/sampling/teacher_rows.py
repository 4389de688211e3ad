"""What the teachers of a stage that samples read, and which of them scores a completion.

N rows of a batch, one for each completion; T tokens. Letters after an underscore are the axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl.config.model import TeacherOptions
from rl.data.encoded import Example, Problem
from rl.errors import DataError
from rl.stages.sampling.teacher_prompt import TeacherPrompt
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rl.stages.stage import StageKind
    from rl.training.batch import Batch
    from rl.training.trainer import RunState


def check_rows(
    options: TeacherOptions, prompt: TeacherPrompt | None, problems: Sequence[Problem], room: int
) -> None:
    """Raises DataError for rows that no teacher scores, or whose prompt a teacher cannot read.

    prompt: of the teacher; None: it reads the policy's. problems: of this process. room: most
    tokens of a prompt.
    """
    for problem in problems:
        example = problem.example
        if options.sources is not None:
            value = example.columns.get(str(options.by))
            if str(value) not in options.sources:
                raise DataError(
                    f"{example.where}: {options.by} is {value!r}, and teacher.sources has no "
                    f"teacher for it ({', '.join(sorted(options.sources))})"
                )
        if prompt is not None:
            length = len(prompt.ids(example, "" if prompt.reads_success else None))
            if length > room:
                raise DataError(
                    f"{example.where}: the prompt of the teacher has {length} tokens, and "
                    f"max_length less sampling.max_new_tokens leaves {room}; raise max_length or "
                    "shorten teacher.prompt"
                )


@dataclass(frozen=True)
class TeacherRows:
    """The batch that a teacher reads.

    batch: sequences with the prompt of the teacher; rows without one are empty. starts: (row, first
    token of the completion in the batch of the step, in this batch, tokens of the completion).
    """

    batch: Batch
    starts: list[tuple[int, int, int, int]]

    def back(self, logp: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns float32[N,T] in the rows of the step, NaN where the teacher read nothing. logp:
        of this batch."""
        result = np.full(shape, np.nan, np.float32)
        for row, own, read, length in self.starts:
            result[row, own : own + length] = logp[row, read : read + length]
        return result


def with_prompt(
    prompt: TeacherPrompt,
    rollouts: Rollouts,
    totals_N: np.ndarray | None,
    correct_at: float,
    limit: int,
) -> TeacherRows:
    """Returns the completions of a step after the prompt of a teacher. A completion has none where
    no other one of its group succeeded, and where both have more than `limit` tokens.

    totals_N: rewards; None: the prompt shows no completion.
    """
    from rl.training.batch import padded_batch

    rows: list[tuple[list[int], list[int]]] = []
    starts = []
    group_of = []
    for number, (p, success) in enumerate(_successes(rollouts, totals_N, correct_at)):
        trajectory = rollouts.trajectories[number]
        segment = trajectory.only_segment("a prompt of the teacher")
        own = trajectory.prompt_length
        written = segment.tokens[own:].tolist()
        ids: list[int] = []
        if not prompt.reads_success or success is not None:
            ids = prompt.ids(cast(Example, rollouts.groups[p].problem.example), success)
        if ids and len(ids) + len(written) <= limit:
            starts.append((number, own, len(ids), len(written)))
            ids = [*ids, *written]
        else:
            ids = []
        rows.append((ids, [1] * len(ids)))
        group_of.append(p if ids else -1)
    batch = padded_batch(rows, limit).replace(prompt=np.asarray(group_of, np.int32))
    return TeacherRows(batch, starts)


def _successes(
    rollouts: Rollouts, totals_N: np.ndarray | None, correct_at: float
) -> Iterator[tuple[int, str | None]]:
    """Yields (number of its group, text of the first other completion of the group with a reward of
    at least `correct_at`, or None) for each completion."""
    number = 0
    for p, group in enumerate(rollouts.groups):
        first = number
        texts: dict[int, str] = {}
        if totals_N is not None:
            own = totals_N[first : first + len(group.trajectories)]
            correct = np.flatnonzero(own >= correct_at).tolist()
            texts = {n: group.trajectories[n].text or "" for n in correct}
        for n in range(len(group.trajectories)):
            yield p, next((text for other, text in texts.items() if other != n), None)
            number += 1


def teacher_logprobs(
    stage: StageKind,
    state: RunState,
    batch: Batch,
    rollouts: Rollouts,
    totals_N: np.ndarray | None = None,
) -> np.ndarray:
    """Returns float32[N,T] on the host: the log-probability of each token of the batch of a step
    under the teacher of its row; NaN where none scores it.

    totals_N: rewards of the completions, if the prompt of the teacher shows a success.
    """
    batch = batch.replace(routes=None, kept=None)
    prompt: TeacherPrompt | None = stage.teacher_prompt
    if prompt is None:
        return _scored(stage, state, batch, rollouts)
    least = stage.teacher.correct_at
    rows = with_prompt(prompt, rollouts, totals_N, least, stage.config.max_length)
    logp = np.zeros((1, 1), np.float32)
    if rows.starts:
        logp = _scored(stage, state, rows.batch, rollouts)
    return rows.back(logp, batch.tokens.shape)


def _scored(stage: StageKind, state: RunState, batch: Batch, rollouts: Rollouts) -> np.ndarray:
    """Returns the log-probabilities of a batch that has a row for each completion."""
    options: TeacherOptions = stage.teacher
    trainer = stage.trainer
    if options.is_own:
        of_policy = options.source == "policy"
        params = trainer.policy_params if of_policy else trainer.reference_params
        return trainer.logprobs(params(state), batch)[0]
    result = np.full(batch.tokens.shape, np.nan, np.float32)
    for scorer in stage.teacher_scorers:
        other_N = _of_other_teachers(options, scorer.source, rollouts)
        if other_N.all():
            continue
        own_rows = batch.without_rows(other_N)
        packing, R = trainer.packing_of(own_rows, trainer.row_history)
        logp = scorer(own_rows, packing, R)
        trainer.add_forward_flops(scorer.flops, packing)
        result = np.where(other_N[:, None], result, logp)
    return result


def _of_other_teachers(options: TeacherOptions, source: str, rollouts: Rollouts) -> np.ndarray:
    """Returns bool[N]: which rows another teacher scores."""
    if options.sources is None:
        return np.zeros(len(rollouts.rows), bool)
    column = options.by
    examples: list[Any] = [problem.example for problem in rollouts.problems]
    names = [options.sources[str(each.columns[column])] for each in examples]
    return np.asarray([names[row.group] != source for row in rollouts.rows])
