"""Parts that change the shape of the stream, or read tables, compute on several devices what they
compute on one."""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_streams_and_tables_are_the_same_on_four_devices():
    for decoder, result in on_devices(4, Path(__file__).with_name("parts_on_mesh.py")).items():
        for name, mesh in result.items():
            assert mesh["logp"] < 1e-4 and mesh["gradient"] < 1e-5, (decoder, name, mesh)
            assert mesh["cut"] == 4, (decoder, name, mesh)
        assert [name for name, mesh in result.items() if mesh["memory"] == "pinned_host"] == [
            "fsdp4_host"
        ], decoder
