"""Mixtures of experts compute on a mesh what they compute on one device: values, gradients,
selection biases, completions.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCHEMES = ("gather", "all_to_all", "hidden")
SKEWED = {"skew": 100}  # all tokens go to the last experts
MESHES = {
    2: [{"expert": 2}],
    4: [{"expert": 4}, {"fsdp": 2, "expert": 2}],
    8: [
        {"data": 2, "expert": 2, "tensor": 2},
        {"expert": 8},
        {"fsdp": 2, "expert": 2, "context": 2},
    ],
}


def on_devices(number: int, cases: list, script: str = "experts_on_mesh.py") -> list:
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={number}"
    script = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "XLA_FLAGS": flags,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PJRT_NPROC": str(8 * number),
        },
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_layers(number: int, cases: list) -> None:
    for case, result in zip(cases, on_devices(number, cases), strict=True):
        assert result["difference"] < case[4].get("tolerance", 1e-5) and result["dropped"] == 0, (
            case,
            result,
        )


def test_rows_that_arrive_by_expert_give_what_one_device_does():
    """As in decoding on TPU, where weights stay in their stack: weighed outputs, weighed inputs,
    and biases with sliced experts. What lies in the places where no row arrives reaches no result.
    """
    cases = [[{"expert": 4}, {}], [{"fsdp": 2, "expert": 2}, {"weigh": "input"}]]
    differences = on_devices(
        4, [*cases, [{"expert": 2, "tensor": 2}, {"bias": True}]], "stacked_experts_on_mesh.py"
    )
    assert max(differences) < 2e-6, differences


@pytest.mark.slow
def test_every_scheme_computes_what_one_device_does_unless_its_buffer_is_full():
    """Groups, a shared expert and a selection bias; biases and clamps with all tokens on two
    experts of one device, whose buffer is then too small; weighed inputs. A device has 8 rows of 6
    tokens for four devices, 2 choices each: 24 choices. With room for 16 rows of float32 it works
    through its tokens one or two at a time."""
    little = {"room": 16 * 64}
    full = {"how": {"ragged_buffer_factor": 1.0}, **SKEWED}
    rounded, *result, dropping = on_devices(
        4,
        [
            ["rounded_gradients", {"expert": 4}, 8],
            ["layer", {"expert": 4}, "gather", "groups", {}],
            ["layer", {"fsdp": 2, "expert": 2}, "all_to_all", "biases", SKEWED],
            ["layer", {"expert": 2, "tensor": 2}, "hidden", "biases", SKEWED],
            ["layer", {"expert": 4}, "gather", "groups", little],
            ["layer", {"fsdp": 2, "expert": 2}, "all_to_all", "biases", SKEWED | little],
            ["layer", {"expert": 4}, "all_to_all", "biases", full],
        ],
    )
    assert all(each["difference"] < 1e-5 and each["dropped"] == 0 for each in result), result
    assert (
        rounded["differ"] > 0 and rounded["share"] < 0.126
    )  # two bits after the point: an eighth, and what the scale rounds
    assert dropping["choices"] > 24 and dropping["dropped"] == dropping["choices"] - 24


@pytest.mark.slow
def test_the_usual_room_is_taken_where_it_is_enough_and_drops_nothing_where_it_is_not():
    """Four devices with 12 tokens each: of 2 choices a device has 24 rows in the mean, room for 48,
    and 96 at most, which it needs where all tokens choose its two experts. Also a part of the
    tokens at a time, and with a token for each device: decoding."""
    only, small, little = {"usual": "only"}, {"usual": "small", **SKEWED}, {"room": 32 * 64}
    cases = [
        ["layer", {"expert": 4}, "gather", "biases", only],
        ["layer", {"expert": 4}, "all_to_all", "biases", only],
        ["layer", {"expert": 4}, "all_to_all", "biases", only | little],
        ["layer", {"expert": 4}, "gather", "input", only],
        ["layer", {"expert": 4}, "gather", "biases", small],
        ["layer", {"expert": 4}, "all_to_all", "biases", small],
        ["layer", {"expert": 4}, "gather", "biases", small | little],
        ["layer", {"expert": 4}, "gather", "biases", {"usual": "small", "shape": [4, 1]}],
    ]
    *result, wrong = on_devices(
        4, [*cases, ["layer", {"expert": 4}, "gather", "biases", only | SKEWED]]
    )
    for case, each in zip(cases, result, strict=True):
        assert each["difference"] < 1e-5 and each["dropped"] == 0, (case, each)
    assert np.isnan(
        wrong["difference"]
    )  # what the case "only" does where the usual room is not enough


@pytest.mark.slow
def test_few_tokens_go_through_every_expert_of_a_device():
    """As on a TPU. Devices have experts, or a slice of their width, or of both."""
    every = {"usual": "every"}
    cases = [
        ["layer", {"expert": 4}, "gather", "biases", every],
        ["layer", {"expert": 2, "tensor": 2}, "hidden", "biases", every],
        ["layer", {"fsdp": 2, "expert": 2}, "gather", "input", every],
        ["layer", {"tensor": 4}, "auto", "groups", every],
        ["layer", {"expert": 4}, "gather", "groups", every | {"shape": [3, 1]}],
    ]
    check_layers(4, cases)


@pytest.mark.slow
def test_groups_of_devices_take_the_usual_room_each_by_itself():
    """Of two groups of four devices the first has tokens that are all the same, and so needs all
    room for one expert.
    """
    mixed = {"shape": [8, 6, 4]}
    cases = [
        ["layer", {"fsdp": 2, "expert": 4}, scheme, "input", mixed]
        for scheme in ("gather", "all_to_all")
    ]
    for case in cases:
        same, half = on_devices(
            8, [[*case[:4], mixed | {"usual": usual}] for usual in ("small", "only")]
        )
        assert same["difference"] < 1e-5 and same["finite"] == 1, (case, same)
        assert half["finite"] == 0.5, (case, half)


# Each scheme on each mesh has one of the mixtures, in turns. bfloat16 has 8 bits, and a gradient
# sums numbers that were rounded one by one.
ROUNDED = {"how": {"dtype": "bfloat16"}, "tolerance": 0.03}
MIXTURES = itertools.cycle(
    [
        ("groups", {}),
        ("biases", SKEWED),
        ("input", SKEWED),
        ("groups", {"shape": [3, 4]}),
        ("biases", {}),
        ("groups", ROUNDED),
    ]
)
LAYERS = {
    number: [["layer", mesh, scheme, *next(MIXTURES)] for mesh in meshes for scheme in SCHEMES]
    for number, meshes in MESHES.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("number", MESHES)
def test_every_scheme_on_every_mesh(number):
    # The scheme auto replicates dimensions that the mesh does not divide. One token for each row:
    # decoding.
    odd = [["layer", MESHES[number][0], "auto", name, {}] for name in ("narrow", "six", "limited")]
    one = [["layer", MESHES[number][-1], "gather", "groups", {"shape": [8, 1]}]]
    check_layers(number, LAYERS[number] + odd + one)


@pytest.mark.slow
def test_experts_of_limited_capacity_drop_the_same_on_a_mesh():
    how = {"how": {"capacity_factor": 0.75}}
    cases = [["layer", mesh, scheme, "groups", how] for mesh in MESHES[4] for scheme in SCHEMES]
    for result in on_devices(4, cases):
        assert result["difference"] < 1e-5 and result["dropped"] > 0, result


SPLIT = {"batch_split": True}


@pytest.mark.slow
@pytest.mark.parametrize("number", MESHES)
def test_updates_in_micro_batches_move_biases_exactly_as_on_one_device_and_completions_are_equal(
    number,
):
    """In the batch-split schedule too, for which a micro-batch of 4 rows is one row for each of two
    devices and halves.
    """
    pairs = zip(itertools.cycle(MESHES[number]), SCHEMES, strict=False)
    balance = {"router": {"balance": "batch"}}
    cases = [["update", mesh, scheme, balance] for mesh, scheme in pairs]
    if number == 2:
        cases += [
            ["update", {"expert": 2}, "gather", options | {"how": SPLIT}]
            for options in (balance, {"dropout": 0.2})
        ]
    for case, result in zip(cases, on_devices(number, cases), strict=True):
        assert result["biases"] == 0 and result["equal"], (case, result)
        assert result["cut"] > 5, (case, result)
        assert max(result["weights"], result["metrics"], result["logprobs"]) < 1e-4, (case, result)


@pytest.mark.slow
def test_the_batch_split_schedule_computes_what_plain_layers_do():
    """Packed and padded rows, group-limited routing, a shared expert, layers scanned under remat.
    By a rule of quantisation, a gradient of a weight is a product over tokens of which each half
    rounds its own by its own scale (e5m2: 2 bits)."""
    ways = [
        {},
        {"expert_parallel": "hidden"},
        {"scan": False, "remat": "none"},
        {"remat": "minimal"},
    ]
    cases = [
        ["gradients", mesh, SPLIT | how]
        for how, mesh in zip(ways, itertools.cycle(MESHES[4]), strict=False)
    ]
    cases.append(["gradients", {"fsdp": 2, "expert": 2}, SPLIT | {"quantization": "fp8_full"}])
    for case, result in zip(cases, on_devices(4, cases), strict=True):
        assert result["counts"] == 0 and result["logprobs"] < 1e-5, (case, result)
        assert result["gradient"] < (0.075 if "quantization" in case[2] else 1e-5), (case, result)
