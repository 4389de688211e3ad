"""What the policy-gradient algorithms share: the options of their loss, and advantages relative to a group.

Shapes: P prompts, G completions of one prompt (the group). Host code, numpy only; the loss itself is in `_losses`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from rl.algorithms._options import algorithm_options

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]


@algorithm_options
class PolicyGradient:
    """The clipped policy-gradient loss and its options. With R = exp(logp - old_logp), for each token

        max(-R A, -clip(R, 1 - epsilon, 1 + epsilon_high) A) * w + kl_coef * KL(policy, reference)

    where A is the advantage and w the sampler correction; the tokens are then aggregated, and `entropy_coef` times the
    mean entropy is taken off. (Schulman et al. 2017, arXiv:1707.06347; Shao et al. 2024, arXiv:2402.03300)
    """

    needs_rollouts: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = False

    epsilon: float = Field(0.2, ge=0, description="the ratio is clipped below 1 - epsilon where A < 0")
    epsilon_high: float | None = Field(None, ge=0, description="and above 1 + epsilon_high where A > 0; null: epsilon")
    delta: float | None = Field(None, gt=1, description="cap of the ratio where A < 0 (arXiv:2505.07291)")
    dual_clip: float | None = Field(None, gt=1, description="c: the loss is at most -c A where A < 0 (arXiv:1912.09729)")
    ratio: Literal["token", "sequence", "sequence_token"] = Field(
        "token", description="sequence: length-normalised ratio of the sequence (GSPO, arXiv:2507.18071)"
    )
    aggregation: Literal["token", "sequence", "sequence_sum", "constant", "prompt"] = Field(
        "token",
        description="from tokens to a scalar; constant: over sequences x maximum length (arXiv:2503.20783)",
    )
    count_empty_sequences: bool = Field(True, description="completions without a token count in means over sequences")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL term; 0 needs no reference model")
    kl: Literal["k1", "k2", "k3", "unbiased"] = Field("k3", description="estimator of the KL term; unbiased: R k3")
    correction: Correction | None = Field(None, description="what is done with w = exp(old_logp - sampler_logp)")
    correction_min: float | None = Field(None, ge=0, description="lower bound; default: none, geometric_mask 0.999")
    correction_max: float | None = Field(None, gt=0, description="upper bound; default: 3, geometric_mask 1.002")
    off_policy_delta: float | None = Field(
        None, gt=0, description="drop completions with A < 0 whose mean log-probability fell by more since sampling"
    )
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    top_entropy: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of tokens, of highest entropy, that keep their policy loss (arXiv:2506.01939)",
    )

    @model_validator(mode="after")
    def _consistent(self):
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ValueError(f"delta ({self.delta}) must be above 1 + epsilon_high ({1 + high}): it caps beyond the clipping")
        if self.kl == "k1" and self.kl_coef:
            raise ValueError(
                "kl: k1 is no loss, the expectation of its gradient is zero. Use k3, k2 or unbiased; "
                "with kl_coef: 0, k1 is only logged"
            )
        if self.correction is None and (self.correction_min is not None or self.correction_max is not None):
            raise ValueError("correction_min and correction_max do nothing without correction")
        low, high = self.correction_bounds
        if low >= high:
            raise ValueError(f"correction_min ({low}) must be below correction_max ({high})")
        return self

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Bounds of the sampler's weights; those of geometric_mask are NeMo-RL's reference, 3 is TRL's."""
        low, high = (0.999, 1.002) if self.correction == "geometric_mask" else (0.0, 3.0)
        return (
            low if self.correction_min is None else self.correction_min,
            high if self.correction_max is None else self.correction_max,
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss cannot do without `entropy`; where it is given anyway it is logged."""
        return self.entropy_coef != 0 or self.top_entropy is not None

    def needs_old_logp(self, updates_per_step: int) -> bool:
        """Before the only update of a batch, old and current log-probabilities are the same numbers and one forward is
        saved.

        The entropy quantile is one of the whole batch, so it has to be known before the first micro-batch.
        """
        return updates_per_step > 1 or self.top_entropy is not None

    def with_totals(self, inputs):
        """`inputs` of a whole optimiser batch with its token, sequence and prompt counts, and its entropy quantile,
        filled in.

        Micro-batches cut from the result give losses, gradients and metrics that add up to those of the whole batch.
        """
        from rl.algorithms._inputs import with_totals

        return with_totals(inputs, self.aggregation == "prompt", self.count_empty_sequences, top_entropy=self.top_entropy)

    def loss(self, inputs):
        """Loss and metrics of a `PolicyInputs`, as (float32 scalar, dict of float32 scalars).

        Losses, gradients and metrics of micro-batches add up (metrics by `reduce_metrics`) where the totals are given.
        Raises ValueError where an input is absent that an option needs.
        """
        from rl.algorithms._losses import policy_loss

        return policy_loss(self, inputs)


@algorithm_options
class GroupRelative:
    """Advantages from the other completions of the same prompt, without a critic."""

    scale: Literal["group", "batch", "none", "others"] = Field(
        "group",
        description="what centred rewards are divided by: a standard deviation, or none (Dr.GRPO, arXiv:2503.20783)",
    )
    std_eps: float = Field(1e-4, ge=0, description="added to the standard deviation")

    def advantages(self, rewards, lengths=None) -> np.ndarray:
        """float[P,G] rewards, NaN: no score -> float[P,G], as `group_advantages` says; `lengths` plays no part."""
        return group_advantages(rewards, self.scale, self.std_eps)


def group_advantages(rewards, scale: str, std_eps: float) -> np.ndarray:
    """Rewards minus the mean of their group, over a standard deviation (with n - 1) plus `std_eps`.

    `scale`: group: of the group; batch: of all rewards; none: no division; others: both mean and deviation are of the
    other completions of the group, and without a deviation there is no division (NeMo-RL).
    A completion without a score (not finite) takes no part and gets 0. Equal rewards, and a single one, give exactly 0:
    the rounding of a mean over a small `std_eps` would not.
    float[P,G] -> float[P,G], computed in float64; float32 stays float32.
    """
    rewards = np.asarray(rewards)
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape [prompts, completions], got {list(rewards.shape)}")
    dtype = np.float32 if rewards.dtype == np.float32 else np.float64
    scored_PG = np.isfinite(rewards.astype(np.float64))
    rewards_PG = np.where(scored_PG, rewards, 0).astype(np.float64)
    mean_P1, std_P1 = _moments(rewards_PG, scored_PG)
    varied_P1 = std_P1 > 0
    if scale == "others":
        group = rewards_PG.shape[1]
        others_PGG = scored_PG[:, None, :] & ~np.eye(group, dtype=bool)
        mean_PG1, std_PG1 = _moments(np.broadcast_to(rewards_PG[:, None, :], others_PGG.shape), others_PGG)
        centred_PG, std = rewards_PG - mean_PG1[..., 0], std_PG1[..., 0]
        divisor = np.where(std > 0, std + std_eps, 1.0)
    else:
        centred_PG = rewards_PG - mean_P1
        batch_std = _moments(rewards_PG.reshape(1, -1), scored_PG.reshape(1, -1))[1]
        divisor = {"group": std_P1 + std_eps, "batch": batch_std + std_eps, "none": np.ones(1)}[scale]
    return np.where(scored_PG & varied_P1, centred_PG / np.where(varied_P1, divisor, 1.0), 0.0).astype(dtype)


def _moments(values: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n - 1) of valid values over the last axis, kept; exactly 0 where all are equal."""
    count = valid.sum(-1, keepdims=True)
    mean = np.where(valid, values, 0).sum(-1, keepdims=True) / np.maximum(count, 1)
    squares = np.where(valid, (values - mean) ** 2, 0).sum(-1, keepdims=True)
    highest = np.where(valid, values, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    lowest = np.where(valid, values, np.inf).min(-1, keepdims=True, initial=np.inf)
    return mean, np.where(highest > lowest, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)
