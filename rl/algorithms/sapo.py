"""Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347).

A smooth gate of the ratio replaces clipping. The gate is narrower for tokens with a negative
advantage.
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
    """For each token -A (4 / tau) sigmoid(tau (R - 1)), of slope -A at R = 1."""

    name: ClassVar[str] = "sapo"

    tau_pos: float = Field(1.0, gt=0, description="tau where A > 0")
    tau_neg: float = Field(1.05, gt=0, description="tau elsewhere")

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of each token, metrics)."""
        import jax
        import jax.numpy as jnp

        from rl.algorithms._losses import importance_ratio

        tau = jnp.where(tokens.advantages > 0, self.tau_pos, self.tau_neg)
        gate = 4.0 / tau * jax.nn.sigmoid(tau * (importance_ratio("token", tokens) - 1.0))
        return -gate * tokens.advantages, {}
