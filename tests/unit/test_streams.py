"""Hyper-connections switched on for decoders of every form: in all ways of computing them the
numbers are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import by_kind, configuration, random_model, short, tokens

import policy
from policy import families, modes
from policy.cache import cache as caches
from policy.config import HyperConnections, Runtime
from policy.fields.config_fields import UnsupportedModel
from policy.mesh.sharding import layout
from policy.model import Graph
from policy.modes import make_step
from policy.ops.dropout import Dropout, row_seeds

# Norms on one side and on both, a parallel block, layer norms with biases, no residual at all,
# hybrids, experts; and the options.
KINDS = {
    "Llama": {"streams": 4, "norm_weight": True},
    "DeepseekV3": {"streams": 2, "reduce": "head", "sinkhorn_iterations": 3},
    "Gemma2": {"streams": 3, "variant": "lite"},
    "Qwen3Next": {"streams": 2, "norm_weight": True, "reduce": "head"},
    "ParallelRMS": {"streams": 4, "variant": "lite", "reduce": "head"},
    "GPT2": {"streams": 1},
}
ROWS = tokens(2, 8)


def extended(kind, **section):
    return short(kind) | {"duet": {"hyper_connections": section}}


MODELS = {}


def model_of(kind):
    if kind not in MODELS:
        MODELS[kind] = random_model(families.read(extended(kind, **KINDS[kind])))
    return MODELS[kind]


def every(*quick):
    """All kinds, of which those that are not `quick` are left out of the default run."""
    return pytest.mark.parametrize("kind", by_kind(KINDS, always=quick))


def gradients(model, **runtime):
    """(loss, gradients) of a small batch of two packed documents a row, with dropout."""
    graph = Graph(model.config, Runtime(**runtime), model.graph.layout)
    segments = np.array([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2])
    step = dataclasses.replace(
        make_step(ROWS, None, segments), dropout=Dropout(row_seeds(0, 0, 2), rate=0.2)
    )
    loss = lambda params: graph.logprobs(params, ROWS, step, 1.0)[0].sum()  # noqa: E731
    loss, grads = jax.jit(jax.value_and_grad(loss))(model.params)
    return float(loss), {path: np.asarray(grad) for path, grad in grads.items()}


@every()
def test_scanned_and_rematerialised_layers_equal_unrolled_ones_and_every_weight_learns(kind):
    model = model_of(kind)
    loss, grads = gradients(model)
    other, unrolled = gradients(model, scan=False, remat="none")
    assert abs(loss - other) < 1e-4
    largest = max(np.abs(grad).max() for grad in grads.values())
    for path, grad in grads.items():
        np.testing.assert_allclose(
            grad, unrolled[path], atol=1e-5 * largest, rtol=1e-4, err_msg=path
        )
    for path in grads:
        if ".mapping." in path or path.startswith("streams."):
            for name, part in parts(path, grads[path], model.config.hyper_connections).items():
                assert idle(path, name, model.config) or np.abs(part).max() > 1e-7 * largest, (
                    path,
                    name,
                )


def idle(path, part, config):
    """What makes no difference: mixing one stream, and reading it before a norm; reading and mixing
    streams that are still equal; and mixing before a sum, as rows sum to one."""
    stack = config.stacks[int(path.split(".")[1])] if path.startswith("stacks.") else None
    first = path.startswith("stacks.0.layers.0.mixer_residual") and stack.repeats == 1
    last = (
        path.startswith(f"stacks.{len(config.stacks) - 1}.layers.0.feed_forward_residual")
        and stack.repeats == 1
    )
    last = last and len(stack.pattern) == 1 and config.hyper_connections.reduce == "sum"
    return (part != "write" and (first or config.hyper_connections.streams == 1)) or (
        part == "mix" and last
    )


def parts(path, grad, options):
    """The gradients of the parts of a mapping: reading, writing, mixing."""
    if path.startswith("streams.") or path.endswith("norm"):
        return {"write": grad}
    cuts = [1, 2] if path.endswith("scale") else [options.streams, 2 * options.streams]
    return dict(zip(("read", "write", "mix"), np.split(grad, cuts, axis=-1), strict=True))


@pytest.mark.slow
@every("Qwen3Next")
def test_prefill_and_decoding_equal_the_full_forward(kind):
    model = model_of(kind)
    graph, runtime = model.graph, model.graph.runtime
    expected = np.asarray(model.logits(ROWS))

    @jax.jit
    def run(params):
        kv = caches.create(graph.config, 2, 9, jnp.float32, scan=True)
        with graph.precision():
            decoder = graph.decoder(params)
            kv = modes.prefill(decoder, ROWS[:, :6], make_step(ROWS[:, :6]), kv, runtime)
            result = []
            for t in (6, 7):
                step = modes.next_token_step(jnp.full(2, t), jnp.ones(2, bool))
                states, kv = modes.next_token_states(decoder, ROWS[:, t], step, kv, runtime)
                result.append(modes.logits(decoder, states, runtime))
        return jnp.stack(result, 1)

    np.testing.assert_allclose(run(model.params), expected[:, 6:], atol=5e-5, rtol=0)


@every(*KINDS)
def test_saving_and_loading_is_the_identity(kind, tmp_path):
    model = model_of(kind)
    policy.save(model, tmp_path)
    back = policy.load(tmp_path)
    assert back.config.hyper_connections == model.config.hyper_connections
    assert back.params.keys() == model.params.keys()
    for path, array in model.params.items():
        np.testing.assert_array_equal(
            np.asarray(back.params[path]), np.asarray(array), err_msg=path
        )


@pytest.mark.slow
def test_a_fresh_decoder_starts_as_the_one_without():
    """With scales of 0 exactly, up to the eps of the norms: the streams are equal, and a norm takes
    their number out."""
    plain = policy.create(families.read(short("Llama")))
    more = policy.create(families.read(extended("Llama", streams=4)))
    fresh = {path: plain.params.get(path, array) for path, array in more.params.items()}
    more.params = {
        path: array * 0 if path.endswith("mapping.scale") else array
        for path, array in fresh.items()
    }
    expected = np.asarray(plain.logits(ROWS))
    np.testing.assert_allclose(more.logits(ROWS), expected, atol=1e-3, rtol=0)
    more.params = fresh
    assert (
        1e-4 < np.abs(np.asarray(more.logits(ROWS)) - expected).max() < 0.3 * np.abs(expected).max()
    )


def test_recorded_hidden_states_are_those_of_the_streams():
    config = families.read(extended("Llama", streams=3))
    graph = Graph(config, Runtime(record=("hidden", "activations")), layout({"fsdp": 1}))
    params = random_model(config).params
    segments = np.array([[1] * 8, [1] * 5 + [0] * 3])
    aux = jax.jit(lambda p: graph.logprobs(p, ROWS, make_step(ROWS, None, segments), 1.0)[2])(
        params
    )
    (hidden,), (activations,) = (
        aux.by_layer("hidden").values(),
        aux.by_layer("activations").values(),
    )
    assert hidden.shape == (2, *ROWS.shape, 3, config.hidden_size)
    real = np.asarray(hidden)[:, segments != 0]
    np.testing.assert_allclose(activations.mean, real.mean((1, 2, 3)), atol=1e-5)
    np.testing.assert_allclose(activations.std, real.std((1, 2, 3)), rtol=1e-5)


def test_the_streams_are_replicated_and_the_mapping_is_spread_along_the_hidden_size():
    graph = Graph(
        families.read(extended("Llama", norm_weight=True, reduce="head")),
        Runtime(),
        layout({"fsdp": 1}),
    )
    axes = {
        path: axes for path, axes in graph.axes.items() if "mapping" in path or "streams" in path
    }
    assert axes["stacks.0.layers.0.mixer_residual.mapping.weight"] == (
        "layers",
        None,
        "embed",
        None,
    )
    assert axes["streams.head.weight"] == (None, "embed", None)
    assert {axis for names in axes.values() for axis in names} == {"layers", "embed", "norm", None}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"streams": 0}, "streams"),
        ({"stream": 2}, "unknown keys stream"),
        ({"variant": "dense"}, "variant: 'dense' is none of sinkhorn, lite"),
        ({"streams": 6, "variant": "lite"}, "at most 5"),
        ({"sinkhorn_iterations": 0}, "sinkhorn_iterations"),
    ],
)
def test_wrong_options_are_refused(section, message):
    with pytest.raises(UnsupportedModel, match=message):
        families.read(configuration("Llama", duet={"hyper_connections": section}))


def test_without_the_section_there_is_nothing():
    assert families.read(configuration("Llama")).hyper_connections is None
    assert (
        families.read(configuration("Llama", duet={"hyper_connections": {}})).hyper_connections
        == HyperConnections()
    )
    with pytest.raises(UnsupportedModel, match="unknown sections towers"):
        families.read(configuration("Llama", duet={"towers": {}}))
