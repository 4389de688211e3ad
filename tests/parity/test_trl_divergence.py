"""The generalised Jensen-Shannon divergence and its gradient are those of TRL's GKDTrainer."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.heads.divergence import Divergence, divergence

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is the oracle: pip install 'duet-rl[test]'"
)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
def test_values_and_gradients_are_those_of_gkd(temperature, monkeypatch):
    """Masked tokens count for neither; TRL's `batchmean` is the mean over the tokens that are not
    masked."""
    import torch

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    rng = np.random.default_rng(0)
    shapes = (2, 6, 5), (11, 5), (2, 6, 4), (11, 4)
    h, w, ht, wt = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    mask = rng.random((2, 6)) < 0.6
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        states, weight = (torch.tensor(a, requires_grad=True) for a in (h, w))
        labels = torch.where(torch.tensor(mask), 0, -100)
        teacher = torch.tensor(ht) @ torch.tensor(wt).T
        theirs = GKDTrainer.generalized_jsd_loss(
            states @ weight.T, teacher, labels=labels, beta=beta, temperature=temperature
        )
        theirs.backward()

        def loss(h, w, beta=beta):
            states = h.reshape(-1, 5), w, ht.reshape(-1, 4), wt
            rows = divergence(
                *states, Divergence.generalised(beta), temperature
            ).divergence.reshape(2, 6)
            return jnp.sum(jnp.where(mask, rows, 0.0)) / mask.sum()

        with jax.default_matmul_precision("highest"):
            ours, gradients = jax.value_and_grad(loss, argnums=(0, 1))(
                jnp.asarray(h), jnp.asarray(w)
            )
        assert float(ours) == pytest.approx(theirs.item(), abs=2e-6)
        for gradient, tensor in zip(gradients, (states, weight), strict=True):
            np.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=2e-6)
