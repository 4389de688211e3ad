"""Groups with their scores: those of a call taken apart, and groups of several calls put together.

P prompts of a step, G trajectories of each, F reward functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rewards import RewardFault, Scores
from rewards.workers.rounding import all_equal
from rewards.workers.scores import COUNTS, call_times, statistics
from rl.errors import ModelError
from rollout.collect import ReadyScores, Rollouts
from rollout.types import Completion, Group, Kept, ProblemLike, Trajectory

if TYPE_CHECKING:
    from rl.data.shard import Shard


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """The trajectories of one prompt with their scores.

    faults and logs: those of its `Scores`, trajectories counted from 0.
    """

    group: Group
    rewards: np.ndarray  # float64[G, F]
    total: np.ndarray  # float64[G]
    faults: list[RewardFault] = field(default_factory=list)
    logs: dict[int, dict[str, str]] = field(default_factory=dict)

    def has_zero_std(self, column: int | None) -> bool:
        """Whether its scores, of one reward function (None: in sum), are equal but for rounding, so
        that advantages relative to the group are 0."""
        return all_equal(self.total if column is None else self.rewards[:, column])

    @property
    def has_prompt_of_row(self) -> bool:
        """Whether its trajectories begin with the tokens of its problem. A group of a checkpoint
        does not if the row of its number has changed."""
        return all(
            each.segments[0].tokens[: each.prompt_length].tolist() == list(self.group.problem.ids)
            for each in self.group.trajectories
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the group as values that JSON can hold, without its problem: `row` says which one
        of the stage's data it is."""
        return {
            "row": self.group.row,
            "prompt_id": self.group.prompt_id,
            "trajectories": [each.to_json() for each in self.group.trajectories],
            "rewards": self.rewards.tolist(),
            "total": self.total.tolist(),
            "faults": [asdict(fault) for fault in self.faults],
            "logs": self.logs,
        }

    @classmethod
    def from_json(
        cls, plain: Mapping[str, Any], problems: Callable[[list[int]], Sequence[ProblemLike]]
    ) -> ScoredGroup:
        """Returns the group that `to_json` wrote, also one of a version that kept completions in
        the place of trajectories, or no faults and logs. problems: returns the problems of rows of
        the data. Raises ModelError for a group of another form."""
        try:
            (problem,) = problems([plain["row"]])
            if "completions" in plain:
                trajectories = [
                    _of_completion(problem, each, plain["version"]) for each in plain["completions"]
                ]
            else:
                trajectories = [Trajectory.from_json(each) for each in plain["trajectories"]]
            return cls(
                group=Group(problem, plain["prompt_id"], trajectories, plain["row"]),
                rewards=np.asarray(plain["rewards"], np.float64),
                total=np.asarray(plain["total"], np.float64),
                faults=[RewardFault(**each) for each in plain.get("faults", ())],
                logs={int(sample): texts for sample, texts in plain.get("logs", {}).items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                "the saved state of the run was written by another version of Duet: this version "
                f"cannot read a group that it carries to the next step ({error!r}). Continue the "
                "run with that version, or start a new one in another run.dir"
            ) from None


def of_same_rows(plain: Sequence[Mapping[str, Any]], rows: Shard) -> list[ScoredGroup]:
    """Returns the groups that `to_json` wrote whose row has the same prompt in these rows.

    In a run of several processes all of them call it. Raises ModelError as `from_json`.
    """
    # A group without a row goes on to `from_json`, which refuses it by name.
    known = [each for each in plain if (each.get("row") or 0) < rows.total]
    groups = [ScoredGroup.from_json(each, rows.take) for each in known]
    return [group for group in groups if group.has_prompt_of_row]


def _of_completion(problem: ProblemLike, plain: Mapping[str, Any], version: int) -> Trajectory:
    """Returns the trajectory of a completion as checkpoints of earlier versions hold it."""
    fields = dict(plain)
    kept = fields.get("kept")
    if kept is not None:
        fields["kept"] = Kept.ids_from_json(kept, len(plain["tokens"]))
    return Trajectory.of_completion(problem.ids, Completion(**fields), version)


def split(rollouts: Rollouts) -> list[ScoredGroup]:
    """Waits for the scores, and returns each group with its own."""
    scores = rollouts.scores.result()
    result = []
    first = 0
    for group in rollouts.groups:
        own = range(first, first + len(group.trajectories))
        result.append(
            ScoredGroup(
                group,
                scores.rewards[own.start : own.stop],
                scores.total[own.start : own.stop],
                [
                    replace(fault, sample=fault.sample - first)
                    for fault in scores.faults
                    if fault.sample in own
                ],
                {sample - first: texts for sample, texts in scores.logs.items() if sample in own},
            )
        )
        first = own.stop
    return result


def joined(
    groups: Sequence[ScoredGroup], taken: Sequence[Rollouts], names: tuple[str, ...]
) -> Rollouts:
    """Returns rollouts of these groups, with the counts and times of all calls in `taken`.

    Means and standard deviations of scores are over these groups. Faults and other counts, and the
    times of reward calls, are of all groups in `taken`. names: of the reward functions.
    """
    faults = []
    logs = {}
    first = 0
    for each in groups:
        faults += [replace(fault, sample=first + fault.sample) for fault in each.faults]
        logs |= {first + sample: texts for sample, texts in each.logs.items()}
        first += len(each.total)
    rewards = np.concatenate([each.rewards for each in groups])
    sampled = [rollouts.scores.result() for rollouts in taken]
    seconds = [each for scores in sampled for each in scores.seconds]
    scores = Scores(
        rewards,
        np.concatenate([each.total for each in groups]),
        names,
        faults,
        statistics(rewards, names) | _counted(sampled) | call_times(seconds),
        logs,
        seconds=seconds,
    )
    counts = None if taken and all(rollouts.counts is None for rollouts in taken) else Counter()
    for rollouts in taken:
        if counts is not None:
            counts.update(rollouts.counts or {})
    return Rollouts(
        groups=[each.group for each in groups],
        scores=ReadyScores(scores),
        counts=counts,
        seconds=sum(rollouts.seconds for rollouts in taken),
        scoring=sum(rollouts.scoring for rollouts in taken),
        waiting=sum(rollouts.waiting for rollouts in taken),
        metrics={name: value for each in taken for name, value in each.metrics.items()},
    )


def _counted(sampled: Sequence[Scores]) -> dict[str, float]:
    """Returns the sums of the counts of these scores, as metrics."""
    return {
        name: sum(scores.metrics[name] for scores in sampled if name in scores.metrics)
        for name in COUNTS
        if any(name in scores.metrics for scores in sampled)
    }
