"""Accuracy on held-out problems: greedy, and pass@k from samples."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rewards import Scores, plugins
from rewards.workers.rounding import at_least
from rl.config.data import EvaluationOptions
from rl.data.encoded import Problem
from rl.errors import DataError
from rl.stages.sampling.by_source import numbers_by_prefix
from rl.stages.sampling.params import WITHOUT_FILTERS
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rollout import SamplingParams
    from rollout.types import Trajectory

# Evaluation draws from keys of its own, so that training sees the same numbers with and without it.
SEED_OFFSET = 1 << 30


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns an unbiased estimate of the chance that one of k samples is correct (arXiv
    2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def params_of(
    options: EvaluationOptions, params: SamplingParams
) -> tuple[SamplingParams, SamplingParams]:
    """Returns how greedy and sampled completions of an evaluation are drawn. params: lengths and
    stops. Raises ValueError for settings of the evaluation that are out of range or do not fit
    these lengths."""
    unfiltered = replace(params, n=1, **WITHOUT_FILTERS, **options.processors)
    greedy = replace(unfiltered, temperature=0)
    return greedy, replace(unfiltered, n=max(1, options.samples), temperature=options.temperature)


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
    ):
        """Computes nothing yet.

        collect: completes and scores (problems, params, prompt ids). params: lengths and stops;
        temperatures come from `options`. record: gets (step, completions, scores) of each call.
        block: problems of one call, whose pictures are on the devices at a time; None: all.
        """
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
        """Returns eval/greedy_accuracy, eval/reward_mean and eval/pass@k after a step, and what
        they count.

        A completion without a score is in none of them, and counted in eval/unscored and
        eval/unscored_samples. A problem with fewer than k scored samples is not in pass@k. A metric
        of no completion is absent.
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
            totals = self._rollouts(sampled, step)[1].reshape(len(self.problems), options.samples)
            metrics["eval/samples"] = float(options.samples)
            for prefix, rows in problems.items():
                of_rows = self._sampled(totals[rows])
                metrics |= {f"{prefix}{name}": each for name, each in of_rows.items()}
        return metrics | {"time/eval": time.perf_counter() - began}

    def _greedy(self, totals_P: np.ndarray) -> dict[str, float]:
        """Returns the metrics of greedy completions with these rewards."""
        scored = totals_P[np.isfinite(totals_P)]
        metrics = {
            "problems": float(len(totals_P)),
            "unscored": float(np.sum(~np.isfinite(totals_P))),
        }
        if scored.size:
            correct = at_least(scored, self.options.correct_at)
            metrics["greedy_accuracy"] = float(np.mean(correct))
            metrics["reward_mean"] = float(np.mean(scored))
        return metrics

    def _sampled(self, totals_PG: np.ndarray) -> dict[str, float]:
        """Returns the metrics of sampled completions with these rewards."""
        scored = np.isfinite(totals_PG).sum(axis=1)
        correct = at_least(totals_PG, self.options.correct_at).sum(axis=1)
        counts = list(zip(scored.tolist(), correct.tolist(), strict=True))
        metrics = {"unscored_samples": float(np.sum(~np.isfinite(totals_PG)))}
        for k in self.options.k:
            if chances := [pass_at_k(n, c, k) for n, c in counts if n >= k]:
                metrics[f"pass@{k}"] = float(np.mean(chances))
        return metrics

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
