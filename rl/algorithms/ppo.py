"""Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347; as in RLHF,
arXiv:2203.02155).

The reward of a token is -kl_reward_coef * (old_logp - ref_logp), plus the score of the completion
on its last token; advantages are generalised advantage estimates (arXiv:1506.02438), whitened over
all tokens of the batch: a long completion counts more in their mean and standard deviation. With
`lam_critic`, `lam_alpha` and `positive_nll_coef` it is VAPO (arXiv:2504.05118). Shapes: N
completions of T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from rl.algorithms._advantages import whiten
from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import Clipped, KLReward

if TYPE_CHECKING:
    import jax

    from rl.algorithms._inputs import PolicyInputs
    from rl.algorithms._protocols import SampledArrays


@algorithm_options()
class Algorithm(KLReward, Clipped):
    """Advantages of each token from a critic, the clipped loss, and the critic's own loss."""

    name: ClassVar[str] = "ppo"

    gamma: float = Field(1.0, ge=0, le=1, description="discount of a reward one token later")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    lam_critic: float | None = Field(
        None, ge=0, le=1, description="lambda of the returns that the critic learns; null: lam"
    )
    lam_alpha: float | None = Field(
        None,
        gt=0,
        description="advantages of a completion of L tokens with lambda 1 - 1 / (lam_alpha L), at "
        "least 0; null: lam",
    )
    bootstrap_truncated: bool = Field(
        False,
        description="the return of a completion that was cut off goes on with the value at the "
        "cut; false: with 0",
    )
    whiten_rewards: bool = Field(
        False,
        description="scale the rewards of tokens to variance 1 over the tokens of the batch, and "
        "keep their mean",
    )
    whiten: bool = Field(
        True,
        description="shift and scale advantages to mean 0 and variance 1 over the tokens of the "
        "batch",
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="clipping range of a value around the old one; null: none"
    )
    value_init_std: float = Field(
        0.0, ge=0, description="standard deviation of the value head's first weights"
    )
    critic_trunk: Literal["own", "policy"] = Field(
        "own",
        description="the input of the value head. own: the final hidden states of a second "
        "decoder, which starts as a copy of the policy and is trained. policy: those of the "
        "policy, detached; no second model in memory",
    )
    critic_warmup: int = Field(0, ge=0, description="first steps in which only the critic learns")

    positive_nll_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the mean negative log-probability of the tokens of correct "
        "completions; 0: none",
    )
    positive_above: float = Field(
        0.0, description="for positive_nll_coef, a completion is correct whose reward is above this"
    )

    @model_validator(mode="after")
    def _consistent_truncation(self):
        if self.bootstrap_truncated and self.mask_truncated:
            raise ValueError(
                "bootstrap_truncated does nothing for completions that mask_truncated leaves out"
            )
        return self

    @property
    def inputs(self) -> frozenset[str]:
        """Returns the inputs of the loss and the KL penalty, `values`, and with `positive_nll_coef`
        also `correct`."""
        extra = {"values", "correct"} if self.positive_nll_coef else {"values"}
        return (super().inputs - {"token_kl"}) | extra

    def estimate(
        self, rewards: np.ndarray, lengths: np.ndarray, batch: SampledArrays, **inputs: Any
    ) -> tuple[np.ndarray, np.ndarray | None, dict[str, float]]:
        """Returns (advantages, returns, metrics) as `advantages_per_token` does, from the arrays of
        the batch."""
        assert batch.old_values is not None  # `inputs` names `values`
        return self.advantages_per_token(
            np.reshape(rewards, -1),
            batch.old_logp,
            batch.ref_logp,
            batch.old_values,
            batch.mask,
            batch.last_values,
        )

    def advantages_per_token(
        self,
        scores: ArrayLike,
        old_logp: ArrayLike | None,
        ref_logp: ArrayLike | None,
        values: ArrayLike,
        mask: ArrayLike,
        last_values: ArrayLike | None = None,
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Returns (advantages, returns, metrics), float[N,T], on the host.

        scores: float[N]; a row without a finite score gets zeros, and the mask of the losses must
        exclude it. old_logp, ref_logp: [N,T], unused without `kl_reward_coef`. mask: [N,T]. values:
        [N,T], value of the state *before* token t. last_values: float[N], value of the state after
        the last token, 0 if the completion ended; unused without `bootstrap_truncated`.
        """
        scores_N = np.asarray(scores, np.float64)
        scored_N = np.isfinite(scores_N)
        mask_NT = (np.asarray(mask) != 0) & scored_N[:, None]
        rewards_NT, metrics = self._rewards(scores_N, old_logp, ref_logp, mask_NT)
        bootstrap_N = last_values if self.bootstrap_truncated else None

        def estimate_with(lam: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return gae(rewards_NT, values, mask_NT, self.gamma, lam, bootstrap_N)

        advantages_NT, returns_NT = estimate_with(self._policy_lam(mask_NT))
        if self.lam_alpha is not None or self.lam_critic is not None:
            returns_NT = estimate_with(self.lam if self.lam_critic is None else self.lam_critic)[1]
        metrics |= value_metrics(values, returns_NT, mask_NT)
        if self.whiten:
            advantages_NT = whiten(advantages_NT, mask_NT)
        return advantages_NT, returns_NT, metrics

    def _policy_lam(self, mask_NT: np.ndarray) -> float | np.ndarray:
        """Returns lambda of the advantages: a scalar or float[N]."""
        if self.lam_alpha is None:
            return self.lam
        return np.clip(1.0 - 1.0 / (self.lam_alpha * np.maximum(mask_NT.sum(axis=1), 1)), 0.0, 1.0)

    def _rewards(
        self,
        scores_N: np.ndarray,
        old_logp: ArrayLike | None,
        ref_logp: ArrayLike | None,
        mask_NT: np.ndarray,
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Returns (reward of each token float64[N,T], metrics)."""
        rewards_NT = np.zeros(mask_NT.shape)
        metrics = {}
        if self.kl_reward_coef:
            if old_logp is None or ref_logp is None:
                raise ValueError("kl_reward_coef needs old_logp and ref_logp")
            kl_NT = np.asarray(old_logp, np.float64) - np.asarray(ref_logp, np.float64)
            rewards_NT = np.where(mask_NT, -self.kl_reward_coef * kl_NT, 0.0)
            metrics["kl/reward"] = float(kl_NT[mask_NT].mean()) if mask_NT.any() else 0.0
        rows = np.flatnonzero(mask_NT.any(axis=1))
        last = mask_NT.shape[1] - 1 - np.argmax(mask_NT[rows, ::-1], axis=1)
        rewards_NT[rows, last] += scores_N[rows]
        if self.whiten_rewards and mask_NT.any():
            rewards_NT = np.where(
                mask_NT, whiten(rewards_NT, mask_NT) + rewards_NT[mask_NT].mean(), 0.0
            )
        return rewards_NT, metrics

    def correct(self, scores: ArrayLike, mask: ArrayLike) -> np.ndarray | None:
        """Returns float32[N,T]: 1 on tokens of completions that score above `positive_above`.

        Returns None if the loss does not use them.
        """
        if not self.positive_nll_coef:
            return None
        above_N = np.nan_to_num(np.asarray(scores, np.float64), nan=-np.inf) > self.positive_above
        return ((np.asarray(mask) != 0) & above_N[:, None]).astype(np.float32)

    def loss(self, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the clipped loss plus `positive_nll_coef` times the mean of -logp over
        `inputs.correct`."""
        if not self.positive_nll_coef:
            return super().loss(inputs)
        if inputs.correct is None:
            raise ValueError("PolicyInputs.correct missing: needed with positive_nll_coef")
        import jax

        from rl.algorithms import _losses

        inputs = self.with_totals(inputs)
        loss, metrics = super().loss(inputs)
        nll = _losses.correct_nll(inputs)
        return loss + self.positive_nll_coef * nll, metrics | {
            "positive_nll": jax.lax.stop_gradient(nll)
        }

    def value_loss(
        self, values: jax.Array, old_values: jax.Array, returns: jax.Array, inputs: PolicyInputs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the loss of the critic on a micro-batch, (scalar, metrics).

        Both add up over micro-batches. `inputs`: a PolicyInputs; only mask and num_tokens are used.
        """
        from rl.algorithms import _losses

        return _losses.value_loss(values, old_values, returns, inputs, self.value_clip)


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    gamma: float,
    lam: float | np.ndarray,
    last_values: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (generalised advantage estimates, returns = advantage + value), float[N,T]; 0 where
    `mask` is 0.

    values[:, t] is the value of the state before token t. last_values: float[N], after the last
    token; None: 0. lam: a scalar or float[N]. The recursion skips tokens with mask 0, such as tool
    output. Computed in float64; float32 stays float32.
    """
    rewards = np.asarray(rewards)
    values = np.asarray(values)
    dtype = np.result_type(rewards.dtype, values.dtype, np.float32)
    mask_NT = np.asarray(mask) != 0
    rewards_NT = np.where(mask_NT, rewards, 0).astype(np.float64)
    values_NT = np.where(mask_NT, values, 0).astype(np.float64)
    advantages_NT = np.zeros(mask_NT.shape)
    next_advantage_N = np.zeros(mask_NT.shape[0])
    next_value_N = next_advantage_N if last_values is None else np.asarray(last_values, np.float64)
    for t in reversed(range(mask_NT.shape[1])):
        td_error_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        advantage_N = td_error_N + gamma * lam * next_advantage_N
        next_value_N = np.where(mask_NT[:, t], values_NT[:, t], next_value_N)
        next_advantage_N = np.where(mask_NT[:, t], advantage_N, next_advantage_N)
        advantages_NT[:, t] = np.where(mask_NT[:, t], advantage_N, 0.0)
    return advantages_NT.astype(dtype), (advantages_NT + values_NT).astype(dtype)


def value_metrics(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> dict[str, float]:
    """Returns the explained variance, 1 - var(returns - values) / (var(returns) + 1e-5), and the
    mean return."""
    mask_NT = np.asarray(mask) != 0
    if not mask_NT.any():
        return {"value/explained_variance": 0.0, "value/return_mean": 0.0}
    predicted = np.asarray(values, np.float64)[mask_NT]
    target = np.asarray(returns, np.float64)[mask_NT]
    explained = 1.0 - (target - predicted).var() / (target.var() + 1e-5)
    return {"value/explained_variance": float(explained), "value/return_mean": float(target.mean())}


def value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    clip: float | None,
) -> jax.Array:
    """Returns half the token mean of max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), a
    scalar. Arrays [N,T].
    """
    return _value_loss(values, old_values, returns, mask, clip)[0]


def value_clip_fraction(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    clip: float | None,
) -> jax.Array:
    """Returns the share of tokens with the clipped error as the larger one in `value_loss`, a
    scalar."""
    return _value_loss(values, old_values, returns, mask, clip)[1]["value/clip_frac"]


def _value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    clip: float | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    from rl.algorithms import _inputs, _losses

    return _losses.value_loss(values, old_values, returns, _inputs.PolicyInputs(mask=mask), clip)
