"""Decoding over a paged cache compiles for TPU as it is meant to run: kernels read the pages where
they lie, weights are read once, and nothing the size of a layer's cache is made."""

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
# Attention weights replicated along `expert`: sharded along it, as for training, they would be
# exchanged for every token.
REPLICATED = {name: [] for name in ("embed", "embed_moe", "embed_vocab", "q_lora", "kv_lora")}
CASES = {
    "llama-v5p": ("llama3.1-8b", "v5p:2x2x1", {"fsdp": 1}, 64, 64, {}),
    "llama-v6e": ("llama3.1-8b", "v6e:2x2", {"tensor": 4}, 64, 64, {}),
    "deepseek-v5p": ("deepseek-v3", "v5p:2x4x4", {"expert": 8, "tensor": 4}, 64, 256, REPLICATED),
    "deepseek-v6e": ("deepseek-v3", "v6e:8x8", {"expert": 16, "tensor": 4}, 64, 256, REPLICATED),
}
LAYERS = {"llama3.1-8b": 32, "deepseek-v3": 61}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_weights_and_cache_once(case):
    preset, topology, *numbers = CASES[case]
    command = [
        sys.executable,
        Path(__file__).with_name("compile_decode_for_tpu.py"),
        preset,
        topology,
        *map(json.dumps, numbers),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kernel_calls"] == LAYERS[preset]
    assert not result["strangers"], (
        "arrays of the size of a layer's cache are read or written outside the kernel"
    )
    assert result["temporary"] < result["layer"], result
    assert result["ideal"] <= result["bytes"] < 1.3 * result["ideal"], result["most"]
