"""GRPO's advantages, losses, gradients and metrics against numbers computed apart; see
algorithms_fixture."""

import jax
import numpy as np
import pytest
from algorithms_fixture import LOGP, REWARDS, close, inputs

import rl.algorithms

SEQUENCE = {"ratio": "sequence"}
GSPO_CLIP = {"epsilon": 3e-4, "epsilon_high": 4e-4}


def grpo_loss(arrays=None, **options):
    return rl.algorithms.get("grpo", **options).loss(inputs() if arrays is None else arrays)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.305310, -0.783186, 0.261062, -0.783186]),
        ({"std_eps": 1e-6}, [1.305580, -0.783348, 0.261116, -0.783348]),
        ({"scale": "batch"}, [1.305310, -0.783186, 0.261062, -0.783186]),
        ({"scale": "none"}, [0.625, -0.375, 0.125, -0.375]),
        ({"scale": "others", "std_eps": 1e-6}, [2.886741, -0.999998, 0.288675, -0.999998]),
    ],
)
def test_advantages(options, expected):
    close(rl.algorithms.get("grpo", **options).advantages(REWARDS), [expected])


def test_batch_scale_divides_by_the_deviation_of_all_rewards():
    rewards = np.array([[1.0, 0.0], [4.0, 8.0], [5.0, 5.0]])
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(
        rl.algorithms.get("grpo", scale="batch").advantages(rewards), expected, atol=1e-12
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none", "others"])
def test_a_completion_without_a_score_takes_no_part(scale):
    algorithm = rl.algorithms.get("grpo", scale=scale)
    alone = algorithm.advantages([[1.0, 0.5, 0.0]])
    with_gap = algorithm.advantages(np.array([[1.0, np.nan, 0.5, 0.0]]))
    np.testing.assert_allclose(with_gap, np.insert(alone, 1, 0.0, axis=1), atol=1e-15)


@pytest.mark.parametrize("scale", ["group", "batch", "none", "others"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3e5])
def test_equal_rewards_give_exactly_zero(scale, reward):
    rewards = np.stack([np.full(7, reward), np.arange(7.0)])
    advantages = rl.algorithms.get("grpo", scale=scale, std_eps=1e-6).advantages(rewards)
    assert not advantages[0].any()
    assert advantages[1].any()


def test_a_group_of_one_gives_zero_and_an_unscored_batch_too():
    algorithm = rl.algorithms.get("grpo")
    assert algorithm.advantages([[3.0], [np.nan]]).tolist() == [[0.0], [0.0]]
    assert algorithm.advantages([[np.nan, np.inf, 3.0]]).tolist() == [[0.0, 0.0, 0.0]]


def test_advantages_keep_float32_and_refuse_other_ranks():
    assert rl.algorithms.get("grpo").advantages(np.ones((2, 3), np.float32)).dtype == np.float32
    with pytest.raises(ValueError, match=r"\[prompts, completions\]"):
        rl.algorithms.get("grpo").advantages([1.0, 0.0])


def test_per_token_loss_of_the_first_row():
    for token, expected in enumerate([-1.566372, -1.305310, -1.442590, -1.181093]):
        mask = np.zeros((4, 4), np.float32)
        mask[0, token] = 1
        close(grpo_loss(inputs(mask=mask))[0], expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"aggregation": "sequence"}, -0.038800),
        ({}, -0.393441),
        ({"aggregation": "constant"}, -0.122950),
        ({"aggregation": "sequence_sum"}, -0.983602),
        ({"aggregation": "prompt"}, -0.393441),  # one prompt
        ({"epsilon_high": 0.28}, -0.405972),
        ({"delta": 1.3}, -0.397346),
        (SEQUENCE | {"aggregation": "sequence"}, -0.080889),
        (SEQUENCE, -0.441134),
        (SEQUENCE | GSPO_CLIP | {"aggregation": "sequence"}, 0.001892),
        ({"ratio": "sequence_token", "aggregation": "sequence"}, -0.080889),
        ({"off_policy_delta": 0.06}, -0.456096),
    ],
)
def test_loss(options, expected):
    loss, metrics = grpo_loss(**options)
    close(loss, expected)
    close(metrics["policy_loss"], expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kl": "k3", "aggregation": "sequence"}, -0.038250),
        ({"kl": "k3"}, -0.392958),
        ({"kl": "unbiased", "aggregation": "sequence"}, -0.038330),
        ({"kl": "unbiased"}, -0.392973),
        ({"kl": "k2"}, -0.393441 + 0.04 * 0.012125),
    ],
)
def test_loss_with_kl(options, expected):
    loss, metrics = grpo_loss(inputs(with_ref=True), kl_coef=0.04, **options)
    close(loss, expected)
    close(metrics["policy_loss"], -0.038800 if "aggregation" in options else -0.393441)


@pytest.mark.parametrize(
    ("kl", "expected"), [("k1", 0.005), ("k2", 0.012125), ("k3", 0.012077), ("unbiased", 0.011698)]
)
def test_kl_is_logged_even_where_it_is_no_part_of_the_loss(kl, expected):
    loss, metrics = grpo_loss(inputs(with_ref=True), kl=kl)
    close(metrics["kl/ref"], expected)
    close(loss, -0.393441)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"correction": "token_truncate"}, -0.463287),
        ({"correction": "token_mask"}, -0.384969),
        ({"correction": "sequence_truncate"}, -0.603271),
        ({"correction": "sequence_mask"}, -0.378472),
        ({"correction": "token_mask", "correction_min": 0.96, "correction_max": 1.05}, -0.195451),
        ({"correction": "token_mask", "correction_min": 0.5, "correction_max": 5.0}, -0.463396),
        ({"correction": "geometric_mask"}, 0.062655),
        ({"correction": "token_truncate", "correction_normalize": True}, -0.463287 / 1.204454),
        ({"correction": "sequence_truncate", "correction_normalize": True}, -0.603271 / 1.627916),
        ({"off_policy_delta": 0.06}, -0.624470),
    ],
)
def test_loss_with_the_samplers_log_probabilities(options, expected):
    close(grpo_loss(inputs(with_sampler=True), **options)[0], expected)


def test_the_correction_leaves_the_kl_term_alone():
    arrays = inputs(with_sampler=True, with_ref=True)
    close(
        grpo_loss(arrays, correction="token_truncate", kl_coef=0.04)[0], -0.463287 + 0.04 * 0.012077
    )


def test_clip_fractions():
    metrics = grpo_loss()[1]
    close(metrics["clip_ratio/low_mean"], 0.2)
    close(metrics["clip_ratio/high_mean"], 0.2)
    close(metrics["clip_ratio/region_mean"], 0.4)
    close(metrics["clip_ratio/low_min"], 0.0)
    close(metrics["clip_ratio/high_max"], 1 / 3)
    close(metrics["kl/approx_update"], 0.03)


def test_sampler_metrics():
    metrics = grpo_loss(
        inputs(with_sampler=True), correction="token_mask", correction_min=0.96, correction_max=1.05
    )[1]
    close(metrics["sampler/logp_diff_mean"], 0.128)
    close(metrics["sampler/logp_diff_max"], 1.1)
    close(metrics["sampler/mult_prob_error"], 1.218875)
    close(metrics["sampler/ess"], 0.801019)
    close(metrics["sampler/kl"], -0.114)
    close(metrics["sampler/k3_kl"], 0.090870)
    close(
        metrics["sampler/is_oob_ratio"], 0.4
    )  # log weights 0.05, 0.06, -0.05 and 1.1, of ten tokens
    close(metrics["sampler/is_ratio_max"], np.exp(1.1))
    close(metrics["sampler/is_ratio_min"], np.exp(-0.05))


def test_gradient_is_zero_on_padding_and_on_clipped_tokens():
    algorithm = rl.algorithms.get("grpo")
    gradient = jax.jit(jax.grad(lambda logp: algorithm.loss(inputs(logp=logp))[0]))(LOGP)
    expected = [
        [0, -0.130531, -0.144259, -0.118109],
        [0, 0.105719, 0, 0],
        [-0.026106, -0.017500, 0, 0],
        [0, 0, 0, 0],
    ]
    close(gradient, expected)


def test_sequence_token_ratio_gives_each_token_the_gradient_of_its_own_advantage():
    """With one advantage in a sequence it is GSPO's gradient; with several, each token follows its
    own."""
    advantages = np.ones((4, 4), np.float32) * np.array([[1.0], [-1.0], [2.0], [0.0]], np.float32)

    def gradient(ratio):
        algorithm = rl.algorithms.get("grpo", ratio=ratio, epsilon=10.0, aggregation="sequence")
        return np.asarray(
            jax.grad(lambda logp: algorithm.loss(inputs(logp=logp, advantages=advantages))[0])(LOGP)
        )

    close(gradient("sequence_token"), gradient("sequence"))
    advantages[0, 1:] = 0.0
    assert gradient("sequence_token")[0, 1:].tolist() == [0, 0, 0]
    assert (gradient("sequence")[0] != 0).all()


def test_kl_gradients_are_those_of_their_estimators():
    """k2: lp - lr; k3: 1 - exp(lr - lp); unbiased: R (lp - lr); each over the number of tokens."""
    zero = np.zeros(4, np.float32)
    arrays = inputs(with_ref=True)
    logp, old, ref = (
        np.where(arrays.mask, array, 0) for array in (arrays.logp, arrays.old_logp, arrays.ref_logp)
    )
    expected = {
        "k2": logp - ref,
        "k3": 1 - np.exp(ref - logp),
        "unbiased": np.exp(logp - old) * (logp - ref),
    }
    for kl, values in expected.items():
        algorithm = rl.algorithms.get("grpo", kl=kl, kl_coef=0.5)
        gradient = jax.grad(
            lambda logp, a=algorithm: a.loss(inputs(True, logp=logp, advantages=zero))[0]
        )(LOGP)
        close(gradient, 0.5 * values / 10)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    arrays = inputs(
        logp=np.zeros((1, 2), np.float32),
        old_logp=np.array([[-3.0, -0.5]], np.float32),
        mask=np.ones((1, 2)),
        advantages=np.array([-2.0]),
        prompt=None,
    )
    loss, metrics = grpo_loss(arrays, dual_clip=3.0)
    close(loss, (3.0 * 2.0 + np.exp(0.5) * 2.0) / 2)
    close(metrics["clip_ratio/dual_mean"], 0.5)
    close(grpo_loss(arrays)[0], (np.exp(3.0) * 2.0 + np.exp(0.5) * 2.0) / 2)


def test_without_old_log_probabilities_the_gradient_is_the_plain_policy_gradient():
    algorithm = rl.algorithms.get("grpo")
    arrays = inputs(old_logp=None)
    loss, gradient = jax.value_and_grad(
        lambda logp: algorithm.loss(inputs(logp=logp, old_logp=None))[0]
    )(LOGP)
    expected = -arrays.mask * arrays.advantages[:, None] / 10
    close(loss, expected.sum())
    close(gradient, expected)


def test_prompt_aggregation_weighs_prompts_equally():
    prompt = np.array([12, 7, 12, 7], np.int32)
    loss = grpo_loss(inputs(prompt=prompt), aggregation="prompt")[0]
    apart = [
        grpo_loss(inputs(mask=inputs().mask * (prompt == number)[:, None]))[0] for number in (7, 12)
    ]
    close(loss, np.mean(apart))


def test_entropy_bonus_and_its_gradient():
    entropy = np.where(inputs().mask, 0.5, np.nan).astype(np.float32)
    entropy[0, 0] = 1.5
    algorithm = rl.algorithms.get("grpo", entropy_coef=0.1)
    (loss, metrics), gradient = jax.value_and_grad(
        lambda entropy: algorithm.loss(inputs(entropy=entropy)), has_aux=True
    )(entropy)
    close(metrics["entropy"], 0.6)
    close(loss, -0.393441 - 0.06)
    close(gradient, -0.1 * inputs().mask / 10)


def test_top_entropy_keeps_the_loss_of_the_most_uncertain_tokens():
    entropy = np.where(inputs().mask, 0.1, np.nan).astype(np.float32)
    entropy[0, 1:3] = 2.0
    loss = grpo_loss(inputs(entropy=entropy), top_entropy=0.2)[0]
    close(loss, (-1.305310 - 1.442590) / 10)


def test_empty_sequences_count_unless_asked_otherwise_and_filler_never():
    mask = inputs().mask.copy()
    mask[3] = 0
    counted, metrics = grpo_loss(inputs(mask=mask), aggregation="sequence_sum")
    skipped = grpo_loss(inputs(mask=mask), aggregation="sequence_sum", count_empty_sequences=False)[
        0
    ]
    close(skipped, counted * 4 / 3)
    assert metrics["sequences/empty"] == 1
    filler = inputs(mask=mask, prompt=np.array([0, 0, 0, -1], np.int32))
    loss, metrics = grpo_loss(filler, aggregation="sequence_sum")
    close(loss, skipped)
    assert metrics["sequences/empty"] == 0


def test_huge_log_ratios_are_clamped_counted_and_finite():
    logp = LOGP.copy()
    logp[1, 0], logp[0, 0] = 500.0, -np.inf
    algorithm = rl.algorithms.get("grpo", kl_coef=0.1)
    (loss, metrics), gradient = jax.value_and_grad(
        lambda logp: algorithm.loss(inputs(with_ref=True, logp=logp)), has_aux=True
    )(logp)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert metrics["clip_ratio/log_ratio_clamped"] == 2
    assert metrics["kl/ref_clamped"] == 2
    assert gradient[1, 0] == 0


def test_bfloat16_inputs_are_summed_in_float32():
    ones = jax.numpy.ones((1, 1001), jax.numpy.bfloat16)
    arrays = inputs(
        logp=ones,
        old_logp=ones,
        mask=np.ones((1, 1001)),
        advantages=np.ones(1),
        prompt=None,
        num_tokens=1,
    )
    assert float(grpo_loss(arrays)[0]) == -1001.0


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({}, "logp"),
        ({}, "advantages"),
        ({"kl_coef": 0.1}, "ref_logp"),
        ({"correction": "token_mask"}, "sampler_logp"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"aggregation": "constant"}, "max_length"),
        ({"aggregation": "prompt"}, "prompt"),
        ({"off_policy_delta": 0.1}, "old_logp"),
    ],
)
def test_an_absent_input_is_named(options, absent):
    with pytest.raises(ValueError, match=absent):
        grpo_loss(inputs(**{absent: None}), **options)
