"""Defines the scores of completions, and the faults of the reward functions.

Shapes: N completions, F functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class RewardFault:
    """A sample to which a function gave no score.

    kind: raised, timeout, died (the process ended), wrong_type, wrong_length, not_finite, or load
    (the worker could not
        import the function).
    """

    function: str
    sample: int
    kind: str
    traceback: str
    prompt: object
    completion: object

    def sample_text(self) -> str:
        """Returns prompt and completion for a message, shortened."""
        return f"prompt: {_shortened(self.prompt)}\ncompletion: {_shortened(self.completion)}"


@dataclass(frozen=True)
class Scores:
    """The scores of N completions.

    rewards: float64[N, F]; NaN: no score.
    total: float64[N], weighted sum of the scores of a sample; NaN if it has none or any function
    faulted.
    names: short names of the F functions.
    faults: by function, then sample.
    logs: sample -> function -> what the function printed, or returned with the score.
    causes: function -> why its first failed call with several completions failed; each was then
    scored alone.
    """

    rewards: np.ndarray
    total: np.ndarray
    names: tuple[str, ...]
    faults: list[RewardFault]
    metrics: dict[str, float]
    logs: dict[int, dict[str, str]] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)


def _shortened(value: object) -> str:
    text = repr(value)
    return (
        text
        if len(text) <= _SHOWN_CHARACTERS
        else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    )
