"""Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673).

The ratio of a sequence is the geometric mean of its token ratios. Each token ratio is first clipped
on the side that the advantage pushes to, so single tokens have little effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import GroupRelative, PolicyGradient

if TYPE_CHECKING:
    import jax

    from rl.algorithms._losses import Tokens


@algorithm_options(defaults={"aggregation": "sequence"})
class Algorithm(GroupRelative, PolicyGradient):
    """For each sequence -A exp(mean of the clipped log-ratios)."""

    name: ClassVar[str] = "gmpo"

    epsilon: float = Field(
        0.4, ge=0, description="log-ratios are clipped below -epsilon where A <= 0"
    )
    epsilon_high: float | None = Field(
        None, ge=0, description="and above epsilon_high where A > 0; null: epsilon"
    )

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of each token, metrics)."""
        import jax.numpy as jnp

        from rl.algorithms import _losses

        low = -self.epsilon
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        log_ratio = _losses.clamp(tokens.log_ratio)
        clipped = jnp.where(
            tokens.advantages > 0, jnp.minimum(log_ratio, high), jnp.maximum(log_ratio, low)
        )
        ratio = jnp.exp(tokens.sequences.to_tokens(tokens.sequences.mean(clipped)))
        return -ratio * tokens.advantages, _losses.clip_metrics(
            tokens.log_ratio, (low, high), tokens
        )
