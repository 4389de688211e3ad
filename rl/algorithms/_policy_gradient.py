"""Defines the options of policy-gradient losses, and advantages relative to a group.

Shapes: P prompts, G completions of one prompt (the group), F reward functions, T tokens. Letters
after an underscore are the axes: rewards_PG is [P, G]. Advantages are numpy on the host. The losses
of the device are in `_losses`, which is imported lazily.

Log-probabilities of a token:

    logp           under the weights that are trained
    old_logp       before the updates of the step, or the generator's (option `old_logp`,
                   `generator.exact`); the ratio is R = exp(logp - old_logp)
    sampler_logp   as the generator computed it
    ref_logp       under the reference model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from rl.algorithms._advantages import combined_advantages, completion_mask, group_advantages
from rl.algorithms._options import algorithm_options
from rl.algorithms._sampled import ArrayT, Sampled

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs
    from rl.algorithms._losses import Tokens
    from rl.algorithms._protocols import OldLogps

_KL_COEF = "kl/coef"
Correction = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]
Rejection = Literal[
    "token_k2",
    "token_k3",
    "sequence_sum_k2",
    "sequence_sum_k3",
    "sequence_mean_k2",
    "sequence_mean_k3",
    "sequence_max_k2",
    "sequence_max_k3",
    "sequence_max_ratio",
]


@algorithm_options()
class PolicyGradient(Sampled):
    """The base of all policy-gradient losses. For each token

        loss(logp, old_logp, A) * w + kl_coef * KL(policy, reference)

    where A is the advantage and w is the weight of the sampler correction (the option
    `correction`). `per_token` of the algorithm computes loss(logp, old_logp, A), which
    `off_policy_delta` and `top_entropy` set to 0 for some tokens. The tokens are then aggregated,
    and `entropy_coef` times the mean entropy is subtracted. (Shao et al. 2024, arXiv:2402.03300)
    """

    # Whether `per_token` applies w itself, in a form of its own.
    per_token_applies_correction: ClassVar[bool] = False

    aggregation: Literal["token", "sequence", "sequence_sum", "constant", "prompt"] = Field(
        "token",
        description="from tokens to a scalar; constant: over sequences x maximum length "
        "(arXiv:2503.20783)",
    )
    count_empty_sequences: bool = Field(
        True, description="completions without a token count in means over sequences"
    )
    old_logp: Literal["trainer", "sampler"] = Field(
        "trainer",
        description="source of the old log-probabilities. trainer: a forward pass of the training "
        "graph, or the update itself if a step makes one update. sampler: the generator, which "
        "saves that pass; nothing is then corrected",
    )
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL term; 0 needs no reference model"
    )
    kl: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3",
        description="estimator of the KL term; unbiased: k3 times the ratio exp(logp - old_logp)",
    )
    reference_every: int = Field(
        0, ge=0, description="steps after which the reference model is renewed; 0: never"
    )
    reference_mix: float = Field(
        1.0, gt=0, le=1, description="share of the policy in the renewed reference model"
    )
    correction: Correction | None = Field(
        None, description="what is done with w = exp(old_logp - sampler_logp)"
    )
    correction_min: float | None = Field(
        None, ge=0, description="lower bound; default: none, geometric_mask 0.999"
    )
    correction_max: float | None = Field(
        None, gt=0, description="upper bound; default: 3, geometric_mask 1.002"
    )
    correction_normalize: bool = Field(
        False,
        description="the bounded weights are divided by their mean over the tokens of the update, "
        "so that it is 1",
    )
    rejection: Rejection | None = Field(
        None,
        description="drop tokens or sequences where d = old_logp - sampler_logp is too large: d^2 "
        "/ 2 (k2), exp(d) - d - 1 (k3), or any token's exp(|d|) (ratio)",
    )
    rejection_max: float | None = Field(None, gt=0, description="above this they are dropped")
    rejection_changes_denominator: bool = Field(
        False, description="what correction or rejection drops does not count in means either"
    )
    off_policy_delta: float | None = Field(
        None,
        gt=0,
        description="drop completions with A < 0 whose mean log-probability per token has fallen "
        "by more than this since they were sampled",
    )
    entropy_coef: float = Field(
        0.0, description="weight of the entropy bonus; with entropy_target, its first value"
    )
    entropy_target: float | None = Field(
        None,
        gt=0,
        description="target of the entropy. At or below it, the bonus applies and its weight "
        "grows by entropy_step per "
        "update. Above it, the bonus does not apply and its weight shrinks by entropy_step",
    )
    entropy_step: float = Field(
        0.005, gt=0, description="change of entropy_coef per update under entropy_target"
    )
    entropy_coef_max: float = Field(
        1.0, gt=0, description="upper bound of a moving entropy_coef; lower: 0"
    )
    top_entropy: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of tokens, of highest entropy, that keep their policy loss "
        "(arXiv:2506.01939)",
    )

    @model_validator(mode="after")
    def _consistent_loss(self):
        if self.kl == "k1" and self.kl_coef:
            raise ValueError(
                "kl: k1 is no loss, the expectation of its gradient is zero. Use k3, k2 or "
                "unbiased; "
                "k1 is only for logging, with kl_coef: 0 and the reference model of kl_reward_coef"
            )
        if self.correction is None and (
            self.correction_min is not None or self.correction_max is not None
        ):
            raise ValueError("correction_min and correction_max do nothing without correction")
        if self.correction_normalize and (
            self.correction is None or self.per_token_applies_correction
        ):
            raise ValueError(
                "correction_normalize needs a correction that multiplies the loss of a token"
            )
        low, high = self.correction_bounds
        if low >= high:
            raise ValueError(f"correction_min ({low}) must be below correction_max ({high})")
        if (self.rejection is None) != (self.rejection_max is None):
            raise ValueError("rejection and rejection_max go together")
        if (
            self.rejection == "sequence_max_ratio"
            and self.rejection_max is not None
            and self.rejection_max <= 1
        ):
            raise ValueError(
                f"rejection_max ({self.rejection_max}) bounds a ratio of probabilities: it must "
                "be above 1"
            )
        if self.rejection_changes_denominator and not self._drops:
            raise ValueError(
                "rejection_changes_denominator does nothing without rejection or a correction "
                "that masks"
            )
        if self.old_logp == "sampler" and (self.correction or self.rejection):
            raise ValueError(
                "old_logp: sampler excludes correction and rejection: the ratio already measures "
                "from the sampler"
            )
        if self.reference_every and not self.may_have_reference:
            raise ValueError("reference_every: there is no reference model without a KL term")
        return self

    @property
    def may_have_reference(self) -> bool:
        """Whether a stage can have a reference model: for a KL term, or as a teacher."""
        return "ref_logp" in self.inputs

    @property
    def _drops(self) -> bool:
        return self.rejection is not None or (self.correction or "").endswith("mask")

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Returns the bounds of the correction weights. Defaults: NeMo-RL for geometric_mask, TRL
        for the others."""
        low, high = (0.999, 1.002) if self.correction == "geometric_mask" else (0.0, 3.0)
        return (
            low if self.correction_min is None else self.correction_min,
            high if self.correction_max is None else self.correction_max,
        )

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return self.entropy_coef != 0 or self.entropy_target is not None

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the names of rl/stages/inputs.py that the loss and the advantages take.

        `old_logp` is one of them if the loss needs a statistic of the mini-batch in advance: the
        entropy quantile, the count of tokens that are not rejected, or the mean weight of the
        correction. This input is a pass of the trainer before the updates, whatever the option
        `old_logp` says.
        """
        uses = {
            "ref_logp": self.kl_coef > 0,
            "sampler_logp": self.correction is not None
            or self.rejection is not None
            or self.old_logp == "sampler",
            "entropy": self.has_entropy_bonus or self.top_entropy is not None,
            "old_logp": self.top_entropy is not None
            or self.rejection_changes_denominator
            or self.correction_normalize,
        }
        return frozenset(name for name, is_used in uses.items() if is_used)

    @property
    def repeated_inputs(self) -> frozenset[str]:
        """Returns the inputs that several updates per step need in addition. With one update, logp
        before the update is old_logp, and the update needs no pass for it."""
        return frozenset({"old_logp"} if self.old_logp == "trainer" else ())

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of each token [N,T], metrics). Each algorithm has its own."""
        raise NotImplementedError

    def token_flags(self, inputs: PolicyInputs) -> jax.Array | None:
        from rl.algorithms._token_flags import token_flags

        return token_flags(self, inputs)

    def select_old_logp(self, arrays: OldLogps[ArrayT]) -> ArrayT:
        """Returns the log-probabilities that the ratio of the loss divides by: the array
        `sampler_logp` or `old_logp` of a Batch or a PolicyInputs, as the option `old_logp` says."""
        return arrays.sampler_logp if self.old_logp == "sampler" else arrays.old_logp

    @property
    def first_update_metrics(self) -> frozenset[str]:
        names = ("sampler/logp_diff_mean", "sampler/logp_diff_max")
        return frozenset(names if self.old_logp == "sampler" else ())

    @property
    def adaptive_coefs(self) -> dict[str, float]:
        """Returns the initial values of the adapted scalars: with `entropy_target`, the entropy
        coefficient."""
        if self.entropy_target is None:
            return {}
        return {"entropy_coef": self.entropy_coef, "entropy_bonus_applied": 0.0}

    def adapt_after_update(
        self, coefs: dict[str, float], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Returns the values for the next update from the values and metrics of this one, as in
        TRL."""
        if self.entropy_target is None:
            return coefs
        low = metrics["entropy"] <= self.entropy_target
        adapted = coefs["entropy_coef"] + (self.entropy_step if low else -self.entropy_step)
        return coefs | {
            "entropy_coef": min(max(adapted, 0.0), self.entropy_coef_max),
            "entropy_bonus_applied": float(low),
        }

    def applied_entropy_coef(
        self, coefs: Mapping[str, float | jax.Array] | None
    ) -> float | jax.Array:
        """Returns the weight of the entropy bonus in this update."""
        if self.entropy_target is None:
            return self.entropy_coef
        coefs = self.adaptive_coefs if coefs is None else coefs
        return coefs["entropy_coef"] * coefs["entropy_bonus_applied"]

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs:
        """Returns the `PolicyInputs` of a mini-batch with its counts, entropy quantile and mean
        weight.

        Losses, gradients and metrics of micro-batches cut from the result add up to the values of
        the mini-batch.
        """
        from rl.algorithms import _inputs, _losses

        if self.rejection_changes_denominator:
            inputs = _losses.without_rejected(self, inputs)
        inputs = _inputs.with_totals(
            inputs,
            self.aggregation == "prompt",
            self.count_empty_sequences,
            top_entropy=self.top_entropy,
        )
        return _losses.with_mean_weight(self, inputs) if self.correction_normalize else inputs

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss, metrics) of a `PolicyInputs`: a float32 scalar and a dict of float32
        scalars.

        With totals, losses, gradients and metrics of micro-batches add up (metrics by
        `reduce_metrics`). Raises ValueError if an input is absent that an option needs.
        """
        from rl.algorithms._losses import policy_loss

        return policy_loss(self, inputs)


@algorithm_options()
class Clipped(PolicyGradient):
    """The clipped loss: with the ratio R = exp(logp - old_logp), for each token

        max(-R A, -clip(R, 1 - epsilon, 1 + epsilon_high) A)

    (Schulman et al. 2017, arXiv:1707.06347)
    """

    epsilon: float = Field(
        0.2, ge=0, description="the ratio is clipped below 1 - epsilon where A < 0"
    )
    epsilon_high: float | None = Field(
        None, ge=0, description="clips R above 1 + epsilon_high if A > 0; null: epsilon"
    )
    delta: float | None = Field(
        None, gt=1, description="cap of the ratio where A < 0 (arXiv:2505.07291)"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="c: the loss is at most -c A where A < 0 (arXiv:1912.09729)"
    )
    ratio: Literal["token", "sequence", "sequence_token", "sequence_sum"] = Field(
        "token",
        description="what the ratio is of. token: each token. sequence: exp of the mean log-ratio "
        "of the sequence (GSPO, arXiv:2507.18071). sequence_token: the value of sequence with the "
        "gradient of the token. sequence_sum: exp of the summed log-ratio (RLOO, arXiv:2402.14740)",
    )

    @model_validator(mode="after")
    def _consistent_clip(self):
        high = self.clip_bounds[1]
        if self.delta is not None and self.delta <= high:
            raise ValueError(
                f"delta ({self.delta}) must be above 1 + epsilon_high ({high}): it caps beyond "
                "the clipping"
            )
        return self

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Returns the lower and the upper bound of the ratio."""
        return 1 - self.epsilon, 1 + (
            self.epsilon if self.epsilon_high is None else self.epsilon_high
        )

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of each token, metrics)."""
        from rl.algorithms._losses import clipped

        return clipped(self, tokens)


# Mixins go with every PolicyGradient and read its options. Type checkers take it for their base.
if TYPE_CHECKING:
    _Mixin = PolicyGradient
else:
    _Mixin = object


@algorithm_options()
class KLReward(_Mixin):
    """A mixin: a KL penalty in the rewards, not in the loss: -kl_reward_coef (old_logp - ref_logp)
    for each token."""

    kl_reward_coef: float = Field(
        0.05, ge=0, description="weight of the KL penalty in the rewards; 0: none"
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="target of kl/reward. After each step kl_reward_coef is multiplied by 1 + e "
        "min(1, completions / kl_horizon), where e = kl/reward / kl_target - 1, clipped to -0.2 "
        ".. 0.2 (arXiv:1909.08593); null: kl_reward_coef is constant",
    )
    kl_horizon: int = Field(10000, ge=1, description="completions per change of at most a fifth")

    @model_validator(mode="after")
    def _consistent_kl_reward(self):
        if self.kl_target is not None and not self.kl_reward_coef:
            raise ValueError("kl_target moves kl_reward_coef, which must be above 0 at first")
        return self

    @property
    def adaptive_coefs(self) -> dict[str, float]:
        """Returns the initial values of the adapted scalars: with `kl_target`, also the KL
        coefficient."""
        return super().adaptive_coefs | (
            {} if self.kl_target is None else {_KL_COEF: self.kl_reward_coef}
        )

    def adapt_after_step(
        self, coefs: dict[str, float], metrics: dict[str, float], completions: int
    ) -> dict[str, float]:
        """Returns the values for the next step; the KL coefficient changes so that the KL
        approaches `kl_target`."""
        if self.kl_target is None:
            return coefs
        error = min(max(metrics["kl/reward"] / self.kl_target - 1.0, -0.2), 0.2)
        return coefs | {
            _KL_COEF: coefs[_KL_COEF] * (1.0 + error * min(1.0, completions / self.kl_horizon))
        }

    def with_coefs(self, coefs: dict[str, float]) -> Self:
        """Returns the algorithm with the KL coefficient in `coefs`."""
        return (
            self
            if self.kl_target is None
            else dataclasses.replace(self, kl_reward_coef=coefs[_KL_COEF])
        )

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the inputs of the loss; with a penalty, the KL of each token and what it is
        computed from."""
        if not self.kl_reward_coef:
            return super().inputs
        return (
            super().inputs
            | {"token_kl", "ref_logp"}
            | ({"old_logp"} if self.old_logp == "trainer" else set())
        )

    def require_token_kl(self, token_kl: ArrayLike | None) -> np.ndarray:
        """Returns `token_kl` in float64. Raises ValueError if it is absent."""
        if token_kl is None:
            raise ValueError(
                "kl_reward_coef penalises old_logp - ref_logp of each token: give `token_kl`"
            )
        return np.asarray(token_kl, np.float64)

    def subtract_kl(
        self,
        rewards: ArrayLike,
        lengths: ArrayLike | None,
        token_kl: ArrayLike | None,
        mask: ArrayLike | None,
    ) -> np.ndarray:
        """Returns float64[P,G]: rewards minus the penalty of all tokens of the completion."""
        rewards_PG = np.asarray(rewards, np.float64)
        if not self.kl_reward_coef:
            return rewards_PG
        kl_PGT = np.where(
            completion_mask(lengths, token_kl, mask), self.require_token_kl(token_kl), 0.0
        )
        return rewards_PG - self.kl_reward_coef * kl_PGT.sum(-1)


@algorithm_options()
class GroupRelative(_Mixin):
    """A mixin: advantages relative to the mean reward of the group, without a critic.

    `estimate` (rl/algorithms/_sampled.py) calls `advantages` with the arguments that the providers
    of `inputs` add (rl/stages/inputs.py): here `weights`, by `each_reward`. An algorithm that
    penalises the KL in the rewards (KLReward) names `token_kl`, whose provider adds `mask` and
    `token_kl`, and defines `advantages` with these arguments.
    """

    scale: Literal["group", "batch", "none", "others"] = Field(
        "group",
        description="standard deviation that rewards minus the mean of their group are divided "
        "by. group: of the group. batch: of all rewards of the step. none: no division (Dr.GRPO, "
        "arXiv:2503.20783). others: mean and standard deviation are of the other completions of "
        "the group",
    )
    std_eps: float = Field(1e-4, ge=0, description="added to the standard deviation")
    combine: Literal["sum", "normalize_then_sum"] = Field(
        "sum",
        description="several reward functions: by their weighted sum; or each first normalised in "
        "its group, then their weighted sum over the batch (GDPO, arXiv:2601.05242)",
    )

    @model_validator(mode="after")
    def _consistent_scale(self):
        if self.combine == "normalize_then_sum" and self.scale != "group":
            raise ValueError(
                "combine: normalize_then_sum normalises in groups, then over the batch: scale: "
                f"{self.scale} is unused"
            )
        return self

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the inputs of the loss; the scores of each reward function if normalised
        separately."""
        return super().inputs | ({"each_reward"} if self.combine == "normalize_then_sum" else set())

    def advantages(
        self, rewards: ArrayLike, lengths: ArrayLike | None = None, weights: ArrayLike | None = None
    ) -> np.ndarray:
        """Returns float[P,G], as `group_advantages` does; `lengths` has no effect.

        rewards: float[P,G], NaN: no score; with `combine: normalize_then_sum` float[P,G,F], and
        weights float[F] (None: 1 each).
        """
        if self.combine == "normalize_then_sum":
            return combined_advantages(rewards, weights, self.std_eps)
        return group_advantages(rewards, self.scale, self.std_eps)
