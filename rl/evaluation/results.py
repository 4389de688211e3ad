"""The results of an evaluation: estimates from what was recorded. Free of jax.

P problems, G samples of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from policy.json_types import JsonObject, JsonValue
from rewards import registry
from rewards.workers.rounding import at_least
from rl.data.encoded import Problem
from rl.evaluation.prepare import PreparedTask, weights_of
from rl.evaluation.task import Score
from rl.records.schema import SampleRecord
from rl.statistics import Estimate, majority_shares, mean, pass_shares, shares

_MOST_VALUES = 64
"""Values of a column that get accuracies of their own; columns with more, such as names, get none.
"""


@dataclass
class RecordedSamples:
    """What was recorded of the samples of a task.

    rewards: score -> float[P, G], NaN without a score. truncated: bool[P, G]. lengths: int[P, G],
    tokens. texts: the completions, where maj@k needs them.
    """

    rewards: dict[str, np.ndarray]
    truncated: np.ndarray
    lengths: np.ndarray
    texts: list[list[str]]

    @classmethod
    def read(cls, task: PreparedTask, records: Iterable[SampleRecord]) -> RecordedSamples:
        """Takes the samples of a task from the records of its folder."""
        shape = len(task.problems), task.params.n
        votes = bool(task.task.maj)
        recorded = cls(
            {name: np.full(shape, np.nan) for name in task.task.scores},
            np.zeros(shape, bool),
            np.zeros(shape, np.int64),
            [[""] * shape[1] for _ in range(shape[0])] if votes else [],
        )
        for record in records:
            if record["stage"] != task.name:
                continue
            place = record["prompt_id"], record["sample"]
            for name, value in record["rewards"].items():
                if name in recorded.rewards and value is not None:
                    recorded.rewards[name][place] = value
            recorded.truncated[place] = record["finish"] == "length"
            recorded.lengths[place] = record["n"]
            if votes:
                recorded.texts[place[0]][place[1]] = record["completion"]
        return recorded


@dataclass(frozen=True)
class ScoreResult:
    """The numbers of one score of a task.

    reward: mean reward. unscored: completions without one. passes, majorities: by k. by: column ->
    value -> accuracy of its problems. shares: float[P] for paired comparisons, NaN without a score.
    weights: how often each problem counts; None: once.
    """

    name: str
    accuracy: Estimate | None
    reward: float | None
    unscored: int
    passes: dict[int, Estimate]
    majorities: dict[int, Estimate]
    by: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    shares: Sequence[float] = ()
    weights: Sequence[float] | None = None

    @classmethod
    def of(
        cls, name: str, score: Score, task: PreparedTask, recorded: RecordedSamples
    ) -> ScoreResult:
        """Computes the numbers of a score from what was recorded."""
        rewards_PG = recorded.rewards[name]
        known_PG = np.isfinite(rewards_PG)
        right_PG = np.where(known_PG, at_least(rewards_PG, score.correct_at), np.nan)
        weights_P = weights_of(score, task.problems)
        # Where a reward is a share of entries, all of its value counts.
        shares_P = shares(right_PG if weights_P is None else rewards_PG)
        return cls(
            name,
            mean(shares_P, weights_P),
            float(np.mean(rewards_PG[known_PG])) if known_PG.any() else None,
            int(np.sum(~known_PG)),
            _estimates({k: pass_shares(right_PG, k) for k in task.task.k}),
            _majorities(score, task, right_PG, recorded),
            _by(task.task.by, task.problems, shares_P, weights_P),
            shares_P.tolist(),
            weights_P,
        )

    def to_json(self) -> JsonObject:
        """Returns the score for eval.json."""
        return {
            "accuracy": _estimate(self.accuracy),
            "reward_mean": self.reward,
            "unscored": self.unscored,
            "pass": {str(k): _estimate(each) for k, each in self.passes.items()},
            "maj": {str(k): _estimate(each) for k, each in self.majorities.items()},
            "by": {
                column: {value: _estimate(each) for value, each in values.items()}
                for column, values in self.by.items()
            },
        }


@dataclass(frozen=True)
class TaskResult:
    """The results of a task. truncated: share of completions that were cut at max_new_tokens.
    length: mean tokens of a completion."""

    name: str
    problems: int
    samples: int
    truncated: float
    length: float
    scores: tuple[ScoreResult, ...]

    @classmethod
    def of(cls, task: PreparedTask, recorded: RecordedSamples) -> TaskResult:
        """Computes the results of a task from what was recorded."""
        scores = task.task.scores.items()
        return cls(
            task.name,
            len(task.problems),
            task.params.n,
            float(recorded.truncated.mean()),
            float(recorded.lengths.mean()),
            tuple(ScoreResult.of(name, score, task, recorded) for name, score in scores),
        )

    def to_json(self) -> JsonObject:
        """Returns the task for eval.json."""
        return {
            "problems": self.problems,
            "samples": self.samples,
            "truncated": self.truncated,
            "mean_tokens": self.length,
            "scores": {score.name: score.to_json() for score in self.scores},
        }

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the task for events.jsonl (docs/evaluation.md). Those of the first
        score do not have its name."""
        first = self.scores[0]
        result = {
            "eval/problems": float(self.problems),
            "eval/samples": float(self.samples),
            "eval/unscored_samples": float(first.unscored),
            "eval/truncated": self.truncated,
        }
        if first.accuracy is not None:
            accuracy = first.accuracy
            result["eval/accuracy"] = accuracy.value
            result |= {"eval/low": accuracy.low, "eval/high": accuracy.high}
        if first.reward is not None:
            result["eval/reward_mean"] = first.reward
        for name, values in (("pass", first.passes), ("maj", first.majorities)):
            result |= {f"eval/{name}@{k}": each.value for k, each in values.items()}
        others = [score for score in self.scores[1:] if score.accuracy is not None]
        return result | {
            f"eval/{each.name}": each.accuracy.value for each in others if each.accuracy
        }

    def lines(self, keys: Sequence[str]) -> list[JsonObject]:
        """Returns a line for each problem, for paired comparisons. keys: of the problems."""
        return [
            {
                "task": self.name,
                "problem": number,
                "key": key,
                "right": {score.name: _number(score.shares[number]) for score in self.scores},
                "counts": {
                    score.name: score.weights[number]
                    for score in self.scores
                    if score.weights is not None
                },
            }
            for number, key in enumerate(keys)
        ]


def _majorities(
    score: Score, task: PreparedTask, right_PG: np.ndarray, recorded: RecordedSamples
) -> dict[int, Estimate]:
    """Returns maj@k of a score; none of a score whose reward tells no answers."""
    answer = registry.answer_of(score.reward, score.options) if task.task.maj else None
    if answer is None:
        return {}
    answers_PG = [[answer(text) for text in texts] for texts in recorded.texts]
    seed = int(task.settings["seed"])  # pyright: ignore[reportArgumentType]
    return _estimates({k: majority_shares(right_PG, answers_PG, k, seed) for k in task.task.maj})


def _estimates(values: Mapping[int, np.ndarray]) -> dict[int, Estimate]:
    return {k: each for k, value in values.items() if (each := mean(value)) is not None}


def _by(
    columns: Sequence[str],
    problems: Sequence[Problem],
    shares_P: np.ndarray,
    weights_P: Sequence[float] | None,
) -> dict[str, dict[str, Estimate]]:
    """Returns the accuracies of the problems with each value of each column."""
    result: dict[str, dict[str, Estimate]] = {}
    weights = np.ones(len(problems)) if weights_P is None else np.asarray(weights_P)
    for column in columns:
        values = [str(problem.example.columns[column]) for problem in problems]
        different = sorted(set(values))
        if len(different) > _MOST_VALUES:
            continue
        for value in different:
            rows = [number for number, each in enumerate(values) if each == value]
            if (estimate := mean(shares_P[rows], weights[rows])) is not None:
                result.setdefault(column, {})[value] = estimate
    return result


def _estimate(each: Estimate | None) -> JsonValue:
    return None if each is None else asdict(each)


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
