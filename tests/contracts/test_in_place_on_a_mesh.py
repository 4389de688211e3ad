"""On a mesh updates write in place, the generator reads the very arrays that they wrote, or a copy
resharded for decoding, and a checkpoint comes back on any other mesh."""

from pathlib import Path

import pytest
from devices import on_devices

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("in_place_on_a_mesh")]


@pytest.fixture(scope="module", params=["auto", "explicit"])
def result(request):
    """With each `mesh.shard_mode`."""
    return on_devices(8, Path(__file__).with_name("in_place_on_mesh.py"), request.param)


def test_updates_write_all_of_their_state_in_place(result):
    """Weights and moments of policy and critic, and not a byte besides."""
    for name, held in result["in place"]["held"].items():
        assert result["in place"]["written"][name] == [held] and held > 0, result["in place"]


def test_prefill_and_decoding_read_the_buffers_that_the_update_wrote(result):
    read = result["read"]
    for name in ("prefill", "decode"):
        assert read[name] and all(read[name]), read
    assert 0 < read["written"] <= read["cache"], "weights are given up to no program"


def test_a_copy_of_rows_sends_those_rows_and_writes_in_place(result):
    """Room for two rows and what is sent of them, not for those of other devices."""
    copied = result["copied"]
    assert copied["same"] and copied["written"] == copied["cache"]
    assert 0 < copied["needed"] < 3 * copied["row"] < copied["cache"], copied


def test_a_checkpoint_comes_back_on_any_other_mesh(result):
    assert len(result["elastic"]) == 5 and all(result["elastic"].values()), result["elastic"]


def test_completions_are_the_same_where_weights_are_resharded_for_decoding(result):
    for kind, each in result["resharded"].items():
        assert each["equal"] and each["logprobs"] < 2e-5, (kind, each)
        assert each["share"] > 0.9 and each["kept"] and each["dropped"], (kind, each)


def test_weights_of_few_bits_are_resharded_by_the_same_program(result):
    assert result["quantised"] == {"same": True, "sharded": True}
