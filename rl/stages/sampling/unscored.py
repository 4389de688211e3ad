"""Ends a stage whose completions get no scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rewards import Scores
from rl.errors import RewardStop

if TYPE_CHECKING:
    from rl.stages.stage import StageKind


def check_scored(stage: StageKind, scores: Scores) -> None:
    """Raises RewardStop after `rewards.unscored_steps` steps in a row without one score."""
    progress = stage.context.progress
    progress.unscored_steps = 0 if np.isfinite(scores.total).any() else progress.unscored_steps + 1
    limit = min(stage.rewards.unscored_steps, stage.options.total_steps)
    if limit and progress.unscored_steps >= limit:
        raise RewardStop(_message(stage.name, progress.unscored_steps, scores))


def _message(stage: str, steps: int, scores: Scores) -> str:
    """Returns the message about steps without a score, with the first fault of the last one."""
    cause = "every function returned None (not applicable)"
    if scores.faults:
        fault = scores.faults[0]
        cause = (
            f"{fault.function} failed ({fault.kind}): "
            f"{fault.traceback.strip().rpartition(chr(10))[2]}"
        )
    return (
        f"{stage}: no completion of the last {steps} steps has a score, so there is nothing to "
        f"learn: {cause}. Test the function with `rl reward test`, or set "
        "rewards.unscored_steps=0 to go on"
    )
