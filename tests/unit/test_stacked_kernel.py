"""The kernel that multiplies rows with one layer of stacked weights, interpreted, against
`jax.lax.ragged_dot` over the slice of the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.ops import stacked_kernel
from policy.ops.stacked import StackedWeight, in_place, unstacked
from rl.plan.hlo import HloProgram

R, G, E, F = 3, 4, 256, 384


@pytest.mark.parametrize(
    "sizes", [[10, 70, 0, 30], [0, 0, 0, 0], [150, 0, 0, 0], [64, 64, 0, 22]], ids=str
)
def test_products_are_those_of_one_layer(sizes, monkeypatch):
    """Blocks of half the inputs and a third of the outputs. Rows past the last group are anything,
    and give 0."""
    monkeypatch.setattr(stacked_kernel, "BLOCK", 128 * 384)
    rng, M, used = np.random.default_rng(0), 150, sum(sizes)
    rows, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((M, E), (R, G, E, F))
    )
    sizes = jnp.asarray(sizes, jnp.int32)
    given = jnp.where((np.arange(M) < used)[:, None], rows, jnp.nan)
    for layer in (0, 2):
        result = stacked_kernel.product(
            given, StackedWeight(weights, jnp.int32(layer)), sizes, interpret=True
        )
        expected = np.asarray(jax.lax.ragged_dot(rows, weights[layer], sizes), np.float32)[:used]
        result = np.asarray(result, np.float32)
        np.testing.assert_allclose(
            result[:used], expected, atol=0.02 * np.abs(expected).max(initial=1)
        )
        assert not result[used:].any()


def test_halves_of_rows_are_joined():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(128, 512)), jnp.bfloat16)
    halves = stacked_kernel.halves(rows)
    for joined in (
        stacked_kernel.joined(halves, None, interpret=True),
        stacked_kernel.joined(halves, None),
    ):
        np.testing.assert_array_equal(np.asarray(joined, np.float32), np.asarray(rows, np.float32))


def test_a_stacked_weight_stands_for_its_layer():
    array = jnp.arange(24.0).reshape(3, 2, 4)
    weight = StackedWeight(array, jnp.int32(2))
    assert weight.shape == (2, 4) and weight[...] is weight
    np.testing.assert_array_equal(unstacked({"gate": weight, "bias": array})["gate"], array[2])
    np.testing.assert_array_equal(unstacked({"gate": weight, "bias": array})["bias"], array)
    sliced = StackedWeight(array, jnp.int32(2), array[1])
    assert sliced.one is sliced.own
    np.testing.assert_array_equal(in_place(sliced).one, array[2])


def test_a_plan_counts_one_layer_of_the_stack():
    """Of a stack of three: a third of its bytes, and all rows in and out."""
    text = """
ENTRY %main (rows: bf16[64,256], weights: bf16[3,4,256,384]) -> bf16[64,384] {
  %rows = bf16[64,256]{1,0} parameter(0)
  %weights = bf16[3,4,256,384]{3,2,1,0} parameter(1)
  ROOT %gmm_stacked.3 = bf16[64,384]{1,0} custom-call(%rows, %weights), custom_call_target="tpu_custom_call"
}
"""
    assert sum(each.bytes for each in HloProgram(text).moved()) == 2 * (
        64 * 256 + 4 * 256 * 384 + 64 * 384
    )


def test_a_plan_counts_an_asynchronous_exchange_once():
    """Its start names its operands again in its result, of which the second is written in place. 64
    rows leave, and as many arrive in a room of 160."""
    text = """
%exchange (rows: bf16[64,2,128], into: bf16[160,2,128], at: s32[4]) -> bf16[160,2,128] {
  %rows = bf16[64,2,128]{2,1,0} parameter(0)
  %into = bf16[160,2,128]{2,1,0} parameter(1)
  %at = s32[4]{0} parameter(2)
  ROOT %inner = bf16[160,2,128]{2,1,0} ragged-all-to-all(%rows, %into, %at, %at, %at, %at), channel_id=1
}

ENTRY %main (rows: bf16[64,2,128], at: s32[4]) -> bf16[160,2,128] {
  %rows = bf16[64,2,128]{2,1,0} parameter(0)
  %at = s32[4]{0} parameter(1)
  %into = bf16[160,2,128]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %start = ((ROWS, PLACES), PLACES) async-start(%rows, %into, %at), calls=%exchange
  ROOT %done = bf16[160,2,128]{2,1,0} async-done(%start), calls=%exchange
}
"""
    for name, rows in (("ROWS", 64), ("PLACES", 160)):
        text = text.replace(name, f"bf16[{rows},2,128]{{2,1,0}}")
    assert sum(each.bytes for each in HloProgram(text).moved()) == 2 * 2 * 64 * 2 * 128
