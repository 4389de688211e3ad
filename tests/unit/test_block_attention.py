"""Attention in blocks gives what a softmax over the tokens of each path gives, and its gradients,
and computes no pair of blocks whose tokens do not see each other."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from tree_rows import arrays, reference, seen, trees

from policy.attention import block_attention
from policy.attention.block_attention import BlockSpec
from policy.attention.dot_product_attention import AttentionBounds, Mask
from policy.cache.layer_cache import own_tokens
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.modes import make_step

SIZE = 16
# Trees of a row: (tokens of a node, its children). One node ends with a block, one is a token, and
# trees share blocks.
ROWS = (
    [(5, [(3, []), (20, [(1, []), (4, [])])]), (2, [(1, []), (2, [])])],
    [(16, [(7, []), (9, [])]), (1, [(2, [])])],
)


def flat(rows, T):
    """int32[len(rows), T]: segments of these lengths, then padding; numbers need not ascend."""
    return np.asarray(
        [np.repeat([*range(len(row), 0, -1), 0], [*row, T - sum(row)]) for row in rows],
        np.int32,
    )


def call(step, size=SIZE, **bounds):
    """The attention of a step in blocks: a function of queries, keys and values."""
    mask = Mask(step, own_tokens(step, {}))
    return partial(
        block_attention.block_attention,
        BlockSpec(size, AttentionBounds(**bounds)),
        queries=mask.queries,
        keys=mask.keys,
    )


def steps(kind, T):
    """(Step, the place before each token) of trees or of segments."""
    if kind == "trees":
        tree = trees(ROWS, T)
        return make_step(jnp.zeros((2, T)), tree=jax.tree.map(jnp.asarray, tree)), tree.before
    segments = flat([[9, 1, 20], [T]], T)
    places = np.broadcast_to(np.arange(T), segments.shape)
    starts = np.diff(segments, axis=1, prepend=-1) != 0
    return make_step(jnp.zeros((2, T)), segments=segments), np.where(
        starts | (segments == 0), -1, places - 1
    )


CASES = {
    "trees": ("trees", 40, (4, 2, 8, 8), {}),
    "window and cap": ("trees", 43, (3, 1, 12, 8), {"window": 6, "softcap": 3.0}),
    "chunk": ("trees", 40, (2, 2, 8, 4), {"chunk": 8}),
    "segments": ("segments", 40, (4, 2, 8, 8), {"window": 7}),
    "one block": ("segments", 32, (2, 1, 8, 8), {}),
    "full blocks": ("trees", 48, (2, 1, 8, 8), {"window": 20}),
    "chunk of segments": ("segments", 33, (2, 2, 8, 8), {"chunk": 5, "softcap": 2.0}),
}
FIRST = ("trees", "window and cap", "chunk", "segments")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FIRST)) for c in CASES]
)
def test_blocks_are_the_softmax_over_paths(case):
    """Values and gradients: several trees in a row, nodes that share blocks, padding, blocks that
    are not full."""
    kind, T, heads, bounds = CASES[case]
    step, before = steps(kind, T)
    attention = call(step, 32 if case == "one block" else SIZE, **bounds)
    real, bounds = np.asarray(step.segments != 0)[:, None, :, None], dict(bounds)
    softcap = bounds.pop("softcap", None)
    allowed = (
        seen(before, np.asarray(step.positions), **bounds) & real[:, 0] & real[:, 0].swapaxes(1, 2)
    )
    *parts, given = arrays(2, T, heads)

    def run(function, *parts):
        out = function(*parts)
        return jnp.sum(jnp.where(real, out * given, 0.0)), out

    ((_, out), gradients), ((_, expected), slopes) = (
        jax.jit(jax.value_and_grad(partial(run, f), argnums=(0, 1, 2), has_aux=True))(*parts)
        for f in (attention, partial(reference, allowed, softcap))
    )
    np.testing.assert_allclose(np.where(real, out, 0), np.where(real, expected, 0), atol=2e-6)
    assert np.all(np.isfinite(out))
    for ours, want in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(ours, want, atol=1e-5 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("kind", ["trees", "segments"])
@pytest.mark.parametrize("bounds", [{}, {"window": 6}, {"chunk": 8}], ids=str)
def test_pairs_of_blocks(kind, bounds):
    """Each pair of blocks with a query that sees a key is listed once; trees of unequal branches
    leave others out."""
    size, T = 4, 60
    step, before = steps(kind, T)
    mask = Mask(step, own_tokens(step, {}))
    listed = block_attention.pairs(
        BlockSpec(size, AttentionBounds(**bounds)), mask.queries, mask.keys
    )
    number = int(listed.number)
    ours = list(zip(*(np.asarray(a)[:number].tolist() for a in listed[:3]), strict=True))
    real = np.asarray(step.segments) != 0
    allowed = seen(before, np.asarray(step.positions), **bounds) & real[:, :, None] & real[:, None]
    blocks = allowed.reshape(2, T // size, size, T // size, size).any(axis=(2, 4))
    need = {tuple(at) for at in np.argwhere(blocks).tolist()}
    assert len(set(ours)) == number and need <= set(ours)
    assert number < 2 * (T // size) * (T // size + 1) // 2
    if not bounds:
        assert number <= 1.1 * len(need)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_packed_row_costs_what_its_sequences_cost(count):
    """The pairs of a row of equal sequences are those of each sequence in a row of its own."""
    size, T = 64, 1024

    def listed(row, T):
        step = make_step(jnp.zeros((1, T)), segments=flat([row], T))
        mask = Mask(step, own_tokens(step, {}))
        spec = BlockSpec(size, AttentionBounds())
        return int(block_attention.pairs(spec, mask.queries[:2], mask.keys).number)

    length = T // count
    blocks = length // size
    assert listed([length] * count, T) == count * listed([length], length)
    assert listed([length], length) == blocks * (blocks + 1) // 2
    # Borders inside of blocks add at most two blocks to the keys of a sequence.
    uneven = listed([length - 5] * count, T)
    assert uneven <= count * (blocks + 1) * (blocks + 2) // 2


def test_a_policy_saves_what_the_backward_pass_needs():
    """With "context" saved the backward pass has no second forward loop."""
    step, _ = steps("trees", 40)
    *parts, given = arrays(2, 40, (2, 1, 8, 8))

    def loops(policy):
        attention = jax.checkpoint(call(step), policy=policy)
        return str(
            jax.make_jaxpr(jax.grad(lambda *p: jnp.sum(attention(*p) * given)))(*parts)
        ).count(" while[")

    policies = jax.checkpoint_policies
    assert loops(policies.save_only_these_names("context")) == 2
    assert loops(policies.nothing_saveable) == 3


def test_calls_that_blocks_serve():
    """Trees where a row has two blocks; segments in training only, and only in long rows; sinks,
    layers that look ahead and tokens with positions of their own have the dense form."""
    runtime = Runtime(layout=layout({"fsdp": 1}, devices=jax.devices()[:1]))
    training, long, T = (
        Runtime(layout=runtime.layout, skip_blocks=True),
        block_attention.SHORTEST_FLAT,
        2 * block_attention.SIZES["cpu"],
    )
    step, _ = steps("trees", T)
    q = jnp.zeros((2, 1, T, 8))
    assert (
        jax.eval_shape(lambda q: block_attention.attend(q, q, q, step, runtime), q).shape == q.shape
    )
    assert block_attention.attend(q, q, q, step, runtime, AttentionBounds(looks_ahead=True)) is None
    assert block_attention.attend(q, q, q, step, runtime, sinks_H=jnp.zeros(1)) is None
    assert not block_attention.served(steps("trees", T - 1)[0], runtime)
    for platform in ("tpu", "gpu"):
        place = SimpleNamespace(platform=platform, cache_rows_differ=False)
        elsewhere = Runtime(layout=place, skip_blocks=True)
        row = jnp.zeros((1, 2 * block_attention.OTHERWISE), jnp.int32)
        assert block_attention.served(make_step(row), elsewhere), "on every platform"
        assert not block_attention.served(make_step(row[:, :-1]), elsewhere)
    tokens = jnp.zeros((1, long), jnp.int32)
    assert block_attention.served(make_step(tokens), training)
    assert not block_attention.served(make_step(tokens), runtime)
    assert not block_attention.served(make_step(tokens[:, :-1]), training)
    assert not block_attention.served(make_step(tokens, positions=jnp.zeros_like(tokens)), training)


def test_blocks_on_a_cpu_are_larger_in_long_rows_and_for_wide_heads(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        block_attention, "block_attention", lambda spec, q, *_: sizes.append(spec.size) or q
    )
    runtime = Runtime(skip_blocks=True)
    for T, D in ((576, 64), (1024, 64), (576, 128)):
        q = jnp.zeros((1, 1, T, D))
        block_attention.attend(q, q, q, make_step(jnp.zeros((1, T), jnp.int32)), runtime)
    assert sizes == [48, 64, 64]


def test_only_training_skips_blocks_of_segments():
    """The scorer and what the generator is made of keep their programs."""
    model = learners.dense()
    trainer, _ = learners.begin(model, learners.stage("grpo"), fresh=True)
    assert trainer._update_graph.runtime.skip_blocks and trainer._scoring_graph.runtime.skip_blocks
    assert (
        not model.scorer.graph.runtime.skip_blocks
        and not model.graph.for_inference().runtime.skip_blocks
    )
