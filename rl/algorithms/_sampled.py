"""Defines stage options and interface defaults of algorithms that learn from sampled
completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import numpy as np
from pydantic import Field, model_validator

from rl.algorithms._options import algorithm_options

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs
    from rl.algorithms._protocols import OldLogps, SampledArrays

ArrayT = TypeVar("ArrayT")


@algorithm_options()
class Sampled:
    """An algorithm of an online stage: no inputs, no adaptive coefficients, no critic."""

    stage: ClassVar[str] = "online"
    critic_warmup: ClassVar[int] = 0  # first steps in which only a critic learns
    old_logp: ClassVar[str | None] = None  # "trainer" or "sampler" for a loss with a ratio
    needs_rewards: ClassVar[bool] = True  # whether completions without a score leave the loss
    reference_every: ClassVar[int] = 0  # steps after which the reference model is renewed
    inputs: ClassVar[frozenset[str]] = frozenset()
    repeated_inputs: ClassVar[frozenset[str]] = frozenset()
    adaptive_coefs: ClassVar[dict[str, float]] = {}
    first_update_metrics: ClassVar[frozenset[str]] = frozenset()
    """Metrics of which a step logs the value of its first update: those that compare generator and
    trainer without a pass before the updates, since later updates compare with weights that the
    step has changed."""

    mask_truncated: bool = Field(
        False,
        description="no loss on completions that were cut off; their rewards still count in their "
        "group",
    )
    dynamic_batches: int = Field(
        0,
        ge=0,
        description="generation batches at most, to fill a step with groups whose rewards differ; "
        "the others are dropped, those too many kept for the next step (DAPO, arXiv:2503.14476); "
        "0: every group is kept",
    )
    dynamic_reward: str | None = Field(
        None, description="the reward function that has to differ; null: their weighted sum"
    )

    metric_names: ClassVar[frozenset[str]] = frozenset()
    """Names of metrics of the loss that docs/metrics.md lacks, so that `until.metric` can name
    them."""

    def token_flags(self, inputs: PolicyInputs) -> jax.Array | None:
        """Returns uint8[N,T]: which tokens of a PolicyInputs clipping or the sampler correction
        cuts off; None: the loss does not say."""
        return None

    @model_validator(mode="after")
    def _consistent_groups(self):
        if self.dynamic_reward is not None and not self.dynamic_batches:
            raise ValueError("dynamic_reward does nothing without dynamic_batches")
        return self

    def select_old_logp(self, arrays: OldLogps[ArrayT]) -> ArrayT:
        """Returns the old log-probabilities among the arrays of a Batch or a PolicyInputs."""
        return arrays.old_logp

    def adapt_after_update(
        self, coefs: dict[str, float], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Returns the values of `adaptive_coefs` for the next update, from the values and the
        metrics of this one."""
        return coefs

    def adapt_after_step(
        self, coefs: dict[str, float], metrics: dict[str, float], completions: int
    ) -> dict[str, float]:
        """Returns the values of `adaptive_coefs` for the next step, from the values and the metrics
        of this one."""
        return coefs

    def with_coefs(self, coefs: dict[str, float]) -> Self:
        """Returns the algorithm that computes `advantages` with these values of
        `adaptive_coefs`."""
        return self

    def estimate(
        self, rewards: np.ndarray, lengths: np.ndarray, batch: SampledArrays, **inputs: Any
    ) -> tuple[np.ndarray, np.ndarray | None, dict[str, float]]:
        """Returns (advantages, returns that a critic learns or None, metrics) of the N = P G
        completions.

        Advantages are float[N] or float[N,T].

        rewards: float[P,G]. lengths: int[P,G], tokens. batch: the Batch of all completions. inputs:
        further arguments of `advantages`, added by the providers of rl/stages/inputs.py: `greedy`,
        `weights`, `mask`, `token_kl`.
        """
        advantages = cast(Any, self).advantages(rewards, lengths, **inputs)
        return advantages.reshape(-1, *advantages.shape[2:]), None, {}
