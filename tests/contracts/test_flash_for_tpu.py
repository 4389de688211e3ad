"""Training and the first prefill of a prompt compile for TPU with attention kernels, and no program
holds a row's scores or the logits of all its tokens. Rows of trees compile with a kernel too, and
hold the masks of one row."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu compiles for TPU; it is not installed",
    ),
]
CASES = {
    "llama": ("Llama", "v5p:2x2x1", {"fsdp": 2, "tensor": 2}),
    "windows-and-sinks": ("GptOss", "v6e:2x2", {"fsdp": 1}),
    "latent": ("DeepseekV3", "v5p:2x2x1", {"fsdp": 4}),
    "cut": ("GptOss", "v5p:2x2x1", {"fsdp": 2, "context": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_take_full_sequences(case):
    family, topology, mesh = CASES[case]
    command = [
        sys.executable,
        Path(__file__).with_name("compile_flash_for_tpu.py"),
        family,
        topology,
        json.dumps(mesh),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for name, kinds in {"gradient": {"fwd", "dq", "dkv"}, "prefill": {"fwd"}}.items():
        assert not result[name]["scores"] and not result[name]["logits"], result
        assert all(any(kind in call for call in result[name]["kernels"]) for kind in kinds), result


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_kernels_take_trees(topology):
    tokens = 4096
    mesh, script = (
        json.dumps({"fsdp": 2, "tensor": 2}),
        Path(__file__).with_name("compile_trees_for_tpu.py"),
    )
    command = [sys.executable, script, topology, mesh, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert all(any(kind in call for call in result["kernels"]) for kind in ("fwd", "dq", "dkv")), (
        result
    )
    masks = 3 * 4 * tokens**2 / 2**20  # MiB of a row; a device has two rows
    assert result["temporaries"] < 2 * masks, result
