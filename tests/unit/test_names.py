"""Layouts of stored tensors: what they say, on numbers whose places are known, in full and in
slices. Needs no jax."""

import itertools

import numpy as np
import pytest

from policy.fields import names
from policy.fields.names import Stored

E, H, K, D, X, F, W = 6, 4, 2, 3, 5, 8, 4
# A Qwen3-Next delta net: KH key heads of KD, each with R value heads of VD.
KH, R, KD, VD = 2, 3, 4, 5
QKV = ("q", "k", "v")


def numbers(*shape):
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def heads(stored, count):
    """A torch Linear [count * d, E] as ours [E, count, d]."""
    return stored.T.reshape(stored.shape[1], count, -1)


def gpt2(c_attn):
    q, k, v = np.split(c_attn, 3, axis=-1)
    return [a.reshape(*a.shape[:-1], H, D) for a in (q, k, v)]


def qkvz(stored):
    """Per key head the rows are q, k, the R values, the R gates."""
    grouped = stored.reshape(KH, -1, E)
    q, k, v, z = np.split(grouped, np.cumsum([KD, KD, R * VD]), axis=1)
    return [a.transpose(2, 0, 1) for a in (q, k, v, z)]


def flat_qkv(stored):
    q, k, v = np.split(stored, np.cumsum([KH * KD, KH * KD]))
    return [heads(a, KH) for a in (q, k, v)]


def convolution(stored):
    q, k, v = np.split(stored[:, 0], np.cumsum([KH * KD, KH * KD]))
    return [a.reshape(KH, -1, W) for a in (q, k, v)]


# name -> (form, stored tensor, the parts that it means)
CASES = {
    "same": (Stored("a"), numbers(7, E), lambda a: [a]),
    "linear": (Stored("a", "f e -> e f"), numbers(F, E), lambda a: [a.T]),
    "heads in": (Stored("a", "(h d) e -> e h d"), numbers(H * D, E), lambda a: [heads(a, H)]),
    "heads out": (
        Stored("a", "e (h d) -> h d e"),
        numbers(E, H * D),
        lambda a: [a.T.reshape(H, D, E)],
    ),
    "bias": (Stored("a", "(h d) -> h d"), numbers(H * D), lambda a: [a.reshape(H, D)]),
    "scalar": (Stored("a", "1"), numbers(1), lambda a: [a[0]]),
    "gpt2": (Stored("a", "e (h d)+ -> e h d", QKV), numbers(E, 3 * H * D), gpt2),
    "gpt2 bias": (Stored("a", "(h d)+ -> h d", QKV), numbers(3 * H * D), gpt2),
    "grouped": (
        Stored("a", "(h d)+ e -> e h d", QKV),
        numbers((H + 2 * K) * D, E),
        lambda a: [
            heads(part, n)
            for part, n in zip(np.split(a, [H * D, (H + K) * D]), (H, K, K), strict=True)
        ],
    ),
    "fused experts": (
        Stored("a", "x f+ e -> x e f", ("gate", "up")),
        numbers(X, 2 * F, E),
        lambda a: [a[:, :F].swapaxes(1, 2), a[:, F:].swapaxes(1, 2)],
    ),
    "llama4 experts": (
        Stored("a", "x e f+ -> x e f", ("gate", "up")),
        numbers(X, E, 2 * F),
        lambda a: [a[..., :F], a[..., F:]],
    ),
    "gpt-oss experts": (
        Stored("a", "x e f* -> x e f", ("gate", "up")),
        numbers(X, E, 2 * F),
        lambda a: [a[..., ::2], a[..., 1::2]],
    ),
    "gpt-oss bias": (
        Stored("a", "x f*", ("gate", "up")),
        numbers(X, 2 * F),
        lambda a: [a[:, ::2], a[:, 1::2]],
    ),
    "qwen3-next qkvz": (
        Stored("a", "(h d+) e -> e h d", ("q", "k", "v", "z")),
        numbers(KH * 2 * (KD + R * VD), E),
        qkvz,
    ),
    "qwen3-next ba": (
        Stored("a", "(h d+) e -> e h d", ("b", "a")),
        numbers(2 * KH * R, E),
        lambda a: [
            part.transpose(2, 0, 1) for part in np.split(a.reshape(KH, 2 * R, E), 2, axis=1)
        ],
    ),
    "qwen3.5 qkv": (
        Stored("a", "(h d)+ e -> e h d", QKV),
        numbers(KH * (2 * KD + R * VD), E),
        flat_qkv,
    ),
    "convolution": (
        Stored("a", "(h d)+ 1 w -> h d w", QKV),
        numbers(KH * (2 * KD + R * VD), 1, W),
        convolution,
    ),
    "interleaved heads": (
        Stored("a", "(h d)* e -> h d e", ("gate", "up")),
        numbers(2 * H * D, E),
        lambda a: [a[i::2].reshape(H, D, E) for i in (0, 1)],
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    form, stored, meaning = CASES[request.param]
    return form, stored, meaning(stored)


def some_slices(size):
    return [
        slice(0, size),
        slice(0, (size + 1) // 2),
        slice(size - 1, size),
        slice(1, max(1, size - 1)),
    ]


def test_every_slice_of_every_part_is_located(case):
    form, stored, parts = case
    shapes = [part.shape for part in parts]
    for number, part in enumerate(parts):
        for index in itertools.product(*map(some_slices, part.shape)):
            block = form.block(shapes, number, index)
            assert block.shape == stored.shape
            np.testing.assert_array_equal(block.finish(stored[block.index]), part[index])


def test_parts_are_joined_to_what_they_came_from(case):
    form, stored, parts = case
    joined = form.join([np.asarray(part) for part in parts])
    assert joined.flags.c_contiguous and joined.dtype == stored.dtype
    np.testing.assert_array_equal(joined, stored)


@pytest.mark.parametrize(
    ("name", "index", "rows"),
    [
        ("heads in", (slice(0, 2), slice(1, 3), slice(0, D)), (slice(D, 3 * D), slice(0, 2))),
        ("heads in", (slice(0, 2), slice(1, 2), slice(1, 3)), (slice(D + 1, D + 3), slice(0, 2))),
        ("gpt2", (slice(0, E), slice(2, 4), slice(0, D)), (slice(0, E), slice(2 * D, 4 * D))),
        (
            "gpt-oss experts",
            (slice(1, 2), slice(0, 3), slice(4, 8)),
            (slice(1, 2), slice(0, 3), slice(8, 16)),
        ),
    ],
)
def test_no_more_is_asked_for_than_the_smallest_block(name, index, rows):
    form, stored, meaning = CASES[name]
    assert form.block([part.shape for part in meaning(stored)], 0, index).index == rows


@pytest.mark.parametrize(
    "layout",
    ["(h d e -> e h d", "h d -> h", "h h", "H -> H", "h -> d", "h->h", "(h d) ->h d", "->"],
)
def test_a_layout_that_says_nothing_is_refused(layout):
    with pytest.raises(ValueError, match="expected stored axes"):
        Stored("a", layout)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [("f e -> e f", QKV), ("f+ e -> e f", ()), ("f+ e+ -> e f", QKV), ("", QKV)],
)
def test_parts_and_marks_belong_together(layout, parts):
    with pytest.raises(ValueError, match="must mark one axis"):
        Stored("a", layout, parts)


def test_shapes_that_a_layout_does_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not fit our shape"):
        Stored("a", "f e -> e f").block([(2, 3, 4)], 0, (slice(None),) * 3)
    with pytest.raises(ValueError, match="differ along e"):
        Stored("a", "f+ e -> e f", ("p", "q")).block([(2, 3), (4, 3)], 0, (slice(None),) * 2)


def test_tables_are_moved_and_joined():
    table = names.moved(names.MOE, ("feed_forward.", "feed_forward.shared."), ("mlp.", "block."))
    assert table["feed_forward.shared.expert_up_proj"].name == "block.experts.{e}.up_proj.weight"
    assert table["feed_forward.shared.expert_up_proj"].also[0].name == "block.experts.gate_up_proj"
    shared = names.joined("mixer.", ("q_proj", "k_proj"), "qk.weight", "(h d)+ e -> e h d")
    assert {
        end: place.parts.index(end.removeprefix("mixer.")) for end, place in shared.items()
    } == {
        "mixer.q_proj": 0,
        "mixer.k_proj": 1,
    }


def test_a_norm_is_located_by_its_role():
    """What Llama calls post_attention_layernorm acts before the feed-forward; in Gemma2 it acts on
    the attention's output.
    """
    end = "pre_feedforward_layernorm.weight"
    assert names.ATTENTION[end].name == "post_attention_layernorm.weight"
    by_role = names.ATTENTION | names.NORMS_BY_ROLE
    assert (
        by_role[end].name == end and len({by_role[role].name for role in names.NORMS_BY_ROLE}) == 4
    )
