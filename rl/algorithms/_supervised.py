"""Defines the defaults of algorithms that learn from a dataset and do not sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rl.algorithms._inputs import PolicyInputs


class Supervised:
    """Defaults of an algorithm that learns from data alone: no inputs, no adaptive coefficients."""

    stage: ClassVar[str] = "supervised"
    inputs: ClassVar[frozenset[str]] = frozenset()
    repeated_inputs: ClassVar[frozenset[str]] = frozenset()
    adaptive_coefs: ClassVar[dict[str, float]] = {}
    first_update_metrics: ClassVar[frozenset[str]] = frozenset()
    metric_names: ClassVar[frozenset[str]] = frozenset()

    def scheduled_coefs(self, done: float) -> dict[str, float]:
        """Returns the `adaptive_coefs` that follow from the share of the stage's steps that are
        done: none."""
        return {}

    def adapt_after_update(
        self, coefs: dict[str, float], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Returns the values of `adaptive_coefs` for the next update: the same."""
        return coefs

    def token_flags(self, inputs: PolicyInputs) -> None:
        """Returns which tokens the loss cuts off: None, it cuts off none."""

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the `PolicyInputs` of a mini-batch with its counts; see
        `PolicyGradient.with_totals`."""
        from rl.algorithms._inputs import with_totals

        return with_totals(inputs)
