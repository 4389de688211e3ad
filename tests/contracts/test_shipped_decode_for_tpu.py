"""A decoded token of the shipped configurations reads weights and cache once, on the slices and at
the lengths that they are meant for.

Their stacks are deep and wide enough that VMEM hides no copy: on a small one slices stay there, and
copies that cost the full model a third of its traffic count nothing.
"""

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
# (configuration, slice) -> (most bytes moved over arguments, calls of kernels per token).
# The windows of Gemma are less than its pages.
CASES = {
    ("grpo_deepseek", "v5p:8x8x4"): (
        1.15,
        {"latent_paged_attention": 61, "gmm_stacked": 3 * 58, "join_halves": 2 * 58},
    ),
    ("grpo_qwen3_30b_a3b", "v6e:4x4"): (1.15, {"paged_attention": 48}),
    ("grpo_qwen3_30b_a3b", "v5p:2x2x4"): (1.15, {"paged_attention": 48}),
    ("grpo_llama3_8b", "v5e:4x4"): (1.15, {"paged_attention": 32}),
    ("grpo_llama3_8b", "v6e:2x4"): (1.15, {"paged_attention": 32}),
    ("ppo_gemma3_27b", "v5p:2x2x4"): (1.0, {"paged_attention": 10, "window_paged_attention": 52}),
}


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_a_decoded_token_moves_little_more_than_its_arguments(name, topology):
    most, kernels = CASES[name, topology]
    command = [
        sys.executable,
        Path(__file__).with_name("compile_shipped_decode_for_tpu.py"),
        name,
        topology,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kernels"] == kernels
    assert 0.5 * result["arguments"] < result["moved"] <= most * result["arguments"], result["most"]
    assert result["temporary"] < 0.05 * result["arguments"], (
        "weights or cache are copied in another order"
    )
