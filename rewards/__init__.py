"""Scores completions. A reward is a function `(prompts, completions, **columns) -> list[float |
None]`.

    from rewards import reward

    @reward
    def short(prompts, completions, limit=80):
        return [1.0 if len(text) <= limit else 0.0 for text in completions]

`registry` finds a function by name, module or file. `runner` calls it in worker processes, so that
its failures do not reach the run. `check` runs it on its examples. A file of this folder that holds
a function of its own name under `@reward` is a built-in reward.
"""

from importlib import import_module
from typing import Any

from rewards.registry import RewardError, RewardFailed, RewardFunction, known, load, reward
from rewards.text import text_of

__all__ = [
    "RewardError",
    "RewardFailed",
    "RewardFault",
    "RewardFunction",
    "Runner",
    "RunnerOptions",
    "Scores",
    "Share",
    "known",
    "load",
    "reward",
    "text_of",
]

_NEEDS_NUMPY = ("RewardFault", "Runner", "RunnerOptions", "Scores", "Share")


def __getattr__(name: str) -> Any:
    """Imports the runner, and with it numpy, on first use: worker processes start without numpy."""
    if name == "Fault":  # an older name that callers import
        name = "RewardFault"
    if name in _NEEDS_NUMPY:
        return getattr(import_module("rewards.runner"), name)
    raise AttributeError(f"module 'rewards' has no attribute {name!r}")
