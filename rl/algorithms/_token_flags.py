"""Computes which tokens the loss cuts off, for the record of a run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rl.algorithms._inputs import PolicyInputs
from rl.algorithms._losses import (
    PolicyLossOptions,
    correction,
    importance_ratio,
    tokens_of,
    with_rejected,
)

CLIPPED_LOW = 4
CLIPPED_HIGH = 8
DROPPED = 16
"""Bits of a token: its ratio is below the lower or above the upper bound, on the side that the
advantage pushes to, so that it has no gradient; the correction for the sampler's log-probability
gives it the weight 0."""


def token_flags(options: PolicyLossOptions, inputs: PolicyInputs) -> jax.Array:
    """Returns uint8[N,T], the bits of each token under the policy-gradient loss `options`; 0
    outside the mask that the batch came with.

    Losses without `clip_bounds` clip no ratio.
    """
    inputs = options.with_totals(
        dataclasses.replace(inputs, old_logp=options.select_old_logp(inputs))
    )
    tokens = tokens_of(inputs)
    flags = jnp.zeros(tokens.mask.shape, jnp.uint8)
    if bounds := getattr(options, "clip_bounds", None):
        ratio = importance_ratio(getattr(options, "ratio", "token"), tokens)
        flags += CLIPPED_LOW * ((ratio < bounds[0]) & (tokens.advantages < 0)).astype(jnp.uint8)
        flags += CLIPPED_HIGH * ((ratio > bounds[1]) & (tokens.advantages > 0)).astype(jnp.uint8)
    flags = jnp.where(tokens.mask, flags, 0)
    if tokens.sampler is not None:
        dropped = correction(options, tokens)[0] == 0
        flags += DROPPED * (with_rejected(tokens).mask & dropped).astype(jnp.uint8)
    return flags.astype(jnp.uint8)
