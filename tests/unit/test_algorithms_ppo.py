"""PPO's rewards, advantages and value loss against numbers computed apart; see
algorithms_fixture."""

import jax
import numpy as np
import pytest
from algorithms_fixture import LOGP, MASK, OLD, REF, close, inputs, padded

import rl.algorithms
from rl.algorithms import ppo
from rl.stages.inputs import values_at_the_end

ROWS = slice(0, 2)
VALUES = padded([[0.2, 0.3, 0.5, 0.6], [0.1, 0]])
NEW_VALUES = padded([[0.5, 0.3, 0.4, 0.9], [0.1, 0.3]], garbage=np.inf)
ADVANTAGES = [[0.721919, 0.638862, 0.477750, 0.395], [-0.1005, 0.01, 0, 0]]
WHITENED = [[1.091498, 0.842952, 0.360827, 0.113199], [-1.369573, -1.038904, 0, 0]]
RETURNS = [[0.921919, 0.938862, 0.97775, 0.995], [-0.0005, 0.01, 0, 0]]


def per_token(scores, mask=MASK[ROWS], **options):
    return rl.algorithms.get("ppo", **options).advantages_per_token(
        scores, OLD[ROWS], REF[ROWS], VALUES, mask
    )


def test_advantages_and_returns():
    advantages, returns, metrics = per_token([1.0, 0.0], whiten=False)
    close(advantages, ADVANTAGES)
    close(returns, RETURNS)
    close(metrics["kl/reward"], np.mean([-0.3, 0.3, -0.05, 0.1, 0.2, -0.2]))


def test_whitened_advantages():
    advantages, returns, _ = per_token([1.0, 0.0])
    close(advantages, WHITENED)
    close(returns, RETURNS)


def test_without_a_kl_penalty_no_log_probabilities_are_needed():
    algorithm = rl.algorithms.get("ppo", kl_reward_coef=0.0, whiten=False, lam=1.0)
    assert "ref_logp" not in algorithm.inputs
    _, returns, metrics = algorithm.advantages_per_token(
        [1.0, -2.0], None, None, VALUES, MASK[ROWS]
    )
    close(returns, [[1, 1, 1, 1], [-2, -2, 0, 0]])
    assert "kl/reward" not in metrics
    with pytest.raises(ValueError, match="ref_logp"):
        rl.algorithms.get("ppo").advantages_per_token(
            [1.0, -2.0], OLD[ROWS], None, VALUES, MASK[ROWS]
        )


def test_a_completion_without_a_score_changes_nothing_for_the_others():
    algorithm = rl.algorithms.get("ppo")
    scores, values = np.array([1.0, np.nan, 0.5, 0.0]), np.where(MASK, 0.3, np.nan)
    advantages, returns, metrics = algorithm.advantages_per_token(scores, OLD, REF, values, MASK)
    kept = [0, 2, 3]
    expected = algorithm.advantages_per_token(
        scores[kept], OLD[kept], REF[kept], values[kept], MASK[kept]
    )
    close(advantages[kept], expected[0])
    close(returns[kept], expected[1])
    assert metrics == expected[2]
    assert not advantages[1].any()
    assert not returns[1].any()


def test_a_completion_without_tokens_gets_nothing():
    mask = MASK[ROWS].copy()
    mask[1] = 0
    advantages, returns, _ = per_token([1.0, 5.0], mask)
    assert not advantages[1].any()
    assert not returns[1].any()
    close(returns[0], RETURNS[0])


def test_a_batch_without_any_score_is_all_zero_and_finite():
    advantages, returns, metrics = per_token([np.nan, np.nan])
    assert not advantages.any()
    assert not returns.any()
    assert all(np.isfinite(value) for value in metrics.values())


def estimates(rewards, values, gamma, lam, last_value):
    """Advantages of the tokens of one completion by the sum that defines them (arXiv:1506.02438,
    equation 16)."""
    following = [*values, last_value][1:]
    surprise = [
        r + gamma * after - value
        for r, value, after in zip(rewards, values, following, strict=True)
    ]
    return [
        sum((gamma * lam) ** k * later for k, later in enumerate(surprise[t:]))
        for t in range(len(surprise))
    ]


@pytest.mark.parametrize("rows", [1, 9])
def test_gae_is_that_of_the_tokens_that_count(rows):
    """Those that a tool wrote are dropped before, in the middle and at the end; the last row has
    none that counts. Lambda and the value at the end are those of the row."""
    rng = np.random.default_rng(rows)
    mask = rng.random((rows, 12)) < 0.6
    mask[0] = [0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0]
    mask[1:][-1:] = False
    rewards, values = (np.where(mask, rng.normal(size=mask.shape), np.nan) for _ in range(2))
    lam, last = rng.random(rows), rng.normal(size=rows)
    advantages, returns = ppo.gae(rewards, values, mask, 0.9, lam, last)
    for row, kept in enumerate(mask):
        expected = estimates(rewards[row, kept], values[row, kept], 0.9, lam[row], last[row])
        np.testing.assert_allclose(advantages[row, kept], expected, atol=1e-12)
        np.testing.assert_allclose(returns[row, kept], expected + values[row, kept], atol=1e-12)
        assert not advantages[row, ~kept].any()
        assert not returns[row, ~kept].any()


def test_policy_and_critic_have_a_lambda_each():
    """VAPO: that of the policy is 1 - 1 / (alpha L), here 0.5 for 4 tokens and 0 for the 2 that
    would have 0; the critic learns Monte Carlo returns."""
    scores, mask = [1.0, -2.0], MASK[ROWS]
    options = {"kl_reward_coef": 0.0, "whiten": False, "lam_critic": 1.0}
    advantages, returns, metrics = per_token(scores, lam_alpha=0.5, **options)
    close(returns, [[1, 1, 1, 1], [-2, -2, 0, 0]])
    close(advantages[0], estimates([0, 0, 0, 1], VALUES[0].tolist(), 1.0, 0.5, 0.0))
    close(advantages[1, :2], estimates([0, -2], VALUES[1, :2].tolist(), 1.0, 0.0, 0.0))
    assert metrics == ppo.value_metrics(VALUES, returns, mask)
    short, _, _ = per_token(scores, lam_alpha=0.01, **options)  # below 0: 0
    close(short[0], estimates([0, 0, 0, 1], VALUES[0].tolist(), 1.0, 0.0, 0.0))
    fixed, returns, _ = per_token(scores, lam=0.7, **options)
    close(fixed[0], estimates([0, 0, 0, 1], VALUES[0].tolist(), 1.0, 0.7, 0.0))
    close(per_token(scores, lam=0.7, lam_alpha=0.5, kl_reward_coef=0.0)[1][0] - VALUES[0], fixed[0])


def test_the_return_of_a_completion_that_was_cut_off_goes_on_with_the_value_there():
    algorithm = rl.algorithms.get(
        "ppo", kl_reward_coef=0.0, whiten=False, lam=1.0, gamma=0.5, bootstrap_truncated=True
    )
    arguments = [1.0, -2.0], None, None, VALUES, MASK[ROWS], np.array([4.0, 0.0])
    close(algorithm.advantages_per_token(*arguments)[1], [[0.375, 0.75, 1.5, 3], [-1, -2, 0, 0]])
    ended = rl.algorithms.get("ppo", kl_reward_coef=0.0, whiten=False, lam=1.0, gamma=0.5)
    close(ended.advantages_per_token(*arguments)[1], [[0.125, 0.25, 0.5, 1], [-1, -2, 0, 0]])


def test_the_value_at_the_cut_is_that_after_the_last_token():
    after, mask = (
        np.arange(12.0).reshape(3, 4),
        np.array([[0, 1, 1, 0], [1, 0, 1, 1], [0, 1, 1, 0]]),
    )
    assert values_at_the_end(after, mask, [True, True, False]).tolist() == [2, 7, 0]
    assert values_at_the_end(after, mask * [[0], [1], [1]], [True, True, False]).tolist() == [
        0,
        7,
        0,
    ], "nothing is trained"


def test_whitened_rewards_keep_their_mean():
    returns = per_token([1.0, 0.0], lam=1.0, whiten_rewards=True)[1]
    mask = MASK[ROWS] != 0
    rewards = np.where(mask, -0.05 * (OLD[ROWS] - REF[ROWS]), 0.0)
    rewards[0, 3] += 1.0
    kept = rewards[mask]
    rewards[mask] = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8) + kept.mean()
    close(returns, np.where(mask, np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1], 0.0))


def test_gae_takes_lists_numpy_and_jax_arrays():
    rewards, values, mask = [[0.0, 1.0]], [[0.5, 0.25]], [[1, 1]]
    expected = [[0.25 - 0.5 + 0.95 * 0.75, 0.75]]
    for convert in (list, np.asarray, lambda x: jax.numpy.asarray(x, jax.numpy.float32)):
        advantages, returns = ppo.gae(convert(rewards), convert(values), convert(mask), 1.0, 0.95)
        close(advantages, expected)
        close(returns, np.add(expected, values))
    assert advantages.dtype == np.float32


def test_whitening_a_single_token_gives_zero():
    assert ppo.whiten(np.array([[3.0, 9.0]]), [[1, 0]]).tolist() == [[0.0, 0.0]]


def test_value_loss_and_clip_fraction():
    arrays = NEW_VALUES, VALUES, padded(RETURNS), MASK[ROWS]
    close(ppo.value_loss(*arrays, 0.2), 0.095547)
    close(ppo.value_clip_fraction(*arrays, 0.2), 1 / 3)
    rows = [ppo.value_loss(*(array[row : row + 1] for array in arrays), 0.2) for row in (0, 1)]
    close(np.mean(rows), 0.077548)


def test_value_loss_without_clipping_is_half_the_squared_error():
    mask = MASK[ROWS] != 0
    arrays = NEW_VALUES, VALUES, padded(RETURNS), MASK[ROWS]
    close(
        ppo.value_loss(*arrays, None),
        0.5 * np.mean((NEW_VALUES[mask] - np.array(RETURNS)[mask]) ** 2),
    )
    assert ppo.value_clip_fraction(*arrays, None) == 0


def test_value_losses_of_micro_batches_add_up_and_padding_gets_no_gradient():
    algorithm = rl.algorithms.get("ppo")
    full = algorithm.with_totals(rl.algorithms.PolicyInputs(mask=MASK[ROWS]))

    def loss(values, row):
        part = rl.algorithms.PolicyInputs(mask=MASK[row : row + 1], num_tokens=full.num_tokens)
        return algorithm.value_loss(
            values, VALUES[row : row + 1], padded(RETURNS)[row : row + 1], part
        )

    parts = [
        jax.value_and_grad(loss, has_aux=True)(NEW_VALUES[row : row + 1], row) for row in (0, 1)
    ]
    close(sum(value for (value, _), _ in parts), 0.095547)
    close(sum(metrics["value/clip_frac"] for (_, metrics), _ in parts), 1 / 3)
    # First row: the clipped error wins at the first and last token, which stops the gradient there.
    close(parts[0][1], [[0, (0.3 - 0.938862) / 6, (0.4 - 0.97775) / 6, 0]])
    close(parts[1][1], [[(0.1 + 0.0005) / 6, (0.3 - 0.01) / 6, 0, 0]])


def test_explained_variance():
    returns, mask = np.array([[1.0, 2.0, 3.0, 99.0]]), [[1, 1, 1, 0]]
    close(ppo.value_metrics(returns, returns, mask)["value/explained_variance"], 1.0)
    half = np.array([[1.5, 2.0, 2.5, np.nan]])
    close(
        ppo.value_metrics(half, returns, mask)["value/explained_variance"],
        1 - (0.5 / 3) / (2 / 3 + 1e-5),
    )


def test_policy_loss_takes_an_advantage_for_each_token():
    advantages = padded([WHITENED[0], WHITENED[1][:2], [0.0, 0.5, -0.5], [1.0]])
    loss, _ = rl.algorithms.get("ppo").loss(inputs(advantages=advantages))
    mask = MASK != 0
    ratio = np.exp(LOGP[mask] - OLD[mask])
    expected = np.minimum(ratio * advantages[mask], np.clip(ratio, 0.8, 1.2) * advantages[mask])
    close(loss, -expected.mean())


def test_correct_completions_are_imitated_too():
    """The mean over their 4 and 3 tokens is 4.5 / 7 (VAPO, equation 10); a completion without a
    score is not correct.
    """
    algorithm = rl.algorithms.get("ppo", positive_nll_coef=0.1)
    correct = algorithm.correct([1.0, 0.0, 0.5, np.nan], MASK)
    assert correct.tolist() == np.where([[1], [0], [1], [0]], MASK, 0).tolist()
    assert not algorithm.correct([1.0, 0.0, 0.5, np.nan], np.zeros_like(MASK)).any()
    assert rl.algorithms.get("ppo").correct([1.0], MASK[:1]) is None
    plain = rl.algorithms.get("ppo").loss(inputs())[0]
    loss, metrics = algorithm.loss(inputs(correct=correct))
    close((loss - plain, metrics["positive_nll"]), (0.45 / 7, 4.5 / 7))
    close(algorithm.loss(inputs(correct=np.zeros(4)))[0], plain)
    with pytest.raises(ValueError, match="PolicyInputs.correct missing"):
        algorithm.loss(inputs())


@pytest.mark.parametrize("name", ["ppo", "rloo", "reinforce_pp"])
def test_the_kl_coefficient_moves_towards_its_target(name):
    """Ziegler et al. 2019, section 2.2; the error is bounded by 0.2, and so is the step."""
    algorithm = rl.algorithms.get(
        name, kl_reward_coef=0.1, kl_target=0.5, kl_horizon=100, entropy_target=1.0
    )
    coefs = algorithm.adaptive_coefs
    assert coefs.keys() == {"entropy_coef", "entropy_bonus_applied", "kl/coef"}
    for kl, completions, factor in (
        (0.55, 10, 1.01),
        (5.0, 50, 1.1),
        (-3.0, 50, 0.9),
        (0.5, 50, 1.0),
        (5.0, 1000, 1.2),
    ):
        moved = algorithm.adapt_after_step(coefs, {"kl/reward": kl}, completions)
        assert moved == coefs | {"kl/coef": pytest.approx(0.1 * factor)}
    assert algorithm.with_coefs(moved) == rl.algorithms.get(
        name, kl_reward_coef=moved["kl/coef"], kl_target=0.5, kl_horizon=100, entropy_target=1.0
    )
    fixed = rl.algorithms.get(name, kl_reward_coef=0.1)
    assert fixed.with_coefs({}) is fixed
    assert fixed.adaptive_coefs == fixed.adapt_after_step({}, {}, 8) == {}


def test_what_the_trainer_has_to_provide():
    algorithm = rl.algorithms.get("ppo")
    assert algorithm.stage == "online" and {"values", "ref_logp", "old_logp"} <= algorithm.inputs
    bare = rl.algorithms.get("ppo", kl_reward_coef=0.0)
    assert "ref_logp" not in bare.inputs
    assert "old_logp" not in bare.inputs
    assert "old_logp" in bare.repeated_inputs
    assert rl.algorithms.get("ppo", kl_reward_coef=0.0, kl_coef=0.1).inputs >= {"ref_logp"}
