"""The schemes of expert parallelism compile for TPU, with the collectives that they are named after
and no others of that size.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu compiles for TPU; it is not installed",
    ),
]


def printed(script: str, *arguments: str):
    command = [sys.executable, Path(__file__).with_name(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compiled(scheme: str, degrees: dict, topology: str = "v5p:2x2x1") -> dict[str, int]:
    """Of each kind of collective and each kernel, how many there are."""
    return printed("compile_experts_for_tpu.py", scheme, json.dumps(degrees), topology)


def test_rows_travel_by_ragged_all_to_all():
    """There and back, and both again for the gradient; the counts of all devices are the only other
    thing that travels.
    """
    result = compiled("all_to_all", {"expert": 4})
    assert result["ragged-all-to-all"] == 4
    assert not result.keys() & {"all-gather", "reduce-scatter", "all-to-all"}


@pytest.mark.parametrize("scheme", ["gather", "hidden"])
def test_tokens_take_all_gathers_and_gradients_of_weights_reduce_scatters(scheme):
    """All-gathers: tokens, ids, weights of choices, the cotangent of the result, and three weights
    over fsdp. Reduce-scatters: the result, the gradients of tokens and of the weights of choices,
    and of the three weights, which no all-reduce touches."""
    result = compiled(scheme, {"fsdp": 2, "expert": 2})
    assert result["reduce-scatter"] == 6 and result["all-gather"] == 7
    assert result.get("all-reduce", 0) <= 1  # the gradient of the router


@pytest.mark.parametrize(
    ("topology", "kernels"),
    [("v5p:2x2x1", {"ragged-dot-none": 9}), ("v6e:2x2", {"gmm": 6, "tgmm": 3})],
)
def test_products_are_those_of_kernels(topology, kernels):
    """Three products, and two of the gradient of each; on v6e those of
    policy/ops/grouped_kernel.py."""
    result = compiled("all_to_all", {"expert": 4}, topology)
    assert {
        name: count for name, count in result.items() if name in ("ragged-dot-none", "gmm", "tgmm")
    } == kernels


def overlapped(*arguments: str) -> set[tuple[str, str]]:
    """(kind of collective, micro-batch) of those between whose start and end stands a grouped
    product of another micro-batch. The two, if there are two, are called 0 and 1 in the order of
    their first gathers."""
    moves = printed("compile_batch_split_for_tpu.py", *arguments)
    names = {
        batch: str(i)
        for i, batch in enumerate(dict.fromkeys(batch for _, batch, _ in moves if batch))
    }
    assert {kind for kind, *_ in moves} == {"all-gather", "reduce-scatter"}
    return {
        (kind, names[batch])
        for kind, batch, products in moves
        if batch and any(product and product != batch for product in products)
    }


BOTH_HALVES = {(kind, half) for kind in ("all-gather", "reduce-scatter") for half in "01"}


@pytest.mark.parametrize("rule", [[], ["fp8_full"]], ids=["bfloat16", "fp8_full"])
def test_the_batch_split_schedule_overlaps_products_of_one_half_with_collectives_of_the_other(rule):
    assert overlapped("split", *rule) >= BOTH_HALVES


def test_plain_layers_overlap_no_products_with_their_collectives():
    assert not overlapped("plain")
