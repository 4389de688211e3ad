"""The balance term of a full batch against the loss of `transformers`. N tokens, X experts, k
choices."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rl.training.auxiliary_losses import Totals, batch_balance  # noqa: E402


@pytest.mark.parametrize(("X", "k"), [(8, 2), (5, 3)])
def test_the_balance_of_a_batch_is_that_of_mixtral_over_k(X, k):
    """transformers pools layers and counts f_e so that it sums to k; here each layer is a term of
    its own and f_e sums to X.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    from policy.experts.router import routing_statistics

    rng = np.random.default_rng(0)
    B, T = 3, 7
    logits = rng.normal(0, 2.0, (2, B, T, X)).astype(np.float32)
    segments = (np.arange(T) < np.array([[7], [4], [1]])).astype(np.int32)
    routing, expected = {}, 0.0
    for layer in range(2):
        scores = np.exp(logits[layer]) / np.exp(logits[layer]).sum(-1, keepdims=True)
        experts = np.argsort(-logits[layer], axis=-1)[..., :k]
        routing[f"layer {layer}"] = routing_statistics(
            jnp.asarray(experts), jnp.asarray(scores), jnp.asarray(segments)
        )
        flat = torch.tensor(logits[layer].reshape(-1, X))
        expected += float(load_balancing_loss_func((flat,), X, k, torch.tensor(segments))) / k
    full = Totals(jnp.int32(3), jnp.int32(segments.sum()), segments, segments)
    np.testing.assert_allclose(float(batch_balance(routing, full)), expected, rtol=1e-5)
    assert expected > 2.01, "an even load cannot tell a wrong form from a right one"
