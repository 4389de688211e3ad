"""Divergences and the features that layers record are on four devices what they are on one, and no
logits are exchanged.
"""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_divergences_are_the_same_on_four_devices():
    for case, result in on_devices(4, Path(__file__).with_name("divergence_on_mesh.py")).items():
        assert result["results"] < 1e-5, (case, result)
        assert result.get("gradients", 0.0) < 1e-5, (case, result)
        assert not result.get("logits"), (case, result)
        assert not result.get("full"), (case, result)
