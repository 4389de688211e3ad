"""Over meshes that cut rows, sequences and experts, routes are recorded and replayed as on one
device."""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_routes_on_four_devices_are_those_of_one():
    for name, difference in on_devices(4, Path(__file__).with_name("replay_on_mesh.py")).items():
        assert difference["tokens"] == difference["recorded"] == 0, name
        assert max(difference["logp"], difference["weights"], difference["disagreement"]) < 1e-5, (
            name,
            difference,
        )
