"""Hyper-connections against the modules of transformers' DeepSeek-V4, and against numpy where it
has none."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
from oracles import configuration  # noqa: E402
from transformers import DeepseekV4Config  # noqa: E402
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (  # noqa: E402
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from policy import families  # noqa: E402
from policy.layers.hyper_connections import HyperConnection, Streams, sinkhorn  # noqa: E402

E = 20
# streams, rounds of Sinkhorn, eps, eps of the norm, [B, T]
SHAPES = [
    (4, 20, 1e-6, 1e-6, (2, 7)),
    (2, 3, 1e-2, 0.3, (1, 5)),
    (1, 1, 0.1, 1e-2, (3, 1)),
    (3, 2, 1e-3, 1e-3, (1, 1)),
]


@pytest.fixture(autouse=True)
def unplaced():
    """Modules made outside a Graph, so without a mesh."""
    with nnx.use_eager_sharding(False):
        yield


def options(G, **section):
    keys = configuration("Llama", hidden_size=E, head_dim=4)
    return families.read(keys | {"duet": {"hyper_connections": {"streams": G} | section}})


def theirs(kind, G, rounds, eps, norm_eps):
    """A module of transformers with random weights, all of them away from their defaults."""
    made = kind(
        DeepseekV4Config(
            hidden_size=E, hc_mult=G, hc_sinkhorn_iters=rounds, hc_eps=eps, rms_norm_eps=norm_eps
        )
    )
    torch.manual_seed(G)
    with torch.no_grad():
        for name, array in made.named_parameters():
            array.copy_(torch.randn(array.shape) * (0.2 if name.endswith("fn") else 0.7))
    return made


def numbers(module) -> dict:
    """The weights of a mapping of ours, from those of transformers."""
    fn, base, scale = (p.detach().numpy() for p in module.parameters())
    return {"weight": fn.reshape(len(fn), -1, E).transpose(1, 2, 0), "bias": base, "scale": scale}


def on(module, numbers):
    """The mapping of `module` with these weights."""
    for name, array in numbers.items():
        getattr(module, name)[...] = jnp.asarray(array)


def streams_of(G, shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=(*shape, G, E)).astype(np.float32) * 2, rng.normal(
        size=(*shape, E)
    ).astype(np.float32)


def tokens_last(array):
    return np.moveaxis(array.detach().numpy(), (0, 1), (-2, -1))


@pytest.mark.parametrize(("G", "rounds", "eps", "norm_eps", "shape"), SHAPES)
def test_a_connection_reads_and_writes_as_that_of_transformers(G, rounds, eps, norm_eps, shape):
    oracle = theirs(DeepseekV4HyperConnection, G, rounds, eps, norm_eps)
    weights, (x, y) = numbers(oracle), streams_of(G, shape)
    config = options(G, sinkhorn_iterations=rounds, eps=eps, norm_eps=norm_eps)
    with jax.default_matmul_precision("highest"):
        ours = HyperConnection(config, nnx.Rngs(0))
        graph, _ = nnx.split(ours)

        def joined(x, y, weights):
            module = nnx.merge(
                graph, nnx.State({"mapping": {k: nnx.Param(v) for k, v in weights.items()}})
            )
            read, mix = module.read(x)
            out = module.write(x, read + y, mix)
            return out, (read, *mix, out)

        @jax.jit
        def run(x, y, weights, cotangent):
            _, back, result = jax.vjp(joined, x, y, weights, has_aux=True)
            return result, back(cotangent)

        cotangent = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
        (read, post, matrix, out), grads = run(x, y, weights, cotangent)

    tx, ty = torch.tensor(x, requires_grad=True), torch.tensor(y, requires_grad=True)
    their_post, their_matrix, collapsed = oracle(tx)
    np.testing.assert_allclose(read, collapsed.detach(), atol=1e-5, rtol=0)
    np.testing.assert_allclose(post, tokens_last(their_post), atol=1e-5, rtol=0)
    np.testing.assert_allclose(matrix, tokens_last(their_matrix), atol=1e-5, rtol=0)
    mixed = torch.matmul(
        their_matrix.transpose(-1, -2), tx
    )  # as DeepseekV4DecoderLayer.forward joins them
    expected = their_post[..., None] * (collapsed + ty)[..., None, :] + mixed
    np.testing.assert_allclose(out, expected.detach(), atol=2e-5, rtol=0)
    expected.backward(torch.tensor(cotangent))
    their_grads = {
        "weight": oracle.fn.grad.numpy().reshape(-1, G, E).transpose(1, 2, 0),
        "bias": oracle.base.grad,
    }
    for ours, grad in (
        (grads[0], tx.grad),
        (grads[1], ty.grad),
        *((grads[2][k], g) for k, g in their_grads.items()),
    ):
        np.testing.assert_allclose(ours, grad, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(grads[2]["scale"], oracle.scale.grad, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(("G", "rounds", "eps", "norm_eps", "shape"), SHAPES)
def test_the_head_is_that_of_transformers(G, rounds, eps, norm_eps, shape):
    oracle, (x, _) = theirs(DeepseekV4HyperHead, G, rounds, eps, norm_eps), streams_of(G, shape)
    ours = Streams(options(G, eps=eps, norm_eps=norm_eps, reduce="head"), nnx.Rngs(0))
    on(ours.head, numbers(oracle))
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(
            ours.reduce(jnp.asarray(x)), oracle(torch.tensor(x)).detach(), atol=1e-5, rtol=0
        )


def test_the_sum_of_copies_is_as_many_times_the_vector():
    ends, x = (
        Streams(options(3), nnx.Rngs(0)),
        np.random.default_rng(0).normal(size=(2, 5, E)).astype(np.float32),
    )
    np.testing.assert_allclose(ends.reduce(ends.expand(jnp.asarray(x))), 3 * x, rtol=1e-6)


@pytest.mark.parametrize("G", [1, 2, 4, 5])
def test_rows_and_columns_sum_to_one(G):
    logits = np.random.default_rng(G).normal(size=(G, G, 2, 9)).astype(np.float32)
    matrix = np.asarray(sinkhorn(jnp.asarray(logits), 20, 1e-6))
    assert (matrix >= 0).all()
    for axis in (0, 1):
        np.testing.assert_allclose(matrix.sum(axis), 1.0, atol=1e-3)


@pytest.mark.parametrize("G", [2, *(pytest.param(G, marks=pytest.mark.slow) for G in (1, 3, 4))])
def test_lite_mixes_all_permutations(G):
    """As numpy: a convex combination of permutation matrices, which is exactly doubly
    stochastic."""
    rng, orders = np.random.default_rng(G), list(itertools.permutations(range(G)))
    ours = HyperConnection(options(G, variant="lite", norm_weight=True), nnx.Rngs(0))
    shapes = {
        "weight": (G, E, 2 * G + len(orders)),
        "bias": (2 * G + len(orders),),
        "scale": (3,),
        "norm": (G, E),
    }
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    on(ours.mapping, weights)
    x, _ = streams_of(G, (2, 3))
    z = x / np.sqrt((x**2).mean((2, 3), keepdims=True) + 1e-6) * weights["norm"]
    a = (
        np.einsum("btge,gek->btk", z, weights["weight"])[..., 2 * G :] * weights["scale"][2]
        + weights["bias"][2 * G :]
    )
    chosen = np.exp(a - a.max(-1, keepdims=True))
    expected = np.zeros((2, 3, G, G))
    for n, order in enumerate(orders):
        for row, column in enumerate(order):
            expected[..., row, column] += (chosen / chosen.sum(-1, keepdims=True))[..., n]
    with jax.default_matmul_precision("highest"):
        matrix = np.asarray(ours.read(jnp.asarray(x))[1][1])
    np.testing.assert_allclose(matrix, np.moveaxis(expected, (0, 1), (2, 3)), atol=1e-5)
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-6)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-6)
