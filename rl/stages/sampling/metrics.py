"""Metrics of the groups of a step: rewards, lengths, and the work of the generator.

P prompts, G trajectories of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rewards import Scores
from rewards.workers.rounding import all_equal, without_rounding
from rl.accounting.flops import Operations, memory_share, rates
from rl.stages.sampling import by_source
from rl.stages.sampling.reward_statistics import reward_statistics
from rollout.collect import Rollouts

if TYPE_CHECKING:
    from policy.mesh.sharding import Layout
    from rollout.generator import Generator


def sampled_metrics(
    rollouts: Rollouts,
    scores: Scores,
    generator: Generator,
    operations: Operations,
    layout: Layout,
    *,
    drafted: bool,
) -> dict[str, float]:
    """Returns the metrics of the groups of a step: `group_metrics`, `generator_rates`, and those of
    how the groups were chosen."""
    return (
        group_metrics(rollouts, scores, drafted=drafted)
        | generator_rates(rollouts, operations, generator, layout)
        | dict(rollouts.metrics)
    )


def group_metrics(rollouts: Rollouts, scores: Scores, *, drafted: bool) -> dict[str, float]:
    """Returns rewards and lengths of a step, also by source, by the names of docs/metrics.md. If
    nothing was scored, `reward/mean` is NaN, and the other statistics of rewards are absent.
    Without reward functions all of them are.

    drafted: adds the tokens that drafts gained.
    """
    G = len(rollouts.groups[0].trajectories)
    trajectories = rollouts.trajectories
    totals = without_rounding(scores.total.reshape(-1, G))
    scored = totals[np.isfinite(totals)]
    lengths = np.asarray([trajectory.length for trajectory in trajectories])
    ended = np.asarray([not trajectory.truncated for trajectory in trajectories])
    statistics = reward_statistics(totals)
    result = {
        "completion/mean_length": float(lengths.mean()),
        "completion/min_length": float(lengths.min()),
        "completion/max_length": float(lengths.max()),
        "completion/truncated_ratio": float(1 - ended.mean()),
        "time/sample": rollouts.seconds,
    }
    if scores.names:
        result["reward/mean"] = float("nan") if statistics is None else statistics.mean
        result["reward/unscored"] = float(np.sum(~np.isfinite(totals)))
    counts = rollouts.counts
    if counts is not None:
        # Of the rows of all decoding steps, those that produced a token.
        result["generator/useful_rows"] = counts["useful"] / max(1, counts["rows"])
        result["generator/prompt_tokens_read"] = float(counts["prefill"])
        result["generator/preempted"] = float(counts["preempted"])
        if "checked" in counts:
            result["generator/replaced_share"] = counts["replaced"] / max(1, counts["checked"])
    if statistics is not None:
        result["reward/std"] = 0.0 if all_equal(scored) else float(scored.std(ddof=1))
        result["reward/frac_zero_std"] = statistics.frac_zero_std
    if rollouts.scoring:
        result["time/reward_models"] = rollouts.scoring
    if drafted and counts is not None:
        steps = sum(trajectory.steps for trajectory in trajectories)
        result["speculative/accepted_per_step"] = float(lengths.sum() / steps - 1)
    if ended.any():
        result |= {
            f"completion/{name}_terminated_length": float(getattr(lengths[ended], name)())
            for name in ("mean", "min", "max")
        }
    return result | scores.metrics | by_source.of_rollouts(rollouts, scores)


def generator_flops(rollouts: Rollouts, operations: Operations) -> float:
    """Returns the FLOPs of the generator for these trajectories; 0 where none was called.

    Groups that dynamic sampling left out are counted by their tokens only, without the FLOPs of
    their attention.
    """
    counts = rollouts.counts
    if counts is None:
        return 0.0
    lengths = [len(row.segment.tokens) for row in rollouts.rows]
    return operations.forward(lengths, weighed=counts["prefill"] + counts["useful"])


def generator_rates(
    rollouts: Rollouts, operations: Operations, generator: Generator, layout: Layout
) -> dict[str, float]:
    """Returns the rates of the generator while it sampled these groups; {} where none was
    called."""
    counts = rollouts.counts
    if counts is None:
        return {}
    flops = generator_flops(rollouts, operations)
    weights_read = counts["steps"] * generator.weight_bytes
    shares = memory_share(weights_read, rollouts.seconds, layout)
    return rates("sample", flops, counts["tokens"], rollouts.seconds, layout) | shares
