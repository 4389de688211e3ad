"""Weights of products that are stored quantised and that nothing trains: how they are quantised,
how products read them, and where they are read from."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from adapted import RANK, with_adapter
from oracles import by_kind, random_model, short

import policy
from policy import families, modes
from policy.adapter_spec import AdapterSpec
from policy.compatibility import Conflict
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.model import Graph
from policy.ops.host_memory import shard_bytes
from policy.ops.linear import linear, ragged_linear
from policy.ops.quantization import (
    NF4,
    TYPES,
    block_sizes,
    dequantised,
    quantize_blocks,
    scale_shape,
)
from rollout import Generator, SamplingParams

KINDS = ("int8", "int4", "fp8", "nf4")
# Root mean square error of Gaussian weights in blocks of 64, over that of the weights
# (../shared/spec: measured with qwix).
ERROR = {"int8": 0.006, "int4": 0.105, "fp8": 0.024, "nf4": 0.094}


def gaussian(*shape, seed=0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "inputs", "block", "sizes"),
    [
        ((3, 128, 40), (1,), None, {}),
        ((3, 128, 40), (1,), 64, {1: 64}),
        ((3, 96, 40), (1,), 64, {1: 48}),
        ((3, 40, 8), (1,), 64, {1: 40}),
        ((3, 67, 8), (1,), 64, {1: 67}),
        ((3, 134, 8), (1,), 64, {1: 67}),
        ((3, 8, 128, 40), (1, 2), 64, {1: 1, 2: 64}),
        ((3, 8, 16, 40), (1, 2), 64, {1: 4, 2: 16}),
        ((3, 6, 16, 40), (1, 2), 64, {1: 3, 2: 16}),
        ((3, 2, 5, 40), (1, 2), 64, {1: 2, 2: 5}),
    ],
)
def test_a_block_divides_the_inputs_and_has_at_most_so_many_numbers_if_it_can(
    shape, inputs, block, sizes
):
    assert block_sizes(shape, inputs, block) == sizes
    for kind in ("int8", "nf4"):
        array = gaussian(*shape)
        stored = quantize_blocks(array, kind, inputs, block)
        assert stored.scale.shape == scale_shape(shape, inputs, block)
        assert stored.scale.dtype == jnp.float32
        assert np.abs(dequantised(stored) - array).max() < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_scales_are_those_of_qwix(kind):
    array = gaussian(2, 256, 96).at[0, :64, 0].set(0.0)
    stored = quantize_blocks(array, kind, (1,), 64)
    theirs = qwix.quantize(
        array,
        TYPES.get(kind, kind),
        channelwise_axes=(0, 2),
        tiled_axes={1: 64},
        calibration_method=f"absmax,{127.5 / 127}" if kind == "int8" else "absmax",
    )
    assert stored.qvalue.dtype == theirs.qvalue.dtype
    np.testing.assert_array_equal(stored.qvalue, theirs.qvalue)
    np.testing.assert_allclose(stored.scale, theirs.scale, rtol=1e-7)
    np.testing.assert_allclose(dequantised(stored), qwix.dequantize(theirs), rtol=1e-6)
    error = np.sqrt(np.mean((dequantised(stored) - array) ** 2))
    assert abs(error / ERROR[kind] - 1) < 0.15, error


def test_a_code_of_nf4_is_that_of_the_nearest_number():
    numbers = np.array(NF4, np.float32)
    x = np.random.default_rng(0).uniform(-1, 1, (1, 64, 500)).astype(np.float32)
    x[:, 0] = 1.0  # so that all scales are 1
    stored = quantize_blocks(jnp.asarray(x), "nf4", (1,), 64)
    nearest = np.abs(x[..., None].astype(np.float64) - numbers).argmin(-1)
    np.testing.assert_array_equal(stored.qvalue.astype(np.int32), nearest)
    np.testing.assert_array_equal(dequantised(stored), numbers[nearest])


EQUATIONS = {
    "bte,ef->btf": ((2, 5, 128), (128, 24), (0,)),
    "bte,ehd->bhtd": ((2, 5, 128), (128, 3, 8), (0,)),
    "bhtd,hde->bte": ((2, 3, 5, 32), (3, 32, 24), (0, 1)),
    "bre,bef->brf": ((4, 5, 128), (4, 128, 24), (1,)),
    "gnf,gfe->gne": ((4, 5, 128), (4, 128, 24), (1,)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_product_and_its_gradient_are_those_of_the_dequantised_weight(equation, kind):
    x_shape, w_shape, inputs = EQUATIONS[equation]
    weight = quantize_blocks(gaussian(*w_shape, seed=1), kind, inputs, 64)
    x = gaussian(*x_shape)
    runtime = Runtime()
    y, pull = jax.vjp(lambda x: linear(equation, x, weight, runtime), x)
    floats = dequantised(weight)
    expected, expected_pull = jax.vjp(lambda x: jnp.einsum(equation, x, floats), x)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    g = gaussian(*y.shape, seed=2)
    np.testing.assert_allclose(pull(g)[0], expected_pull(g)[0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_groups_and_its_gradient_are_those_of_the_dequantised_weights(kind):
    weights = quantize_blocks(gaussian(4, 128, 24, seed=1), kind, (1,), 64)
    rows = gaussian(16, 128)
    sizes = jnp.array([3, 0, 8, 5])
    y, pull = jax.vjp(lambda rows: ragged_linear(rows, weights, sizes, Runtime()), rows)
    floats = dequantised(weights)
    expected, expected_pull = jax.vjp(lambda rows: jax.lax.ragged_dot(rows, floats, sizes), rows)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    g = gaussian(*y.shape, seed=2)
    np.testing.assert_allclose(pull(g)[0], expected_pull(g)[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_gradients_go_through_scans_and_checkpoints(kind):
    weights = quantize_blocks(gaussian(3, 128, 128, seed=1) / 11, kind, (1,), 64)
    floats = dequantised(weights)
    x = gaussian(4, 128)

    def loss(x, weights, wrapped):
        def layer(x, w):
            return jnp.tanh(linear("ne,ef->nf", x, w, Runtime())), None

        return jnp.sum(jax.lax.scan(wrapped(layer), x, weights)[0] ** 2)

    for wrapped in (lambda layer: layer, jax.checkpoint):
        gradient = jax.jit(jax.grad(loss), static_argnums=2)
        np.testing.assert_allclose(
            gradient(x, weights, wrapped), gradient(x, floats, wrapped), atol=1e-5
        )


def as_floats(model) -> policy.Model:
    """The model with the floats by which the products of `model` multiply."""
    runtime = dataclasses.replace(model.graph.runtime, base_weights=None)
    graph = Graph(model.config, runtime, model.graph.layout)
    params = {
        path: dequantised(array) if path in model.graph.quantized else array
        for path, array in model.params.items()
    }
    return policy.Model(graph, params)


def stored(model, **runtime) -> policy.Model:
    """The model with its weights of products quantised."""
    how = dataclasses.replace(model.graph.runtime, **runtime)
    graph = Graph(model.config, how, model.graph.layout)
    params = {
        path: graph.quantized_weight(path).of(array) if path in graph.quantized else array
        for path, array in model.params.items()
    }
    return policy.Model(graph, params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_kind())
def test_every_product_of_a_family_reads_quantised_weights(kind):
    model = random_model(families.read(short(kind)))
    quantised = stored(model, base_weights="nf4", base_block=16)
    floats = as_floats(quantised)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, model.config.vocab_size, (2, 11)))

    def outputs(model):
        """Log-probabilities, and the gradient of their sum in the embedding."""

        def logprobs(table, params):
            step = modes.make_step(tokens)
            params = params | {"embed_tokens": table}
            logp = model.graph.logprobs(params, tokens, step, 1.0)[0]
            return logp.sum(), logp

        others = {path: array for path, array in model.params.items() if path != "embed_tokens"}
        gradient = jax.jit(jax.grad(logprobs, has_aux=True))
        return gradient(model.params["embed_tokens"], others)

    (gradient, logp), (expected, expected_logp) = map(outputs, (quantised, floats))
    np.testing.assert_allclose(logp, expected_logp, atol=1e-5)
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory of latent attention, a dense layer and experts, with inputs of 64 numbers."""
    path = tmp_path_factory.mktemp("deepseek")
    config = families.read(short("DeepseekV3", hidden_size=64, initializer_range=0.1))
    policy.save(random_model(config), path)
    return path


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "nf4" else pytest.mark.slow) for kind in KINDS]
)
def test_generator_and_log_probabilities_read_what_was_loaded(directory, kind):
    model = policy.load(directory, base_weights=kind, base_block=32)
    for path, inputs in model.graph.inputs.items():
        stored = model.params[path]
        abstract = model.graph.abstract[path]
        assert isinstance(stored, qwix.QArray)
        assert jax.tree.structure(stored) == jax.tree.structure(abstract)
        for array, expected in zip(*map(jax.tree.leaves, (stored, abstract)), strict=True):
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            assert array.sharding == expected.sharding
        assert stored.scale.shape == scale_shape(stored.shape, inputs, 32)
    others = set(model.params) - set(model.graph.inputs)
    assert all(isinstance(model.params[path], jax.Array) for path in others)
    assert {"embed_tokens", "lm_head"} < others
    floats = as_floats(model)
    tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, (2, 12))
    logp, _ = model.logprobs(tokens)
    np.testing.assert_allclose(logp, floats.logprobs(tokens)[0], atol=1e-5)
    assert np.abs(logp - policy.load(directory).logprobs(tokens)[0]).max() > 1e-3
    generator = Generator(model, max_length=24, slots=2, seed=1)
    prompts = [[3, 5, 7, 4], [9, 2]]
    groups = generator.generate(prompts, SamplingParams(max_new_tokens=8))
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        row = np.array([prompt + list(completion.tokens)])
        expected = model.logprobs(row)[0][0, len(prompt) :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_over_quantised_weights_learns_as_over_their_floats(directory, dora):
    model = policy.load(directory, base_weights="nf4", base_block=32)
    spec = AdapterSpec(rank=RANK, alpha=6.0, dora=dora)
    adapted, floats = (with_adapter(each, spec) for each in (model, as_floats(model)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, model.config.vocab_size, (2, 12)))
    results = []
    for each in (adapted, floats):
        base = {path: each.params[path] for path in each.graph.paths}
        learning = {path: each.params[path] for path in each.params.keys() - base.keys()}

        def loss(learning, base, graph=each.graph):
            step = modes.make_step(tokens)
            return graph.logprobs(base | learning, tokens, step, 1.0)[0].sum()

        results.append(jax.jit(jax.value_and_grad(loss))(learning, base))
    (value, gradient), (expected_value, expected) = results
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for path, array in expected.items():
        tolerance = 1e-5 * np.abs(array).max()
        np.testing.assert_allclose(gradient[path], array, atol=tolerance, err_msg=path)


def test_random_weights_are_stored_quantised_too(directory):
    config = policy.load(directory).config
    model = policy.create(config, seed=3, base_weights="nf4")
    plain = policy.create(config, seed=3)
    for path, inputs in model.graph.inputs.items():
        expected = quantize_blocks(plain.params[path], "nf4", inputs, 64)
        same = np.mean(np.asarray(model.params[path].qvalue) == np.asarray(expected.qvalue))
        assert same > 0.999, path
        np.testing.assert_allclose(model.params[path].scale, expected.scale, rtol=1e-6)
    np.testing.assert_array_equal(model.params["embed_tokens"], plain.params["embed_tokens"])


def test_the_floats_of_products_are_what_is_saved(directory, tmp_path):
    model = policy.load(directory, base_weights="int4")
    policy.save(model, tmp_path)
    again = policy.load(tmp_path).params
    for path, array in as_floats(model).params.items():
        np.testing.assert_array_equal(again[path], array, err_msg=path)


def test_modules_that_start_fresh_are_quantised(directory):
    model = policy.load(
        directory, sections={"multi_token_prediction": {"depth": 1}}, base_weights="nf4", seed=4
    )
    path = "mtp.layer.mixer.o_proj"
    drawn = model.graph.init(4, [path])[path]
    assert path in model.newly_initialized
    np.testing.assert_array_equal(model.params[path].qvalue, drawn.qvalue)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_a_program_of_a_gradient_has_no_floats_of_a_stack(remat):
    """Sizes are prime, so that no other array has as many numbers as a stacked weight."""
    config = families.read(
        short(
            "Qwen3",
            hidden_size=53,
            intermediate_size=59,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    )
    runtime = Runtime(remat=remat)
    model = policy.create(config, base_weights="nf4", runtime=runtime)
    base = {path: model.params[path] for path in model.graph.quantized}
    others = {path: model.params[path] for path in model.params.keys() - base.keys()}
    tokens = jnp.ones((2, 7), jnp.int32)

    def loss(others, base):
        step = modes.make_step(tokens)
        return model.graph.logprobs(others | base, tokens, step, 1.0)[0].sum()

    def stacks(compiled) -> set[str]:
        arrays = re.findall(r"(?:f32|bf16|f16)\[([\d,]+)\]", compiled.as_text())
        sizes = {array.qvalue.size for array in base.values()}
        return {each for each in arrays if np.prod([*map(int, each.split(","))]) in sizes}

    gradient = jax.jit(jax.grad(loss))
    assert not stacks(gradient.lower(others, base).compile())
    floats = {path: dequantised(array) for path, array in base.items()}
    assert stacks(gradient.lower(others, floats).compile())  # the measure sees them


@pytest.mark.parametrize(
    ("runtime", "mesh", "named"),
    [
        (Runtime(quantization="int8"), None, "model.quantization"),
        (Runtime(), {"explicit": True}, "mesh.shard_mode: explicit"),
    ],
)
def test_products_that_cannot_read_them_are_refused(runtime, mesh, named):
    config = families.read(short("Llama"))
    devices = layout({"fsdp": 1}, devices=jax.devices()[:1])
    devices = dataclasses.replace(devices, **(mesh or {}))
    with pytest.raises(Conflict, match=named):
        policy.create(config, runtime=runtime, mesh=devices, base_weights="nf4")


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_four_bits_count_half_a_byte(dtype):
    assert shard_bytes(jax.ShapeDtypeStruct((3, 5), dtype)) == 8
