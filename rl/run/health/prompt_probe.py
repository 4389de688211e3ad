"""Samples a few prompts with the settings of a stage before its first step, and tells whether it
can learn from them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from rewards.workers.rounding import all_equal
from rl.data.encoded import Problem
from rl.errors import Fault
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from rollout import SamplingParams
    from rollout.text.interface import Tokenizer
    from rollout.types import Trajectory

FIRST_ID = 3 << 29
"""First prompt id of a probe. Neither training nor evaluations draw from these ids, so a probe
changes no number."""
MOST_CUT = 0.9
MOST_UNSCORED = 0.5


@dataclass(frozen=True)
class ProbeResult:
    """What the completions of a probe show.

    cut: share that ran into max_new_tokens. stops: share that ended with each stop. reward_mean,
    reward_std: over the scored completions; None without one. scored: share with a score; None:
    there are no reward functions. signal: share of groups whose rewards differ; None for groups of
    one. faults: failed scores. seconds: time of the probe. logp_diff: mean difference of the
    log-probabilities of generator and trainer; None where it was not measured. needs_rewards:
    whether the stage learns from rewards.
    """

    stage: str
    prompts: int
    completions: int
    cut: float
    stops: dict[str, float]
    mean_length: float
    max_new_tokens: int
    reward_mean: float | None
    reward_std: float | None
    scored: float | None
    signal: float | None
    faults: int
    seconds: float
    logp_diff: float | None = None
    needs_rewards: bool = True

    def lines(self) -> list[str]:
        """Returns lines: what was sampled, how completions ended, and their rewards, if any."""
        ends = ", ".join(f"{name} {share:.0%}" for name, share in self.stops.items()) or "no stop"
        reward = (
            "no score"
            if self.reward_mean is None
            else f"{self.reward_mean:.3g} +- {self.reward_std:.2g}"
        )
        signal = "" if self.signal is None else f", {self.signal:.0%} of the groups differ"
        logp_diff = (
            ""
            if self.logp_diff is None
            else f"; generator against trainer {self.logp_diff:.2g} per token"
        )
        return [
            f"probe of {self.stage}: {self.prompts} prompts, {self.completions} completions in "
            f"{self.seconds:.1f} s{logp_diff}",
            f"  ended by {ends}; {self.cut:.0%} cut off at {self.max_new_tokens} tokens; mean "
            f"length {self.mean_length:.1f}",
            *(
                ()
                if self.scored is None
                else (
                    f"  reward {reward}{signal}; {self.scored:.0%} have a score, "
                    f"{self.faults} faults",
                )
            ),
        ]

    def check(self) -> list[Fault]:
        """Returns a fault, with the name of the illness in `rl explain`, for each cause of learning
        nothing."""
        result = []
        if self.cut > MOST_CUT:
            result.append(
                Fault(
                    f"{self.cut:.0%} of the completions are cut off at {self.max_new_tokens} "
                    "tokens: raise sampling.max_new_tokens, or check chat template and stop "
                    "tokens with `rl inspect`",
                    name="clipped completions",
                )
            )
        if self.scored is None or not self.needs_rewards:
            return result
        if self.scored < 1 - MOST_UNSCORED:
            result.append(
                Fault(
                    f"{1 - self.scored:.0%} of the completions have no score ({self.faults} "
                    "faults): read the tracebacks above, then `rl reward test FUNCTION`",
                    name="reward faults" if self.faults else "no scores",
                )
            )
        elif self.reward_std == 0 and self.completions > 1:
            result.append(
                Fault(
                    f"all {self.completions} rewards are {self.reward_mean:g}: test the reward on "
                    "demonstrations with `rl inspect`, use easier problems, or start from weights "
                    "that solve some (stage sft)",
                    name="equal rewards",
                )
            )
        return result

    def to_json(self) -> dict[str, object]:
        """Returns all fields as values that JSON can hold."""
        problems = [{"illness": each.name, "text": each.text} for each in self.check()]
        return {**asdict(self), "problems": problems}


def probe(
    stage: str,
    problems: Sequence[Problem],
    params: SamplingParams,
    collect: Callable[[Sequence[Problem], SamplingParams, Sequence[int]], Rollouts],
    tokenizer: Tokenizer,
) -> tuple[ProbeResult, Rollouts]:
    """Samples `params.n` completions of each problem with `collect`, and waits for their scores."""
    began = time.perf_counter()
    rollouts = collect(problems, params, range(FIRST_ID, FIRST_ID + len(problems)))
    scores = rollouts.scores.result()
    trajectories = rollouts.trajectories
    groups = scores.total.reshape(len(problems), params.n)
    scored = scores.total[np.isfinite(scores.total)]
    differ = [not all_equal(group) for group in groups if np.isfinite(group).any()]
    ends = Counter(
        _end(trajectory, params, tokenizer)
        for trajectory in trajectories
        if not trajectory.truncated
    )
    result = ProbeResult(
        stage=stage,
        prompts=len(problems),
        completions=len(trajectories),
        cut=float(np.mean([trajectory.truncated for trajectory in trajectories])),
        stops={name: count / len(trajectories) for name, count in ends.most_common()},
        mean_length=float(np.mean([trajectory.length for trajectory in trajectories])),
        max_new_tokens=params.max_new_tokens,
        reward_mean=float(scored.mean()) if scored.size else None,
        reward_std=float(scored.std()) if scored.size else None,
        scored=scored.size / len(trajectories) if scores.names else None,
        signal=float(np.mean(differ)) if params.n > 1 and differ else None,
        faults=len(scores.faults),
        seconds=time.perf_counter() - began,
    )
    return result, rollouts


def _end(trajectory: Trajectory, params: SamplingParams, tokenizer: Tokenizer) -> str:
    """Returns the name of the stop that ended a trajectory."""
    last = int(trajectory.segments[-1].tokens[-1])
    if last in params.stop_token_ids:
        return str(tokenizer.convert_ids_to_tokens(last))
    return next(
        (repr(text) for text in params.stop if text in (trajectory.text or "")), "a stop text"
    )
