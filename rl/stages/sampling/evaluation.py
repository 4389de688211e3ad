"""Accuracy on held-out problems: greedy, and pass@k and maj@k from samples."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rewards import Scores, plugins, registry
from rewards.workers.rounding import at_least
from rl.config.data import EvaluationOptions, RewardSettings
from rl.data.encoded import Problem
from rl.errors import DataError, reward_errors
from rl.stages.sampling.by_source import numbers_by_prefix
from rl.stages.sampling.params import WITHOUT_FILTERS
from rl.statistics import Estimate, majority_shares, mean, pass_shares, shares
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rollout import SamplingParams
    from rollout.types import Trajectory

# Evaluation draws from keys of its own, so that training sees the same numbers with and without it.
SEED_OFFSET = 1 << 30


def params_of(
    options: EvaluationOptions, params: SamplingParams
) -> tuple[SamplingParams, SamplingParams]:
    """Returns how greedy and sampled completions of an evaluation are drawn. params: lengths and
    stops. Raises ValueError for settings of the evaluation that are out of range or do not fit
    these lengths."""
    unfiltered = replace(params, n=1, **WITHOUT_FILTERS, **options.processors)
    greedy = replace(unfiltered, temperature=0)
    return greedy, replace(unfiltered, n=max(1, options.samples), temperature=options.temperature)


def answer_of(settings: RewardSettings) -> registry.AnswerOf | None:
    """Returns what a completion answers by the first reward that tells; None: no reward does.
    Raises RewardError for an unknown reward."""
    answers = (registry.answer_of(each.name, each.options) for each in settings.functions)
    return next((answer for answer in answers if answer is not None), None)


class Evaluation:
    """Evaluates the policy on held-out problems. A completion is correct from the reward
    `correct_at` on."""

    def __init__(
        self,
        options: EvaluationOptions,
        problems: Sequence[Problem],
        collect: Callable[[Sequence[Problem], SamplingParams, Sequence[int]], Rollouts],
        params: SamplingParams,
        record: Callable[[int, Rollouts, Scores], None] = lambda step, samples, scores: None,
        block: int | None = None,
        answer: registry.AnswerOf | None = None,
    ):
        """Computes nothing yet.

        collect: completes and scores (problems, params, prompt ids). params: lengths and stops;
        temperatures come from `options`. record: gets (step, completions, scores) of each call.
        block: problems of one call, whose pictures are on the devices at a time; None: all.
        answer: what a completion answers, for maj@k; None: no reward tells.
        """
        self._answer = answer
        self._block = block or max(1, len(problems))
        self.options = options
        self.problems = problems
        self._collect = collect
        self._params = params
        self._record = record

    @property
    def every(self) -> int:
        """After how many steps an evaluation follows; 0: only before the first and
        after the last one."""
        return self.options.every

    def run(self, step: int = 0) -> dict[str, float]:
        """Returns eval/greedy_accuracy, eval/reward_mean, eval/pass@k and eval/maj@k after a step,
        and what they count.

        A completion without a score is in none of them, and counted in eval/unscored and
        eval/unscored_samples. A problem with fewer than k scored samples is not in pass@k and
        maj@k. A metric of no completion is absent.
        """
        began = time.perf_counter()
        options = self.options
        greedy, sampled = params_of(options, self._params)
        trajectories, totals = self._rollouts(greedy, step)
        sources = [problem.example.source for problem in self.problems]
        problems = numbers_by_prefix("eval/", len(self.problems), sources)
        metrics = {}
        for prefix, rows in problems.items():
            metrics |= {
                f"{prefix}{name}": each for name, each in self._greedy(totals[rows]).items()
            }
        for name in options.metrics:
            metrics |= _own_metric(name, self.problems, trajectories, totals)
        if options.samples:
            trajectories, totals = self._rollouts(sampled, step)
            totals = totals.reshape(len(self.problems), options.samples)
            answers = self._answers(trajectories)
            metrics["eval/samples"] = float(options.samples)
            for prefix, rows in problems.items():
                of_rows = self._sampled(totals[rows], [answers[row] for row in rows])
                metrics |= {f"{prefix}{name}": each for name, each in of_rows.items()}
        return metrics | {"time/eval": time.perf_counter() - began}

    def _greedy(self, totals_P: np.ndarray) -> dict[str, float]:
        """Returns the metrics of greedy completions with these rewards."""
        right_P1 = self._right(totals_P)[:, None]
        metrics = {
            "problems": float(len(totals_P)),
            "unscored": float(np.sum(~np.isfinite(totals_P))),
        }
        if (accuracy := mean(shares(right_P1))) is not None:
            metrics["greedy_accuracy"] = accuracy.value
            metrics["reward_mean"] = float(np.nanmean(totals_P))
        return metrics

    def _sampled(
        self, totals_PG: np.ndarray, answers_PG: Sequence[Sequence[str | None]]
    ) -> dict[str, float]:
        """Returns the metrics of sampled completions with these rewards and answers."""
        right_PG = self._right(totals_PG)
        estimates: dict[str, Estimate | None] = {}
        for k in self.options.k:
            estimates[f"pass@{k}"] = mean(pass_shares(right_PG, k))
        for k in self.options.maj:
            estimates[f"maj@{k}"] = mean(majority_shares(right_PG, answers_PG, k))
        metrics = {"unscored_samples": float(np.sum(~np.isfinite(totals_PG)))}
        return metrics | {name: each.value for name, each in estimates.items() if each is not None}

    def _right(self, totals: np.ndarray) -> np.ndarray:
        """Returns 1 where a reward counts as correct, else 0; NaN without a score."""
        right = at_least(totals, self.options.correct_at).astype(float)
        return np.where(np.isfinite(totals), right, np.nan)

    def _answers(self, trajectories: list[Trajectory]) -> list[list[str | None]]:
        """Returns what the samples of each problem answer; nothing where no maj@k asks for it."""
        G = self.options.samples
        if not self.options.maj:
            return [[None] * G for _ in self.problems]
        assert self._answer is not None  # checked before the run
        with reward_errors():
            answers = [self._answer(each.text or "") for each in trajectories]
        return [answers[p * G : (p + 1) * G] for p in range(len(self.problems))]

    def _rollouts(self, params: SamplingParams, step: int) -> tuple[list[Trajectory], np.ndarray]:
        """Returns (trajectories, rewards float[problems * n]); NaN where there is no score."""
        trajectories = []
        totals = []
        for start in range(0, len(self.problems), self._block):
            problems = self.problems[start : start + self._block]
            first = SEED_OFFSET + start
            rollouts = self._collect(problems, params, range(first, first + len(problems)))
            scores = rollouts.scores.result()
            self._record(step, rollouts, scores)
            trajectories += rollouts.trajectories
            totals.append(scores.total)
        return trajectories, np.concatenate(totals)


def _own_metric(
    name: str, problems: Sequence[Problem], trajectories: list[Trajectory], rewards: np.ndarray
) -> dict[str, float]:
    """Returns a user-defined metric of greedy completions: one number eval/<function>, or several
    by name.

    The function takes lists (prompts, completions, raw, rewards, **columns), completions as texts
    and raw as texts with special tokens, or the part of these that it names. Raises DataError for a
    result that is no finite number.
    """
    function = plugins.load(name, "evaluation metric")
    examples = [problem.example for problem in problems]
    names = dict.fromkeys(key for each in examples for key in each.columns)
    columns = {key: [each.columns.get(key) for each in examples] for key in names}
    values = columns | {
        "prompts": [each.prompt for each in examples],
        "completions": [each.text for each in trajectories],
        "raw": [each.text if each.raw is None else each.raw for each in trajectories],
        "rewards": rewards.tolist(),
    }
    parameters = inspect.signature(function).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        values = {key: value for key, value in values.items() if key in parameters}
    result = function(**values)
    short = name.rpartition(":")[2]
    named = (
        {f"{short}/{key}": value for key, value in result.items()}
        if isinstance(result, dict)
        else {short: result}
    )
    try:
        return {f"eval/{key}": float(value) for key, value in named.items()}
    except (TypeError, ValueError):
        raise DataError(
            f"evaluation metric {name}: gave {result!r}, which is no number and no mapping to "
            "numbers"
        ) from None
