"""Over meshes that cut rows, sequences and experts, routes are recorded and replayed as on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_routes_on_four_devices_are_those_of_one():
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]]),
    }
    script = Path(__file__).with_name("replay_on_mesh.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, difference in json.loads(done.stdout.splitlines()[-1]).items():
        assert difference["tokens"] == difference["recorded"] == 0, name
        assert max(difference["logp"], difference["weights"], difference["disagreement"]) < 1e-5, (name, difference)
