"""Gradients of a loss of log-probabilities and entropies equal those of torch through transformers,
weight by weight.

Ours are saved as if they were weights and read by transformers, so that names, layouts and
transposes are those of its memory.
"""

import numpy as np
import pytest
from oracles import (
    KINDS,
    by_kind,
    floats_and_integers,
    oracle,
    reload,
    saved,
    tokens,
    torch_logprobs,
)

import policy

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)
LENGTH = 40
WEIGHTS = np.random.default_rng(6).normal(size=(2, 2, LENGTH - 1)).astype(np.float32)


def their_gradients(model, row):
    logp, entropy = torch_logprobs(model(torch.tensor(row), use_cache=False).logits, row, 0.7)
    (torch.tensor(WEIGHTS[0]) * logp + torch.tensor(WEIGHTS[1]) * entropy).sum().backward()
    return {
        name: None if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()
    }


def our_gradients(kind, model, row, directory):
    import jax

    from policy.modes import make_step

    def loss(floats):
        logp, entropy, _ = model.graph.logprobs(integers | floats, row, make_step(row), 0.7)
        return (WEIGHTS[0] * logp[:, 1:] + WEIGHTS[1] * entropy[:, 1:]).sum()

    floats, integers = floats_and_integers(model.params)
    policy.save(policy.Model(model.graph, integers | jax.jit(jax.grad(loss))(floats)), directory)
    return {name: p.detach().numpy() for name, p in reload(kind, directory).named_parameters()}


def check(kind, directory):
    theirs = oracle(kind, **KINDS[kind].standard | KINDS[kind].short)
    ours = policy.load(saved(theirs, directory / "model"))
    row = tokens(2, LENGTH, seed=4)
    result, expected = (
        our_gradients(kind, ours, row, directory / "ours"),
        their_gradients(theirs, row),
    )
    assert result.keys() == expected.keys()
    compared = 0
    for name, gradient in expected.items():
        if gradient is None or not gradient.any():
            assert not result[name].any(), name
            continue
        compared += 1
        np.testing.assert_allclose(
            result[name], gradient, atol=1e-4 * np.abs(gradient).max(), rtol=0, err_msg=name
        )
    assert compared > 4


@pytest.mark.parametrize("kind", by_kind(always=("Llama", "DeepseekV3")))
def test_gradients(kind, tmp_path):
    check(kind, tmp_path)
