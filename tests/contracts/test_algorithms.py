"""Every algorithm in rl/algorithms, listed from the folder, keeps the promises that the trainer
relies on."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

import rl.algorithms
from rl.stages.inputs import INPUTS

ALGORITHMS = rl.algorithms.known()
ROWS, WIDTH = 4, 3
PAIRED = ("preference", "reward_model")  # kinds of stage whose rows hold two answers


def batch(name):
    """Rows of one completion, or of a pair where the algorithm asks for them."""
    algorithm, rng = rl.algorithms.get(name), np.random.default_rng(0)
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 1]], np.float32)
    names = ("logp", "old_logp", "sampler_logp", "ref_logp", "entropy")
    arrays = {
        name: np.where(mask, rng.normal(-1, 0.2, mask.shape), np.nan).astype(np.float32)
        for name in names
    }
    arrays["entropy"] = np.abs(arrays["entropy"])
    return rl.algorithms.PolicyInputs(
        mask=mask,
        advantages=np.array([1.0, -1.0, 0.5, -0.5], np.float32),
        prompt=np.zeros(ROWS, np.int32),
        segments=np.array([[1, 1, 2], [1, 2, 0], [1, 2, 2], [1, 1, 2]])
        if algorithm.stage in PAIRED
        else None,
        scores=rng.normal(size=mask.shape).astype(np.float32) * mask
        if algorithm.stage == "reward_model"
        else None,
        extra={"label": np.array([[1.0], [0.0], [1.0], [0.0]]) * mask, "kl": mask}
        if algorithm.stage == "unpaired"
        else None,
        divergence=mask * 0.5 if "teacher" in algorithm.inputs else None,
        max_length=WIDTH,
        **arrays,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_its_name_is_its_file_and_every_option_has_a_default_and_a_description(name):
    algorithm = rl.algorithms.get(name)
    assert algorithm.name == name
    for field in dataclasses.fields(algorithm):
        assert algorithm.__pydantic_fields__[field.name].description, field.name
    values = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    assert rl.algorithms.get(name, **values) == algorithm


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_says_what_it_needs(name):
    algorithm = rl.algorithms.get(name)
    assert isinstance(algorithm.inputs | algorithm.repeated_inputs, frozenset)
    assert algorithm.inputs | algorithm.repeated_inputs <= INPUTS.keys()
    assert importlib.import_module(f"rl.stages.{algorithm.stage}").Stage
    estimator = "advantages_per_token" if "values" in algorithm.inputs else "advantages"
    assert hasattr(algorithm, estimator) == (algorithm.stage == "online")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_its_loss_compiles_and_gives_finite_float32_scalars(name):
    algorithm = rl.algorithms.get(name)
    loss, metrics = jax.jit(algorithm.loss)(batch(name))
    for key, value in {"loss": loss, **metrics}.items():
        assert value.shape == (), key
        assert value.dtype == np.float32, key
        assert np.isfinite(value), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if rl.algorithms.get(name).stage in PAIRED]
)
def test_micro_batches_of_pairs_add_up_and_padding_gets_no_gradient(name):
    """For the others see unit/test_algorithms_properties.py."""
    algorithm = rl.algorithms.get(name)
    arrays = algorithm.with_totals(batch(name))
    trained = "scores" if algorithm.stage == "reward_model" else "logp"
    gradient_of = jax.grad(
        lambda values, part: algorithm.loss(dataclasses.replace(part, **{trained: values}))[0]
    )
    full = np.asarray(gradient_of(getattr(arrays, trained), arrays))
    parts = []
    for row in range(ROWS):
        part = jax.tree.map(
            lambda array, row=row: array[row : row + 1] if np.ndim(array) else array, arrays
        )
        parts.append(gradient_of(getattr(part, trained), part))
    np.testing.assert_allclose(np.concatenate(parts), full, atol=1e-6)
    assert (
        not full[arrays.mask == 0].any() or algorithm.stage == "reward_model"
    )  # a score is read at the last token
    assert full.any()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ALGORITHMS
        if hasattr(rl.algorithms.get(name), "advantages")
        and name != "raft"
        and rl.algorithms.get(name).needs_rewards
    ],
)
def test_equal_and_absent_rewards_have_no_advantage(name):
    """With a group of equal ones whose mean is rounded, a lone score and a gap. ReMax compares with
    one completion, which has the reward of its group here; REINFORCE++ with the full batch, so its
    groups are taken one by one."""
    algorithm = rl.algorithms.get(name)
    rewards = np.array([[0.1, 0.1, 0.1], [np.nan, np.nan, 1.0], [0.0, np.nan, 1.0]])
    given = {"greedy": np.array([0.1, np.nan, 0.5])} if "greedy_reward" in algorithm.inputs else {}
    lengths = np.array([[1, 2, 2], [2, 2, 1], [2, 1, 1]])
    groups = [range(3)] if "completion_mask" not in algorithm.inputs else [[0], [1], [2]]
    result = np.concatenate(
        [algorithm.advantages(rewards[rows], lengths[rows], **given) for rows in groups]
    )
    assert result.shape[:2] == rewards.shape
    advantages = result[..., 0] if result.ndim == 3 else result
    assert not result[:2].any()
    assert not result[2, 1].any()
    assert advantages[2, 0] < 0 < advantages[2, 2]
