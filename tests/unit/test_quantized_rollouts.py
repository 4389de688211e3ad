"""Weights and caches of few bits for rollouts: what is kept, what is written again, and what comes
back."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from oracles import configuration, random_model, short

from policy import families
from policy.cache import cache as caches
from policy.cache.layer_cache import LayerCache, extend
from policy.cache.step import Step
from policy.config import Runtime
from policy.huggingface import sources
from policy.model import Graph
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.engine.weights import RolloutWeights

LARGEST = {"int8": 127.0, "int4": 7.5, "fp8": 448.0}
# Half a step of the integers; e4m3 has 3 bits after the point.
STEP = {"int8": 0.5 / 127.5, "int4": 0.5 / 7.5, "fp8": 2**-4}
NEVER = (
    "router",
    "norm",
    "embed_tokens",
    "lm_head",
    "indexer",
    "shared_gate",
    "a_proj",
    "b_proj",
    "conv",
    "bias",
)


def small(kind, **keys):
    return families.read(short(kind, initializer_range=0.05, **keys))


def fresh(params, seed=1):
    rng = np.random.default_rng(seed)
    return {
        path: jax.device_put(np.asarray(a) + rng.normal(size=a.shape).astype(a.dtype), a.sharding)
        for path, a in params.items()
    }


@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int4", "fp8"))]
)
def test_weights_are_rounded_with_a_scale_for_each_output_channel(kind):
    model = random_model(small("DeepseekV3"))
    view = RolloutWeights(model.graph, kind).with_copies(model.params)
    for path, inputs in model.graph.inputs.items():
        array, quantized = np.asarray(model.params[path]), view[path]
        peak = np.abs(array).max(axis=inputs, keepdims=True)
        np.testing.assert_allclose(quantized.scale, peak / LARGEST[kind], rtol=1e-6)
        assert quantized.qvalue.shape == array.shape and quantized.qvalue.dtype.itemsize == 1
        error = np.abs(np.asarray(qwix.dequantize(quantized)) - array)
        assert (error <= STEP[kind] * peak * 1.01).all() and error.max() > 0
    experts = "stacks.1.layers.0.feed_forward.expert_down_proj"
    X, F, E = model.params[experts].shape[1:]
    assert view[experts].scale.shape == (1, X, 1, E)
    # Keys and values of latent attention are cut out of one weight: a scale belongs to a head and
    # one of its dimensions.
    c, H, D = model.params["stacks.0.layers.0.mixer.kv_b_proj"].shape[1:]
    assert view["stacks.0.layers.0.mixer.kv_b_proj"].scale.shape == (1, 1, H, D)


@pytest.mark.parametrize("kind", ["DeepseekV32", "Qwen3Next", "Gemma4Moe", "GPT2", "GptOss"])
def test_routers_norms_gates_indexers_and_heads_are_never_quantised(kind):
    graph = Graph(small(kind), Runtime(), _mesh())
    others = set(graph.paths) - set(graph.inputs)
    assert not [
        path
        for path in graph.inputs
        if any(part in path.split(".")[-1] or f".{part}." in path for part in NEVER[:6])
    ]
    assert all(
        any(
            part in path
            for part in (*NEVER, "sinks", "A_log", "scalar", "scale", "embed_positions")
        )
        for path in others
    ), others
    for path, inputs in graph.inputs.items():
        assert 0 not in inputs and graph.axes[path][0] == "layers"


def _mesh():
    from policy.mesh.sharding import layout

    return layout({"fsdp": 1}, devices=jax.devices()[:1])


def test_a_view_is_made_again_in_its_own_buffers_when_the_weights_change_and_only_then():
    model = random_model(small("Llama"))
    weights = RolloutWeights(model.graph, "int8")
    first = weights.with_copies(model.params)
    path = next(iter(model.graph.inputs))
    assert weights.with_copies(dict(model.params))[path] is first[path]
    assert all(first[p] is model.params[p] for p in model.params if p not in model.graph.inputs)
    places = [
        a.unsafe_buffer_pointer()
        for p in model.graph.inputs
        for a in (first[p].qvalue, first[p].scale)
    ]
    changed = fresh(model.params)
    second = weights.with_copies(changed)
    assert first[path].qvalue.is_deleted() and first[path].scale.is_deleted()
    assert [
        a.unsafe_buffer_pointer()
        for p in model.graph.inputs
        for a in (second[p].qvalue, second[p].scale)
    ] == places
    for p in model.graph.inputs:
        expected = np.asarray(changed[p])
        np.testing.assert_allclose(
            qwix.dequantize(second[p]), expected, atol=0.006 * np.abs(expected).max()
        )
    one = changed | {path: changed[path] + 1.0}
    expected = np.asarray(one[path])
    np.testing.assert_allclose(
        qwix.dequantize(weights.with_copies(one)[path]),
        expected,
        atol=0.006 * np.abs(expected).max(),
    )


def test_a_view_lies_where_its_weights_do():
    """On one device; `layout` drops an axis that does not divide, as for a scale that has length 1
    where products sum.
    """
    graph = Graph(small("Llama"), Runtime(), _mesh())
    weights = RolloutWeights(graph, "int8")
    abstract = jax.eval_shape(
        weights._program.jitted, {path: graph.shapes[path] for path in graph.inputs}, None
    )
    assert abstract["stacks.0.layers.0.mixer.o_proj"].scale.shape == (2, 1, 1, 32)
    assert abstract["stacks.0.layers.0.mixer.q_proj"].scale.shape == (2, 1, 4, 12)


S, K, C, D = 3, 2, 8, 6


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("tiles", [1, 3])
def test_entries_come_back_rounded_and_only_those_written_change(kind, tiles):
    rng = np.random.default_rng(0)
    qtype = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}[kind]
    arrays = {
        "k": jnp.ones((1, S, K, C, D), qtype),
        "k.scale": jnp.full((1, S, K, C, tiles), 9.0),
        "other": jnp.ones((1, 1)),
    }
    new = rng.normal(size=(S, K, 2, D)).astype(np.float32) * 10.0 ** rng.integers(
        -3, 3, (S, K, 2, 1)
    )
    new[0, :, 0] = 0.0
    positions = jnp.asarray([[0, 1], [5, 6], [7, 8]])
    segments = jnp.asarray([[1, 1], [1, 1], [1, 0]])
    visible, cache = jax.jit(extend)(
        LayerCache(arrays, 0), Step(positions, segments), k=jnp.asarray(new)
    )
    seen, error = np.asarray(visible.arrays["k"]), STEP[kind]
    for row, slots in enumerate([[0, 1], [5, 6], [7]]):
        for t, at in enumerate(slots):
            given, back = (a.reshape(K, tiles, -1) for a in (new[row, :, t], seen[row, :, at]))
            assert (
                np.abs(given - back) <= error * 1.01 * np.abs(given).max(axis=-1, keepdims=True)
            ).all()
        untouched = np.delete(seen[row], slots, axis=1)
        np.testing.assert_array_equal(untouched, 9.0)
    np.testing.assert_array_equal(seen[0, :, 0], 0.0)
    assert cache.arrays["k"].dtype == qtype and cache.arrays["other"].shape == (1, 1)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV32", "Qwen3Next"])
def test_bytes_of_a_token_count_the_scales_and_states_and_index_keys_stay_as_they_are(family):
    config = families.read(configuration(family))
    for kind in ("int8", "int4", "fp8"):
        cache = caches.create(config, S, C, "bfloat16", scan=True, quantization=kind)
        flat = [
            (name, a)
            for part in jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, dict))
            for name, a in part.items()
        ]
        by_token = [(n, a) for n, a in flat if n not in ("conv", "state")]
        bits = sum(
            a.size * (4 if a.dtype == jnp.int4 else 8 * a.dtype.itemsize) for _, a in by_token
        )
        assert bits == 8 * S * C * caches.bytes_per_token(config, "bfloat16", kind)
        kept = {name: str(a.dtype) for name, a in flat}
        stored = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}[kind]
        expected = {
            "k": stored,
            "v": stored,
            "latent": stored,
            "index": "bfloat16",
            "conv": "bfloat16",
            "state": "float32",
        }
        expected |= {f"{name}.scale": "float32" for name in ("k", "v", "latent")}
        assert kept == {name: expected[name] for name in kept}


def test_a_latent_of_deepseek_v3_takes_576_bytes_and_nine_scales():
    config = sources.preset("deepseek-v3")
    assert caches.bytes_per_token(config, "bfloat16") == 61 * 2 * 576
    assert caches.bytes_per_token(config, "bfloat16", "int8") == 61 * (576 + 9 * 4)


def differences(model, options, seed=0) -> np.ndarray:
    """|log-probability of the generator - of the trainer| of every token of some completions;
    prompts of many lengths, more than there are slots, prefilled in chunks."""
    rng, result = np.random.default_rng(seed), []
    prompts = [rng.integers(0, model.config.vocab_size, n).tolist() for n in (5, 9, 1, 20)]
    generator = Generator(
        model, max_length=32, slots=3, options=dataclasses.replace(options, prefill_chunk=8)
    )
    rows, segments = np.zeros((4, 32), np.int32), np.zeros((4, 32), np.int32)
    made = generator.generate(prompts, SamplingParams(n=1, max_new_tokens=8, temperature=1.0))
    for i, (prompt, [completion]) in enumerate(zip(prompts, made, strict=True)):
        row = prompt + completion.tokens
        rows[i, : len(row)], segments[i, : len(row)] = row, 1
    logp = np.asarray(model.logprobs(rows, segments=segments)[0])
    for i, (prompt, [completion]) in enumerate(zip(prompts, made, strict=True)):
        result.append(
            logp[i, len(prompt) : len(prompt) + len(completion.tokens)]
            - np.asarray(completion.logprobs)
        )
    return np.abs(np.concatenate(result))


BOUNDS = {  # (weights, cache): mean and largest difference
    ("int8", "int8"): (0.005, 0.05),
    ("fp8", "fp8"): (0.03, 0.2),
    ("int4", "int4"): (0.1, 0.8),
    ("int8", None): (0.005, 0.05),
    (None, "int8"): (0.005, 0.05),
}
FAMILIES = ("Llama", "DeepseekV3", "Qwen3Next", "Gemma2", "DeepseekV32", "GptOss")
# Each pair of types with two of the families, in turns.
TURNS = zip(itertools.cycle(FAMILIES), itertools.chain(BOUNDS, BOUNDS), strict=False)
CASES = [("DeepseekV3", "int8", "int8"), *((family, *pair) for family, pair in TURNS)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "weights", "cache"), CASES)
def test_a_quantised_generator_stays_near_the_trainer(family, weights, cache):
    result = differences(
        random_model(small(family)), GeneratorOptions(weights=weights, kv_cache=cache)
    )
    mean, largest = BOUNDS[weights, cache]
    assert 0 < result.mean() < mean and result.max() < largest


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["contiguous", "paged"])
@pytest.mark.parametrize("kind", ["int8", "int4", None])
def test_keys_that_layers_share_are_rounded_once(kind, stored):
    """The layers of the small Gemma 4 that share keys read the rounded entries of an earlier layer.
    The float cache gives what the trainer computes."""
    model = random_model(small("Gemma4Small"))
    assert any(spec.shares for spec in model.config.layers)
    options = GeneratorOptions(kv_cache=kind, cache=stored, page_size=4)
    result = differences(model, options)
    if kind is None:
        assert result.max() < 1e-5
        return
    mean, largest = BOUNDS[None if kind == "int8" else kind, kind]
    assert 1e-5 < result.mean() < mean and result.max() < largest
    entries = [
        {name: str(a.dtype) for name, a in part.items()}
        for part in jax.tree.leaves(
            caches.create(model.config, S, C, "float32", scan=False, quantization=kind),
            is_leaf=lambda x: isinstance(x, dict),
        )
    ]
    keeper = {"k": kind, "v": kind, "k.scale": "float32", "v.scale": "float32"}
    assert entries == [{} if spec.shares else keeper for spec in model.config.layers]


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        pytest.param(family, weights, marks=pytest.mark.slow)
        for family in ("Llama", "Qwen3Next", "DeepseekV3")
        for weights in (None, "int8")
    ],
)
def test_with_a_training_rule_generator_and_trainer_compute_the_same(family, weights):
    """To the last bits, though decoding takes other products with the latents. A number next to the
    middle of two others may round apart, so not every token is held to it."""
    model = random_model(small(family), runtime=Runtime(quantization="int8"))
    result = differences(model, GeneratorOptions(weights=weights))
    assert np.median(result) < 1e-6 and result.mean() < 1e-4


@pytest.mark.slow
def test_new_weights_reach_a_generator_that_keeps_quantised_ones():
    model = random_model(small("Llama"))
    generator = Generator(model, max_length=16, slots=1, options=GeneratorOptions(weights="int8"))
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    before = generator.generate([[1, 2, 3]], greedy)
    model.params = fresh(model.params)
    after = generator.generate([[1, 2, 3]], greedy)
    other = Generator(model, max_length=16, slots=1, options=GeneratorOptions(weights="int8"))
    assert after == other.generate([[1, 2, 3]], greedy) != before


def test_an_unknown_type_is_refused():
    with pytest.raises(
        ValueError, match=r"GeneratorOptions.kv_cache: 'int16' is none of int8, int4, fp8"
    ):
        GeneratorOptions(kv_cache="int16")
