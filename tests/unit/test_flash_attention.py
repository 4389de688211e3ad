"""The kernel over full sequences, interpreted, gives what the dense form gives, and its
gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_rows import arrays, reference, seen, trees

from policy.attention import flash_attention
from policy.attention.dot_product_attention import AttentionBounds, Mask, attend
from policy.cache.layer_cache import Visible, own_tokens
from policy.cache.paths import Tree
from policy.config import Runtime
from policy.mesh.sharding import Layout, layout
from policy.modes import make_step

T = 300  # not a multiple of the block size


def packed(rows):
    """int32[len(rows), T]: documents of these lengths one after the other, then padding."""
    return np.asarray(
        [np.repeat(np.append(np.arange(1, len(row) + 1), 0), [*row, T - sum(row)]) for row in rows],
        np.int32,
    )


CASES = {
    "plain": {"heads": (4, 2, 64, 64)},
    "latent": {"heads": (2, 2, 192, 128)},
    "window": {"heads": (2, 1, 128, 128), "window": 40},
    "softcap": {"heads": (2, 2, 128, 128), "softcap": 3.0},
    "sinks": {"heads": (4, 1, 64, 64), "sinks": True},
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "window")) for c in CASES]
)
def test_the_kernel_is_the_portable_form(case, monkeypatch):
    """Packed documents, a row of one, and padding; scores of unequal sizes, so that a wrong mask is
    seen."""
    monkeypatch.setattr(flash_attention, "BLOCK", 256)
    options = dict(CASES[case])
    (H, K, D, V), segments = options.pop("heads"), packed([[130, 1, 90], [T]])
    # Scores up to about 5: the rounding of an exponential grows with its score, differently on each
    # CPU.
    q, k, v, given = (
        scale * jax.random.normal(jax.random.key(i), (2, heads, T, dim)) / np.sqrt(np.sqrt(dim))
        for i, (heads, dim, scale) in enumerate([(H, D, 1), (K, D, 1), (K, V, 2), (H, V, 2)])
    )
    sinks = jax.random.normal(jax.random.key(9), (H,)) if options.pop("sinks", False) else None
    step, seen = make_step(segments, segments=segments), (segments != 0)[:, None, :, None]

    bounds = AttentionBounds(**options)

    def kernel(q, k, v, sinks):
        return flash_attention.splash_attention(
            q, k, v, jnp.asarray(segments), sinks, bounds, interpret=True
        )

    def portable(q, k, v, sinks):
        mask = Mask(step, Visible({}, step.positions, step.segments), options.get("window"))
        return attend(q, k, v, mask, 512, options.get("softcap"), sinks)

    def objective(attention):
        return lambda *arrays: jnp.sum(jnp.where(seen, attention(*arrays) * given, 0.0))

    arguments, wrt = (q, k, v, sinks), (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    ours, want = (jnp.where(seen, attention(*arguments), 0.0) for attention in (kernel, portable))
    np.testing.assert_allclose(ours, want, atol=2e-6)
    for ours, want in zip(
        *(jax.grad(objective(f), wrt)(*arguments) for f in (kernel, portable)), strict=True
    ):
        np.testing.assert_allclose(ours, want, atol=3e-5 * float(jnp.abs(want).max()))


TREES = {
    "plain": ((4, 2, 64, 64), {}),
    "bounds": ((2, 1, 128, 64), {"window": 40, "softcap": 3.0}),
    "chunk": ((2, 2, 128, 128), {"chunk": 32}),
    "sinks": ((4, 1, 64, 64), {}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "bounds")) for c in TREES]
)
def test_the_kernel_of_trees_is_the_softmax_over_paths(case, monkeypatch):
    """The mask is an array: two rows of trees under one jit, padding that fills blocks, and blocks
    nothing sees."""
    monkeypatch.setattr(flash_attention, "BLOCK", 128)
    heads, bounds = TREES[case]
    bounds = AttentionBounds(**bounds)
    rows = (
        [(40, [(30, []), (50, [(9, []), (10, [])])]), (20, [])],
        [(100, [(8, []), (90, []), (70, [])])],
    )
    tree = trees(rows, T)
    step = make_step(jnp.zeros((2, T)), tree=jax.tree.map(jnp.asarray, tree))
    mask = Mask(step, own_tokens(step, {}), bounds.window, bounds.chunk)
    allowed = seen(tree.before, tree.position, bounds.window, bounds.chunk)
    *parts, given = arrays(2, T, heads)
    wrt, real = (0, 1, 2, 3) if case == "sinks" else (0, 1, 2), (tree.node != 0)[:, None, :, None]
    parts.append(jax.random.normal(jax.random.key(9), heads[:1]) if case == "sinks" else None)

    def kernel(q, k, v, sinks):
        tokens = mask.queries, mask.keys
        return flash_attention.tree_attention(
            q, k, v, tokens, sinks, mask, bounds.softcap, interpret=True
        )

    def run(attention, *parts):
        out = attention(*parts)
        return jnp.sum(jnp.where(real, out * given, 0.0)), out

    ((_, out), gradients), ((_, expected), slopes) = (
        jax.jit(jax.value_and_grad(partial(run, attention), wrt, has_aux=True))(*parts)
        for attention in (kernel, partial(reference, allowed, bounds.softcap))
    )
    assert np.all(np.isfinite(out))  # padding too: as keys of weight 0 its values are multiplied
    np.testing.assert_allclose(np.where(real, out, 0), np.where(real, expected, 0), atol=2e-6)
    for ours, want in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(ours, want, atol=3e-5 * float(jnp.abs(want).max()))


def test_calls_with_trees(monkeypatch):
    """No kernel but the one of trees takes a tree, and rows that are too long have none."""
    monkeypatch.setattr(Layout, "platform", "tpu")
    runtime = Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1]))

    def step(T):
        return make_step(jnp.zeros((1, T)), tree=Tree(*[jnp.ones((1, T), jnp.int32)] * 5))

    for platform in ("tpu", "gpu"):
        monkeypatch.setattr(Layout, "platform", platform)
        assert not flash_attention.served(step(256), jnp.bfloat16, runtime, platform)
        assert flash_attention.serves_trees(step(256), jnp.bfloat16, runtime) == (platform == "tpu")
    monkeypatch.setattr(Layout, "platform", "tpu")
    assert not flash_attention.serves_trees(
        step(flash_attention.LONGEST_TREES + 1), jnp.bfloat16, runtime
    )
    assert not flash_attention.serves_trees(step(256), jnp.float32, runtime)
    assert not flash_attention.serves_trees(make_step(jnp.zeros((1, 256))), jnp.bfloat16, runtime)


def test_calls_without_a_kernel(monkeypatch):
    """Float32, tokens with positions of their own, short calls, a mesh that cuts heads unevenly and
    pictures that see themselves get the dense form.
    """
    monkeypatch.setattr(Layout, "platform", "tpu")
    tokens = jnp.zeros((2, 256), jnp.int32)
    runtime, step = (
        Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1])),
        make_step(tokens),
    )
    assert flash_attention.served(step, jnp.bfloat16, runtime)
    assert not flash_attention.served(step, jnp.float32, runtime)
    assert not flash_attention.served(
        make_step(tokens, positions=step.positions), jnp.bfloat16, runtime
    )
    assert not flash_attention.served(make_step(tokens[:, :64]), jnp.bfloat16, runtime)
    q = jnp.zeros((2, 1, 256, 8), jnp.bfloat16)
    assert flash_attention.attend(q, q, q, step, runtime, AttentionBounds(looks_ahead=True)) is None
    monkeypatch.setattr(Layout, "platform", "cpu")
    assert not flash_attention.served(step, jnp.bfloat16, runtime)
