"""With routes given, log-probabilities, entropies and gradients are those of transformers whose
routers are made to take the same.

Only the choice of its routers is replaced: scores, weights and gradients stay its own.
"""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from oracles import oracle, reload, saved, tokens, torch_logprobs

import policy

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)
B, T = 2, 12
WEIGHTS = np.random.default_rng(6).normal(size=(2, B, T - 1)).astype(np.float32)


@contextlib.contextmanager
def forced(model, routes_LBTk):
    """Router number l of the model takes routes[l]: the one `torch.topk` that picks its experts
    gives these."""
    routers = [
        m
        for _, m in model.named_modules()
        if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]
    assert len(routers) == len(routes_LBTk)
    topk, used = torch.topk, []

    def run(router, chosen, forward, *inputs):
        def given(scores, k, *args, **how):
            if k != chosen.shape[-1] or scores.shape[-1] != router.num_experts:
                return topk(scores, k, *args, **how)
            used.append(router)
            return scores.gather(-1, chosen), chosen

        torch.topk = given
        try:
            return forward(*inputs)
        finally:
            torch.topk = topk

    for router, chosen in zip(routers, routes_LBTk, strict=True):
        chosen, forward = torch.tensor(chosen.reshape(-1, chosen.shape[-1])), router.forward
        router.forward = lambda *inputs, r=router, c=chosen, f=forward: run(r, c, f, *inputs)
    yield
    assert used == routers, "a router did not use what it was given, or asked twice"


def random_routes(config, rng) -> dict[str, np.ndarray]:
    """[B, T, R, k] by path of the layer, in the order of the layers."""
    result = {}
    for s, stack in enumerate(config.stacks):
        for i, spec in enumerate(stack.pattern):
            if spec.moe:
                X, k = spec.moe.router.experts, spec.moe.router.experts_per_token
                shape = (B, T, stack.repeats, X)
                result[f"stacks.{s}.layers.{i}"] = rng.permuted(
                    np.broadcast_to(np.arange(X), shape), axis=-1
                )[..., :k]
    return result


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("DeepseekV3", {"num_hidden_layers": 3}),
        pytest.param("GptOss", {"num_hidden_layers": 2}, marks=pytest.mark.slow),
    ],
)
def test_given_routes_give_what_transformers_gives_with_the_same(kind, keys, tmp_path):
    import jax

    from policy.modes import make_step

    theirs = oracle(kind, **keys)
    ours, row = policy.load(saved(theirs, tmp_path / "model")), tokens(B, T, seed=4)
    routes = random_routes(ours.config, np.random.default_rng(1))
    numbered = {
        n: a[:, :, r]
        for path, a in routes.items()
        for r, n in enumerate(ours.config.layer_numbers(path))
    }
    step = replace(make_step(row), routes=routes)

    def loss(params):
        logp, entropy, _ = ours.graph.logprobs(params, row, step, 0.7)
        return (WEIGHTS[0] * logp[:, 1:] + WEIGHTS[1] * entropy[:, 1:]).sum(), (
            logp[:, 1:],
            entropy[:, 1:],
        )

    (_, result), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(ours.params)
    free, _ = torch_logprobs(theirs(torch.tensor(row), use_cache=False).logits, row, 0.7)
    with forced(theirs, [numbered[n] for n in sorted(numbered)]):
        expected = torch_logprobs(theirs(torch.tensor(row), use_cache=False).logits, row, 0.7)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=2e-5)
    assert abs(np.asarray(result[0]) - free.detach().numpy()).max() > 1e-2, (
        "other experts give the same"
    )

    (
        torch.tensor(WEIGHTS[0]) * expected[0] + torch.tensor(WEIGHTS[1]) * expected[1]
    ).sum().backward()
    policy.save(policy.Model(ours.graph, gradients), tmp_path / "gradients")
    ours_by_name = {
        name: p.detach().numpy()
        for name, p in reload(kind, tmp_path / "gradients").named_parameters()
    }
    routers = 0
    for name, p in theirs.named_parameters():
        if p.grad is None or not p.grad.any():
            continue
        routers += "gate.weight" in name or "router.weight" in name
        atol = 1e-4 * float(p.grad.abs().max())
        np.testing.assert_allclose(
            ours_by_name[name], p.grad.numpy(), atol=atol, rtol=0, err_msg=name
        )
    assert routers == len(numbered), "no gradient reaches a router"
