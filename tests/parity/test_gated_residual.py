"""Gated residual streams equal those of transformers, in float32 and bfloat16, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import configuration

from policy import families
from policy.layers.gated_residual import GatedConnection, GatedStreams

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)
from transformers import Qwen4ExpTextConfig  # noqa: E402
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual  # noqa: E402

G, E, R = 3, 20, 7


@pytest.fixture(autouse=True)
def unplaced():
    """Modules made outside a Graph, so without a mesh."""
    with nnx.use_eager_sharding(False):
        yield


def theirs(writes: bool):
    """A module of transformers with random weights, all of them away from their defaults."""
    config = Qwen4ExpTextConfig(hidden_size=E, hc_count=G, hc_lowrank=R, rms_norm_eps=1e-3)
    module = Qwen4ExpTextGatedResidual(config, use_combine=writes)
    torch.manual_seed(1)
    with torch.no_grad():
        for array in module.parameters():
            array.copy_(torch.randn(array.shape) * 0.4)
    return module


def ours(kind, oracle):
    keys = {"hidden_size": E, "hc_count": G, "hc_lowrank": R, "rms_norm_eps": 1e-3}
    module = kind(families.read(configuration("Qwen4Exp", **keys)), nnx.Rngs(0))
    weights = {name: array.detach().numpy() for name, array in oracle.named_parameters()}
    reader = module.reader
    reader.norm[...] = jnp.asarray(weights["hc_norm.weight"].reshape(G, E))
    reader.down[...] = jnp.asarray(weights["input_mix_weight_down.weight"].T.reshape(G, E, R))
    reader.up[...] = jnp.asarray(weights["input_mix_weight_up.weight"].T.reshape(R, G, E))
    if "block_inject_weight.weight" in weights:
        module.inject[...] = jnp.asarray(weights["block_inject_weight.weight"].T.reshape(G, E, G))
    return module


def streams(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, 5, G, E)).astype(np.float32) * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_connection_reads_and_writes_as_that_of_transformers(dtype):
    oracle = theirs(True)
    module, x, cotangent = ours(GatedConnection, oracle), streams(0), streams(1)

    def joined(x):
        read, mix = module.read(x)
        return module.write(x, jnp.tanh(read), mix), (read, mix)

    @jax.jit
    def with_gradient(x, cotangent):
        out, back, (read, mix) = jax.vjp(joined, x, has_aux=True)
        return out, back(cotangent)[0], read, mix

    with jax.default_matmul_precision("highest"):
        out, grad, read, mix = with_gradient(jnp.asarray(x, dtype), jnp.asarray(cotangent, dtype))

    tx = torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=True)
    their_read, stream, injection = oracle.to(tx.dtype)(tx.flatten(-2))
    added = torch.tanh(their_read).unsqueeze(-2) * injection.unsqueeze(
        -1
    )  # as Qwen4ExpTextDecoderLayer.forward
    expected = (stream + added.flatten(-2)).unflatten(-1, (G, E))
    expected.backward(torch.tensor(cotangent, dtype=tx.dtype))
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for result, right in ((read, their_read), (mix, injection), (out, expected), (grad, tx.grad)):
        np.testing.assert_allclose(
            np.asarray(result, np.float32),
            right.detach().float().numpy(),
            atol=tolerance,
            rtol=tolerance,
        )


def test_the_streams_end_as_those_of_transformers():
    oracle = theirs(False)
    module, x = ours(GatedStreams, oracle), streams(2)
    with torch.no_grad():
        expected = oracle(torch.tensor(x).flatten(-2)).numpy()
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(module.reduce(jnp.asarray(x)), expected, atol=1e-5, rtol=0)
    copies = module.expand(jnp.asarray(x[:, :, 0]))
    np.testing.assert_array_equal(copies, np.repeat(x[:, :, :1], G, axis=2))
