"""Runs that train an adapter over quantised weights, and those that are refused."""

import json

import jax
import launch
import pytest

from policy.ops.host_memory import on_a_device
from rl.errors import ConfigError
from rl.plan import programs
from rl.run import build
from rl.run.load import load

STAGE = {
    "algorithm": "grpo",
    "steps": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "optimizer": {"learning_rate": 1e-2},
    "sampling": {"max_new_tokens": 6},
}
QUANTISED = ("model.base_weights=nf4", "model.base_block=16")
ADAPTER = "model.adapter={rank: 4}"


@pytest.mark.slow
def test_an_adapter_learns_over_weights_that_generator_and_trainer_share(tmp_path):
    stages = f"stages={json.dumps([STAGE | {'algorithm': 'sft'}, STAGE])}"
    assert launch.train(tmp_path / "run", *QUANTISED, ADAPTER, stages, "evaluation=null") == 0
    steps = [metrics for _, _, metrics in launch.numbers(tmp_path / "run")]
    assert len(steps) == 4
    assert all(metrics["optim/grad_norm"] > 0 for metrics in steps[:2])
    for metrics in steps[2:]:
        assert metrics["sampler/logp_diff_max"] < 1e-5


def read(*overrides):
    return load([launch.SMALL], ["run.dir=null", "evaluation=null", *overrides])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "model.base_weights: grpo trains the weights of the policy: set model.adapter"),
        (
            [ADAPTER, f"stages={json.dumps([STAGE | {'trains': 'weights'}])}"],
            "model.base_weights: grpo trains the weights of the policy (trains: weights): leave",
        ),
        ([ADAPTER, "generator.weights=int8"], "generator.weights: int8, but rollouts read the nf4"),
    ],
)
def test_weights_that_a_stage_trains_are_not_stored_quantised(overrides, said):
    with pytest.raises(ConfigError) as error:
        read(*QUANTISED, f"stages={json.dumps([STAGE])}", *overrides)
    assert said in str(error.value)


def test_a_plan_counts_the_bytes_that_are_stored():
    sizes = {}
    for kind in ("null", "int8", "nf4"):
        config = read(ADAPTER, f"model.base_weights={kind}", f"stages={json.dumps([STAGE])}")
        mesh = build.on_mesh(config, jax.devices()[:1])
        ((stage, _),) = programs.stages(config, mesh, None)
        base = stage.stage.trainer.base
        assert stage.bytes > on_a_device(base)
        sizes[kind] = sum(on_a_device(base[path]) for path in stage.graph.inputs)
        (update,) = [each for each in programs.planned(stage, None) if each.kind == "update"]
        update.lower()
    # A scale of 4 bytes for each 64 numbers, or for 16 to 48 where there are fewer inputs.
    assert 1 / 4 < sizes["int8"] / sizes["null"] < 1.2 / 4
    assert 1 / 8 < sizes["nf4"] / sizes["null"] < 1.4 / 8
