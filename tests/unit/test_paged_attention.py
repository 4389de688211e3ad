"""Kernels that attend over pages in place give what the dense form gives over copied pages. B rows,
H heads, M pages of a row, P tokens of a page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from policy.attention import paged_attention
from policy.cache.layer_cache import LayerCache
from policy.cache.pages import Pool
from policy.cache.step import Step
from policy.config import Attention, Runtime
from policy.mesh.axes import AXES, DEFAULT_RULES, STATIONARY_RULES
from policy.mesh.sharding import Layout, layout


def by_numpy(q_BHL, pool_NPL, table_BM, lengths_B, rank):
    out = []
    for q, pages, length in zip(q_BHL, table_BM, lengths_B, strict=True):
        keys = pool_NPL[pages].reshape(-1, pool_NPL.shape[-1])[:length].astype(np.float64)
        scores = q.astype(np.float64) @ keys.T
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out.append(weights / weights.sum(axis=-1, keepdims=True) @ keys[:, :rank])
    return np.stack(out)


def one_row(q_HD, pools, pages_M, seen: slice, softcap):
    """Attention over the entries `seen` of these pages, in the second layer of pools [K, R, N, P,
    D]: [H, D]."""
    K, *_, D = pools[0].shape
    keys, values = (
        np.asarray(pool, np.float32)[:, 1, pages_M].reshape(K, -1, D)[:, seen] for pool in pools
    )
    scores = np.einsum("kgd,ktd->kgt", q_HD.reshape(K, -1, D), keys)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("kgt,ktd->kgd", weights / weights.sum(axis=-1, keepdims=True), values).reshape(
        q_HD.shape
    )


@pytest.mark.parametrize("lengths", [[1, 12, 33, 40], [17], [40, 1], [20, 8, 32, 9]])
def test_latents_are_attended_over_their_pages(lengths, monkeypatch):
    """Blocks of two pages and a table of five: rows of one to three blocks, the last of them in
    part, in scattered pages.
    """
    monkeypatch.setattr(paged_attention, "BLOCK_TOKENS", 16)
    B, H, L, rank, M, P = len(lengths), 4, 24, 16, 5, 8
    rng = np.random.default_rng(0)
    q, pool = (
        rng.normal(size=(B, H, L)).astype(np.float32),
        rng.normal(size=(30, P, L)).astype(np.float32),
    )
    table = rng.permutation(np.arange(1, 30))[: B * M].reshape(B, M).astype(np.int32)
    table[0] = table[-1]  # two rows with the same pages
    pool[0] = 100.0
    arguments = (q, pool[None], table, np.asarray(lengths, np.int32))
    result = paged_attention.latent_kernel(*arguments, rank=rank, interpret=True)
    np.testing.assert_allclose(result, by_numpy(q, pool, table, lengths, rank), atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_keys_and_values_are_attended_over_their_pages(softcap, monkeypatch):
    """The second of two layers, a table that is not a multiple of the block size, and a row that is
    not active, which gives a number."""
    monkeypatch.setattr(paged_attention, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(Layout, "platform", "tpu")
    K, G, D, P, N = 2, 3, 128, 16, 9
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, K * G, 1, D)).astype(np.float32) * 0.1
    k, v = (jnp.asarray(rng.normal(size=(K, 2, N, P, D)), jnp.bfloat16) for _ in range(2))
    table, positions = (
        np.array([[5, 2, 8], [1, 0, 0], [7, 3, 0]], np.int32),
        np.array([[40], [15], [16]]),
    )
    cache = LayerCache({"k": Pool(k, D), "v": Pool(v, D)}, 1, jnp.asarray(table))
    step = Step(jnp.asarray(positions), jnp.asarray([[1], [0], [1]]))
    runtime = Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1]))
    spec = Attention(heads=K * G, kv_heads=K, head_dim=D, scale=1.0, softcap=softcap)
    with pltpu.force_tpu_interpret_mode():
        result = np.asarray(paged_attention.decode(jnp.asarray(q), cache, step, spec, runtime))
    assert np.isfinite(result).all()
    for b in (0, 2):
        expected = one_row(q[b, :, 0], (k, v), table[b], slice(positions[b, 0] + 1), softcap)
        np.testing.assert_allclose(result[b, :, 0], expected, atol=1e-5)


BOUNDS = {"window": 17}, {"window": 100}, {"chunk": 24}, {"window": 20, "chunk": 64}


@pytest.mark.parametrize(
    ("bounds", "softcap"),
    [
        *zip(BOUNDS, (None, 2.0, None, 2.0), strict=True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in zip(BOUNDS, (2.0, None, 2.0, None), strict=True)
        ),
    ],
    ids=str,
)
def test_a_window_is_attended_over_its_pages_alone(bounds, softcap, monkeypatch):
    """Rows of one page to a full table, in the second of two layers; blocks of one page or two, and
    windows that start and end inside a page. Entries that no token of the step sees are not
    numbers."""
    monkeypatch.setattr(paged_attention, "BLOCK_TOKENS", 32 if softcap else 16)
    monkeypatch.setattr(Layout, "platform", "tpu")
    K, G, D, P, M, B = 2, 3, 128, 16, 6, 5
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, K * G, 1, D)).astype(np.float32) * 0.1
    q = np.asarray(jnp.asarray(q, jnp.bfloat16), np.float32)
    pools = [rng.normal(size=(K, 2, B * M + 1, P, D)).astype(np.float32) for _ in range(2)]
    table = 1 + rng.permutation(B * M).reshape(B, M).astype(np.int32)
    last = np.array([5, 16, 47, 70, P * M - 1], np.int32)
    window, chunk = bounds.get("window", 1000), bounds.get("chunk", 1000)
    first = np.maximum(np.maximum(last - window + 1, last - last % chunk), 0)
    for pool in pools:
        pool[:, 0] = np.nan
        for b in range(B):
            for page in range(M):
                if (page + 1) * P <= first[b] or page * P > last[b]:
                    pool[:, 1, table[b, page]] = np.nan
    k, v = (jnp.asarray(pool, jnp.bfloat16) for pool in pools)
    cache = LayerCache({"k": Pool(k, D), "v": Pool(v, D)}, 1, jnp.asarray(table))
    step = Step(jnp.asarray(last)[:, None], jnp.ones((B, 1), jnp.int32))
    runtime = Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1]))
    spec = Attention(heads=K * G, kv_heads=K, head_dim=D, scale=1.0, softcap=softcap, **bounds)
    with pltpu.force_tpu_interpret_mode():
        result = np.asarray(paged_attention.decode(jnp.asarray(q), cache, step, spec, runtime))
    for b in range(B):
        expected = one_row(q[b, :, 0], (k, v), table[b], slice(first[b], last[b] + 1), softcap)
        np.testing.assert_allclose(result[b, :, 0], expected, atol=6e-3)


def test_what_no_kernel_serves_is_left_to_the_portable_form(monkeypatch):
    runtime = Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1]))
    step, q = (
        Step(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)),
        jnp.zeros((1, 2, 1, 128)),
    )

    def served(dtype=jnp.bfloat16, size=16, **spec):
        pools = {name: Pool(jnp.zeros((2, 1, 4, size, 128), dtype), 128) for name in "kv"}
        cache = LayerCache(pools, 0, jnp.ones((1, 2), jnp.int32))
        attention = Attention(**{"heads": 2, "kv_heads": 2, "head_dim": 128, "scale": 1.0} | spec)
        with pltpu.force_tpu_interpret_mode():
            return paged_attention.decode(q, cache, step, attention, runtime) is not None

    assert not served()  # on a CPU
    monkeypatch.setattr(Layout, "platform", "tpu")
    assert served()
    assert served(window=8) and served(chunk=8)
    assert not any((served(dtype=jnp.float32), served(size=4), served(sinks=True)))


@pytest.mark.parametrize(("kv_heads", "served"), [(4, True), (2, False), (1, True)])
@pytest.mark.parametrize("rules", [{}, STATIONARY_RULES])
def test_a_kernel_serves_heads_that_are_cut_as_those_of_the_cache(kv_heads, rules, served):
    """Of 8 query heads over 4 devices the first 2 would read the wrong one of 2 key-value heads,
    which are not cut."""
    mesh = Layout(jax.sharding.AbstractMesh((1, 2, 4, 1, 1), AXES), tuple(DEFAULT_RULES.items()))
    mesh = mesh.for_rollouts(rules, "auto") if rules else mesh
    assert paged_attention._same_shards((8, 8, 1, 128), (kv_heads, 1, 64, 16, 128), mesh) == served


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_kernel_serves_rows_whose_pages_are_on_their_own_device(anywhere, monkeypatch):
    monkeypatch.setattr(Layout, "platform", "tpu")
    mesh = Layout(jax.sharding.AbstractMesh((1, 2, 1, 1, 1), AXES), tuple(DEFAULT_RULES.items()))
    cache = LayerCache(
        {"k": Pool(jnp.zeros((2, 1, 4, 16, 128)), 128)},
        0,
        jnp.ones((2, 1), jnp.int32),
        anywhere=anywhere,
    )
    step, q = (
        Step(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), jnp.int32)),
        jnp.zeros((2, 2, 1, 128)),
    )
    assert paged_attention._served(q, cache, "k", step, Runtime(layout=mesh)) != anywhere
