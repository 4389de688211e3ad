"""A run whose rollouts are made in few bits: it says how far generator and trainer are apart."""

import json

import launch
import pytest

STAGE = {
    "algorithm": {"name": "grpo", "correction": "token_truncate"},
    "steps": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
}
QUANTIZED = ("generator.weights=int8", "generator.kv_cache=int8", "evaluation=null")


def logged(directory, *more) -> list[dict]:
    stage = STAGE | {"optimizer": {"learning_rate": 1e-3}, "sampling": {"max_new_tokens": 6}}
    assert launch.train(directory, *QUANTIZED, f"stages={json.dumps([stage])}", *more) == 0
    return [metrics for _, _, metrics in launch.numbers(directory)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, "int8"])
def test_the_distance_of_generator_and_trainer_is_logged_at_every_step(tmp_path, rule):
    """With one update a step nothing needs old log-probabilities, and the distance is there all the
    same."""
    steps = logged(tmp_path / "run", *([f"model.quantization={rule}"] if rule else []))
    assert len(steps) == 2
    for metrics in steps:
        assert (
            0 < metrics["sampler/logp_diff_mean"] < 0.02 and metrics["sampler/logp_diff_max"] < 0.2
        )
        assert metrics["optim/grad_norm"] > 0
