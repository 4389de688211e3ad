"""PPO's rewards, advantages and value loss against numbers computed apart; see algorithms_fixture."""

import jax
import numpy as np
import pytest
from algorithms_fixture import LOGP, MASK, OLD, REF, close, inputs, padded

import rl.algorithms
from rl.algorithms import ppo

ROWS = slice(0, 2)
VALUES = padded([[0.2, 0.3, 0.5, 0.6], [0.1, 0]])
NEW_VALUES = padded([[0.5, 0.3, 0.4, 0.9], [0.1, 0.3]], garbage=np.inf)
ADVANTAGES = [[0.721919, 0.638862, 0.477750, 0.395], [-0.1005, 0.01, 0, 0]]
WHITENED = [[1.091498, 0.842952, 0.360827, 0.113199], [-1.369573, -1.038904, 0, 0]]
RETURNS = [[0.921919, 0.938862, 0.97775, 0.995], [-0.0005, 0.01, 0, 0]]


def per_token(scores, mask=MASK[ROWS], **options):
    return rl.algorithms.get("ppo", **options).advantages_per_token(scores, OLD[ROWS], REF[ROWS], VALUES, mask)


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
    assert not algorithm.needs_reference
    _, returns, metrics = algorithm.advantages_per_token([1.0, -2.0], None, None, VALUES, MASK[ROWS])
    close(returns, [[1, 1, 1, 1], [-2, -2, 0, 0]])
    assert "kl/reward" not in metrics
    with pytest.raises(ValueError, match="ref_logp"):
        rl.algorithms.get("ppo").advantages_per_token([1.0, -2.0], OLD[ROWS], None, VALUES, MASK[ROWS])


def test_a_completion_without_a_score_changes_nothing_for_the_others():
    algorithm = rl.algorithms.get("ppo")
    scores, values = np.array([1.0, np.nan, 0.5, 0.0]), np.where(MASK, 0.3, np.nan)
    advantages, returns, metrics = algorithm.advantages_per_token(scores, OLD, REF, values, MASK)
    kept = [0, 2, 3]
    expected = algorithm.advantages_per_token(scores[kept], OLD[kept], REF[kept], values[kept], MASK[kept])
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


def test_gae_passes_over_masked_tokens_as_if_they_were_not_there():
    dense = ppo.gae([[0.1, 0.2, 1.0]], [[0.3, 0.5, 0.4]], [[1, 1, 1]], 0.9, 0.8)
    gaps = ppo.gae([[0.1, np.nan, 0.2, 7.0, 1.0]], [[0.3, 9.0, 0.5, np.inf, 0.4]], [[1, 0, 1, 0, 1]], 0.9, 0.8)
    for without, with_gaps in zip(dense, gaps, strict=True):
        np.testing.assert_allclose(with_gaps[:, [0, 2, 4]], without, atol=1e-15)
        assert with_gaps[0, [1, 3]].tolist() == [0, 0]


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
    close(ppo.value_loss(*arrays, None), 0.5 * np.mean((NEW_VALUES[mask] - np.array(RETURNS)[mask]) ** 2))
    assert ppo.value_clip_fraction(*arrays, None) == 0


def test_value_losses_of_micro_batches_add_up_and_padding_gets_no_gradient():
    algorithm = rl.algorithms.get("ppo")
    whole = algorithm.with_totals(rl.algorithms.PolicyInputs(mask=MASK[ROWS]))

    def loss(values, row):
        part = rl.algorithms.PolicyInputs(mask=MASK[row : row + 1], num_tokens=whole.num_tokens)
        return algorithm.value_loss(values, VALUES[row : row + 1], padded(RETURNS)[row : row + 1], part)

    parts = [jax.value_and_grad(loss, has_aux=True)(NEW_VALUES[row : row + 1], row) for row in (0, 1)]
    close(sum(value for (value, _), _ in parts), 0.095547)
    close(sum(metrics["value/clip_frac"] for (_, metrics), _ in parts), 1 / 3)
    # First row: the clipped error wins at the first and last token, which stops the gradient there.
    close(parts[0][1], [[0, (0.3 - 0.938862) / 6, (0.4 - 0.97775) / 6, 0]])
    close(parts[1][1], [[(0.1 + 0.0005) / 6, (0.3 - 0.01) / 6, 0, 0]])


def test_explained_variance():
    returns, mask = np.array([[1.0, 2.0, 3.0, 99.0]]), [[1, 1, 1, 0]]
    close(ppo.value_metrics(returns, returns, mask)["value/explained_variance"], 1.0)
    half = np.array([[1.5, 2.0, 2.5, np.nan]])
    close(ppo.value_metrics(half, returns, mask)["value/explained_variance"], 1 - (0.5 / 3) / (2 / 3 + 1e-5))


def test_policy_loss_takes_an_advantage_for_each_token():
    advantages = padded([WHITENED[0], WHITENED[1][:2], [0.0, 0.5, -0.5], [1.0]])
    loss, _ = rl.algorithms.get("ppo").loss(inputs(advantages=advantages))
    mask = MASK != 0
    ratio = np.exp(LOGP[mask] - OLD[mask])
    expected = np.minimum(ratio * advantages[mask], np.clip(ratio, 0.8, 1.2) * advantages[mask])
    close(loss, -expected.mean())


def test_what_the_trainer_has_to_provide():
    algorithm = rl.algorithms.get("ppo")
    assert (algorithm.needs_rollouts, algorithm.needs_critic, algorithm.needs_reference) == (True, True, True)
    assert algorithm.needs_old_logp(1)
    bare = rl.algorithms.get("ppo", kl_reward_coef=0.0)
    assert not bare.needs_reference
    assert not bare.needs_old_logp(1)
    assert bare.needs_old_logp(2)
    assert rl.algorithms.get("ppo", kl_reward_coef=0.0, kl_coef=0.1).needs_reference
