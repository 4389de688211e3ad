"""Rollouts made of completions, as `collect` makes them."""

from rollout.collect import Rollouts
from rollout.types import Group, Trajectory

COUNTS = {"useful": 4, "rows": 4, "prefill": 1, "preempted": 0}


def rollouts(problems, prompt_ids, completions, scores=None, counts=COUNTS, versions=None):
    """Returns rollouts of these completions [P][G]; a problem without ids has the prompt [7]."""
    groups = [
        Group(
            problem,
            prompt_id,
            [Trajectory.of_completion(getattr(problem, "ids", [7]), each, version) for each in own],
            row=number,
        )
        for number, (problem, prompt_id, own, version) in enumerate(
            zip(problems, prompt_ids, completions, versions or [0] * len(problems), strict=True)
        )
    ]
    return Rollouts(groups, scores, counts, 0.5)
