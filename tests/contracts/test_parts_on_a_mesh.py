"""Parts that change the shape of the stream, or read tables, compute on several devices what they compute on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_streams_and_tables_are_the_same_on_four_devices():
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]]),
    }
    script = Path(__file__).with_name("parts_on_mesh.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, mesh in found.items():
        assert mesh["logp"] < 1e-4 and mesh["gradient"] < 1e-5, (name, mesh)
        assert mesh["cut"] == 4, (name, mesh)
    assert {name: mesh["memory"] for name, mesh in found.items() if mesh["memory"] == "pinned_host"} == {
        "fsdp4_host": "pinned_host"
    }
