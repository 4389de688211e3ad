"""Mixtures of experts compute on a mesh what they compute on one device: values, gradients, selection biases, completions."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCHEMES = ("gather", "all_to_all", "hidden")
SKEWED = {"skew": 100}  # all tokens go to the last experts
MESHES = {
    2: [{"expert": 2}],
    4: [{"expert": 4}, {"fsdp": 2, "expert": 2}],
    8: [{"data": 2, "expert": 2, "tensor": 2}, {"expert": 8}, {"fsdp": 2, "expert": 2, "context": 2}],
}


def on_devices(number: int, cases: list) -> list[dict]:
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={number}"
    script = Path(__file__).with_name("experts_on_mesh.py")
    done = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags},
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_layers(number: int, cases: list) -> None:
    for case, found in zip(cases, on_devices(number, cases), strict=True):
        assert found["difference"] < case[4].get("tolerance", 1e-5), (case, found)
        assert found["dropped"] == 0, (case, found)


def test_every_scheme_computes_what_one_device_does():
    """Groups, a shared expert and a selection bias; biases and clamps with all tokens on two experts; weighed inputs in a batch
    that the devices cannot share; capacities."""
    check_layers(
        4,
        [
            ["layer", {"expert": 4}, "gather", "groups", {}],
            ["layer", {"fsdp": 2, "expert": 2}, "all_to_all", "biases", SKEWED],
            ["layer", {"expert": 2, "tensor": 2}, "hidden", "biases", {}],
            ["layer", {"expert": 4}, "all_to_all", "input", {}],
            ["layer", {"fsdp": 2, "expert": 2}, "gather", "input", {"shape": [1, 5]}],
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", MESHES)
def test_every_scheme_on_every_mesh(number):
    """bfloat16 has 8 bits, and a gradient sums numbers that were rounded one by one."""
    mixtures = [("groups", {}), ("biases", {}), ("biases", SKEWED), ("input", SKEWED), ("groups", {"shape": [8, 1]})]
    rounded = {"how": {"dtype": "bfloat16"}, "tolerance": 0.03}
    mixtures += [("groups", {"shape": [3, 4]}), ("groups", rounded)]
    cases = itertools.product(MESHES[number], SCHEMES, mixtures)
    check_layers(number, [["layer", mesh, scheme, *mixture] for mesh, scheme, mixture in cases])
    # Numbers that the mesh does not divide: the scheme auto keeps whole what it cannot cut.
    odd = itertools.product(MESHES[number], (("narrow", {}), ("six", {})))
    check_layers(number, [["layer", mesh, "auto", *mixture] for mesh, mixture in odd])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_limited_capacity_drop_the_same_on_a_mesh(scheme):
    how = {"how": {"capacity_factor": 0.75}}
    for found in on_devices(4, [["layer", mesh, scheme, name, how] for mesh in MESHES[4] for name in ("groups", "biases")]):
        assert found["difference"] < 1e-5 and found["dropped"] > 0, found


def test_updates_in_micro_batches_move_biases_exactly_as_on_one_device_and_completions_are_equal():
    case = ["update", {"data": 2, "expert": 2}, "gather", {"router": {"balance": "batch"}}]
    check_updates(4, [case])


@pytest.mark.slow
@pytest.mark.parametrize("number", MESHES)
def test_updates_on_every_mesh(number):
    check_updates(
        number, [["update", mesh, scheme, {"router": {"balance": "batch"}}] for mesh in MESHES[number] for scheme in SCHEMES]
    )


def check_updates(number: int, cases: list) -> None:
    for case, found in zip(cases, on_devices(number, cases), strict=True):
        assert found["biases"] == 0 and found["equal"], (case, found)
        assert found["cut"] > 5, (case, found)
        assert max(found["weights"], found["metrics"], found["logprobs"]) < 1e-4, (case, found)


def test_a_full_buffer_drops_and_says_how_much():
    """8 rows of 6 tokens, 2 choices each: 24 choices a device, all of them for two experts of one device."""
    full = {"how": {"ragged_buffer_factor": 1.0}, **SKEWED}
    wide = {"how": {"ragged_buffer_factor": 2.0}, **SKEWED}
    found = on_devices(
        4,
        [
            ["layer", {"expert": 4}, "all_to_all", "biases", full],
            ["layer", {"data": 2, "expert": 2}, "all_to_all", "biases", wide],
        ],
    )
    assert found[0]["choices"] > 24 and found[0]["dropped"] == found[0]["choices"] - 24
    assert found[1]["difference"] < 1e-5 and found[1]["dropped"] == 0
