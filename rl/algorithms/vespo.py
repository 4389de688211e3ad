"""Variational sequence-level soft policy optimisation (arXiv:2602.10693).

A smooth function of the sequence ratio weighs the log-probability. It is largest at ratio 1 and
falls off on both sides.

N rows, S sequence numbers in a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rl.algorithms._options import algorithm_options
from rl.algorithms._policy_gradient import GroupRelative, PolicyGradient

if TYPE_CHECKING:
    import jax

    from rl.algorithms._losses import Tokens

_LEAST = math.log(1e-8)


@algorithm_options()
class Algorithm(GroupRelative, PolicyGradient):
    """For each token -phi A logp, where phi = exp(lambda + k log w - lambda w) is a constant.

    w is the product of the token ratios of the sequence. A sampler correction is a factor of w.
    """

    name: ClassVar[str] = "vespo"
    per_token_applies_correction: ClassVar[bool] = True

    k_pos: float = Field(2.0, ge=0, description="k where A >= 0")
    k_neg: float = Field(3.0, ge=0, description="k elsewhere")
    lambda_pos: float = Field(3.0, ge=1e-4, description="lambda where A >= 0")
    lambda_neg: float = Field(2.0, ge=1e-4, description="lambda elsewhere")

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (loss of each token, metrics)."""
        import jax
        import jax.numpy as jnp

        from rl.algorithms import _losses

        log_w_NS = tokens.sequences.sum(_losses.clamp(tokens.log_ratio))
        if tokens.sampler is not None and "sampler_logp" in self.inputs:
            log_weight = jnp.log(jnp.maximum(_losses.correction(self, tokens)[0], math.exp(_LEAST)))
            per_sequence = (self.correction or "").startswith("sequence") and self.rejection is None
            log_w_NS += (
                tokens.sequences.mean(log_weight)
                if per_sequence
                else tokens.sequences.sum(log_weight)
            )
        log_w = tokens.sequences.to_tokens(jnp.clip(log_w_NS, _LEAST, _losses.MAX_LOG_RATIO))
        positive = tokens.advantages >= 0
        k = jnp.where(positive, self.k_pos, self.k_neg)
        scale = jnp.where(positive, self.lambda_pos, self.lambda_neg)
        phi = jax.lax.stop_gradient(jnp.exp(scale + k * log_w - scale * jnp.exp(log_w)))
        return -phi * tokens.advantages * tokens.logp, {"vespo/phi_mean": tokens.mean(phi)}
