"""The other policy gradients against numbers computed apart; see algorithms_fixture."""

import dataclasses

import jax
import numpy as np
import pytest
from algorithms_fixture import LENGTHS, LOGP, MASK, OLD, REF, REWARDS, SAMPLER, close, inputs

import rl.algorithms
from rl.algorithms._token_flags import DROPPED

PLAIN = [0.625, -0.375, 0.125, -0.375]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dr_grpo", {}, PLAIN),
        ("dapo", {}, [1.305310, -0.783186, 0.261062, -0.783186]),
        ("dppo", {}, PLAIN),
        ("rloo", {}, [0.833333, -0.5, 0.166667, -0.5]),
        ("opo", {}, [0.45, -0.55, -0.05, -0.55]),
        ("maxrl", {}, [1.666662, -0.999997, 0.333332, -0.999997]),
    ],
)
def test_advantages(name, options, expected):
    close(rl.algorithms.get(name, **options).advantages(REWARDS, LENGTHS and [LENGTHS]), [expected])


@pytest.mark.parametrize("options", [{}, {"baseline": True}])
def test_reinforce_pp_whitens_over_tokens(options):
    result = rl.algorithms.get("reinforce_pp", **options).advantages(REWARDS, [LENGTHS])
    close(result[0], MASK * np.array([[1.027872], [-1.256288], [-0.114208], [-1.256288]]))


def test_reinforce_pp_returns_hold_the_penalty_of_what_comes_after():
    """By hand: the reward on the last token, less the penalty from each token on, discounted; a
    masked token is passed over.
    """
    kl, mask = np.array([[[0.1, 9.0, 0.3], [0.2, 0.4, 9.0]]]), np.array([[[1, 0, 1], [1, 1, 0]]])
    last = [1.0 - 0.5 * 0.3, 0.0 - 0.5 * 0.4]
    returns = np.array([[0.9 * last[0] - 0.5 * 0.1, last[0]], [0.9 * last[1] - 0.5 * 0.2, last[1]]])
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    algorithm = rl.algorithms.get("reinforce_pp", kl_reward_coef=0.5, gamma=0.9)
    result = algorithm.advantages([[1.0, 0.0]], token_kl=kl, mask=mask)
    np.testing.assert_allclose(
        result, [[[expected[0, 0], 0, expected[0, 1]], [*expected[1], 0]]], atol=1e-12
    )


def test_rloo_with_a_penalty_in_the_rewards():
    """TRL's, with k1 of the old log-probabilities."""
    algorithm = rl.algorithms.get("rloo", kl_reward_coef=0.05)
    kl = np.where(MASK, OLD, 0) - np.where(MASK, REF, 0)
    advantages = algorithm.advantages(REWARDS, [LENGTHS], token_kl=kl[None])
    close(advantages, [[0.835833, -0.494167, 0.172500, -0.514167]])
    close(algorithm.loss(inputs(advantages=advantages[0].astype(np.float32)))[0], -0.075153)


def test_a_group_of_equal_rewards_stays_at_zero_among_normalised_ones():
    rewards = np.random.default_rng(0).random((7, 5))
    rewards[3] = 0.3
    plain, normalised = (
        rl.algorithms.get("rloo", normalize_advantages=each).advantages(rewards)
        for each in (False, True)
    )
    assert not normalised[3].any()
    np.testing.assert_allclose(
        normalised, (plain - plain.mean()) / (plain.std(ddof=1) + 1e-4), atol=1e-12
    )


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dr_grpo", {}, -0.122950),
        ("dapo", {}, -0.405972),
        ("gspo", {}, 0.001892),
        ("gspo", {"ratio": "sequence_token"}, 0.001892),
        ("luspo", {"epsilon": 0.2, "epsilon_high": None}, -1.102836),
        ("cispo", {}, 0.200435),
        ("cispo", {"epsilon": 0.2, "epsilon_high": 0.2}, 0.143900),
        ("cispo", {"epsilon": 0.2, "epsilon_high": 0.2, "aggregation": "sequence"}, -0.198754),
        ("sapo", {}, -0.151918),
        ("vespo", {}, 0.037097),
        ("gmpo", {"epsilon": 0.35, "epsilon_high": 0.25}, -0.080519),
    ],
)
def test_loss(name, options, expected):
    close(rl.algorithms.get(name, **options).loss(inputs())[0], expected)


def test_dppo():
    """prime-rl's, with the sampler for what came before; the first tokens of rows 1 and 3 are left
    out."""
    arrays = inputs(with_sampler=True, advantages=np.array(PLAIN, np.float32), old_logp=None)
    loss, metrics = rl.algorithms.get("dppo").loss(arrays)
    close(loss, -0.119260)
    close(metrics["dppo/masked_ratio"], 0.2)
    gradient = jax.grad(
        lambda logp: rl.algorithms.get("dppo", penalty=0.0).loss(inputs(True, True, logp=logp))[0]
    )(LOGP)
    assert (np.asarray(gradient) == 0).tolist()[0] == [True, False, False, False]


def test_gradients_of_constant_weights():
    """CISPO's and VESPO's ratios are constants: the gradient is weight * -A / tokens."""
    advantages = np.asarray(inputs().advantages)[:, None]
    weights = {
        "cispo": np.where(
            MASK, np.clip(np.exp(np.where(MASK, LOGP, 0) - np.where(MASK, OLD, 0)), 0, 5), 0
        ),
        "vespo": MASK * np.array([[0.508915], [0.896125], [1.089248], [0.490141]]),
    }
    for name, weight in weights.items():
        gradient = jax.grad(lambda logp, a=rl.algorithms.get(name): a.loss(inputs(logp=logp))[0])(
            LOGP
        )
        close(gradient, -weight * advantages / 10)


def test_gmpo_clips_before_the_mean():
    """A token beyond the clip on the side its advantage pushes to has no gradient; the others share
    the sequence's ratio.
    """
    algorithm = rl.algorithms.get("gmpo", epsilon=0.35, epsilon_high=0.25)
    gradient = np.asarray(jax.grad(lambda logp: algorithm.loss(inputs(logp=logp))[0])(LOGP))
    assert gradient[0, 0] == 0  # log-ratio 0.4, A > 0
    assert gradient[3, 0] == 0  # log-ratio -0.5, A < 0
    ratio = np.exp((0.25 + 0 + 0.1 - 0.1) / 4)
    close(gradient[0, 1:], -ratio * 1.305310 / 4 / 4)


def test_vespo_folds_the_sampler_correction_into_its_weight():
    """The sum over tokens of the truncated log-weights is added to the log of the sequence's
    ratio."""
    advantages = np.asarray(inputs().advantages)
    log_ratio = np.where(MASK, LOGP, 0) - np.where(MASK, OLD, 0)
    weight = np.minimum(np.exp(np.where(MASK, OLD, 0) - np.where(MASK, SAMPLER, 0)), 1.02)
    log_w = (log_ratio + np.log(weight)).sum(1)
    k, scale = np.where(advantages >= 0, 2, 3), np.where(advantages >= 0, 3, 2)
    phi = np.exp(scale + k * log_w - scale * np.exp(log_w))
    expected = -(phi * advantages * np.where(MASK, LOGP, 0).sum(1)).sum() / 10
    algorithm = rl.algorithms.get("vespo", correction="token_truncate", correction_max=1.02)
    close(algorithm.loss(inputs(with_sampler=True))[0], expected)


def test_groups_are_combined_after_each_function_is_normalised():
    """TRL's normalize_then_sum: one function apart in size, one that is equal in a group, one
    without a score."""
    rewards = np.array(
        [[[1.0, 100.0], [0.0, 300.0], [0.0, 100.0]], [[1.0, 5.0], [np.nan, 5.0], [0.0, 5.0]]]
    )

    def z(values):
        return (values - np.nanmean(values)) / (np.nanstd(values, ddof=1) + 1e-4)

    each = np.stack([[z(rewards[p, :, f]) for p in range(2)] for f in range(2)])
    sums = np.nansum(np.array([2.0, 0.5])[:, None, None] * each, axis=0)
    expected = (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)
    algorithm = rl.algorithms.get("grpo", combine="normalize_then_sum")
    np.testing.assert_allclose(
        algorithm.advantages(rewards, weights=[2.0, 0.5]), expected, atol=1e-12
    )
    assert not algorithm.advantages(np.full((2, 3, 2), 0.1)).any()


def test_remax_compares_with_the_greedy_completion():
    result = rl.algorithms.get("remax").advantages(
        [[1.0, np.nan], [0.5, 0.5]], greedy=[0.25, np.nan]
    )
    assert result.tolist() == [[0.75, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (
            {"rejection": "token_k2", "rejection_max": 0.5},
            [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]],
        ),
        (
            {"rejection": "token_k3", "rejection_max": 0.9},
            [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]],
        ),
        (
            {"rejection": "sequence_mean_k2", "rejection_max": 0.1},
            [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        ),
        (
            {"rejection": "sequence_sum_k2", "rejection_max": 1e-3},
            [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        ),
        (
            {"rejection": "sequence_max_k3", "rejection_max": 1.3e-3},
            [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        ),
        (
            {"rejection": "sequence_max_ratio", "rejection_max": 1.055},
            [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        ),
    ],
)
def test_rejection(options, kept):
    """log-weights: 0.05, 0, -0.02, 0.06 / 0, -0.05 / 1.1, 0, 0 / 0. What is dropped has no loss,
    and counts unless asked.
    """
    kept = np.array(kept, np.float32)
    plain = rl.algorithms.get("grpo").loss(inputs(mask=kept))[0]
    arrays = inputs(with_sampler=True)
    loss, metrics = rl.algorithms.get("grpo", **options).loss(arrays)
    close(loss, plain * kept.sum() / 10)
    close(metrics["sampler/rejected_ratio"], 1 - kept.sum() / 10)
    close(
        rl.algorithms.get("grpo", **options, rejection_changes_denominator=True).loss(arrays)[0],
        plain,
    )


def test_what_is_dropped_is_decided_once_for_all_tokens():
    """By hand: log-weights 1.2, -1.3 / 0.1, 2.0. The first sequence weighs exp(-0.1), and loses its
    second token alone (0.845 > 0.8): without it, it would weigh exp(1.2), which is out of bounds.
    The second sequence weighs exp(2.1), which is. So one of four tokens is left.
    """
    algorithm = rl.algorithms.get(
        "grpo",
        correction="sequence_mask",
        correction_max=3.0,
        rejection="token_k2",
        rejection_max=0.8,
        rejection_changes_denominator=True,
    )
    old = np.full((2, 2), -3.0, np.float32)
    batch = rl.algorithms.PolicyInputs(
        mask=np.ones((2, 2), np.float32),
        logp=old,
        old_logp=old,
        sampler_logp=old - np.array([[1.2, -1.3], [0.1, 2.0]], np.float32),
        advantages=np.array([[0.5], [-2.0]], np.float32) * np.ones((1, 2), np.float32),
    )
    counted = algorithm.with_totals(batch)
    np.testing.assert_array_equal(counted.mask, [[1, 0], [0, 0]])
    again = algorithm.with_totals(counted)
    np.testing.assert_array_equal(again.mask, counted.mask)
    close(again.num_tokens, 1.0)
    loss, metrics = algorithm.loss(counted)
    close(loss, -0.5 * np.exp(-0.1))
    close(metrics["sampler/rejected_ratio"], 2 / 4)
    close(metrics["sampler/is_oob_ratio"], 2 / 4)
    close(metrics["sampler/logp_diff_mean"], (1.2 + 1.3 + 0.1 + 2.0) / 4)
    np.testing.assert_array_equal(algorithm.token_flags(batch), [[0, DROPPED], [DROPPED, DROPPED]])
    normalized = dataclasses.replace(algorithm, correction_normalize=True)
    close(normalized.loss(batch)[0], -0.5)


def test_old_log_probabilities_of_the_sampler():
    close(
        rl.algorithms.get("grpo", old_logp="sampler").loss(inputs(with_sampler=True))[0],
        rl.algorithms.get("grpo").loss(inputs(old_logp=SAMPLER))[0],
    )


def test_adaptive_entropy_bonus():
    """TRL's: off before the first entropy is known; then on while it is at most the target, with a
    weight that has grown.
    """
    algorithm = rl.algorithms.get(
        "grpo", entropy_coef=0.1, entropy_target=0.2, entropy_step=0.03, entropy_coef_max=0.15
    )
    arrays = inputs(entropy=np.where(MASK, 0.5, np.nan).astype(np.float32))
    plain, coefs = rl.algorithms.get("grpo").loss(arrays)[0], algorithm.adaptive_coefs
    for entropy, coef, applied in [
        (0.1, 0.13, True),
        (0.2, 0.15, True),
        (0.3, 0.12, False),
        (0.1, 0.15, True),
    ]:
        coefs = algorithm.adapt_after_update(coefs, {"entropy": entropy})
        close(coefs["entropy_coef"], coef)
        given = inputs(
            entropy=arrays.entropy,
            adaptive_coefs={name: np.float32(value) for name, value in coefs.items()},
        )
        close(algorithm.loss(given)[0], plain - coef * applied * 0.5)
    close(algorithm.loss(arrays)[0], plain)
