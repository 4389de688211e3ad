"""The attention of DeepSeek V4 against the module of transformers, with the same weights: outputs
and gradients of full rows, packed rows, and the same rows in parts over caches of every form."""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tree_rows import trees

from policy.attention.compressed.attention import CompressedMultiQueryAttention
from policy.cache import cache as caches
from policy.cache.layer_cache import LayerCache
from policy.cache.pages import Pages
from policy.cache.sliding_window import WithSlidingWindows
from policy.cache.step import Step
from policy.config import (
    CompressedAttention,
    Compression,
    DecoderConfig,
    EntryIndexer,
    LayerSpec,
    Norm,
    Rope,
    Runtime,
    Stack,
    YarnScaling,
)
from policy.modes import make_step
from policy.ops.parameter import split_module
from policy.ops.rope import rotation
from rl.accounting.flops import _mixing

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)


SLIDING, HCA, CSA = (
    "sliding_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)
KINDS = (SLIDING, HCA, CSA)
HIDDEN, HEADS, DIM, RANK, TURNED, WINDOW, TOPK, TOLERANCE = 32, 4, 16, 12, 6, 5, 4, 2e-5
RATES = {HCA: 7, CSA: 3}
ROPES = {
    "main": Rope(TURNED, 1e4, interleaved=True),
    "compress": Rope(TURNED, 16e4, YarnScaling(4.0, 8), interleaved=True),
}
INDEXER = EntryIndexer(heads=8, head_dim=16, topk=TOPK)
COMPRESSIONS = {
    SLIDING: None,
    HCA: Compression(7),
    CSA: Compression(3, overlap=True, indexer=INDEXER),
}
RUNTIME = Runtime(dtype="float32")
# The weights of transformers' module by ours, and the axes of ours that its products sum over.
LINEAR = {
    "q_a_proj": "q_a_proj",
    "q_b_proj": "q_b_proj",
    "kv_proj": "kv_proj",
    "compressor.kv_proj": "compressor.kv_proj",
    "compressor.gate_proj": "compressor.gate_proj",
    "indexer.compressor.kv_proj": "compressor.indexer.kv_proj",
    "indexer.compressor.gate_proj": "compressor.indexer.gate_proj",
    "indexer.q_b_proj": "compressor.indexer.q_b_proj",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
}
SAME = {
    "sinks": "sinks",
    "q_a_norm.weight": "q_a_norm.weight",
    "kv_norm.weight": "kv_norm.weight",
    "compressor.position_bias": "compressor.position_bias",
    "compressor.kv_norm.weight": "compressor.kv_norm.weight",
    "indexer.compressor.position_bias": "compressor.indexer.position_bias",
    "indexer.compressor.kv_norm.weight": "compressor.indexer.kv_norm.weight",
}


@cache
def of_transformers(kind):
    """(module, table of rotations) with random weights."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        head_dim=DIM,
        qk_rope_head_dim=TURNED,
        q_lora_rank=RANK,
        layer_types=list(KINDS),
        compress_rates=dict(RATES),
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=10,
        index_n_heads=INDEXER.heads,
        index_head_dim=INDEXER.head_dim,
        index_topk=TOPK,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    )
    config._attn_implementation = "eager"
    torch.manual_seed(KINDS.index(kind))
    module = modeling.DeepseekV4Attention(config, KINDS.index(kind)).float()
    for name, weight in module.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return module, modeling.DeepseekV4RotaryEmbedding(config)


def their_outputs(kind, x_BTE):
    module, rotary = of_transformers(kind)
    T = x_BTE.shape[1]
    positions = torch.arange(T)[None].expand(len(x_BTE), T)
    tables = {name: rotary(x_BTE, positions, layer_type=name) for name in ("main", "compress")}
    back = positions[0, :, None] - positions[0]
    mask = torch.where((back >= 0) & (back < WINDOW), 0.0, -torch.inf)[None, None].expand(
        len(x_BTE), 1, T, T
    )
    return module(x_BTE, tables, positions, mask)[0]


def spec_of(kind):
    rope = ROPES["main" if kind == SLIDING else "compress"]
    norm = Norm(1e-6, "before_cast")
    return CompressedAttention(HEADS, DIM, RANK, 2, 10, WINDOW, rope, norm, COMPRESSIONS[kind])


def config_of(kind):
    layer = LayerSpec(spec_of(kind), None, norms=())
    return DecoderConfig(8, HIDDEN, (Stack((layer,), 1),), Norm(), family="default", hf="{}")


def ours_of(shapes, arrays):
    """Their arrays by our names, in our shapes."""
    by_name = {}
    for ours, theirs in LINEAR.items():
        if ours in shapes:
            by_name[ours] = arrays[f"{theirs}.weight"].T.reshape(shapes[ours])
    for ours, theirs in SAME.items():
        if ours in shapes:
            by_name[ours] = arrays[theirs]
    G, J, L = shapes["o_a_proj"]
    by_name["o_a_proj"] = arrays["o_a_proj.weight"].reshape(G, L, J).swapaxes(1, 2)
    by_name["o_b_proj"] = arrays["o_b_proj.weight"].T.reshape(shapes["o_b_proj"])
    assert by_name.keys() == shapes.keys()
    return by_name


@cache
def module_of(kind):
    """(the module of arrays, the names of the arrays in order, the arrays of transformers by
    name)."""
    with nnx.use_eager_sharding(False):
        module = CompressedMultiQueryAttention(spec_of(kind), config_of(kind), nnx.Rngs(0))
    arrays, build = split_module(module)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(nnx.state(module))[0]]
    names = [
        ".".join(str(getattr(key, "key", key)) for key in path if hasattr(key, "key"))
        for path in paths
    ]
    shapes = {name: array.shape for name, array in zip(names, arrays, strict=True)}
    theirs = {
        name: weight.detach().numpy()
        for name, weight in of_transformers(kind)[0].named_parameters()
    }
    return build, names, ours_of(shapes, theirs)


def called(kind, weights, x_BTE, step, cache=None):
    """(outputs, cache) of our module."""
    build, names, _ = module_of(kind)
    rope = spec_of(kind).rope
    step = replace(step, rotations={str(rope): rotation(rope, step.positions)})
    out, cache, _ = build([weights[name] for name in names])(x_BTE, step, cache, RUNTIME)
    return out, cache


def inputs(rows, length, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, length, HIDDEN)).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def full_rows(kind, weights, x_BTE, segments_BT):
    """Outputs without a cache."""
    return called(kind, weights, x_BTE, make_step(x_BTE[..., 0], None, segments_BT))[0]


def outputs(kind, x_BTE, segments_BT=None):
    segments = np.ones(x_BTE.shape[:2], np.int32) if segments_BT is None else segments_BT
    return np.asarray(full_rows(kind, module_of(kind)[2], x_BTE, segments))


@pytest.mark.parametrize("length", [2, 12, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_transformers(kind, length):
    x = inputs(2, length)
    with torch.no_grad():
        expected = their_outputs(kind, torch.tensor(x)).numpy()
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(outputs(kind, x), expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_transformers(kind):
    """The choice of an indexer has no gradient, as in transformers."""
    x, factors = inputs(1, 26), inputs(1, 26, seed=1)
    module, _ = of_transformers(kind)
    theirs = torch.tensor(x, requires_grad=True)
    module.zero_grad()
    (their_outputs(kind, theirs) * torch.tensor(factors)).sum().backward()
    weights, ones = module_of(kind)[2], np.ones((1, 26), np.int32)
    by_weight, by_input = jax.jit(
        jax.grad(lambda w, x: jnp.sum(full_rows(kind, w, x, ones) * factors), argnums=(0, 1))
    )(weights, x)
    zeros = {name: np.zeros(weight.shape, np.float32) for name, weight in module.named_parameters()}
    expected = zeros | {
        n: w.grad.numpy() for n, w in module.named_parameters() if w.grad is not None
    }
    expected = ours_of({name: weight.shape for name, weight in weights.items()}, expected) | {
        "input": theirs.grad.numpy()
    }
    for name, gradient in (by_weight | {"input": by_input}).items():
        size = 1 + np.abs(expected[name]).max()
        np.testing.assert_allclose(
            gradient / size, expected[name] / size, atol=TOLERANCE, err_msg=name
        )
        assert name.startswith("indexer.") != bool(np.any(np.asarray(gradient)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_is_one_row_for_each_document(kind):
    lengths = (11, 1, 23, 6)
    x, segments = inputs(1, 46), np.zeros((1, 46), np.int32)
    ends = np.cumsum(lengths)
    for number, (end, length) in enumerate(zip(ends, lengths, strict=True), 1):
        segments[0, end - length : end] = number
    result = outputs(kind, x, segments)
    for end, length in zip(ends, lengths, strict=True):
        document = slice(end - length, end)
        np.testing.assert_allclose(
            result[:, document], outputs(kind, x[:, document]), atol=TOLERANCE
        )


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_their_paths(kind):
    """Branches that end inside blocks, that complete one of the root, and a tree after another."""
    root, leaves, after = 8, (7, 1, 17), 9
    places = [0, *np.cumsum([root, *leaves, after])]
    x, tree = inputs(1, 48), trees([[(root, [(n, []) for n in leaves]), (after, [])]], 48)
    build = partial(make_step, jnp.zeros((1, 48)), tree=jax.tree.map(jnp.asarray, tree))
    result = jax.jit(lambda weights, x: called(kind, weights, x, build())[0])(module_of(kind)[2], x)
    for start, end in pairwise(places[1:5]):
        path = [*range(root), *range(start, end)]
        np.testing.assert_allclose(result[:, path], outputs(kind, x[:, path]), atol=TOLERANCE)
    alone = slice(places[4], places[5])
    np.testing.assert_allclose(result[:, alone], outputs(kind, x[:, alone]), atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_that_see_each_other_count(kind):
    spec, lengths = spec_of(kind), [1, 5, 23, 40]
    pairs = scored = 0
    for t in (t for length in lengths for t in range(1, length + 1)):
        blocks = 0 if kind == SLIDING else t // RATES[kind]
        pairs += min(t, WINDOW) + (min(blocks, TOPK) if kind == CSA else blocks)
        scored += blocks * INDEXER.heads * INDEXER.head_dim if kind == CSA else 0
    assert _mixing(spec, np.array(lengths, np.float64)) == 4 * HEADS * DIM * pairs + 2 * scored


ROWS, LENGTH, PROMPT, MOST = 3, 40, 9, 8
LENGTHS = np.array([40, 3, 27])  # the second ends inside the first call, the third while decoding
STORES = {
    "contiguous": LENGTH + 5,
    "contiguous-windows": WithSlidingWindows(LENGTH + 5, MOST),
    "pages_of_6": Pages(40, 6),
    "pages_of_4-windows": WithSlidingWindows(Pages(40, 4), MOST),
    "pages_of_16": Pages(12, 16),
}


def table_of(length):
    """Pages of each row, in no order."""
    pages = length.length if isinstance(length, WithSlidingWindows) else length
    if not isinstance(pages, Pages):
        return None
    columns = -(-LENGTH // pages.size)
    numbers = 1 + np.random.default_rng(0).permutation(pages.number - 1)[: ROWS * columns]
    return jnp.asarray(numbers.reshape(ROWS, columns), jnp.int32)


@partial(jax.jit, static_argnums=0)
def through(kind, weights, arrays, x_BTE, positions_BT, segments_BT, pages_BM):
    step = Step(positions_BT, segments_BT, pages=pages_BM)
    layer = LayerCache.of(arrays, 0, step, None)
    out, layer = called(kind, weights, x_BTE, step, layer)
    return out, layer.arrays


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_rows_over_a_cache_are_the_full_rows(kind, store, chunk):
    """A prefill of 9 tokens in two calls, the first over a cache of its own, which is inserted;
    then calls of `chunk` tokens. Padding is written nowhere: a row that has ended stays as it is.
    Tokens that a call writes and that are taken back leave nothing either."""
    x = inputs(ROWS, LENGTH)
    expected, length = (
        outputs(kind, x, (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.int32)),
        STORES[store],
    )
    cache = caches.create(config_of(kind), ROWS, length, "float32", scan=True)
    arrays, table, weights = cache[0][0][0], table_of(length), module_of(kind)[2]
    starts = [0, 8, *range(PROMPT, LENGTH, chunk)]
    drafts = inputs(ROWS, 4, seed=9)
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        positions = np.broadcast_to(np.arange(start, end, dtype=np.int32), (ROWS, end - start))
        segments = (positions < LENGTHS[:, None]).astype(np.int32)
        if chunk == 4 and start >= PROMPT:  # drafts of these positions, all rejected
            _, arrays = through(
                kind, weights, arrays, drafts[:, : end - start], positions, segments, table
            )
        if start == 0:
            first = caches.create(config_of(kind), ROWS, end, "float32", scan=True)[0][0][0]
            out, first = through(kind, weights, first, x[:, :end], positions, segments, None)
            step = Step(positions, segments, pages=table)
            arrays = caches.insert(cache, (((first,),),), np.arange(ROWS), step)[0][0][0]
        else:
            out, arrays = through(
                kind, weights, arrays, x[:, start:end], positions, segments, table
            )
        real = segments != 0
        np.testing.assert_allclose(
            np.asarray(out)[real], expected[:, start:end][real], atol=TOLERANCE
        )
