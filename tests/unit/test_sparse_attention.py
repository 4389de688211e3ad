"""Attention over selected keys: which are selected, that only their latents are read, and what the
indexer learns from.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stepwise
from flax import nnx
from oracles import configuration, random_model, tokens

from policy import families
from policy.attention import sparse_attention
from policy.attention.indexer import IndexedMask, KeyIndexer
from policy.attention.sparse_attention import attend_selected
from policy.cache.layer_cache import LayerCache, Visible
from policy.cache.step import Step
from policy.config import Indexer, Rope, Runtime
from policy.ops.rope import rotation

# Many index heads: where all relu terms are 0 the scores tie.
ONE = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "index_n_heads": 32}


def model_of(topk, layers=1, seed=0, **keys):
    keys = (
        ONE
        | {"index_topk": topk, "num_hidden_layers": layers, "first_k_dense_replace": layers}
        | keys
    )
    return random_model(families.read(configuration("DeepseekV32", **keys)), seed)


def problem(topk, B=2, T=11, H=3, D=4, V=5, index_heads=6, index_dim=3, seed=0):
    """Random (q, k, v, step, index queries, index keys) of rows that hold two documents and
    padding, as float64."""
    rng = np.random.default_rng(seed)
    segments = np.stack([np.repeat([1, 2, 0], [6, 4, 1]), np.repeat([1, 2, 0], [2, 6, 3])])[:B, :T]
    positions = np.stack(
        [np.concatenate([np.arange((s == i).sum()) for i in (1, 2, 0)]) for s in segments]
    )
    arrays = [rng.normal(size=s) for s in ((B, H, T, D), (B, H, T, D), (B, H, T, V))]
    index = [
        rng.normal(size=s)
        for s in ((B, T, index_heads, index_dim), (B, T, index_heads), (B, T, index_dim))
    ]
    return arrays, (positions, segments), index, Indexer(index_heads, index_dim, topk, Rope(2, 1e4))


def ours(topk, runtime, **how):
    """attend_selected of a problem as a function of its float arrays, and these."""
    arrays, (positions, segments), index, spec = problem(topk, **how)
    step = Step(jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))

    def run(q, k, v, index_q, index_w, index_k):
        mask = IndexedMask(
            step,
            Visible({"index": index_k[:, None]}, step.positions, step.segments),
            (index_q, index_w),
            spec,
        )
        return attend_selected(q, k, v, mask, None, runtime)

    return run, [jnp.asarray(a, jnp.float32) for a in (*arrays, *index)]


def by_numpy(topk, stage, arrays, places, index, spec):
    """(output, divergence, recall) by the formulas, a query at a time. Rows of padding are 0 and
    not counted."""
    (q, k, v), (positions, segments), (index_q, index_w, index_k) = arrays, places, index
    B, H, T, _ = q.shape
    out, divergence, recall = np.zeros((B, H, T, v.shape[-1])), 0.0, 0.0
    for b in range(B):
        for t in np.flatnonzero(segments[b]):
            seen = np.flatnonzero(
                (segments[b] == segments[b, t]) & (positions[b] <= positions[b, t])
            )
            dots = np.maximum(index_k[b, seen] @ index_q[b, t].T / np.sqrt(spec.head_dim), 0)
            scores = dots @ index_w[b, t]
            best = np.argsort(-scores, kind="stable")[:topk]
            allowed = np.arange(len(seen)) if stage == "dense_warmup" else best
            logits = k[b][:, seen[allowed]] @ q[b, :, t, :, None]
            weights = np.exp(logits[..., 0] - logits[..., 0].max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[b, :, t] = np.einsum("hs,hsd->hd", weights, v[b][:, seen[allowed]])
            p = weights.sum(0) / weights.sum()
            log_q = scores[allowed] - scores[allowed].max()
            log_q -= np.log(np.exp(log_q).sum())
            divergence += np.sum(p * (np.log(p) - log_q))
            recall += p[np.isin(allowed, best)].sum()
    return out, divergence, recall


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("stage", ["dense_warmup", "sparse"])
@pytest.mark.parametrize("topk", [1, 3, 50])
def test_output_and_divergence_are_those_of_the_formulas(topk, stage, chunk):
    runtime = Runtime(indexer=stage, attention_chunk=chunk)
    run, arrays = ours(topk, runtime)
    out, aux = jax.jit(run)(*arrays)
    parts = problem(topk)
    expected, divergence, recall = by_numpy(topk, stage, *parts)
    real = (parts[1][1] != 0)[:, None, :, None]
    np.testing.assert_allclose(np.where(real, out, 0), expected, atol=2e-6)
    np.testing.assert_allclose(aux.indexing.divergence, divergence, rtol=2e-5, atol=1e-6)
    if stage == "dense_warmup":
        np.testing.assert_allclose(aux.indexing.recall, recall, rtol=2e-6)
    else:
        assert aux.indexing.recall is None and recall == pytest.approx((parts[1][1] != 0).sum())


@pytest.mark.parametrize("stage", ["dense_warmup", "sparse"])
def test_at_bfloat16_the_divergence_is_near_and_its_gradients_are_finite(stage):
    run, arrays = ours(50, Runtime(indexer=stage))
    half = [
        a.astype(jnp.bfloat16) if i != 4 else a for i, a in enumerate(arrays)
    ]  # 4: the weights of the index heads
    result, grads = jax.jit(
        jax.value_and_grad(lambda *a: run(*a)[1].indexing.divergence, argnums=(3, 4, 5))
    )(*half)
    np.testing.assert_allclose(result, by_numpy(50, stage, *problem(50))[1], rtol=0.02)
    assert all(np.isfinite(g.astype(jnp.float32)).all() for g in grads)


@pytest.mark.parametrize("stage", ["dense_warmup", "sparse"])
def test_gradients_of_the_divergence_are_finite_differences_of_the_formula(stage):
    run, arrays = ours(3, Runtime(indexer=stage, attention_chunk=4))
    grads = jax.jit(jax.grad(lambda *a: run(*a)[1].indexing.divergence, argnums=range(6)))(*arrays)
    assert all(not np.any(g) for g in grads[:3]), "the divergence reaches the main path"
    parts, rng, eps = problem(3), np.random.default_rng(1), 1e-6
    for array, grad in zip(parts[2], grads[3:], strict=True):
        direction = rng.normal(size=array.shape)
        array += eps * direction
        up = by_numpy(3, stage, *parts)[1]
        array -= 2 * eps * direction
        down = by_numpy(3, stage, *parts)[1]
        array += eps * direction
        np.testing.assert_allclose(
            np.sum(np.asarray(grad) * direction), (up - down) / (2 * eps), rtol=1e-4, atol=1e-5
        )
    main = jax.jit(jax.grad(lambda *a: jnp.sum(run(*a)[0] ** 2), argnums=range(6)))(*arrays)
    assert all(np.any(g) for g in main[:3]) and not any(np.any(g) for g in main[3:])


def test_of_equal_scores_the_earlier_keys_are_selected_and_invisible_ones_do_not_count():
    step = Step(jnp.arange(6)[None], jnp.array([[1, 1, 1, 1, 1, 0]]))
    mask = IndexedMask(
        step,
        Visible({"index": jnp.zeros((1, 1, 6, 2))}, step.positions, step.segments),
        (),
        Indexer(1, 2, 3, Rope(2, 1e4)),
    )
    visible = mask.visible(step.positions, step.segments)
    scores = jnp.array([1.0, 0, 0, 0, 2.0, 9.0]) * jnp.ones((1, 6, 1))
    chosen, counts = mask.best(visible, scores)
    result = [
        [int(i) for i, c in zip(*row, strict=True) if c]
        for row in zip(chosen[0], counts[0], strict=True)
    ]
    assert result == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [4, 0, 1], []]
    kept = np.asarray(mask.kept(visible, scores)[0])
    assert [sorted(row) for row in result] == [np.flatnonzero(row).tolist() for row in kept]


@pytest.mark.parametrize("queries", [1, 3])
def test_selected_latents_give_what_the_masked_cache_gives(queries, monkeypatch):
    """With ties, and with queries that see fewer keys than are selected, or are padding."""
    rng, R, B, C, H, D, V, topk = np.random.default_rng(0), 3, 4, 29, 3, 7, 5, 6
    array = {
        name: jnp.asarray(rng.normal(size=(R, B, 1, C, d)), jnp.float32)
        for name, d in (("latent", D), ("index", 4))
    }
    cache = LayerCache(array, jnp.int32(1))
    at = np.array([[0], [3], [25], [12]]) + np.arange(queries)
    step = Step(jnp.asarray(at), jnp.asarray((at != 12).astype(np.int32)))
    queries = [
        jnp.asarray(rng.normal(size=(B, queries, *rest)), jnp.float32) for rest in ((2, 4), (2,))
    ]
    q = jnp.asarray(rng.normal(size=(B, H, at.shape[1], D)), jnp.float32)

    def run(cache):
        seen = {name: array[cache.index] for name, array in cache.arrays.items()}
        everywhere = jnp.broadcast_to(jnp.arange(C), (B, C))
        mask = IndexedMask(
            step,
            Visible(seen, everywhere, jnp.ones_like(everywhere)),
            queries,
            Indexer(2, 4, topk, Rope(2, 1e4)),
        )
        return attend_selected(q, seen["latent"], seen["latent"][..., :V], mask, cache, Runtime())[
            0
        ]

    collected = jax.jit(lambda cache: run(cache))(cache)
    monkeypatch.setattr(sparse_attention, "_gathers", lambda *_: False)
    masked = jax.jit(lambda cache: run(cache))(cache)
    real = (at != 12)[:, None, :, None]
    assert np.isfinite(collected).all() and np.abs(masked).max() > 0.5
    np.testing.assert_allclose(
        np.where(real, collected, 0), np.where(real, masked, 0), atol=1e-6, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topk", "scan"), [(5, True), pytest.param(1, False, marks=pytest.mark.slow)]
)
def test_a_decoder_reads_selected_latents_only(topk, scan, monkeypatch):
    model, rows, lengths, taken = model_of(topk, layers=2), tokens(3, 26, seed=1), [26, 4, 17], []
    real = sparse_attention.gather_entries

    def watched(cache, name, at, dtype):
        taken.append(at.shape)
        return real(cache, name, at, dtype)

    monkeypatch.setattr(sparse_attention, "gather_entries", watched)
    how = {"prompt": 6, "chunk": 2, "capacity": 33, "scan": scan}
    collected, _ = stepwise.through_cache(model, rows, lengths, **how)
    assert {shape[1:] for shape in taken} == {(2, topk), (1, topk)}
    real_tokens = np.arange(26) < np.array(lengths)[:, None]
    expected, _ = stepwise.forward(model, rows, real_tokens.astype(np.int32))
    np.testing.assert_allclose(collected[real_tokens], expected[real_tokens], atol=1e-5, rtol=0)


def test_many_queries_do_not_gather():
    assert sparse_attention._gathers(1, 4096, 2048) and not sparse_attention._gathers(
        256, 4096, 2048
    )
    assert not sparse_attention._gathers(1, 2048, 2048)


def margins(model, rows):
    """float[R, B, T] for each layer: by how little the last selected key beat the next, in the
    forward pass."""
    result, real = [], IndexedMask._best

    def watched(self, visible, scores):
        ranked = jnp.sort(jnp.where(visible, scores, -jnp.inf), axis=-1, descending=True)
        result.append(ranked[..., self.topk - 1] - ranked[..., self.topk])
        return real(self, visible, scores)

    def run(params):
        graph = model.graph.with_runtime(scan=False, remat="none")
        with graph.precision():
            graph.decoder(params)(
                jnp.asarray(rows), stepwise.modes.make_step(jnp.asarray(rows)), None, graph.runtime
            )
        return jnp.stack(result)

    IndexedMask._best = watched
    try:
        return np.asarray(jax.jit(run)(model.params))
    finally:
        IndexedMask._best = real


def test_decoding_selects_the_keys_that_training_selects():
    model, rows = model_of(4, layers=2), tokens(2, 30, seed=2)
    aux = stepwise.forward(model, rows, record=("selection",), indexer="sparse", attention_chunk=8)[
        1
    ]
    _, decoded = stepwise.through_cache(model, rows, [30, 30], prompt=10, record=("selection",))
    clear = margins(model, rows) > 1e-5
    assert clear[..., 3:].mean() > 0.95
    [(path, trained)] = aux.by_layer("selection").items()
    same = np.sort(np.asarray(trained)) == np.sort(decoded[path])
    assert same.shape == (2, 2, 30, 4) and same.all(-1)[clear | np.isnan(clear)].all()
    assert (np.asarray(trained)[:, :, 0] == [0, -1, -1, -1]).all()


@pytest.mark.slow
def test_the_dense_warm_up_is_dense_and_sparse_training_computes_what_the_policy_does():
    sparse, dense, rows = model_of(3, layers=2), model_of(50, layers=2), tokens(2, 14)
    plain = stepwise.forward(sparse, rows)[0]
    warm, result = stepwise.forward(sparse, rows, indexer="dense_warmup", attention_chunk=5)
    np.testing.assert_allclose(warm, stepwise.forward(dense, rows)[0], atol=1e-5)
    assert np.abs(warm - plain).max() > 0.1
    learning, aux = stepwise.forward(sparse, rows, indexer="sparse", attention_chunk=5)
    np.testing.assert_allclose(learning, plain, atol=1e-5)
    [indexing] = result.by_layer("indexing").values()
    assert indexing.divergence.shape == (2,) and (np.asarray(indexing.recall) < 27).all()
    assert not stepwise.forward(sparse, rows)[1].by_layer("indexing")


def gradients(model, rows, of, segments=None, **runtime):
    graph = model.graph.with_runtime(**runtime)

    def loss(params):
        step = stepwise.modes.make_step(jnp.asarray(rows), segments=segments)
        logp, _, aux = graph.logprobs(params, jnp.asarray(rows), step, 1.0)
        return (
            logp.sum()
            if of == "logp"
            else sum(each.divergence.sum() for each in aux.by_layer("indexing").values())
        )

    return {path: np.asarray(g) for path, g in jax.jit(jax.grad(loss))(model.params).items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dense_warmup", "sparse"])
def test_each_loss_reaches_its_own_weights_only(stage):
    model, rows = model_of(3), tokens(2, 12)
    rows[1, 7:], segments = 0, (np.arange(12) < [[12], [7]]).astype(np.int32)
    for of, its_own in (
        ("divergence", lambda p: ".indexer." in p),
        ("logp", lambda p: ".indexer." not in p),
    ):
        for path, grad in gradients(
            model, rows, of, segments, indexer=stage, attention_chunk=5, remat="full"
        ).items():
            assert np.isfinite(grad).all()
            assert bool(np.any(grad)) == its_own(path), f"{of} and {path}"


@pytest.mark.slow
def test_gradients_are_those_of_any_chunks_scan_and_remat():
    model, rows = model_of(3, layers=2), tokens(2, 13)
    one = gradients(model, rows, "divergence", indexer="sparse", remat="none", scan=False)
    other = gradients(
        model, rows, "divergence", indexer="sparse", remat="full", scan=True, attention_chunk=4
    )
    for path, grad in one.items():
        np.testing.assert_allclose(
            other[path], grad, atol=1e-4 * max(np.abs(grad).max(), 1e-3), err_msg=path
        )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dense_warmup", "sparse"])
def test_the_divergence_of_a_packed_row_is_that_of_its_documents(stage):
    model, lengths = model_of(3, layers=2), np.array([9, 1, 6])
    padded = tokens(3, 9)
    real = (np.arange(9) < lengths[:, None]).astype(np.int32)
    packed = np.concatenate([padded[real == 1], [0, 0, 0]])[None]
    segments = np.concatenate([np.repeat([1, 2, 3], lengths), [0, 0, 0]])[None]

    def divergence(rows, segments):
        [result] = (
            stepwise.forward(model, rows, segments, indexer=stage)[1].by_layer("indexing").values()
        )
        return np.asarray(result.divergence)

    assert (divergence(padded, real) > 0.1).all()
    np.testing.assert_allclose(divergence(packed, segments), divergence(padded, real), rtol=1e-4)


def test_index_weights_and_scores_are_float32_in_a_bfloat16_model():
    rope, spec = Rope(2, 1e4), Indexer(5, 4, 3, Rope(2, 1e4))
    config, rng, step = (
        model_of(3).config,
        np.random.default_rng(0),
        stepwise.modes.make_step(np.zeros((2, 6))),
    )
    with nnx.use_eager_sharding(False):
        module = KeyIndexer(spec, 7, config, nnx.Rngs(0))
    x, q_latent = (
        jnp.asarray(rng.normal(size=(2, 6, n)), jnp.bfloat16) for n in (config.hidden_size, 7)
    )

    @jax.jit
    def run(x, q_latent):
        here = dataclasses.replace(step, rotations={str(rope): rotation(rope, step.positions)})
        queries, keys = module(x, q_latent, here)
        mask = IndexedMask(
            here, Visible({"index": keys}, here.positions, here.segments), queries, spec
        )
        return *queries, keys, mask.scores(*queries)

    q, w, keys, scores = run(x, q_latent)
    assert q.dtype == keys.dtype == jnp.bfloat16 and w.dtype == scores.dtype == jnp.float32
    weights = np.asarray(module.weights_proj[...], np.float64)
    np.testing.assert_allclose(
        w, np.asarray(x, np.float64) @ weights * 5**-0.5, rtol=1e-5, atol=1e-6
    )
    dots = np.einsum(
        "bthd,bcd->btch", np.asarray(q, np.float64), np.asarray(keys[:, 0], np.float64)
    )
    expected = np.einsum("btch,bth->btc", np.maximum(dots, 0) / 2, np.asarray(w, np.float64))
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-4)
