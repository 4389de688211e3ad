"""Clipped importance-sampling policy optimisation (MiniMax-M1, arXiv:2506.13585).

The clipped ratio is a constant weight of the log-probability, so tokens outside the clipping range
keep a gradient. By default the weight is at most 5 and has no lower bound, as in TRL and ScaleRL
(arXiv:2510.13786).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import GroupRelative, PolicyGradient

if TYPE_CHECKING:
    import jax

    from rl.algorithms._losses import Tokens


@algorithm_options()
class Algorithm(GroupRelative, PolicyGradient):
    """For each token -clip(R, 1 - epsilon, 1 + epsilon_high) A logp, the clipped ratio a
    constant."""

    name: ClassVar[str] = "cispo"

    epsilon: float = Field(1.0, ge=0, description="the weight is at least 1 - epsilon")
    epsilon_high: float = Field(4.0, ge=0, description="and at most 1 + epsilon_high")

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of each token, metrics)."""
        import jax
        import jax.numpy as jnp

        from rl.algorithms import _losses

        ratio = _losses.importance_ratio("token", tokens)
        bounds = (1 - self.epsilon, 1 + self.epsilon_high)
        weight = jax.lax.stop_gradient(jnp.clip(ratio, *bounds))
        return -weight * tokens.advantages * tokens.logp, _losses.clip_metrics(
            ratio, bounds, tokens
        )
