"""Divergence proximal policy optimisation with the binary total variation (arXiv:2602.04879): a token that the advantage
pushes further away than a difference of probabilities from the sampler's is left out, where PPO would bound the ratio. As in
prime-rl: no standard deviation, the sampler's log-probabilities, and a small penalty on the squared log-ratio of every
token."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import GroupRelative, PolicyGradient


@algorithm_options(defaults={"scale": "none", "old_logp": "sampler"})
class Algorithm(GroupRelative, PolicyGradient):
    """For each token -keep R A + penalty log(R)^2, where keep is 0 if A > 0 and p - p_old > delta_high, or A < 0 and p_old - p >
    delta_low."""

    name: ClassVar[str] = "dppo"

    delta_low: float = Field(0.2, gt=0, le=1, description="a probability may fall by so much where A < 0")
    delta_high: float = Field(0.2, gt=0, le=1, description="and rise by so much where A > 0")
    penalty: float = Field(1e-3, ge=0, description="weight of the squared log-ratio")

    def per_token(self, tokens):
        import jax
        import jax.numpy as jnp

        from rl.algorithms import _losses

        rise = jax.lax.stop_gradient(jnp.exp(tokens.logp)) - jnp.exp(tokens.old)
        far = jnp.where(
            tokens.advantages > 0, rise > self.delta_high, (tokens.advantages < 0) & (-rise > self.delta_low)
        )
        log_ratio = _losses.clamp(tokens.log_ratio)
        loss = -jnp.where(far, 0.0, jnp.exp(log_ratio)) * tokens.advantages + self.penalty * log_ratio**2
        return loss, {"dppo/masked_ratio": tokens.mean(far.astype(jnp.float32))}
