"""Divergence proximal policy optimisation with the binary total variation (arXiv:2602.04879).

PPO bounds the ratio of a token. DPPO masks a token if its probability has moved from the sampler
probability by more than a limit, in the direction of its advantage. As in prime-rl, there is no
standard deviation, the old log-probabilities are the sampler's, and the squared log-ratio of every
token has a small penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import GroupRelative, PolicyGradient

if TYPE_CHECKING:
    import jax

    from rl.algorithms._losses import Tokens


@algorithm_options(defaults={"scale": "none", "old_logp": "sampler"})
class Algorithm(GroupRelative, PolicyGradient):
    """For each token -keep R A + penalty log(R)^2.

    keep is 0 if A > 0 and p - p_old > delta_high, or if A < 0 and p_old - p > delta_low.
    """

    name: ClassVar[str] = "dppo"

    delta_low: float = Field(
        0.2, gt=0, le=1, description="a probability may fall by so much where A < 0"
    )
    delta_high: float = Field(0.2, gt=0, le=1, description="and rise by so much where A > 0")
    penalty: float = Field(1e-3, ge=0, description="weight of the squared log-ratio")

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of each token, metrics)."""
        import jax
        import jax.numpy as jnp

        from rl.algorithms import _losses

        rise = jax.lax.stop_gradient(jnp.exp(tokens.logp)) - jnp.exp(tokens.old)
        far = jnp.where(
            tokens.advantages > 0,
            rise > self.delta_high,
            (tokens.advantages < 0) & (-rise > self.delta_low),
        )
        log_ratio = _losses.clamp(tokens.log_ratio)
        loss = (
            -jnp.where(far, 0.0, jnp.exp(log_ratio)) * tokens.advantages
            + self.penalty * log_ratio**2
        )
        return loss, {"dppo/masked_ratio": tokens.mean(far.astype(jnp.float32))}
