"""Every family is read to its place on a mesh of eight devices, and computes there what it computes on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracles import KINDS, random_model, short

import policy
from policy import families


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        policy.save(random_model(families.read(short(kind))), root / kind)
    return {kind: str(root / kind) for kind in KINDS}


def on_eight_devices(what: str, directories: dict[str, str]) -> dict[str, dict]:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    script = Path(__file__).with_name("load_on_mesh.py")
    done = subprocess.run(
        [sys.executable, script, what, *directories.values()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {kind: found[directory] for kind, directory in directories.items()}


@pytest.mark.slow
def test_weights_are_cut_and_have_the_bits_of_one_device(directories):
    for kind, found in on_eight_devices("weights", directories).items():
        assert found["same"], kind
        assert found["cut"] >= found["weights"] // 3, f"{kind}: {found['cut']} of {found['weights']} weights are cut"


@pytest.mark.slow
def test_logits_equal_those_of_one_device(directories):
    for kind, found in on_eight_devices("with-logits", directories).items():
        assert found["difference"] < 1e-4, kind
