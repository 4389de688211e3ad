"""Over a mesh that cuts rows and pages, a paged cache computes what it computes on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_pages_on_four_devices_are_those_of_one():
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]]),
    }
    script = Path(__file__).with_name("pages_on_mesh.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(form["difference"] < 2e-5 and form["cut"] == 2 for form in found.values()), found
    assert found["kernel"]["pool"][1] == 6, "each device reads its own half of the pages of the one layer of a stack"
