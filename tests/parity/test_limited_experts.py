"""The mixture of experts of DeepSeek-V4 against the class of transformers: scores
sqrt(softplus(.)), experts by the id of the token, and limited activations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)
from transformers import DeepseekV4Config  # noqa: E402
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock  # noqa: E402

from policy.config import ClampedSwiglu, DecoderConfig, Mlp, Moe, Norm, Router, Runtime  # noqa: E402
from policy.experts.moe import MixtureOfExperts  # noqa: E402
from policy.modes import make_step  # noqa: E402

V, E, F, X, k, LIMIT = 40, 20, 12, 8, 3, 0.7
B, T = 2, 9


def theirs(kind: str):
    """The class with random weights, correction and table."""
    config = DeepseekV4Config(
        vocab_size=V,
        hidden_size=E,
        moe_intermediate_size=F,
        n_routed_experts=X,
        num_experts_per_tok=k,
        num_hidden_layers=1,
        num_attention_heads=4,
        mlp_layer_types=[kind],
        swiglu_limit=LIMIT,
        routed_scaling_factor=1.7,
    )
    config._experts_implementation = "eager"
    block = DeepseekV4SparseMoeBlock(config, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
        if kind == "moe":
            block.gate.e_score_correction_bias.copy_(torch.randn(X))
        else:
            block.gate.tid2eid.copy_(torch.rand(V, X).argsort(-1)[:, :k])
    return block


def ours(block):
    """The same mixture, as (graph, state)."""
    by_token = block.is_hash
    clamp = ClampedSwiglu(LIMIT, alpha=1.0, up_offset=0.0)
    router = Router(
        X, k, "sqrt_softplus", correction_bias=not by_token, by_token=by_token, scale=1.7
    )
    spec = Moe(router, F, shared=Mlp(F, clamp=clamp), clamp=clamp)
    with nnx.use_eager_sharding(False):
        module = MixtureOfExperts(spec, DecoderConfig(V, E, (), Norm(), "none", "{}"), nnx.Rngs(0))
    weights = {name: np.asarray(array.detach()) for name, array in block.state_dict().items()}
    module.router.weight[...] = jnp.asarray(weights["gate.weight"].T)
    if by_token:
        module.router.token_experts[...] = jnp.asarray(weights["gate.tid2eid"], jnp.int32)
    else:
        module.router.correction_bias[...] = jnp.asarray(weights["gate.e_score_correction_bias"])
    gate, up = np.split(weights["experts.gate_up_proj"].swapaxes(1, 2), 2, axis=2)
    module.expert_gate_proj[...] = jnp.asarray(gate)
    module.expert_up_proj[...] = jnp.asarray(up)
    module.expert_down_proj[...] = jnp.asarray(weights["experts.down_proj"].swapaxes(1, 2))
    for part in ("gate", "up", "down"):
        getattr(module.shared, f"{part}_proj")[...] = jnp.asarray(
            weights[f"shared_experts.{part}_proj.weight"].T
        )
    return nnx.split(module)


def step_of(ids):
    """The step of these tokens, as the decoder completes it."""
    return replace(make_step(jnp.asarray(ids)), tokens=jnp.asarray(ids))


@pytest.mark.parametrize("kind", ["moe", "hash_moe"])
def test_output_and_gradients_are_those_of_the_class(kind):
    block = theirs(kind)
    graph, state = ours(block)
    rng = np.random.default_rng(1)
    x, cotangent = rng.normal(size=(2, B, T, E)).astype(np.float32)
    ids = rng.integers(0, V, (B, T))
    step = step_of(ids)

    @jax.jit
    def run(state, x):
        def forward(state, x):
            return nnx.merge(graph, state)(x, step, Runtime(record=("routes",)))

        with jax.default_matmul_precision("highest"):
            out, back, aux = jax.vjp(forward, state, x, has_aux=True)
            return out, back(cotangent), aux

    out, (gradient, d_x), aux = run(state, x)
    torch_x = torch.tensor(x, requires_grad=True)
    expected = block(torch_x, input_ids=torch.tensor(ids))
    expected.backward(torch.tensor(cotangent))
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=2e-5)
    np.testing.assert_allclose(d_x, torch_x.grad.numpy(), atol=5e-5)
    np.testing.assert_allclose(
        gradient["router"]["weight"][...], block.gate.weight.grad.numpy().T, atol=5e-5
    )
    np.testing.assert_allclose(
        gradient["expert_down_proj"][...],
        block.experts.down_proj.grad.numpy().swapaxes(1, 2),
        atol=5e-5,
    )
    d_shared = block.shared_experts.gate_proj.weight.grad.numpy().T
    np.testing.assert_allclose(gradient["shared"]["gate_proj"][...], d_shared, atol=5e-5)
    inputs = (torch_x, torch.tensor(ids)) if kind == "hash_moe" else (torch_x,)
    chosen = block.gate(*inputs)[2].numpy().reshape(B, T, k)
    np.testing.assert_array_equal(np.sort(aux.routes, axis=-1), np.sort(chosen, axis=-1))
    counts = np.bincount(chosen.ravel(), minlength=X)
    np.testing.assert_array_equal(aux.routing.counts, counts)
    assert (aux.routing.share.sum() == 0) == (aux.routing.balance == 0) == (kind == "hash_moe")


def test_replayed_experts_take_the_place_of_the_table():
    block = theirs("hash_moe")
    graph, state = ours(block)
    x = np.random.default_rng(1).normal(size=(B, T, E)).astype(np.float32)
    ids = np.random.default_rng(2).integers(0, V, (B, T))
    routes = (np.asarray(block.gate.tid2eid)[ids] + 1) % X
    step = replace(step_of(ids), routes=jnp.asarray(routes))
    with jax.default_matmul_precision("highest"):
        out, aux = nnx.merge(graph, state)(jnp.asarray(x), step, Runtime())
    with torch.no_grad():
        block.gate.tid2eid.add_(1).remainder_(X)
        expected = block(torch.tensor(x), input_ids=torch.tensor(ids))
    np.testing.assert_allclose(out, expected.numpy(), atol=2e-5)
    assert aux.routing.replayed.given == B * T * k and aux.routing.replayed.disagreed > 0
