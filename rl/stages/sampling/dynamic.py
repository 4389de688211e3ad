"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): drops groups whose rewards are all equal
and samples others.

P prompts of a step, G completions of each, F reward functions.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rewards import Fault, Runner, Scores
from rewards.workers.rounding import all_equal
from rl.data.encoded import Problem
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rollout.types import Completion

# Fields of a completion that a checkpoint holds besides tokens and log-probabilities.
_KEPT = ("finish", "text", "raw", "steps")


@dataclass(frozen=True)
class ScoredGroup:
    """The completions of one prompt with their scores.

    row: row of the prompt in the stage's data. version: policy version that sampled the
    completions. faults and logs: those of its `Scores`, completions counted from 0.
    """

    row: int
    prompt_id: int
    version: int
    completions: list[Completion]
    rewards: np.ndarray  # float64[G, F]
    total: np.ndarray  # float64[G]
    faults: list[Fault] = field(default_factory=list)
    logs: dict[int, dict[str, str]] = field(default_factory=dict)

    def differs(self, column: int | None) -> bool:
        """Whether its scores, of one reward function or in sum, differ by more than rounding."""
        return not all_equal(self.total if column is None else self.rewards[:, column])

    def to_json(self) -> dict:
        """Returns all fields as values that JSON can hold."""
        completions = [
            {
                "tokens": [int(token) for token in one.tokens],
                "logprobs": [float(logp) for logp in one.logprobs],
            }
            | {name: getattr(one, name) for name in _KEPT}
            | _filters_to_json(one)
            for one in self.completions
        ]
        scores = {"rewards": self.rewards.tolist(), "total": self.total.tolist(), "logs": self.logs}
        scores["faults"] = [asdict(fault) for fault in self.faults]
        return {
            "row": self.row,
            "prompt_id": self.prompt_id,
            "version": self.version,
            "completions": completions,
        } | scores

    @classmethod
    def from_json(cls, plain: dict) -> ScoredGroup:
        """Returns the group that `to_json` wrote, also one of a version that kept no faults and
        logs."""
        from rollout.types import Completion

        return cls(
            **plain
            | {
                "completions": [
                    Completion(**one | _filters_from_json(one)) for one in plain["completions"]
                ],
                "rewards": np.asarray(plain["rewards"]),
                "total": np.asarray(plain["total"]),
                "faults": [Fault(**one) for one in plain.get("faults", ())],
                "logs": {int(sample): texts for sample, texts in plain.get("logs", {}).items()},
            }
        )


def _filters_to_json(completion: Completion) -> dict:
    """Returns what the completion says about filters; its ids as compressed text, since they are
    many."""
    if completion.kept is None:
        return {}
    assert completion.kept_counts is not None and completion.filtered_logprobs is not None
    ids = base64.b64encode(zlib.compress(np.ascontiguousarray(completion.kept, "<i4").tobytes()))
    logprobs = map(float, completion.filtered_logprobs)
    counts = map(int, completion.kept_counts)
    return {"filtered_logprobs": list(logprobs), "kept_counts": list(counts), "kept": ids.decode()}


def _filters_from_json(plain: dict) -> dict:
    """Returns `kept` of a completion as an array."""
    if "kept" not in plain:
        return {}
    ids = np.frombuffer(zlib.decompress(base64.b64decode(plain["kept"])), "<i4")
    return {"kept": ids.reshape(len(plain["tokens"]), -1)}


@dataclass(frozen=True)
class ReadyScores:
    """Scores that are computed already, in place of a handle."""

    scores: Scores

    def result(self) -> Scores:
        """Returns the scores at once."""
        return self.scores


class DynamicSampling:
    """Fills steps with groups whose rewards differ.

    most: calls of `sample` per step, at most. reward: the function whose scores have to differ,
    None: the weighted sum. problems: returns the problems of rows of the data.
    """

    def __init__(
        self,
        most: int,
        reward: str | None,
        problems: Callable[[list[int]], Sequence[Problem]],
        runner: Runner,
    ):
        self._most = most
        self._problems = problems
        self._names = runner.names
        self._column = None if reward is None else runner.names.index(reward)

    def fill(
        self,
        count: int,
        carried: list[ScoredGroup],
        sample: Callable[[], tuple[Rollouts, list[int]]],
    ) -> tuple[Rollouts, list[ScoredGroup], dict[str, float]]:
        """Returns (rollouts of `count` groups, groups left over for the next step, metrics).

        Takes `carried` first; then `sample()` returns further rollouts, and the rows of their
        prompts in the data. If that is not enough, groups without a difference fill the step: they
        have no advantage.
        """
        kept = list(carried)
        dropped = []
        taken = []
        while len(kept) < count and len(taken) < self._most:
            rollouts, rows = sample()
            scores = rollouts.scores.result()
            taken.append((rollouts, scores))
            for group in _split(rollouts, scores, rows):
                (kept if group.differs(self._column) else dropped).append(group)
        groups = kept[:count] + dropped[: max(0, count - len(kept))]
        totals = np.concatenate([scores.total for _, scores in taken]) if taken else np.zeros(0)
        tried = sum(len(rollouts.problems) for rollouts, _ in taken)
        metrics = {
            "dynamic/batches": float(len(taken)),
            "dynamic/kept_share": 1.0 - len(dropped) / tried if tried else 1.0,
            "dynamic/carried": float(len(carried)),
            "dynamic/without_difference": float(max(0, count - len(kept))),
        }
        if np.isfinite(totals).any():
            metrics["dynamic/reward_mean"] = float(np.nanmean(totals))
        return self._together(groups, taken), kept[count:], metrics

    def _together(
        self, groups: Sequence[ScoredGroup], taken: Sequence[tuple[Rollouts, Scores]]
    ) -> Rollouts:
        """Returns rollouts of these groups, with the counts, times and reward metrics of all calls
        in `taken`."""
        names = sorted({name for _, scores in taken for name in scores.metrics})
        metrics = {
            name: float(np.mean([s.metrics[name] for _, s in taken if name in s.metrics]))
            for name in names
        }
        rewards, total = (
            np.concatenate([getattr(group, name) for group in groups])
            for name in ("rewards", "total")
        )
        G = len(groups[0].completions)
        faults = []
        logs = {}
        for number, group in enumerate(groups):
            faults += [replace(fault, sample=number * G + fault.sample) for fault in group.faults]
            logs |= {number * G + sample: texts for sample, texts in group.logs.items()}
        counts = Counter()
        for rollouts, _ in taken:
            counts.update(rollouts.counts)
        return Rollouts(
            problems=self._problems([group.row for group in groups]),
            prompt_ids=[group.prompt_id for group in groups],
            completions=[group.completions for group in groups],
            scores=ReadyScores(Scores(rewards, total, self._names, faults, metrics, logs)),
            counts=counts,
            seconds=sum(rollouts.seconds for rollouts, _ in taken),
            scoring=sum(rollouts.scoring for rollouts, _ in taken),
            versions=[group.version for group in groups],
        )


def _split(rollouts: Rollouts, scores: Scores, rows: Sequence[int]) -> list[ScoredGroup]:
    G = len(rollouts.completions[0])
    result = []
    for p, (row, prompt_id) in enumerate(zip(rows, rollouts.prompt_ids, strict=True)):
        own = slice(p * G, (p + 1) * G)
        result.append(
            ScoredGroup(
                row,
                int(prompt_id),
                rollouts.versions[p],
                rollouts.completions[p],
                scores.rewards[own],
                scores.total[own],
                [
                    replace(fault, sample=fault.sample - p * G)
                    for fault in scores.faults
                    if fault.sample // G == p
                ],
                {
                    sample - p * G: texts
                    for sample, texts in scores.logs.items()
                    if sample // G == p
                },
            )
        )
    return result
