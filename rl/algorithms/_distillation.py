"""Computes the losses of `distill` and `gkd`, on the device. N rows of T tokens."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from rl.algorithms._inputs import PolicyInputs, with_totals
from rl.algorithms._losses import Tokens, aggregate, tokens_of
from rl.algorithms._protocols import DistillCoefs

_NAMES = {"forward": "distill/forward_kl", "reverse": "distill/reverse_kl", "jsd": "distill/jsd"}


class DistillOptions(Protocol):
    """The options of `distill` that its loss reads."""

    @property
    def divergence(self) -> str: ...

    @property
    def alpha(self) -> float: ...

    @property
    def alpha_end(self) -> float | None: ...

    @property
    def temperature_squared(self) -> bool: ...

    def coefs_of(self, inputs: PolicyInputs) -> DistillCoefs: ...


class SampledOptions(Protocol):
    """The options of `gkd` that its loss reads."""

    @property
    def divergence(self) -> str: ...

    @property
    def aggregation(self) -> str: ...


def distillation_loss(
    options: DistillOptions, inputs: PolicyInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (scalar, metrics): alpha d + (1 - alpha) nll + features_coef f, means over the tokens
    of the batch.

    An alpha that stays 0 or 1 leaves the other targets out, so that they cost no backward pass.
    Raises ValueError for an input that is missing.
    """
    inputs = _compared(inputs, "distill")
    coefs = options.coefs_of(inputs)
    tokens = tokens_of(inputs)
    nll = tokens.mean(-tokens.logp)
    soft = tokens.mean(_float32(inputs.divergence))
    metrics = {"nll": nll, _NAMES[options.divergence]: soft} | _metrics(tokens)
    if options.temperature_squared:
        soft = soft * coefs.temperature**2
    alphas = {options.alpha, options.alpha if options.alpha_end is None else options.alpha_end}
    if alphas == {0.0}:
        loss = nll
    elif alphas == {1.0}:
        loss = soft
    else:
        loss = coefs.alpha * soft + (1.0 - coefs.alpha) * nll
    if inputs.features is not None:
        features = tokens.mean(_float32(inputs.features))
        metrics["distill/features"] = features
        loss = loss + coefs.features_coef * features
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def sampled_divergence_loss(
    options: SampledOptions, inputs: PolicyInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (scalar, metrics): the divergence at the tokens of samples, aggregated as the option
    says. Raises ValueError for an input that is missing."""
    inputs = _compared(inputs, "gkd")
    tokens = tokens_of(inputs)
    divergence = _float32(inputs.divergence)
    metrics = {_NAMES[options.divergence]: tokens.mean(divergence)} | _metrics(tokens)
    loss = aggregate(divergence, inputs, tokens.sequences, options.aggregation)
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def _compared(inputs: PolicyInputs, name: str) -> PolicyInputs:
    """Returns the inputs with their totals. Raises ValueError without a comparison."""
    missing = [each for each in ("logp", "divergence") if getattr(inputs, each) is None]
    if missing:
        raise ValueError(
            f"PolicyInputs.{', '.join(missing)} missing: `{name}` compares the policy with a "
            "teacher"
        )
    return with_totals(inputs)


def _metrics(tokens: Tokens) -> dict[str, jax.Array]:
    """Returns the means of the numbers of the comparison, and of the policy's entropy."""
    numbers = tokens.inputs.teacher or {}
    metrics = {f"distill/{name}": tokens.mean(_float32(array)) for name, array in numbers.items()}
    if tokens.entropy is not None:
        metrics["entropy"] = tokens.mean(tokens.entropy)
    return metrics


def _float32(array: jax.Array | None) -> jax.Array:
    assert array is not None  # `_compared` asks for it
    return jnp.asarray(array, jnp.float32)
