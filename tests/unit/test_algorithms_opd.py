"""On-policy distillation: advantages of tokens from a teacher, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl.algorithms

# Logits of the policy and of a teacher at three tokens of a completion, and the sampled tokens.
POLICY = np.array([[2, 1, 0, -1], [0.5, 0.5, -0.5, 1.5], [0, 3, -2, 1]], np.float64)
TEACHER = np.array([[1, 2, 0.5, -2], [1, 0, -1, 2], [-1, 2, 0, 2]], np.float64)
TOKENS = np.array([1, 3, 1])
MASK = np.array([[1, 1, 0]], np.float32)


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def at_tokens(logp):
    return np.take_along_axis(logp, TOKENS[:, None], -1)[:, 0]


P, Q = log_softmax(POLICY), log_softmax(TEACHER)
KL = (at_tokens(P) - at_tokens(Q))[None, None]  # of each token, [P, G, T]


def advantages(mask=None, rewards=((np.nan,),), kl=KL, **options):
    algorithm = rl.algorithms.get("opd", **options)
    mask = np.ones(np.shape(kl)) if mask is None else mask
    return algorithm.advantages(np.array(rewards), None, teacher_kl=kl, mask=mask)


def test_the_advantage_of_a_token_is_the_difference_of_log_probabilities():
    """No discount: a token has the difference at itself alone. Nothing is centred or scaled."""
    expected = [0.964375, 0.186334, -0.606156]
    np.testing.assert_allclose(advantages()[0, 0], expected, atol=1e-6)
    np.testing.assert_allclose(advantages(teacher_coef=0.5)[0, 0], 0.5 * np.array(expected), 1e-5)
    np.testing.assert_allclose(advantages(MASK[None])[0, 0], [*expected[:2], 0], atol=1e-6)
    with pytest.raises(ValueError, match="give `teacher_kl`"):
        rl.algorithms.get("opd").advantages([[1.0]])


def test_rewards_add_the_advantages_of_grpo():
    rewards = [[1.0, 0.0, 0.5]]
    kl = np.random.default_rng(0).normal(size=(1, 3, 4))
    alone = advantages(rewards=rewards, kl=kl, teacher_coef=2.0)
    both = advantages(rewards=rewards, kl=kl, teacher_coef=2.0, reward_coef=0.3, scale="none")
    group = rl.algorithms.get("grpo", scale="none").advantages(rewards)
    np.testing.assert_allclose(both - alone, 0.3 * np.repeat(group[..., None], 4, -1), atol=1e-12)
    assert rl.algorithms.get("opd", reward_coef=0.3).needs_rewards
    assert not rl.algorithms.get("opd").needs_rewards
    with pytest.raises(ValueError, match="combine does nothing with reward_coef: 0"):
        rl.algorithms.get("opd", combine="normalize_then_sum")


def loss(z, tokens, mask, advantages, old_logp):
    """The loss of `opd` at logits [T, V]."""
    logp = jnp.take_along_axis(jax.nn.log_softmax(z), tokens[:, None], -1)[None, :, 0]
    inputs = rl.algorithms.PolicyInputs(
        mask=mask, logp=logp, old_logp=old_logp, advantages=advantages
    )
    return rl.algorithms.get("opd").loss(inputs)[0]


def test_loss_and_gradient_before_the_first_update():
    arrays = MASK, advantages()[0].astype(np.float32), at_tokens(P)[None].astype(np.float32)
    value, gradient = jax.value_and_grad(loss)(POLICY.astype(np.float32), TOKENS, *arrays)
    assert float(value) == pytest.approx(-0.575354, abs=1e-6)
    expected = [
        [0.310487, -0.367965, 0.042020, 0.015458],
        [0.018318, 0.018318, 0.006739, -0.043374],
        [0, 0, 0, 0],
    ]
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_expected_gradient_is_that_of_the_full_reverse_kl(place):
    """Over all tokens of the vocabulary, weighted by the probability that the policy draws them.
    The gradient of KL(p || q) is p (log p - log q - KL)."""
    p, q = P[place], Q[place]
    mask = np.ones((1, 1), np.float32)
    total = np.zeros(4)
    for token in range(4):
        algorithm_kl = (p - q)[token].reshape(1, 1, 1)
        A = advantages(kl=algorithm_kl)[0].astype(np.float32)
        old = p[token].reshape(1, 1).astype(np.float32)
        z = POLICY[place][None].astype(np.float32)
        gradient = jax.grad(loss)(z, np.array([token]), mask, A, old)
        total += np.exp(p[token]) * np.asarray(gradient, np.float64)[0]
    kl = (np.exp(p) * (p - q)).sum()
    np.testing.assert_allclose(total, np.exp(p) * (p - q - kl), atol=1e-6)


def test_a_teacher_equal_to_the_policy_gives_no_advantage():
    assert not advantages(kl=np.zeros((1, 2, 3))).any()
