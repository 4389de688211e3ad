"""Updates whose sequences share beginnings compute on every mesh what sequences alone compute on
one device."""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_trees_on_every_mesh():
    result = on_devices(4, Path(__file__).with_name("shared_prefix_on_mesh.py"))
    assert len(result) == 9
    for mesh, metrics in result.items():
        assert metrics["shared"] > 1.3, mesh
        assert metrics["logp"] < 1e-5 and metrics["weights"] < 1e-4, (mesh, metrics)
