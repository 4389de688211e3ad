"""A paged cache: decoding over scattered and shared pages gives the outputs of the full forward
pass. B rows, T tokens, M pages of a row, P tokens of a page."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stepwise
import tiny
from jax.experimental.pallas import tpu as pltpu
from oracles import KINDS, configuration, random_model, tokens

from policy import families
from policy.attention import paged_attention
from policy.cache import cache as caches
from policy.cache import pages
from policy.cache.layer_cache import LayerCache, extend, gather_entries
from policy.cache.pages import Pages, Pool
from policy.cache.sliding_window import WindowEntries, WithSlidingWindows
from policy.cache.step import Step
from policy.mesh.sharding import Layout

T, SHARED, SLOTS, LENGTH_OF_C = 19, 8, 5, 11
ENGRAM = {"engram": {"layers": [1], "vocab_bases": [50, 60], "heads": 2, "head_dim": 4}}
MODELS = tiny.GENERATED | {
    "v32": ("DeepseekV32", KINDS["DeepseekV32"].standard | KINDS["DeepseekV32"].short),
    "qwen3_next": ("Qwen3Next", KINDS["Qwen3Next"].standard | KINDS["Qwen3Next"].short),
    "wide-latents": ("DeepseekV3", KINDS["DeepseekV3"].short | {"kv_lora_rank": 140}),
    "latents-of-128": ("DeepseekV3", KINDS["DeepseekV3"].short | {"kv_lora_rank": 128}),
    "engram": ("Llama", {"num_hidden_layers": 2, "duet": ENGRAM}),
    "qwen4_exp": ("Qwen4Exp", KINDS["Qwen4Exp"].standard | KINDS["Qwen4Exp"].short),
}
SIZES = {"llama-mqa-tied": 4, "v32": 1, "qwen3_next": 16}  # of pages


@pytest.mark.parametrize(
    ("back", "count", "size"), [(1, 1, 4), (5, 1, 4), (5, 3, 4), (8, 4, 3), (40, 1, 4)]
)
def test_a_window_needs_few_pages_and_loses_none_that_a_query_sees(back, count, size):
    rng, M = np.random.default_rng(0), 9
    table = rng.permutation(30)[: 3 * M].reshape(3, M)
    for start in ([0, 2, 11], [M * size - count, 7, 19 - count]):
        positions = np.asarray(start)[:, None] + np.arange(count)
        part, first = pages.visible_table(
            jnp.asarray(table), Step(positions, np.ones_like(positions)), back, size
        )
        assert part.shape[1] <= min(M, (back + count - 2) // size + 2)
        for row, own, begins in zip(
            np.asarray(part), range(3), np.broadcast_to(first, (3, 1))[:, 0], strict=True
        ):
            for seen in {p for q in positions[own] for p in range(max(0, q - back + 1), q + 1)}:
                assert (
                    row[(seen - begins) // size] == table[own, seen // size] and begins % size == 0
                )


@functools.cache
def model_of(name):
    kind, keys = MODELS[name]
    return random_model(families.read(configuration(kind, **keys)), seed=3)


@functools.cache
def rows_and_hidden(name):
    """(tokens [3, T] of A, B and C, where A and B share a prefix, their states by the full forward
    pass)."""
    rows = tokens(3, T, seed=1)
    rows[1, :SHARED] = rows[0, :SHARED]
    return rows, stepwise.forward(model_of(name), rows)[0]


class Paged:
    """A paged cache in use, with pages handed out in a random order and every entry that nobody
    wrote a large number.
    """

    def __init__(self, model, size, *, scan=False, room=None):
        self.model, self.size, self.width = model, size, -(-T // size) + 1
        pages = Pages(3 * self.width + 4, size)
        dtype = model.graph.runtime.dtype
        length = pages if room is None else WithSlidingWindows(pages, room)
        cache = caches.create(model.config, SLOTS, length, dtype, scan=scan)
        used = lambda part: isinstance(part, Pool | WindowEntries)  # noqa: E731
        self.cache = jax.tree.map(
            lambda a: jax.tree.map(lambda a: a + 7, a) if used(a) else a, cache, is_leaf=used
        )
        self.free = (1 + np.random.default_rng(0).permutation(pages.number - 1)).tolist()
        self.tables = np.zeros((SLOTS, self.width), np.int32)
        self.run = jax.jit(self._run)

    def _run(self, params, rows, step, cache, slots):
        graph = self.model.graph
        with graph.precision():
            hidden, part, _ = graph.decoder(params)(
                rows, step, caches.rows_of(cache, slots), graph.runtime
            )
        return hidden, caches.with_rows(cache, part, slots)

    def reserve(self, slot, first=0):
        for m in range(first, self.width - 1):  # the last entry of a table stays empty
            self.tables[slot, m] = self.free.pop()

    def fork(self, source, to, length):
        """Slot `to` goes on from the first `length` tokens of `source`: full pages are shared, a
        partial page is copied."""
        full = length // self.size
        self.tables[to, :full] = self.tables[source, :full]
        self.reserve(to, full)
        if length % self.size:
            pair = (self.tables[slot, full : full + 1] for slot in (source, to))
            self.cache = caches.copy_pages(self.cache, *pair)
        self.cache = caches.with_rows(
            self.cache, caches.rows_of(self.cache, np.array([source])), np.array([to])
        )

    def call(self, slots, rows, start, ends):
        """Tokens [start, start + C) of each row, of which those from its end on are padding: the
        states [B, C, E]."""
        rows = np.asarray(rows)
        positions = np.broadcast_to(start + np.arange(rows.shape[1]), rows.shape)
        segments = (positions < np.asarray(ends)[:, None]).astype(np.int32)
        step = Step(
            jnp.asarray(positions),
            jnp.asarray(segments),
            pages=jnp.asarray(self.tables[list(slots)]),
        )
        hidden, self.cache = self.run(self.model.params, rows, step, self.cache, np.array(slots))
        return np.asarray(hidden)


def decode(paged, rows):
    """The states of A, B and C [3, T, E], 0 where they are not computed: A alone in two calls, B
    forked from it, C in two calls with inactive rows, then all together, four tokens and then one
    at a time, C only up to its end."""
    a, b, c, nobody = 2, 0, 3, 1
    result = np.zeros((3, T, paged.model.config.hidden_size), np.float32)
    paged.reserve(a)
    paged.reserve(c)
    for start in range(0, SHARED, 4):
        part = rows[:, start : start + 4]
        result[0, start : start + 4] = paged.call([a], part[:1], start, [T])[0]
        result[2, start : start + 4] = paged.call(
            [nobody, c, a, b], part[[0, 2, 0, 1]], start, [0, T, 0, 0]
        )[1]
    paged.fork(a, b, SHARED)
    for start, end in [(SHARED, SHARED + 4), *((t, t + 1) for t in range(SHARED + 4, T))]:
        hidden = paged.call(
            [a, b, nobody, c], rows[[0, 1, 1, 2], start:end], start, [T, T, 0, LENGTH_OF_C]
        )
        result[:2, start:end] = hidden[:2]
        result[2, start : min(end, LENGTH_OF_C)] = hidden[3, : max(0, LENGTH_OF_C - start)]
    return result


def check(name, size, **kind):
    rows, full = rows_and_hidden(name)
    result = decode(Paged(model_of(name), size, **kind), rows)
    np.testing.assert_allclose(result[0], full[0], atol=2e-5)
    np.testing.assert_allclose(result[1, SHARED:], full[1, SHARED:], atol=2e-5)
    np.testing.assert_allclose(result[2, :LENGTH_OF_C], full[2, :LENGTH_OF_C], atol=2e-5)


@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] != 4)) for case in SIZES.items()],
)
def test_scattered_and_shared_pages_are_the_full_forward_pass(name, size):
    check(name, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(name, (4, 16, 1)[i % 3], id=name) for i, name in enumerate(MODELS)],
)
def test_every_family_and_page_sizes_in_turns(name, size):
    check(name, size, scan=size == 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3-window", "gpt_oss"])
def test_layers_with_a_window_may_keep_window_entries_next_to_pages(name):
    cache = Paged(model_of(name), 4, room=4).cache
    assert any(
        isinstance(leaf, WindowEntries)
        for leaf in jax.tree.leaves(cache, is_leaf=lambda leaf: isinstance(leaf, WindowEntries))
    )
    check(name, 4, room=4)


@pytest.mark.slow
def test_a_scanned_stack_has_its_pages_in_one_pool():
    check("qwen3-window", 4, scan=True)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("deepseek-v3-groups-yarn", None),
        *(
            pytest.param("deepseek-v3-groups-yarn", kind, marks=pytest.mark.slow)
            for kind in ("int8", "int4", "fp8")
        ),
        *(pytest.param("wide-latents", kind, marks=pytest.mark.slow) for kind in (None, "int8")),
    ],
)
def test_a_pool_holds_what_a_contiguous_cache_holds(name, quantization):
    """Written and read in two calls, one over a page boundary, and collected at chosen
    positions."""
    model = model_of(name)
    kind = {"dtype": "float32", "scan": True, "quantization": quantization}
    rng, table = np.random.default_rng(0), jnp.asarray([[5, 2, 0], [3, 6, 0]])
    contiguous = LayerCache(caches.create(model.config, 2, 12, **kind)[-1][0][0], 0)
    paged = LayerCache(caches.create(model.config, 2, Pages(7, 4), **kind)[-1][0][0], 0, table)
    dim = jax.tree.leaves(contiguous.arrays["latent"])[0].shape[-1]
    for positions, segments in [
        ([[0, 1, 2], [0, 1, 2]], [[1, 1, 1], [1, 1, 0]]),
        ([[3, 4, 5], [2, 3, 4]], [[1, 1, 1], [1, 1, 1]]),
    ]:
        step = Step(jnp.asarray(positions), jnp.asarray(segments))
        new = jnp.asarray(rng.normal(size=(2, 1, 3, dim)), jnp.float32)
        seen, contiguous = extend(contiguous, step, latent=new)
        result, paged = extend(paged, step, latent=new)
    np.testing.assert_array_equal(
        result.arrays["latent"][:, :, :8], seen.arrays["latent"][:, :, :8]
    )
    np.testing.assert_array_equal(result.positions, seen.positions)
    at = jnp.asarray([[[0, 4, 3]], [[2, 1, 4]]])
    chosen = (gather_entries(cache, "latent", at, jnp.float32) for cache in (paged, contiguous))
    np.testing.assert_array_equal(*chosen)
    assert np.abs(result.arrays["latent"]).max() > 1


def test_padding_and_what_lies_past_a_table_are_written_nowhere():
    model = model_of("llama-mqa-tied")
    arrays = caches.create(model.config, 1, Pages(4, 2), "float32", scan=True)[0][0][0]
    step = Step(jnp.asarray([[0, 1, 2, 5]]), jnp.asarray([[1, 0, 1, 1]]))
    new = jnp.ones((1, 1, 4, arrays["k"].array.shape[-1]))
    _, cache = extend(LayerCache(arrays, 1, jnp.asarray([[3, 1]])), step, k=new, v=new)
    written = np.asarray(cache.arrays["k"].array).any(axis=-1)[0]
    assert np.argwhere(written).tolist() == [[1, 1, 0], [1, 3, 0]]  # layer, page, entry


def test_bytes_of_pages_and_slots_are_those_of_the_arrays():
    wide = families.read(
        configuration("DeepseekV3", kv_lora_rank=140)
    )  # entries of 144 numbers, filled up to 256
    for config in (model_of("qwen3_next").config, model_of("engram").config, wide):
        pages = Pages(6, 4)
        cache = caches.create(config, SLOTS, pages, "bfloat16", scan=False)
        total = sum(a.nbytes for a in jax.tree.leaves(cache))
        expected = pages.number * caches.bytes_per_page(config, pages.size, "bfloat16")
        assert total == expected + SLOTS * caches.bytes_per_slot(config, "bfloat16")
        assert (caches.bytes_per_slot(config, "bfloat16") > 0) == (config is not wide)


@pytest.mark.slow
def test_the_kernel_for_latents_gives_what_the_full_forward_pass_gives(monkeypatch):
    """Interpreted; what a mesh of CPU devices takes for a TPU is all that decides."""
    calls, kernel = [], paged_attention.latent_kernel
    monkeypatch.setattr(
        paged_attention,
        "latent_kernel",
        lambda *args, **how: calls.append(args) or kernel(*args, **how),
    )
    rows_and_hidden("latents-of-128")
    monkeypatch.setattr(Layout, "platform", "tpu")
    with pltpu.force_tpu_interpret_mode():
        check("latents-of-128", 8, scan=True)
    assert calls
