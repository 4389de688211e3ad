"""Kernels for GPUs, interpreted, give what the dense form and numpy give; programs lowered for CUDA
have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.attention import flash_attention, gpu_attention, paged_attention
from policy.attention.dot_product_attention import AttentionBounds, Mask, attend
from policy.cache.layer_cache import LayerCache, Visible
from policy.cache.pages import Pool
from policy.cache.step import Step
from policy.config import Attention, Runtime
from policy.mesh.sharding import Layout, layout
from policy.modes import make_step

T = 150  # not a multiple of the block size


OTHERS = [
    pytest.param(3, 3, 48, marks=pytest.mark.slow),
    pytest.param(4, 1, 128, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), *OTHERS])
def test_full_sequences_are_attended_as_by_the_portable_form(heads, kv_heads, dim):
    """Packed documents, a row of one, and padding; values and gradients."""
    lengths = [[70, 1, 40, 39], [T, 0, 0, 0]]
    segments = np.asarray([np.repeat([1, 2, 3, 0], row) for row in lengths], np.int32)
    q, k, v, given = (
        2 * jax.random.normal(jax.random.key(i), (2, number, T, dim)) / dim**0.25
        for i, number in enumerate([heads, kv_heads, kv_heads, heads])
    )
    step, seen = make_step(segments, segments=segments), (segments != 0)[:, None, :, None]

    def kernel(q, k, v):
        return gpu_attention.flash_attention(q, k, v, jnp.asarray(segments), interpret=True)

    def portable(q, k, v):
        return attend(q, k, v, Mask(step, Visible({}, step.positions, step.segments)), 512)

    def computed(attention):
        out, back = jax.vjp(lambda *arrays: jnp.where(seen, attention(*arrays), 0.0), q, k, v)
        return [out, *back(given)]

    for ours, want in zip(computed(kernel), computed(portable), strict=True):
        np.testing.assert_allclose(ours, want, atol=3e-5 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("pages", [3, 21])
def test_pages_are_attended_where_they_lie(pages, softcap):
    """Rows that end in the first page, within one and at the end of the last; a table that is not a
    multiple of the block size."""
    K, G, D, P, N = 2, 3, 64, 16, 50
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, K * G, D)).astype(np.float32) * 0.3
    k, v = (rng.normal(size=(K, N, P, D)).astype(np.float32) for _ in range(2))
    table = np.stack([rng.permutation(np.arange(1, N))[:pages] for _ in range(3)]).astype(np.int32)
    lengths = np.asarray([1, pages * P - 7, pages * P], np.int32)
    result = gpu_attention.attend_pages(
        q, k, v, table, jnp.asarray(lengths), softcap=softcap, interpret=True
    )
    for b, h in np.ndindex(3, K * G):
        keys, values = (
            a[h // G][table[b]].reshape(-1, D)[: lengths[b]].astype(np.float64) for a in (k, v)
        )
        scores = keys @ q[b, h]
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(result[b, h], weights @ values / weights.sum(), atol=3e-6)


def lowered(run, *arguments) -> str:
    """The program for CUDA, where there is no GPU: newer jax then wants to know of one."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


KERNEL = "__gpu$xla.gpu.triton"


def test_programs_for_a_gpu_have_the_kernel_of_full_sequences(monkeypatch):
    """One forwards, and for the gradient one more forwards, one of the sums it needs, and one
    backwards. What the kernel does not serve has none."""
    monkeypatch.setattr(Layout, "platform", "gpu")
    runtime, step = (
        Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1])),
        make_step(jnp.zeros((2, 256), jnp.int32)),
    )

    def run(q, k, sinks_H=None, **bounds):
        out = flash_attention.attend(q, k, k, step, runtime, AttentionBounds(**bounds), sinks_H)
        return jnp.float32(0) if out is None else out.astype(jnp.float32).sum()

    def arrays(heads, dim, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((2, heads, 256, dim), dtype)

    q, k = arrays(4, 64), arrays(2, 64)
    assert lowered(run, q, k).count(KERNEL) == 1
    assert lowered(jax.grad(run), q, k).count(KERNEL) == 3
    for other, limits in [
        ((q, k), {"window": 8}),
        ((q, k), {"softcap": 2.0}),
        ((q, k), {"sinks_H": jnp.zeros(4)}),
        ((arrays(4, 256), arrays(2, 256)), {}),
        ((arrays(4, 64, jnp.float32), arrays(2, 64, jnp.float32)), {}),
    ]:
        assert KERNEL not in lowered(lambda q, k, limits=limits: run(q, k, **limits), *other)


def test_programs_for_a_gpu_have_the_kernel_of_pages(monkeypatch):
    monkeypatch.setattr(Layout, "platform", "gpu")
    runtime = Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1]))
    step = Step(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), jnp.int32))

    def run(q, k, v, **spec):
        cache = LayerCache({"k": Pool(k, 64), "v": Pool(v, 64)}, 1, jnp.ones((2, 3), jnp.int32))
        attention = Attention(**{"heads": 4, "kv_heads": 2, "head_dim": 64, "scale": 1.0} | spec)
        out = paged_attention.decode(q, cache, step, attention, runtime)
        return jnp.float32(0) if out is None else out

    def has_kernel(dtype=jnp.bfloat16, page=16, **spec):
        pool = jax.ShapeDtypeStruct((2, 3, 9, page, 64), dtype)
        q = jax.ShapeDtypeStruct((2, 4, 1, 64), dtype)
        return KERNEL in lowered(lambda q, k, v: run(q, k, v, **spec), q, pool, pool)

    assert has_kernel() and has_kernel(softcap=3.0) and has_kernel(page=64)
    assert not any(
        (
            has_kernel(jnp.float32),
            has_kernel(page=24),
            has_kernel(window=8),
            has_kernel(chunk=8),
            has_kernel(sinks=True),
        )
    )
