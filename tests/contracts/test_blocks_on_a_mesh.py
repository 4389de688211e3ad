"""Attention in blocks is what the dense form on one device is, on meshes that cut rows and heads,
and devices exchange nothing in its loops."""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_blocks_are_the_same_on_four_devices():
    for name, mesh in on_devices(4, Path(__file__).with_name("blocks_on_mesh.py")).items():
        assert mesh["logp"] < 2e-5 and mesh["gradient"] < 1e-5, (name, mesh)
        assert mesh["loops"] and not mesh["collectives"], (name, mesh)
