"""The schemes of expert parallelism compile for TPU, with the collectives that they are named after and no others of that size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu compiles for TPU; it is not installed"),
]


def collectives(scheme: str, degrees: dict) -> dict[str, int]:
    script = Path(__file__).with_name("compile_experts_for_tpu.py")
    done = subprocess.run(
        [sys.executable, script, scheme, json.dumps(degrees)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_rows_travel_by_ragged_all_to_all():
    """There and back, and both again for the gradient; the counts of all devices are the only other thing that travels."""
    found = collectives("all_to_all", {"expert": 4})
    assert found["ragged-all-to-all"] == 4
    assert not found.keys() & {"all-gather", "reduce-scatter", "all-to-all"}


@pytest.mark.parametrize("scheme", ["gather", "hidden"])
def test_tokens_are_gathered_and_gradients_of_weights_scattered(scheme):
    """Gathered: tokens, ids, weights of choices, the cotangent of the result, and three weights over fsdp. Scattered: the result,
    the gradients of tokens and of the weights of choices, and of the three weights, which no all-reduce touches."""
    found = collectives(scheme, {"fsdp": 2, "expert": 2})
    assert found["reduce-scatter"] == 6 and found["all-gather"] == 7
    assert found.get("all-reduce", 0) <= 1  # the gradient of the router
