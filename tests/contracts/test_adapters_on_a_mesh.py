"""A policy with an adapter computes on every mesh what it computes on one device."""

import json
from pathlib import Path

import pytest
from devices import on_devices

SCRIPT = Path(__file__).with_name("adapters_on_mesh.py")
GATHER = {"expert_parallel": "gather"}
EXCHANGE = {"expert_parallel": "all_to_all"}
HIDDEN = {"expert_parallel": "hidden"}
# Of these the first two always run.
CASES = [
    ["lora", {"fsdp": 2, "expert": 2}, GATHER],
    ["lora", {"fsdp": 2, "tensor": 2}, {}],
    ["dora, shared", {"fsdp": 2, "tensor": 2}, {}],
    ["lora", {"fsdp": 4}, {}],
    ["lora", {"fsdp": 2, "tensor": 2}, {"scan": False, "remat": "none"}],
    ["dora", {"fsdp": 2, "context": 2}, {"context_parallel": "all_gather"}],
    ["dora", {"expert": 2, "context": 2}, {"context_parallel": "ring"}],
    ["lora", {"fsdp": 2, "context": 2}, {"context_parallel": "ulysses"}],
    ["dora", {"fsdp": 2, "expert": 2}, GATHER],
    ["dora", {"data": 2, "expert": 2}, HIDDEN],
    ["lora", {"data": 2, "expert": 2}, HIDDEN],
    ["lora", {"tensor": 2, "expert": 2}, GATHER],
    ["shared", {"tensor": 2, "expert": 2}, EXCHANGE],
    ["dora, shared", {"fsdp": 2, "expert": 2}, EXCHANGE],
    ["dora, shared", {"data": 2, "expert": 2}, HIDDEN],
    ["dora, shared", {"fsdp": 4}, {}],
]


def check(cases):
    for case, result in zip(cases, on_devices(4, SCRIPT, json.dumps(cases)), strict=True):
        assert result["logp"] < 4e-6, (case, result)
        assert result["gradient"] < 5e-6, (case, result)
        assert any(".lora_a" in path for path in result["cut"]), case


def test_a_mesh_computes_what_one_device_does():
    check(CASES[:2])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_every_mesh_computes_what_one_device_does(part):
    check(CASES[2 + part :: 3])
