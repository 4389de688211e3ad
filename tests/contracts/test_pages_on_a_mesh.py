"""Over a mesh that cuts rows and pages, a paged cache computes what it computes on one device."""

from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_pages_on_four_devices_are_those_of_one():
    result = on_devices(4, Path(__file__).with_name("pages_on_mesh.py"))
    assert all(case["difference"] < 2e-5 for case in result.values()), result
    # Latents have one head, keys and values two.
    cut = {"DeepseekV3": 2, "Gemma3": 4, "DeepseekV32": 2, "GlmMoeDsa": 2}
    cut |= {f"hook of {kind}": number for kind, number in cut.items()}
    cut |= {"kernel": 2, "hook, no kernel": 2}
    assert {name: case["cut"] for name, case in result.items()} == cut, result
    assert result["kernel"]["pool"][1] == 10, (
        "each device reads its own half of the pages of the one layer of a stack"
    )
