"""Gradients of the mean negative log-likelihood equal those of torch through transformers, weight by weight.

Both are written as if they were weights, so that names, layouts and transposes are those of the files.
"""

import numpy as np
import pytest
from oracles import KINDS, oracle, saved, tokens

import policy
from policy import hub

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'")
LENGTH = 40


def their_gradients(model, row, directory):
    """Tensors as stored, of the gradients; those without one are left out."""
    from safetensors.numpy import load_file

    logits = model(torch.tensor(row), use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.tensor(row)[:, 1:].reshape(-1)).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        for buffer in model.buffers():
            buffer.zero_()
    return load_file(saved(model, directory) / hub.SINGLE), without


def our_gradients(model, row, directory):
    import jax
    from safetensors.numpy import load_file

    from policy.modes import sit

    def loss(params):
        return -model.graph.logprobs(params, row, sit(row), 1.0)[0].sum() / (row.shape[0] * (row.shape[1] - 1))

    gradients = jax.jit(jax.grad(loss))(model.params)
    policy.save(policy.Model(model.graph, gradients), directory)
    return load_file(directory / hub.SINGLE)


def check(kind, directory):
    theirs = oracle(kind, **KINDS[kind].standard | KINDS[kind].short)
    ours = policy.load(saved(theirs, directory / "model"))
    row = tokens(2, LENGTH, seed=4)
    found = our_gradients(ours, row, directory / "ours")
    expected, without = their_gradients(theirs, row, directory / "theirs")
    assert found.keys() == expected.keys()
    compared = 0
    for name, gradient in expected.items():
        scale = np.abs(gradient).max()
        if scale == 0 or name in without:
            assert not np.abs(found[name]).max() > 0, name
            continue
        compared += 1
        np.testing.assert_allclose(found[name], gradient, atol=1e-4 * scale, rtol=0, err_msg=name)
    assert compared > 4


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "DeepseekV3")) for k in KINDS])
def test_gradients(kind, tmp_path):
    check(kind, tmp_path)
