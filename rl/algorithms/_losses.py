"""Computes losses and metrics from log-probabilities and advantages, on the device.

Shapes: N rows of T tokens; S sequence numbers in a row (0 is padding). Every array is replaced
where the mask is 0 *before* any exp or difference: 0 * inf is NaN in a gradient. All sums are
float32. Metrics that are means are divided by counts of the mini-batch, so the metrics of its
micro-batches add up (`rl.algorithms.reduce_metrics`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp

from rl.algorithms._inputs import PolicyInputs, Sequences, correct_tokens, with_totals
from rl.algorithms._protocols import OldLogps

ArrayT = TypeVar("ArrayT")

# exp(20) = 4.9e8: finite, and far beyond any clip range; the gradient is 0 outside.
MAX_LOG_RATIO = 20.0
# For `sequence_token`, as in verl.
MAX_SEQUENCE_LOG_RATIO = 10.0


@dataclass(frozen=True)
class Tokens:
    """The inputs of `PolicyGradient.per_token`: the arrays of a `PolicyInputs` in float32, 0 where
    the mask is 0.

    All arrays are [N,T]; an absent array is None.
    """

    inputs: PolicyInputs
    sequences: Sequences
    mask: jax.Array
    logp: jax.Array
    old: jax.Array
    sampler: jax.Array | None
    ref: jax.Array | None
    entropy: jax.Array | None
    advantages: jax.Array

    @property
    def log_ratio(self) -> jax.Array:
        """log(pi / pi_old) of each token [N,T]."""
        return self.logp - self.old

    def mean(self, values_NT: jax.Array) -> jax.Array:
        """Returns the share of this batch in the mean over the tokens of the mini-batch."""
        return aggregate(values_NT, self.inputs, self.sequences, "token")

    def count(self, chosen_NT: jax.Array) -> jax.Array:
        """Returns how many masked tokens are chosen."""
        return (chosen_NT & self.mask).sum().astype(jnp.float32)


class CorrectionOptions(Protocol):
    """The options that weigh or drop tokens by the difference of sampler and trainer, as
    `PolicyGradient` describes them."""

    @property
    def old_logp(self) -> str | None: ...

    @property
    def correction(self) -> str | None: ...

    @property
    def correction_bounds(self) -> tuple[float, float]: ...

    @property
    def correction_normalize(self) -> bool: ...

    @property
    def rejection(self) -> str | None: ...

    @property
    def rejection_max(self) -> float | None: ...


class PolicyLossOptions(CorrectionOptions, Protocol):
    """A `PolicyGradient`, as `policy_loss` reads it."""

    per_token_applies_correction: ClassVar[bool]

    @property
    def inputs(self) -> frozenset[str]: ...

    @property
    def aggregation(self) -> str: ...

    @property
    def kl(self) -> str: ...

    @property
    def kl_coef(self) -> float: ...

    @property
    def off_policy_delta(self) -> float | None: ...

    @property
    def top_entropy(self) -> float | None: ...

    @property
    def has_entropy_bonus(self) -> bool: ...

    def with_totals(self, inputs: PolicyInputs) -> PolicyInputs: ...

    def select_old_logp(self, arrays: OldLogps[ArrayT]) -> ArrayT: ...

    def applied_entropy_coef(
        self, coefs: Mapping[str, float | jax.Array] | None
    ) -> float | jax.Array: ...

    def per_token(self, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]: ...


class ClipOptions(Protocol):
    """The options of a `Clipped` loss."""

    @property
    def clip_bounds(self) -> tuple[float, float]: ...

    @property
    def ratio(self) -> str: ...

    @property
    def delta(self) -> float | None: ...

    @property
    def dual_clip(self) -> float | None: ...


def policy_loss(
    options: PolicyLossOptions, inputs: PolicyInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (scalar, metrics): the loss of a `PolicyGradient` with these options."""
    _check_inputs(options, inputs)
    inputs = options.with_totals(
        dataclasses.replace(inputs, old_logp=options.select_old_logp(inputs))
    )
    tokens = tokens_of(inputs)
    per_token, metrics = options.per_token(tokens)
    metrics |= _common_metrics(tokens)
    if options.off_policy_delta is not None:
        per_token = jnp.where(_off_policy(options.off_policy_delta, tokens), 0.0, per_token)
    if options.top_entropy is not None:
        assert tokens.entropy is not None
        assert inputs.entropy_threshold is not None  # counted by `with_totals`
        per_token = jnp.where(tokens.entropy >= inputs.entropy_threshold, per_token, 0.0)
    if tokens.sampler is not None:
        weight, sampler_metrics = correction(options, tokens)
        metrics |= sampler_metrics
        if not options.per_token_applies_correction:
            per_token = per_token * weight
    loss = aggregate(per_token, inputs, tokens.sequences, options.aggregation)
    metrics["policy_loss"] = loss
    if tokens.ref is not None:
        kl = _kl(options.kl, tokens)
        metrics["kl/ref"] = tokens.mean(kl)
        metrics["kl/ref_clamped"] = tokens.count(jnp.abs(tokens.logp - tokens.ref) > MAX_LOG_RATIO)
        if options.kl_coef:
            loss = loss + options.kl_coef * aggregate(
                kl, inputs, tokens.sequences, options.aggregation
            )
    if tokens.entropy is not None:
        entropy = tokens.mean(tokens.entropy)
        metrics["entropy"] = entropy
        if options.has_entropy_bonus:
            loss = loss - options.applied_entropy_coef(inputs.adaptive_coefs) * entropy
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def supervised_loss(loss_type: str, inputs: PolicyInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (scalar, metrics): -logp (`nll`), or -p logp with a constant p (`dft`), averaged over
    the tokens of the batch."""
    if inputs.logp is None:
        raise ValueError("PolicyInputs.logp is missing")
    inputs = with_totals(inputs)
    tokens = tokens_of(inputs)
    nll = tokens.mean(-tokens.logp)
    loss = nll
    if loss_type == "dft":
        loss = tokens.mean(-jax.lax.stop_gradient(jnp.exp(tokens.logp)) * tokens.logp)
    metrics = {"nll": nll}
    if tokens.entropy is not None:
        metrics["entropy"] = tokens.mean(tokens.entropy)
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def correct_nll(inputs: PolicyInputs) -> jax.Array:
    """Returns the mean of -logp over the `correct` tokens of the mini-batch; 0 without any."""
    mask = (jnp.asarray(inputs.mask) != 0) & correct_tokens(inputs)
    assert inputs.logp is not None  # the policy loss, to which this is added, asks for it
    return -_masked(inputs.logp, mask).sum() / _at_least_one(inputs.num_correct)


def value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    inputs: PolicyInputs,
    clip: float | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (scalar, metrics): half the token mean of the clipped squared error of the critic.
    Arrays [N,T].

    The larger error counts, with `values` or with `values` clipped to within `clip` of `old_values`
    (Schulman et al., PPO2).
    """
    inputs = with_totals(inputs)
    sequences = Sequences(inputs)
    values, old, returns = (_masked(x, sequences.mask_NT) for x in (values, old_values, returns))
    old, returns = jax.lax.stop_gradient((old, returns))
    error = (values - returns) ** 2
    clipped = error if clip is None else (jnp.clip(values, old - clip, old + clip) - returns) ** 2
    loss = 0.5 * aggregate(jnp.maximum(error, clipped), inputs, sequences, "token")
    fraction = aggregate((clipped > error).astype(jnp.float32), inputs, sequences, "token")
    metrics = {
        "value/loss": loss,
        "value/clip_frac": fraction,
        "value/mean": aggregate(values, inputs, sequences, "token"),
    }
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def aggregate(
    per_token: jax.Array, inputs: PolicyInputs, sequences: Sequences, how: str
) -> jax.Array:
    """Returns a scalar: the share of this batch, float[N,T], in a mean over the mini-batch.

    `inputs` holds the totals of the mini-batch. token: mean over tokens; sequence: mean over
    sequences of their token mean; sequence_sum: mean over sequences of their token sum; constant:
    sequence_sum divided by the maximum length; prompt: mean over prompts of their token mean.
    """
    if how == "sequence":
        return sequences.mean(per_token).sum() / _at_least_one(inputs.num_sequences)
    if how == "prompt":
        tokens = _at_least_one(inputs.prompt_tokens)
        shares = per_token / (tokens[:, None] if tokens.ndim == 1 else tokens)
        return jnp.where(sequences.mask_NT, shares, 0.0).sum() / _at_least_one(inputs.num_prompts)
    total = jnp.where(sequences.mask_NT, per_token, 0.0).sum()
    if how == "token":
        return total / _at_least_one(inputs.num_tokens)
    if how == "sequence_sum":
        return total / _at_least_one(inputs.num_sequences)
    assert inputs.max_length is not None  # `_check_inputs` asks for it
    return total / (_at_least_one(inputs.num_sequences) * inputs.max_length)


def _check_inputs(options: PolicyLossOptions, inputs: PolicyInputs) -> None:
    needed = {
        "logp": True,
        "advantages": True,
        "ref_logp": options.kl_coef > 0,
        "sampler_logp": "sampler_logp" in options.inputs,
        "entropy": "entropy" in options.inputs,
        "max_length": options.aggregation == "constant",
    }
    missing = [name for name, need in needed.items() if need and getattr(inputs, name) is None]
    if missing:
        raise ValueError(f"PolicyInputs.{', '.join(missing)} missing: needed with these options")
    if (
        options.off_policy_delta is not None
        and inputs.sampler_logp is None
        and inputs.old_logp is None
    ):
        raise ValueError(
            "off_policy_delta compares with PolicyInputs.sampler_logp or old_logp: both are missing"
        )


def _masked(values: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)


def tokens_of(inputs: PolicyInputs) -> Tokens:
    """Returns the arrays of a loss, 0 where the mask is 0."""
    sequences = Sequences(inputs)
    mask = sequences.mask_NT

    def fixed(values: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(_masked(values, mask))

    assert inputs.logp is not None  # the losses ask for it
    logp = _masked(inputs.logp, mask)
    advantages = inputs.advantages
    if advantages is None:
        advantages = jnp.zeros(mask.shape[0])
    advantages = jnp.asarray(advantages, jnp.float32)
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    return Tokens(
        inputs=inputs,
        sequences=sequences,
        mask=mask,
        logp=logp,
        old=jax.lax.stop_gradient(logp) if inputs.old_logp is None else fixed(inputs.old_logp),
        sampler=None if inputs.sampler_logp is None else fixed(inputs.sampler_logp),
        ref=None if inputs.ref_logp is None else fixed(inputs.ref_logp),
        entropy=None if inputs.entropy is None else _masked(inputs.entropy, mask),
        advantages=fixed(advantages),
    )


def _at_least_one(count: jax.Array | None) -> jax.Array:
    assert count is not None  # counted by `with_totals`
    return jnp.maximum(jnp.asarray(count, jnp.float32), 1.0)


def clamp(log_ratio: jax.Array) -> jax.Array:
    """Clips a log-ratio to MAX_LOG_RATIO on both sides."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(kind: str, tokens: Tokens) -> jax.Array:
    """Returns the ratio that the loss clips, [N,T]: exp of a log-ratio, which is bounded by
    MAX_LOG_RATIO, or above by MAX_SEQUENCE_LOG_RATIO.

    The log-ratio by `kind`. token: logp - old_logp of the token. sequence: its mean over the
    sequence. sequence_token: the value of `sequence` with the gradient of the token. sequence_sum:
    the sum over the sequence.
    """
    log_ratio = tokens.log_ratio
    highest = MAX_LOG_RATIO
    if kind == "sequence_sum":
        log_ratio = tokens.sequences.to_tokens(tokens.sequences.sum(log_ratio))
    elif kind != "token":
        log_ratio = tokens.sequences.to_tokens(tokens.sequences.mean(log_ratio))
    if kind == "sequence_token":
        log_ratio = (
            jax.lax.stop_gradient(log_ratio) + tokens.logp - jax.lax.stop_gradient(tokens.logp)
        )
        highest = MAX_SEQUENCE_LOG_RATIO
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, highest))


def clipped(options: ClipOptions, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (loss of `Clipped` at each token, clip fractions)."""
    low, high = options.clip_bounds
    advantages = tokens.advantages
    ratio = importance_ratio(options.ratio, tokens)
    if options.delta is not None:
        ratio = jnp.minimum(ratio, options.delta)
    per_token = jnp.maximum(-ratio * advantages, -jnp.clip(ratio, low, high) * advantages)
    metrics = clip_metrics(ratio, (low, high), tokens)
    if options.dual_clip is not None:
        bound = -options.dual_clip * advantages
        bounded = (advantages < 0) & (per_token > bound)
        per_token = jnp.where(bounded, bound, per_token)
        metrics["clip_ratio/dual_mean"] = tokens.mean(bounded.astype(jnp.float32))
    return per_token, metrics


def clip_metrics(ratio: jax.Array, bounds: tuple[float, float], tokens: Tokens) -> dict:
    """Returns the shares of tokens whose ratio is out of bounds on the side that the advantage
    pushes to, as in TRL."""
    below = ((ratio < bounds[0]) & (tokens.advantages < 0)).astype(jnp.float32)
    above = ((ratio > bounds[1]) & (tokens.advantages > 0)).astype(jnp.float32)
    sequences = tokens.sequences
    return {
        "clip_ratio/low_mean": tokens.mean(below),
        "clip_ratio/low_min": jnp.where(sequences.length_NS > 0, sequences.mean(below), 1.0).min(),
        "clip_ratio/high_mean": tokens.mean(above),
        "clip_ratio/high_max": sequences.mean(above).max(),
        "clip_ratio/region_mean": tokens.mean(below + above),
    }


def _common_metrics(tokens: Tokens) -> dict:
    sequences = tokens.sequences
    return {
        "clip_ratio/log_ratio_clamped": tokens.count(jnp.abs(tokens.log_ratio) > MAX_LOG_RATIO),
        "kl/approx_update": tokens.mean(-tokens.log_ratio),
        "sequences/empty": (sequences.exists_NS & (sequences.length_NS == 0))
        .sum()
        .astype(jnp.float32),
    }


def _off_policy(delta: float, tokens: Tokens) -> jax.Array:
    """Returns bool[N,T]: tokens with A < 0 in sequences that the policy moved away from since
    sampling."""
    before = tokens.old if tokens.sampler is None else tokens.sampler
    drift = tokens.sequences.mean(before - jax.lax.stop_gradient(tokens.logp))
    return (tokens.advantages < 0) & (tokens.sequences.to_tokens(drift) > delta)


def _bounded_weight(
    options: CorrectionOptions, tokens: Tokens, difference: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (weight of each token by `correction`, whether it was out of bounds), [N,T]."""
    sequences = tokens.sequences
    low_high = options.correction_bounds
    kind = options.correction
    ratio = jnp.exp(clamp(difference))
    if kind in ("sequence_truncate", "sequence_mask"):
        bounded = sequences.to_tokens(jnp.exp(clamp(sequences.sum(difference))))
    elif kind == "geometric_mask":
        bounded = sequences.to_tokens(jnp.exp(clamp(sequences.mean(difference))))
    else:
        bounded = ratio
    outside = (bounded < low_high[0]) | (bounded > low_high[1])
    if kind is None:
        weight = jnp.ones_like(ratio)
    elif kind.endswith("truncate"):
        weight = jnp.clip(bounded, *low_high)
    else:
        weight = jnp.where(outside, 0.0, ratio if kind == "geometric_mask" else bounded)
    return weight, outside


def correction(
    options: CorrectionOptions, tokens: Tokens
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (detached weight [N,T] of the loss of each token, metrics) for the difference of
    sampler and trainer.

    Both are of all tokens that a sampler drew, those that `without_rejected` took out of the mask
    among them.
    """
    tokens = with_rejected(tokens)
    assert tokens.sampler is not None  # callers check it
    trainer = jax.lax.stop_gradient(tokens.logp) if options.old_logp == "sampler" else tokens.old
    difference = trainer - tokens.sampler
    ratio = jnp.exp(clamp(difference))
    weight, outside = _bounded_weight(options, tokens, difference)
    if options.correction_normalize:
        assert tokens.inputs.mean_weight is not None  # counted by `with_totals`
        weight = weight / jnp.maximum(tokens.inputs.mean_weight, jnp.finfo(jnp.float32).tiny)
    mean = tokens.mean(ratio)
    square = tokens.mean(ratio**2)
    metrics = {
        "sampler/logp_diff_mean": tokens.mean(jnp.abs(difference)),
        "sampler/logp_diff_max": jnp.where(tokens.mask, jnp.abs(difference), 0.0).max(),
        "sampler/mult_prob_error": tokens.mean(jnp.exp(jnp.abs(clamp(difference)))),
        "sampler/kl": tokens.mean(-difference),
        "sampler/k3_kl": tokens.mean(ratio - difference - 1.0),
        "sampler/is_ratio_mean": mean,
        "sampler/is_ratio_square_mean": square,
        "sampler/is_ratio_min": jnp.where(tokens.mask, ratio, jnp.exp(MAX_LOG_RATIO)).min(),
        "sampler/is_ratio_max": jnp.where(tokens.mask, ratio, 0.0).max(),
        "sampler/ess": mean**2 / jnp.maximum(square, jnp.finfo(jnp.float32).tiny),
    }
    if options.correction is not None:
        metrics["sampler/is_oob_ratio"] = tokens.mean(outside.astype(jnp.float32))
    if options.rejection is not None:
        rejected = _rejected(options, tokens, difference)
        weight = jnp.where(rejected, 0.0, weight)
        metrics["sampler/rejected_ratio"] = tokens.mean(rejected.astype(jnp.float32))
    return weight, metrics


def without_rejected(options: CorrectionOptions, inputs: PolicyInputs) -> PolicyInputs:
    """Returns the batch with a mask of 0 on tokens that correction or rejection drops, and with the
    mask before; a batch that has both as it is.

    Raises ValueError without old_logp and sampler_logp.
    """
    if inputs.full_mask is not None:
        return inputs
    tokens = _before_the_update(inputs, "rejection_changes_denominator")
    assert tokens.sampler is not None
    difference = tokens.old - tokens.sampler
    kept = _bounded_weight(options, tokens, difference)[0] > 0
    if options.rejection is not None:
        kept &= ~_rejected(options, tokens, difference)
    return dataclasses.replace(
        inputs,
        mask=jnp.where(kept, inputs.mask, 0),
        full_mask=inputs.mask,
        num_full_tokens=tokens.mask.sum().astype(jnp.float32),
    )


def with_rejected(tokens: Tokens) -> Tokens:
    """Returns the tokens under the mask before `without_rejected`, whose means are over that mask
    too."""
    inputs = tokens.inputs
    if inputs.full_mask is None:
        return tokens
    return tokens_of(
        dataclasses.replace(inputs, mask=inputs.full_mask, num_tokens=inputs.num_full_tokens)
    )


def with_mean_weight(options: CorrectionOptions, inputs: PolicyInputs) -> PolicyInputs:
    """Returns the batch, which holds its totals, with the mean weight of `correction` over its
    tokens, without those that `without_rejected` took out of the mask.

    Raises ValueError without old_logp and sampler_logp.
    """
    if inputs.mean_weight is not None:
        return inputs
    tokens = _before_the_update(inputs, "correction_normalize")
    full = with_rejected(tokens)
    assert full.sampler is not None
    weight = _bounded_weight(options, full, full.old - full.sampler)[0]
    return dataclasses.replace(inputs, mean_weight=tokens.mean(weight))


def _before_the_update(inputs: PolicyInputs, option: str) -> Tokens:
    missing = [name for name in ("old_logp", "sampler_logp") if getattr(inputs, name) is None]
    if missing:
        raise ValueError(f"PolicyInputs.{', '.join(missing)} missing: needed with {option}")
    return tokens_of(dataclasses.replace(inputs, logp=inputs.old_logp))


def _rejected(options: CorrectionOptions, tokens: Tokens, difference: jax.Array) -> jax.Array:
    """Returns bool[N,T]: tokens, or tokens of sequences, whose sampler-trainer divergence is above
    the limit."""
    # callers ask for a rejection, which goes together with its limit
    assert options.rejection is not None and options.rejection_max is not None
    sequences = tokens.sequences
    where, estimator = options.rejection.rsplit("_", 1)
    if estimator == "ratio":
        divergence = jnp.abs(difference)
        limit = jnp.log(options.rejection_max)
    else:
        bounded = clamp(difference)
        divergence = 0.5 * difference**2 if estimator == "k2" else jnp.exp(bounded) - bounded - 1.0
        limit = options.rejection_max
    if where == "token":
        return divergence > limit
    reduce = {
        "sequence_sum": sequences.sum,
        "sequence_mean": sequences.mean,
        "sequence_max": sequences.max,
    }[where]
    return sequences.to_tokens(reduce(divergence)) > limit


def _kl(estimator: str, tokens: Tokens) -> jax.Array:
    """Estimates KL(policy || reference) at each token, [N,T] (Schulman 2020,
    joschu.net/blog/kl-approx.html).

    unbiased: k3 times the ratio of the token, with its gradient; unbiased off-policy too
    (DeepSeek-V3.2).
    """
    assert tokens.ref is not None  # the caller checks it
    difference = tokens.logp - tokens.ref
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    difference = clamp(difference)
    k3 = jnp.exp(-difference) + difference - 1.0
    return k3 if estimator == "k3" else jnp.exp(clamp(tokens.log_ratio)) * k3
