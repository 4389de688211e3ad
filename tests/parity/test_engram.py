"""Engram against a port of the released demo (deepseek-ai/Engram, engram_demo_v1.py): hashes in
numpy, bit by bit, and the rest in torch."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import configuration

from policy import families
from policy.config import Runtime
from policy.fields.ngrams import is_prime
from policy.layers.engram import NgramLookup, table_rows
from policy.modes import make_step

torch = pytest.importorskip(
    "torch", reason="the oracle is written in torch: pip install 'duet-rl[test]'"
)


def prime_by_trial(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


class Hashing:
    """The demo's hash of all its layers, on classes of tokens; with `dtype` in place of its 64
    bits."""

    def __init__(self, section, ids, dtype):
        self.pad, self.longest, self.dtype = section.get("pad_id", 0), section["max_ngram"], dtype
        self.factors, self.sizes, taken = {}, {}, set()
        for layer in section["layers"]:
            draw = np.random.default_rng(section["seed"] + 10007 * layer)
            half = max(1, int(np.iinfo(dtype).max // ids) // 2)
            self.factors[layer] = (
                draw.integers(low=0, high=half, size=(self.longest,), dtype=np.int64) * 2 + 1
            )
            self.sizes[layer] = []
            for base in section["vocab_bases"]:
                candidate = base - 1
                for _ in range(section["heads"]):
                    candidate += 1
                    while candidate in taken or not prime_by_trial(candidate):
                        candidate += 1
                    taken.add(candidate)
                    self.sizes[layer].append(candidate)

    def rows(self, layer, ids_BT):
        """[B, T, H], with the offsets of the heads in one table."""
        heads = len(self.sizes[layer]) // (self.longest - 1)
        ids, T = ids_BT.astype(self.dtype), ids_BT.shape[1]
        before = [
            np.pad(ids, ((0, 0), (j, 0)), constant_values=self.pad)[:, :T]
            for j in range(self.longest)
        ]
        products = [
            each * self.dtype(factor)
            for each, factor in zip(before, self.factors[layer], strict=True)
        ]
        offsets, result = np.concatenate([[0], np.cumsum(self.sizes[layer])[:-1]]), []
        for n in range(2, self.longest + 1):
            mixed = np.bitwise_xor.reduce(products[:n])
            for size in self.sizes[layer][(n - 2) * heads : (n - 1) * heads]:
                result.append(mixed % self.dtype(size))
        return np.stack(result, axis=-1) + offsets


SECTION = {
    "layers": [0, 2],
    "vocab_bases": [50, 70],
    "max_ngram": 3,
    "heads": 2,
    "head_dim": 4,
    "seed": 0,
}
SECTIONS = {
    "default": SECTION,
    "orders": SECTION
    | {
        "layers": [2, 1],
        "vocab_bases": [4, 90, 31],
        "max_ngram": 4,
        "heads": 3,
        "seed": 7,
        "pad_id": 5,
    },
    "bigrams": SECTION | {"vocab_bases": [1000], "max_ngram": 2, "heads": 1, "pad_id": 159},
    "large": SECTION | {"vocab_bases": [129280 * 5, 2**27], "heads": 4, "pad_id": 2},
}


def spec_of(section, layer, **more):
    config = families.read(configuration("Llama", **more, duet={"engram": section}))
    return config, config.layers[layer].engram


@pytest.mark.parametrize("integers", ["int32", "int64"])
@pytest.mark.parametrize("name", SECTIONS)
def test_the_rows_of_the_table_are_those_of_the_demo(name, integers):
    vocabulary = 129280 if name == "large" else 160
    section = SECTIONS[name] | {"integers": integers}
    oracle = Hashing(section, vocabulary, getattr(np, integers))
    ids = np.random.default_rng(1).integers(0, vocabulary, (3, 40))
    ids[0, :4] = vocabulary - 1  # the largest products
    for layer in section["layers"]:
        _, spec = spec_of(section, layer, vocab_size=vocabulary)
        assert spec.multipliers == tuple(oracle.factors[layer]) and spec.rows == tuple(
            oracle.sizes[layer]
        )
        shifted = [
            np.pad(ids, ((0, 0), (j, 0)), constant_values=spec.pad_id)[:, : ids.shape[1]]
            for j in range(len(spec.multipliers))
        ]
        result = jax.jit(lambda shifted, spec=spec: table_rows(spec, shifted))(
            [jnp.asarray(a, jnp.int32) for a in shifted]
        )
        np.testing.assert_array_equal(result, oracle.rows(layer, ids))


def test_primes_are_told_from_other_numbers():
    for n in (*range(500), 2047, 3215031749, 2**31 - 1, 25326001, 129280 * 5 + 21):
        assert is_prime(n) == prime_by_trial(n), n


def their_memory(x, rows, w, kernel, dilation, eps):
    """The demo's module on streams x [B, T, G, E]; `eps` of keys and streams, and of the
    convolution's norm."""

    def rms(value, scale, eps):
        return torch.nn.functional.rms_norm(value, value.shape[-1:], scale, eps)

    (B, T, G, E), result = x.shape, w["table"][rows].flatten(-2)
    value, gated = result @ w["value_proj"] + w["value_bias"], []
    for g in range(G):
        key = rms(result @ w["key_proj"][g] + w["key_bias"][g], w["key_norm"][g], eps[0])
        score = (key * rms(x[:, :, g], w["query_norm"][g], eps[0])).sum(-1) / math.sqrt(E)
        gate = torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign())
        gated.append(gate[..., None] * value)
    gated = torch.stack(gated, dim=2)
    normed = torch.cat(
        [rms(gated[:, :, g], w["conv_norm"][g], eps[1]) for g in range(G)], dim=-1
    ).transpose(1, 2)
    taps = w["conv"].permute(1, 2, 0).reshape(G * E, 1, kernel)
    convolved = torch.nn.functional.conv1d(
        normed, taps, padding=(kernel - 1) * dilation, dilation=dilation, groups=G * E
    )
    return gated + torch.nn.functional.silu(convolved[..., :T]).transpose(1, 2).reshape(B, T, G, E)


@pytest.mark.parametrize(
    ("streams", "changes", "shape"),
    [
        (4, {"norm_eps": 0.1, "conv_norm_eps": 1e-3}, (2, 11)),
        (
            None,
            {
                "max_ngram": 4,
                "vocab_bases": [50, 60, 70],
                "heads": 3,
                "head_dim": 5,
                "kernel_size": 2,
            },
            (1, 9),
        ),
        pytest.param(
            2,
            {"kernel_size": 1, "conv_norm_eps": 0.3, "norm_eps": 1e-3},
            (2, 3),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            1,
            {"max_ngram": 2, "vocab_bases": [300], "kernel_size": 3, "integers": "int64"},
            (1, 1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_added_and_its_gradients_are_those_of_the_demo(streams, changes, shape):
    section = SECTION | {"kernel_size": 4, "norm_eps": 1e-6, "conv_norm_eps": 1e-5} | changes
    keys = configuration("Llama", hidden_size=24)
    parts = {"engram": section} | ({"hyper_connections": {"streams": streams}} if streams else {})
    config = families.read(keys | {"duet": parts})
    spec, G, rng = config.layers[2].engram, streams or 1, np.random.default_rng(3)
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(NgramLookup(spec, config, nnx.Rngs(0)))
    shapes = {path[0]: variable.shape for path, variable in nnx.to_flat_state(state)}
    classes = rng.permutation(160).astype(np.int32)
    w = {
        name: (rng.normal(size=each) * 0.6).astype(np.float32)
        for name, each in shapes.items()
        if name != "classes"
    }
    x, cotangent = (rng.normal(size=(*shape, G, 24)).astype(np.float32) for _ in range(2))
    tokens = rng.integers(0, 160, shape)

    @jax.jit
    def run(x, w):
        def ours(x, w):
            variables = {
                name: nnx.Param(array)
                for name, array in (w | {"classes": jnp.asarray(classes)}).items()
            }
            step = replace(make_step(tokens), tokens=jnp.asarray(tokens))
            given = x if streams else x[:, :, 0]
            return nnx.merge(graph, nnx.State(variables))(given, step, None, Runtime())[0].reshape(
                x.shape
            )

        with jax.default_matmul_precision("highest"):
            out, back = jax.vjp(ours, x, w)
            return out, back(jnp.asarray(cotangent))

    out, (x_grad, w_grad) = run(x, w)
    rows = Hashing(section, 160, getattr(np, section.get("integers", "int32"))).rows(
        2, classes[tokens]
    )
    tx, tw = (
        torch.tensor(x, requires_grad=True),
        {name: torch.tensor(array, requires_grad=True) for name, array in w.items()},
    )
    eps = section["norm_eps"], section["conv_norm_eps"]
    expected = their_memory(
        tx, torch.tensor(rows), tw, section["kernel_size"], section["max_ngram"], eps
    )
    np.testing.assert_allclose(out, expected.detach(), atol=1e-5, rtol=0)
    expected.backward(torch.tensor(cotangent))
    np.testing.assert_allclose(x_grad, tx.grad, atol=2e-5, rtol=1e-4)
    for name, tensor in tw.items():
        np.testing.assert_allclose(w_grad[name], tensor.grad, atol=5e-5, rtol=1e-4, err_msg=name)
