"""Options are checked when an algorithm is made, without jax, with messages that say how to go
on."""

import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

import rl.algorithms


def test_known_lists_the_files_of_algorithms():
    assert {"grpo", "ppo", "sft"} <= set(rl.algorithms.known())
    assert not [name for name in rl.algorithms.known() if name.startswith("_")]


def test_unknown_algorithm():
    with pytest.raises(ValueError, match=r"unknown algorithm 'grpoo' .nearest: grpo, .* are valid"):
        rl.algorithms.get("grpoo")


def test_unknown_option_names_the_nearest_and_the_valid_ones():
    with pytest.raises(
        ValueError, match=r"grpo has no option 'epsilom' .nearest: epsilon, .* are valid"
    ) as caught:
        rl.algorithms.get("grpo", epsilom=0.1)
    assert "inputs" not in str(caught.value)


def test_all_faults_are_reported_at_once_each_with_its_option():
    with pytest.raises(ValidationError) as caught:
        rl.algorithms.get("grpo", epsilom=0.1, delta=True, scale="grup", kl_coef=-1)
    assert {fault["loc"] for fault in caught.value.errors()} == {
        ("epsilom",),
        ("delta",),
        ("scale",),
        ("kl_coef",),
    }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"epsilon": "0.2"}, "valid number"),
        ("grpo", {"epsilon": float("nan")}, "finite"),
        ("grpo", {"aggregation": "tokens"}, "'token', 'sequence'"),
        ("grpo", {"kl": "k1", "kl_coef": 0.1}, "expectation of its gradient is zero"),
        ("grpo", {"delta": 1.2}, "must be above 1 \\+ epsilon_high"),
        ("grpo", {"correction_max": 2.0}, "do nothing without correction"),
        (
            "grpo",
            {"correction": "token_mask", "correction_min": 4.0},
            "correction_min .* below correction_max",
        ),
        ("grpo", {"correction_normalize": True}, "correction_normalize needs a correction"),
        (
            "vespo",
            {"correction": "token_mask", "correction_normalize": True},
            "correction_normalize needs a correction",
        ),
        ("rloo", {"kl_target": 0.1}, "kl_target moves kl_reward_coef"),
        (
            "ppo",
            {"bootstrap_truncated": True, "mask_truncated": True},
            "bootstrap_truncated does nothing",
        ),
        ("grpo", {"top_entropy": 1.5}, "less than or equal to 1"),
        ("grpo", {"gamma": 0.9}, "no option 'gamma'"),
        ("ppo", {"lam": 2}, "less than or equal to 1"),
        ("ppo", {"critic_warmup": 1.5}, "valid integer"),
        ("sft", {"loss_type": "mse"}, "'nll' or 'dft'"),
    ],
)
def test_bad_values(name, options, message):
    with pytest.raises(ValueError, match=message):
        rl.algorithms.get(name, **options)


def test_integers_are_taken_as_numbers_and_algorithms_are_frozen_and_hashable():
    algorithm = rl.algorithms.get("grpo", epsilon=1)
    assert algorithm == rl.algorithms.get("grpo", epsilon=1.0)
    assert hash(algorithm) == hash(rl.algorithms.get("grpo", epsilon=1.0))
    with pytest.raises(AttributeError):
        algorithm.epsilon = 2.0


def test_what_the_trainer_has_to_provide():
    grpo = rl.algorithms.get("grpo")
    assert grpo.stage == "online"
    assert not grpo.inputs & {"values", "ref_logp", "entropy", "old_logp"}
    assert "old_logp" in grpo.repeated_inputs
    assert "ref_logp" in rl.algorithms.get("grpo", kl_coef=0.1).inputs
    assert "entropy" in rl.algorithms.get("grpo", entropy_coef=-0.1).inputs
    selective = rl.algorithms.get("grpo", top_entropy=0.2)
    assert "entropy" in selective.inputs
    assert "old_logp" in selective.inputs
    assert rl.algorithms.get("sft").stage == "supervised"


def test_validation_imports_no_jax():
    program = (
        "import sys, rl.algorithms\n"
        "assert 'numpy' not in sys.modules\n"
        "[rl.algorithms.get(name) for name in rl.algorithms.known()]\n"
        "rl.algorithms.ppo.gae\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        rl.algorithms.nothing  # noqa: B018


def test_reduce_metrics():
    stacked = {
        "loss": np.array([1.0, 2.0]),
        "x_max": np.array([1.0, 5.0]),
        "x_min": np.array([1.0, -5.0]),
    }
    assert rl.algorithms.reduce_metrics(stacked) == {"loss": 3.0, "x_max": 5.0, "x_min": -5.0}
