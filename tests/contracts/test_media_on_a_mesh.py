"""Rows with pictures on meshes: the numbers of one device, also where sequences are cut."""

import json
from pathlib import Path

import pytest
from devices import on_devices

SHARDED = {"fsdp": 4, "tensor": 2}
CUT = {"fsdp": 2, "context": 4}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3VLMoe", "Gemma3"])
def test_pictures_on_meshes(kind):
    """Tensor parallel and sharded weights, with completions over pages; sequences that are cut, by
    both schemes that do not cut pictures."""
    cases = [
        [kind, SHARDED, {}],
        [kind, CUT, {}],
        [kind, {"fsdp": 4, "context": 2}, {"context_parallel": "ulysses"}],
    ]
    if kind == "Qwen3VLMoe":
        cases.append([kind, CUT, {"context_parallel": "ring", "context_load_balance": True}])
    for each, result in zip(
        cases,
        on_devices(8, Path(__file__).with_name("media_on_mesh.py"), json.dumps(cases)),
        strict=True,
    ):
        assert result["logp"] < 2e-5 and result["gradient"] < 2e-5 and result.get("tokens", True), (
            each,
            result,
        )
