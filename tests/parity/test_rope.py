"""Rotary frequencies and the attention factor equal those of transformers, at the sizes of released
models: with the few frequencies of the tiny models many a rounding falls out the same."""

import numpy as np
import pytest
from oracles import configuration

from policy import families
from policy.ops.rope import frequencies

pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
SETTINGS = {
    "linear": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "llama3.1": LLAMA3 | {"original_max_position_embeddings": 8192},
    "llama3.2": LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0},
    "llama3-length-of-the-model": LLAMA3,
    "yarn-deepseek-v3": YARN
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    "yarn-deepseek-v2": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn-mscales-differ": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-one-mscale": YARN | {"mscale_all_dim": 0.5},
    "yarn-attention_factor": YARN
    | {"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-not-truncated": YARN | {"truncate": False},
    "yarn-other-betas": YARN | {"beta_fast": 8, "beta_slow": 2, "factor": 4.0},
    "yarn-length-of-the-model": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    "yarn-equal-bounds": YARN | {"beta_fast": 1e-5, "beta_slow": 1e-5},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies(name, head_dim):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    keys = {
        "head_dim": head_dim,
        "rope_parameters": SETTINGS[name],
        "max_position_embeddings": 16384,
    }
    expected, factor = ROPE_INIT_FUNCTIONS[SETTINGS[name]["rope_type"]](LlamaConfig(**keys))
    rope = families.read(configuration("Llama", **keys)).layers[0].mixer.rope
    ours = frequencies(rope)
    assert isinstance(ours, np.ndarray) and ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.numpy(), rtol=4e-7)
    assert (
        ours == expected.numpy()
    ).mean() > 0.9  # powers of torch are rounded in another way here and there
    assert getattr(rope.scaling, "attention_factor", 1.0) == pytest.approx(factor, rel=1e-6)
