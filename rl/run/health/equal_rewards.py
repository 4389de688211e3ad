"""Says once per stage that most groups have equal rewards, from which a group-relative algorithm
learns nothing.

P prompts, G completions of each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from rewards.text import quoted
from rewards.workers.rounding import all_equal
from rl.records.equal_groups import EQUAL_SHARE
from rl.stages.sampling.checks import compares_groups
from rl.stages.stage import StageKind

RECENT = 10
MOST = 8
"""Steps that are looked at, and how many of them must have a share of equal groups of EQUAL_SHARE
or more."""
SOLVED = 0.8
"""Share of the reward of a correct completion (`evaluation.correct_at`) from which equal rewards
mean solved problems.
"""


class EqualRewards:
    """Watches `reward/frac_zero_std` over the steps of a stage."""

    def __init__(self, stage: StageKind, fresh: bool):
        """Watches nothing if the stage does not sample, or its algorithm learns from groups of
        equal rewards.

        fresh: whether the stage begins with the next step, so that all its rewards are seen.
        """
        self._one_reward = fresh  # so far
        self._stage = stage
        self._watches = stage.trains_on_rollouts and compares_groups(stage)
        self._correct_at = stage.config.evaluation.correct_at if stage.config.evaluation else 1.0
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT)

    def after_step(self, metrics: Mapping[str, float]) -> str | None:
        """Takes the metrics of a step. Returns the note when it is due, once.

        Steps without a score count for nothing: `rewards.unscored_steps` is about them.
        """
        if not self._watches or not math.isfinite(metrics.get("reward/mean", math.nan)):
            return None
        self._recent.append(metrics)
        one = metrics["reward/std"] == 0 and all_equal(
            [metrics["reward/mean"], self._recent[0]["reward/mean"]]
        )
        self._one_reward = self._one_reward and one
        equal = [each["reward/frac_zero_std"] for each in self._recent]
        rewards = [each["reward/mean"] for each in self._recent]
        if len(equal) < RECENT or sum(share >= EQUAL_SHARE for share in equal) < MOST:
            return None
        solved = self._correct_at > 0 and np.median(rewards) >= SOLVED * self._correct_at
        if solved and not self._one_reward:
            return None
        self._watches = False
        return self._text(float(np.mean(equal)), float(np.mean(rewards)))

    def _text(self, share: float, mean: float) -> str:
        stage = self._stage
        key = f"stages.{self._stage.index}"
        begins = (
            f"{stage.name}: {share:.0%} of the groups of the last {RECENT} steps have equal rewards"
        )
        if self._one_reward:
            return (
                f"{begins}, every one {mean:.3g}: there is nothing to learn from them. Read some "
                f"completions (`rl samples {quoted(stage.config.run.dir)}`), and test the reward "
                "with `rl reward test`; if all problems are solved, use harder ones"
            )
        dynamic = "" if stage.algorithm.dynamic_batches else f", or {key}.algorithm.dynamic_batches"
        easier = "easier problems" if mean < 0.5 * self._correct_at else "other problems"
        return (
            f"{begins} (reward/mean {mean:.3g}): there is nothing to learn from them. Use "
            f"{easier}, a finer reward, more {key}.samples_per_prompt (now "
            f"{stage.options.samples_per_prompt}){dynamic}"
        )
