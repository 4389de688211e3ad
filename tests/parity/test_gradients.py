"""Gradients of the mean negative log-likelihood equal those of torch through transformers, weight by weight.

Ours are saved as if they were weights and read by transformers, so that names, layouts and transposes are those of its memory.
"""

import numpy as np
import pytest
from oracles import KINDS, oracle, reload, saved, tokens

import policy

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'")
LENGTH = 40


def their_gradients(model, row):
    logits = model(torch.tensor(row), use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.tensor(row)[:, 1:].reshape(-1)).backward()
    return {name: None if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}


def our_gradients(kind, model, row, directory):
    import jax

    from policy.modes import sit

    def loss(params):
        return -model.graph.logprobs(params, row, sit(row), 1.0)[0].sum() / (row.shape[0] * (row.shape[1] - 1))

    policy.save(policy.Model(model.graph, jax.jit(jax.grad(loss))(model.params)), directory)
    return {name: p.detach().numpy() for name, p in reload(kind, directory).named_parameters()}


def check(kind, directory):
    theirs = oracle(kind, **KINDS[kind].standard | KINDS[kind].short)
    ours = policy.load(saved(theirs, directory / "model"))
    row = tokens(2, LENGTH, seed=4)
    found, expected = our_gradients(kind, ours, row, directory / "ours"), their_gradients(theirs, row)
    assert found.keys() == expected.keys()
    compared = 0
    for name, gradient in expected.items():
        if gradient is None or not gradient.any():
            assert not found[name].any(), name
            continue
        compared += 1
        np.testing.assert_allclose(found[name], gradient, atol=1e-4 * np.abs(gradient).max(), rtol=0, err_msg=name)
    assert compared > 4


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "DeepseekV3")) for k in KINDS])
def test_gradients(kind, tmp_path):
    check(kind, tmp_path)
