"""The per-layer embedding of Qwen4Exp against its class in transformers: hashes bit by bit, and
what it adds to the residual streams."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import configuration

from policy import families
from policy.cache.entries import entries
from policy.cache.layer_cache import LayerCache
from policy.cache.step import Step
from policy.config import Runtime
from policy.fields import names, ngrams
from policy.fields.config_fields import UnsupportedModel
from policy.layers.engram import NgramLookup
from policy.modes import make_step

torch = pytest.importorskip(
    "torch", reason="the oracle is written in torch: pip install 'duet-rl[test]'"
)
END, STREAMS, HIDDEN = 7, 3, 32
KEYS = {
    "vocab_size": 160,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 4,
    "hc_count": STREAMS,
    "ple_layer_ids": [2, 4],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "eos_token_id": END,
    "rms_norm_eps": 1e-3,
}
# The sizes of the released model, and others than those above.
SIZES = {
    "tiny": {},
    "long": {
        "ngram_size": 4,
        "heads_per_ngram": 3,
        "ple_embed_dim": 27,
        "seed": 7,
        "eos_token_id": [159, 3],
    },
    "released": {
        "vocab_size": 248320,
        "hidden_size": 2560,
        "ple_embed_dim": 2560,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "eos_token_id": 248044,
    },
}


def modeling():
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    return modeling_qwen4_exp


def class_of_layer(hf, index):
    """The module of transformers for table `index`, with random weights of every kind."""
    from transformers import Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(**hf)
    torch.manual_seed(index)
    module = modeling().Qwen4ExpTextPLELayer(config, config.ple_layer_ids[index] - 1, index)
    for name, weight in module.named_parameters():
        std = 0.3 if "norm" in name or "conv" in name else 0.6 if "embedding" in name else 0.2
        torch.nn.init.normal_(weight, std=std)
    return module.eval(), config


def spec_of(hf, index):
    tables = ngrams.per_layer_embeddings(ngrams.PER_LAYER_DEFAULTS | hf)
    assert list(tables) == [number - 1 for number in hf["ple_layer_ids"]]
    return tables[hf["ple_layer_ids"][index] - 1]


def decoder_of(hf, spec):
    """A decoder with this many streams, for the sizes that the module reads."""
    parts = {"hyper_connections": {"streams": hf["hc_count"]}}
    sizes = {key: hf[key] for key in ("vocab_size", "hidden_size")}
    config = families.read(configuration("Llama", **sizes, duet=parts))
    return config, replace(config.layers[0], engram=spec)


def weights_of(module):
    """The weights of the module of transformers under our names, by the name table."""
    stored = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    sizes = {"lookup.key_proj": (STREAMS, 24, HIDDEN), "lookup.value_proj": (24, HIDDEN)}
    sizes |= {f"lookup.{kind}_norm": (STREAMS, HIDDEN) for kind in ("key", "query", "conv")}
    sizes |= {"lookup.conv": (3, STREAMS, HIDDEN)}
    weights = {}
    for path, shape in sizes.items():
        place = names.PER_LAYER_EMBEDDING[path]
        block = place.block([shape], 0, tuple(slice(0, n) for n in shape))
        weights[path.removeprefix("lookup.")] = block.finish(
            stored[place.name.removeprefix("ple.")][block.index]
        )
    return weights | {"table": stored["ple_embedding.ngram_embedding.weight"]}


class Ours:
    """The module with the weights of the class, compiled for each shape of a call."""

    def __init__(self, hf, index, theirs):
        self.spec = spec_of(hf, index)
        self.config, self.layer = decoder_of(hf, self.spec)
        with nnx.use_eager_sharding(False):
            self.graph, state = nnx.split(NgramLookup(self.spec, self.config, nnx.Rngs(0)))
        self.weights = {name: jnp.asarray(array) for name, array in weights_of(theirs).items()}
        shapes = {path[0]: variable.shape for path, variable in nnx.to_flat_state(state)}
        assert shapes == {name: array.shape for name, array in self.weights.items()}
        self.jitted = jax.jit(self.run)

    def run(self, x, weights, step, cache=None):
        variables = {name: nnx.Param(array) for name, array in weights.items()}
        with jax.default_matmul_precision("highest"):
            added, cache, _ = nnx.merge(self.graph, nnx.State(variables))(x, step, cache, Runtime())
        return added, cache

    def __call__(self, x, tokens, step=None, cache=None):
        step = make_step(tokens) if step is None else step
        return self.jitted(
            jnp.asarray(x), self.weights, replace(step, tokens=jnp.asarray(tokens)), cache
        )

    def cache(self, rows):
        """An empty cache of the layer's lookup."""
        stored = entries(replace(self.layer, mixer=None), self.config)
        arrays = {name: (each.heads, each.length, each.dim) for name, each in stored.items()}
        return LayerCache(
            {
                name: jnp.zeros((1, rows, *shape), jnp.dtype(stored[name].dtype or "float32"))
                for name, shape in arrays.items()
            },
            0,
        )


def texts(rows, length, seed=1):
    """Tokens with several ends of a text, two of them side by side, and the streams of a layer."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 160, (rows, length))
    for row in tokens:
        row[rng.choice(length, length // 5, replace=False)] = END
    tokens[0, 3:5] = END
    return tokens, rng.normal(size=(rows, length, STREAMS, HIDDEN)).astype(np.float32)


def theirs_of(module, x, tokens):
    """What the class adds to the streams [B, T, G, E], each row alone and without a cache."""
    with torch.no_grad():
        return (
            module(torch.tensor(x).flatten(-2), torch.tensor(tokens), None).reshape(x.shape).numpy()
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("index", [0, 1])
def test_multipliers_and_sizes_are_those_of_the_class(size, index):
    hf = KEYS | SIZES[size]
    spec, heads = spec_of(hf, index), (hf["ngram_size"] - 1) * hf["heads_per_ngram"]
    seed, base = hf.get("seed", 1234), hf["ngram_vocab_size_base"]
    drawn = modeling()._build_layer_multipliers(hf["vocab_size"], hf["ngram_size"], index, seed)
    assert spec.multipliers == tuple(drawn.tolist())
    assert spec.rows == tuple(
        modeling()._find_nth_prime_after(base - 1, index * heads + head + 1)
        for head in range(heads)
    )
    if size != "released":  # whose table has 51e9 numbers
        table = class_of_layer(hf, index)[0].ple_embedding.ngram_embedding.weight
        assert (spec.table_rows, spec.head_dim) == tuple(table.shape)


def test_what_is_added_and_its_gradients_are_those_of_the_class():
    for index in (0, 1):
        theirs, _ = class_of_layer(KEYS, index)
        ours, (tokens, x) = Ours(KEYS, index, theirs), texts(3, 17)
        added, _ = ours(x, tokens)
        np.testing.assert_allclose(added, theirs_of(theirs, x, tokens), atol=2e-5, rtol=0)
    cotangent = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)

    @jax.jit
    def backward(x, weights):
        step = replace(make_step(tokens), tokens=jnp.asarray(tokens))
        return jax.vjp(lambda x, weights: ours.run(x, weights, step)[0], x, weights)[1](
            jnp.asarray(cotangent)
        )

    x_grad, grads = backward(jnp.asarray(x), ours.weights)
    streams = torch.tensor(x, requires_grad=True)
    theirs(streams.flatten(-2), torch.tensor(tokens), None).backward(
        torch.tensor(cotangent).flatten(-2)
    )
    np.testing.assert_allclose(x_grad, streams.grad, atol=2e-5, rtol=1e-4)
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    for name, expected in weights_of(theirs).items():
        np.testing.assert_allclose(grads[name], expected, atol=5e-5, rtol=1e-4, err_msg=name)


def test_texts_in_one_row_are_the_same_as_alone():
    theirs, _ = class_of_layer(KEYS, 0)
    ours, lengths, width = Ours(KEYS, 0, theirs), (9, 1, 12), 26
    alone = [texts(1, max(n, 5), seed=n) for n in lengths]
    row, segments = np.zeros((1, width), int), np.zeros((1, width), int)
    x, start = (
        np.random.default_rng(0).normal(size=(1, width, STREAMS, HIDDEN)).astype(np.float32),
        0,
    )
    for number, (n, (tokens, streams)) in enumerate(zip(lengths, alone, strict=True), 1):
        row[:, start : start + n], segments[:, start : start + n] = tokens[:, :n], number
        x[:, start : start + n] = streams[:, :n]
        start += n
    added = np.asarray(ours(x, row, make_step(row, segments=segments))[0])
    for number, (n, (tokens, streams)) in enumerate(zip(lengths, alone, strict=True), 1):
        expected = theirs_of(theirs, streams[:, :n], tokens[:, :n])
        np.testing.assert_allclose(added[segments == number], expected[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "calls", [[1] * 13, [4, 4, 4, 1], [9, 1, 1, 1, 1]], ids=["tokens", "fours", "prompt"]
)
def test_with_a_cache_every_token_is_that_of_the_class(calls):
    theirs, _ = class_of_layer(KEYS, 1)
    ours, (tokens, x), lengths = Ours(KEYS, 1, theirs), texts(3, 13), np.array([13, 7, 3])
    cache, at, parts = ours.cache(3), 0, []
    for count in calls:
        span, positions = (
            slice(at, at + count),
            np.broadcast_to(at + np.arange(count), (3, count)).astype(np.int32),
        )
        step = Step(jnp.asarray(positions), jnp.asarray(positions < lengths[:, None], jnp.int32))
        added, cache = ours(x[:, span], tokens[:, span], step, cache)
        parts.append(np.asarray(added))
        at += count
    added = np.concatenate(parts, axis=1)
    for row, length in enumerate(lengths):
        expected = theirs_of(theirs, x[row : row + 1, :length], tokens[row : row + 1, :length])
        np.testing.assert_allclose(added[row, :length], expected[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_layer_ids": [0]}, "ple_layer_ids: 0 is none of the layers 1 to 4"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids: 5 is none of the layers 1 to 4"),
        ({"ple_embed_dim": 26}, "ple_embed_dim: 26 numbers cannot be cut among heads_per_ngram 2"),
        ({"ngram_size": 1}, "from 2 to ngram_size 1"),
        ({"split_ngram_parts": 0}, "split_ngram_parts: 0 parts of a table"),
        ({"eos_token_id": None}, "eos_token_id: per-layer embeddings"),
        ({"eos_token_id": []}, "eos_token_id: per-layer embeddings"),
        ({"ngram_vocab_size_base": 2**30}, "ngram_vocab_size_base: 1073741824 makes a table of"),
    ],
)
def test_keys_that_make_no_table_are_refused(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        ngrams.per_layer_embeddings(ngrams.PER_LAYER_DEFAULTS | KEYS | changes)
