"""Towers with sharded weights and pictures on several devices give the numbers of one device."""

import json
from pathlib import Path

import pytest
from devices import on_devices


@pytest.mark.slow
def test_towers_on_meshes():
    cases = [[kind, {"fsdp": 2, "tensor": 2}] for kind in ("Qwen3VL", "Qwen2_5_VL", "Gemma4")]
    cases.append(["Gemma3", {"data": 4}])
    results = on_devices(4, Path(__file__).with_name("towers_on_mesh.py"), json.dumps(cases))
    for case, result in zip(cases, results, strict=True):
        assert result["rows"] < 2e-5 and result["gradient"] < 2e-5, (case, result)
