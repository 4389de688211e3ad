"""Log-probabilities over the ids that filters left, their gradients and the ids that a generator
records are on every mesh what they are on one device.
"""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_filters_on_every_mesh():
    result = on_devices(8, Path(__file__).with_name("filters_on_mesh.py"))
    assert len(result) == 5
    for mesh, numbers in result.items():
        assert numbers["logp"] < 1e-5 and numbers["weights"] < 1e-4 and numbers["drawn"], (
            mesh,
            numbers,
        )
        assert numbers["scores"] < 1e-5, (mesh, numbers)
