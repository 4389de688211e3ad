"""Recurrent layers over trees compute on a mesh what they compute on one device."""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_states_are_handed_over_on_every_mesh():
    result = on_devices(2, Path(__file__).with_name("recurrent_trees_on_mesh.py"))
    assert len(result) == 20
    for case, differences in result.items():
        assert differences["logp"] < 2e-5 and differences["gradient"] < 2e-5, (case, differences)
