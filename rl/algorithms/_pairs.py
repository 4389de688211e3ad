"""Computes losses of preferred pairs, on the device.

Shapes: N rows of T tokens with at most K = T // 2 pairs in each. The chosen answer of a pair is an
odd segment of the row, the rejected answer is the next segment. w and l are the sums of logp -
ref_logp over the tokens of the chosen and of the rejected answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from rl.algorithms import _inputs
from rl.algorithms._inputs import PolicyInputs, Sequences


class Pairs:
    """Splits values of sequences, [N,S], into values of pairs, [N,K]."""

    def __init__(self, inputs: PolicyInputs):
        if inputs.segments is None:
            raise ValueError(
                "PolicyInputs.segments is missing: both answers of a pair are in one row, as "
                "segments 1 and 2"
            )
        self.sequences = Sequences(inputs)
        self.exist_NK = self.split(self.sequences.exists_NS)[0]

    @staticmethod
    def split(values_NS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (values of chosen answers, values of rejected answers), [N,K] each. Segment 0 is
        padding."""
        answers = (values_NS.shape[1] - 1) // 2 * 2
        return values_NS[:, 1 : answers + 1 : 2], values_NS[:, 2 : answers + 2 : 2]

    def last(self, values_NT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the value at the last token of each answer, as `split` does."""
        segments = self.sequences.segments_NT
        assert segments is not None  # checked in __init__
        ends_NT = segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
        return self.split(self.sequences.packed_sum(jnp.where(ends_NT, values_NT, 0.0)))

    def mean(self, values_NK: jax.Array, inputs: PolicyInputs) -> jax.Array:
        """Returns the sum over the pairs of these rows, divided by the number of pairs of the
        mini-batch."""
        total = jnp.where(self.exist_NK, values_NK.astype(jnp.float32), 0.0).sum()
        return total / jnp.maximum(jnp.asarray(inputs.num_sequences, jnp.float32) / 2, 1.0)


def with_totals(inputs: PolicyInputs) -> PolicyInputs:
    """Returns `inputs` with counts of the mini-batch: tokens, sequences (two per pair), tokens of
    chosen answers."""
    inputs = _inputs.with_totals(inputs)
    if inputs.chosen_tokens is None:
        pairs = Pairs(inputs)
        inputs = dataclasses.replace(
            inputs, chosen_tokens=pairs.split(pairs.sequences.length_NS)[0].sum()
        )
    return inputs


@dataclass(frozen=True)
class Ratios:
    """w (chosen) and l (rejected) of each pair, and the number of tokens of both answers, at least
    1. All [N,K]."""

    chosen: jax.Array
    rejected: jax.Array
    chosen_length: jax.Array
    rejected_length: jax.Array

    @property
    def difference(self) -> jax.Array:
        """The margin w - l of each pair [N,K]."""
        return self.chosen - self.rejected

    @property
    def mean_difference(self) -> jax.Array:
        """Returns the difference of the means over tokens."""
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


class PairOptions(Protocol):
    """The options of `dpo` that its losses read."""

    @property
    def loss_type(self) -> str: ...

    @property
    def beta(self) -> float: ...

    @property
    def label_smoothing(self) -> float: ...

    @property
    def nll_coef(self) -> float: ...

    @property
    def discopop_tau(self) -> float: ...


class RankingOptions(Protocol):
    """The options of `reward_model` that its loss reads."""

    @property
    def center_coef(self) -> float: ...


def _smoothed_nll(z: jax.Array, smoothing: float) -> jax.Array:
    """Returns -log sigmoid(z), with the labels swapped for a share `smoothing` of the pairs."""
    return -(1 - smoothing) * log_sigmoid(z) - smoothing * log_sigmoid(-z)


def _sigmoid(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2305.18290, eq. 7; with label_smoothing conservative DPO (Mitchell 2023)."""
    return _smoothed_nll(options.beta * r.difference, options.label_smoothing)


def _robust(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2403.00409: unbiased where a share label_smoothing of the preferences is wrong."""
    z = options.beta * r.difference
    s = options.label_smoothing
    return (-(1 - s) * log_sigmoid(z) + s * log_sigmoid(-z)) / (1 - 2 * s)


def _hinge(options: PairOptions, r: Ratios) -> jax.Array:
    """The hinge loss of SLiC-HF (arXiv:2305.10425) with a margin of 1, on log-ratios instead of
    log-probabilities, as `loss_type: hinge` of TRL."""
    return jax.nn.relu(1 - options.beta * r.difference)


def _ipo(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2310.12036, eq. 17, on means over tokens."""
    return (r.mean_difference - 1 / (2 * options.beta)) ** 2


def _sigmoid_norm(options: PairOptions, r: Ratios) -> jax.Array:
    """Means over tokens instead of sums (Tulu 3, arXiv:2411.15124)."""
    return -log_sigmoid(options.beta * r.mean_difference)


def _exo_pair(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2402.00856, eq. 16: the divergence of the model's preference from the smoothed
    label."""
    z = options.beta * r.difference
    s = options.label_smoothing
    return sigmoid(z) * (log_sigmoid(z) - jnp.log1p(-s)) + sigmoid(-z) * (
        log_sigmoid(-z) - jnp.log(s)
    )


def _nca_pair(options: PairOptions, r: Ratios) -> jax.Array:
    """NCA for pairs (arXiv:2402.05369): the chosen answer gets likelier, and both are kept from
    getting likelier without bound."""
    chosen = options.beta * r.chosen
    rejected = options.beta * r.rejected
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _bco_pair(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2404.04656, without the shift, which is a mean over pairs."""
    return -log_sigmoid(options.beta * r.chosen) - log_sigmoid(-options.beta * r.rejected)


def _apo_zero(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2408.06266, eq. 7: chosen answers up, rejected ones down."""
    return 1 - sigmoid(options.beta * r.chosen) + sigmoid(options.beta * r.rejected)


def _apo_down(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2408.06266, eq. 8: both down, rejected ones further."""
    return sigmoid(options.beta * r.chosen) + 1 - sigmoid(options.beta * r.difference)


def _sppo_hard(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2405.00675, eq. 4.7, with a probability of 1 that the chosen answer wins."""
    return (r.chosen - 0.5 / options.beta) ** 2 + (r.rejected + 0.5 / options.beta) ** 2


def _discopop(options: PairOptions, r: Ratios) -> jax.Array:
    """arXiv:2406.08414, eq. 5: between the logistic and the exponential loss, by the log-ratio."""
    z = options.beta * r.difference
    share = sigmoid(z / options.discopop_tau)
    return -(1 - share) * log_sigmoid(z) + share * jnp.exp(-z)


LOSSES = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "sigmoid_norm": _sigmoid_norm,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sppo_hard": _sppo_hard,
    "discopop": _discopop,
}


def preference_loss(
    options: PairOptions, inputs: PolicyInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (scalar, metrics): the loss of `dpo` with these options. Raises ValueError for absent
    inputs."""
    if missing := [name for name in ("logp", "ref_logp") if getattr(inputs, name) is None]:
        raise ValueError(
            f"PolicyInputs.{', '.join(missing)} missing: dpo compares the policy with a reference "
            "model"
        )
    inputs = with_totals(inputs)
    assert (
        inputs.logp is not None and inputs.ref_logp is not None and inputs.chosen_tokens is not None
    )
    pairs = Pairs(inputs)
    sequences = pairs.sequences
    logp = jnp.where(sequences.mask_NT, inputs.logp, 0.0)
    ratio = logp - jax.lax.stop_gradient(jnp.where(sequences.mask_NT, inputs.ref_logp, 0.0))
    lengths = pairs.split(jnp.maximum(sequences.length_NS, 1.0))
    ratios = Ratios(*pairs.split(sequences.sum(ratio)), *lengths)
    chosen_logp, rejected_logp = pairs.split(sequences.sum(logp))
    loss = pairs.mean(LOSSES[options.loss_type](options, ratios), inputs)
    nll = -jnp.where(pairs.exist_NK, chosen_logp, 0.0).sum() / jnp.maximum(
        inputs.chosen_tokens, 1.0
    )
    metrics = {
        "rewards/chosen": pairs.mean(options.beta * ratios.chosen, inputs),
        "rewards/rejected": pairs.mean(options.beta * ratios.rejected, inputs),
        "rewards/margins": pairs.mean(options.beta * ratios.difference, inputs),
        "rewards/accuracies": pairs.mean(ratios.chosen > ratios.rejected, inputs),
        "logps/chosen": pairs.mean(chosen_logp, inputs),
        "logps/rejected": pairs.mean(rejected_logp, inputs),
        "nll": nll,
    }
    if inputs.entropy is not None:
        assert inputs.num_tokens is not None  # counted by `with_totals`
        metrics["entropy"] = sequences.sum(inputs.entropy).sum() / jnp.maximum(
            inputs.num_tokens, 1.0
        )
    return loss + options.nll_coef * nll, jax.tree.map(jax.lax.stop_gradient, metrics)


def ranking_loss(
    options: RankingOptions, inputs: PolicyInputs
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (scalar, metrics): the loss of `reward_model` with these options. Raises ValueError
    without scores."""
    if inputs.scores is None:
        raise ValueError("PolicyInputs.scores is missing: a score after each token")
    inputs = with_totals(inputs)
    pairs = Pairs(inputs)
    assert inputs.scores is not None
    chosen, rejected = pairs.last(inputs.scores)
    margin = 0.0 if inputs.margin is None else jax.lax.stop_gradient(pairs.last(inputs.margin)[0])
    loss = pairs.mean(-log_sigmoid(chosen - rejected - margin), inputs)
    if options.center_coef:
        loss = loss + options.center_coef * pairs.mean((chosen + rejected) ** 2, inputs)
    metrics = {
        "reward_model/accuracy": pairs.mean(chosen > rejected, inputs),
        "reward_model/margin": pairs.mean(chosen - rejected, inputs),
        "reward_model/score_mean": pairs.mean((chosen + rejected) / 2, inputs),
        "reward_model/score_min": jnp.where(
            pairs.exist_NK, jnp.minimum(chosen, rejected), jnp.inf
        ).min(),
        "reward_model/score_max": jnp.where(
            pairs.exist_NK, jnp.maximum(chosen, rejected), -jnp.inf
        ).max(),
    }
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)
