"""Blocks of keys that an indexer chooses: the mask of every form of a call against sets of tokens
in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import configuration, random_model, short, tokens
from tree_rows import seen, trees

from policy import families, modes
from policy.attention.compressed.block_indexer import BlockKeyIndexer, BlockMask
from policy.cache import cache as caches
from policy.cache.layer_cache import own_tokens
from policy.cache.step import Step
from policy.config import Runtime
from policy.model import Graph
from policy.ops.rope import rotation

E = 32
SIZE, BLOCKS = 3, 2


@pytest.fixture(scope="module")
def indexer():
    keys = {
        "indexer_compress_ratio": SIZE,
        "indexer_budget": SIZE * BLOCKS,
        "initializer_range": 1.0,
    }
    config = families.read(configuration("Qwen4Exp", **keys))
    spec = config.layers[-1].mixer.indexer
    with nnx.use_eager_sharding(False):
        module = BlockKeyIndexer(spec, config, nnx.Rngs(3))
    module.q_norm.weight[...] += 0.3
    module.k_norm.weight[...] -= 0.4
    return module


def mask_of(indexer, x, step) -> np.ndarray:
    """bool[B, T, T] for a call without a cache."""
    spec = indexer.spec

    @jax.jit
    def allowed(x, positions, segments, tree):
        step = Step(
            positions,
            segments,
            tree=tree,
            rotations={str(spec.rope): rotation(spec.rope, positions)},
        )
        queries, keys = indexer(x, step)
        visible = own_tokens(step, {"index": keys})
        mask = BlockMask(
            step, visible, queries, indexer.blocks(step, visible, in_cache=False), spec
        )
        return mask.of(*mask.queries)

    with jax.default_matmul_precision("highest"):
        return np.asarray(allowed(jnp.asarray(x), step.positions, step.segments, step.tree))


def expected(indexer, x) -> np.ndarray:
    """bool[T, T] of one document x [T, E], by the definition, token by token."""
    spec, T = indexer.spec, len(x)
    q = np.einsum("te,ehd->thd", x, indexer.q_proj[...])
    k = x @ np.asarray(indexer.k_proj[...])[:, 0]

    def normed(a, weight):
        return (
            a / np.sqrt((a**2).mean(-1, keepdims=True) + spec.norm.eps) * (1 + np.asarray(weight))
        )

    def turned(a, position):
        half = spec.rope.dim // 2
        angle = position * spec.rope.theta ** (-np.arange(half) * 2 / spec.rope.dim)
        u, v = a[..., :half].copy(), a[..., half : 2 * half].copy()
        a = a.copy()
        a[..., :half] = u * np.cos(angle) - v * np.sin(angle)
        a[..., half : 2 * half] = v * np.cos(angle) + u * np.sin(angle)
        return a

    allowed = np.zeros((T, T), bool)
    for t in range(T):
        query = turned(normed(q[t], indexer.q_norm.weight[...]), t)
        complete = (t + 1) // SIZE
        scores = []
        for b in range(complete):
            key = turned(
                normed(k[b * SIZE : (b + 1) * SIZE].mean(0), indexer.k_norm.weight[...]), b * SIZE
            )
            scores.append(np.maximum(query @ key, 0).sum())
        for b in np.argsort(scores)[::-1][:BLOCKS]:
            allowed[t, b * SIZE : (b + 1) * SIZE] = True
        allowed[t, complete * SIZE : t + 1] = True
    return allowed


def states(*shape):
    return np.random.default_rng(len(shape)).normal(size=(*shape, E)).astype(np.float32)


def test_packed_documents_count_their_blocks_from_their_own_starts(indexer):
    """Padding in front, between and behind; a document of one token; one that ends inside a
    block."""
    lengths, row = (1, 14, 7, 12), 40
    x, segments, positions = (
        states(1, row),
        np.zeros((1, row), np.int32),
        np.zeros((1, row), np.int32),
    )
    starts, at = [], 2
    for number, length in enumerate(lengths, 1):
        starts.append(at)
        segments[0, at : at + length], positions[0, at : at + length] = number, np.arange(length)
        at += length + (number == 2)
    result = mask_of(indexer, x, Step(jnp.asarray(positions), jnp.asarray(segments)))[0]
    right = np.zeros_like(result)
    for start, length in zip(starts, lengths, strict=True):
        of_document = slice(start, start + length)
        right[of_document, of_document] = expected(indexer, x[0, of_document])
    np.testing.assert_array_equal(result, right)
    assert not right[starts[1] + 13, of_document].any() and right[starts[1] + 13].sum() < 14


def test_a_query_whose_own_block_is_complete_may_not_see_itself(indexer):
    x = states(1, 30)
    step = Step(jnp.arange(30)[None], jnp.ones((1, 30), jnp.int32))
    allowed = mask_of(indexer, x, step)[0]
    np.testing.assert_array_equal(allowed, expected(indexer, x[0]))
    ends = np.arange(SIZE - 1, 30, SIZE)
    own = allowed[ends, ends]
    assert own.any() and not own.all()
    assert all(allowed[t, t] for t in range(30) if t not in ends)


def test_blocks_of_a_tree_lie_on_paths(indexer):
    """Branches inside a block, at the end of one and inside a branch: several blocks begin with the
    same tokens."""
    leaf = (2, [])
    row = [(7, [(5, [(3, []), leaf, (1, [])]), (6, []), leaf]), (9, [(4, []), (1, [])])]
    tree = trees([row], 42)
    x, paths = states(1, 42), seen(tree.before, tree.position)[0]
    step = Step(
        jnp.asarray(tree.position), jnp.asarray(tree.node), tree=jax.tree.map(jnp.asarray, tree)
    )
    allowed, node = mask_of(indexer, x, step)[0], tree.node[0]
    for t in np.flatnonzero(node):
        path = np.flatnonzero(paths[t])
        assert not allowed[t, ~paths[t]].any()
        np.testing.assert_array_equal(allowed[t, path], expected(indexer, x[0, path])[-1])
    assert not allowed[node == 0].any()


@pytest.mark.parametrize("blocks_of", [pytest.param("all", marks=pytest.mark.slow), "some"])
def test_a_prefill_in_chunks_and_decoding_see_the_blocks_of_the_cache(blocks_of):
    """Chunks that end inside blocks, for a cache shorter and longer than the budget."""
    keys = {"indexer_compress_ratio": 3, "indexer_budget": 9 if blocks_of == "some" else 30}
    model = random_model(families.read(short("Qwen4Exp", **keys)), seed=2)
    row = tokens(2, 28)
    want = np.asarray(model.logits(row))
    graph = Graph(model.config, Runtime(), model.graph.layout)

    @jax.jit
    def call(params, tokens_BT, first, cache):
        B, T = tokens_BT.shape
        step = Step(first + jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.ones((B, T), jnp.int32))
        with graph.precision():
            decoder = graph.decoder(params)
            hidden, cache, _ = decoder(tokens_BT, step, cache, graph.runtime)
            return modes.logits(decoder, hidden, graph.runtime), cache

    cache, results, at = caches.create(model.config, 2, 28, jnp.float32, scan=True), [], 0
    for width in (10, 10, *[1] * 8):
        logits, cache = call(model.params, row[:, at : at + width], at, cache)
        results.append(logits)
        at += width
    np.testing.assert_allclose(np.concatenate(results, axis=1), want, atol=5e-5, rtol=0)
