"""What each remat policy keeps for the backward pass and where, written out by hand; and that none
changes a gradient.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from oracles import by_kind, configuration, random_model, tokens

from policy import families, remat
from policy.config import Runtime
from policy.model import Graph
from policy.modes import make_step
from policy.ops.dropout import Dropout, row_seeds

QKV = {"query_proj", "key_proj", "value_proj"}
MINIMAL = QKV | {"mla_q", "mla_kv", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"}
# Policy -> (kept in device memory, kept in host memory).
KEEPS = {
    "full": (set(), set()),
    "minimal": (MINIMAL, set()),
    "minimal_with_context": (MINIMAL | {"context"}, set()),
    "minimal_flash": (MINIMAL | {"context"}, set()),
    "minimal_with_quantization": (MINIMAL, set()),
    "minimal_with_context_and_quantization": (MINIMAL | {"context"}, set()),
    "save_dot_with_context_except_mlp": (QKV | {"context", "out_proj"}, set()),
    "save_dot_except_mlpwi": (QKV | {"out_proj", "mlpwo"}, set()),
    "save_dot_except_mlp": (QKV | {"out_proj"}, set()),
    "save_qkv_proj": (QKV, set()),
    "save_out_proj": ({"out_proj"}, set()),
    "qkv_proj_offloaded": (set(), QKV),
    "minimal_offloaded": (set(), MINIMAL),
}
# What of these a kind of layer has and its backward pass reads, for jax keeps nothing else: a dense
# feed-forward's `mlpwo` is read only by a norm behind it, those of experts by the gradient of the
# router's weights.
READ = {
    "Llama": MINIMAL - {"mla_q", "mla_kv", "mlpwo"} | {"context"},
    "Gemma2": MINIMAL - {"mla_q", "mla_kv"} | {"context"},
    "DeepseekV3": MINIMAL | {"context"},
}
CUSTOM = (("key_proj", "offload"), ("mlpwi_0", "device"), ("mlpwi_1", "remat"))
KINDS = {
    "Llama": {"num_hidden_layers": 2},  # grouped queries
    "Gemma2": {
        "num_hidden_layers": 2
    },  # norms behind both parts: `mlpwo` is read by the backward pass
    "DeepseekV3": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "Qwen3Next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@functools.cache
def model_of(kind):
    return random_model(families.read(configuration(kind, **KINDS[kind])), seed=2)


def residuals(model, capsys, **runtime) -> list[tuple[str, bool, str | None]]:
    """(shape, in host memory, name or None) of everything kept for the backward pass besides the
    arguments. Values in host memory have no name."""
    graph = Graph(model.config, Runtime(**runtime), model.graph.layout)
    row = jnp.asarray(tokens(2, 12))

    def hidden(params):
        return graph.decoder(params)(row, make_step(row), None, graph.runtime)[0].sum()

    capsys.readouterr()
    print_saved_residuals(hidden, model.params)
    result = []
    for line in capsys.readouterr().out.splitlines():
        shape, source = line.split(" ", 1)
        if not source.startswith("from the argument"):
            name = re.match(r"named '(\w+)'", source)
            result.append((shape.replace("<host>", ""), "<host>" in shape, name and name[1]))
    return result


def kept(model, capsys, **runtime) -> tuple[set[str], list[str]]:
    """(names of what the unrolled decoder keeps in device memory, shapes of what it keeps in host
    memory)."""
    result = residuals(model, capsys, scan=False, **runtime)
    return {name for _, _, name in result if name}, sorted(
        shape for shape, host, _ in result if host
    )


def shapes_of(names, model, capsys) -> list[str]:
    tensors = tuple((name, "device") for name in names) + (("decoder_layer_input", "remat"),)
    result = residuals(model, capsys, scan=False, remat="custom", remat_tensors=tensors)
    return sorted(shape for shape, _, name in result if name)


@pytest.mark.parametrize("policy", remat.POLICIES)
@pytest.mark.parametrize("kind", by_kind(READ, always=("Llama",)))
def test_each_policy_keeps_what_the_table_says(kind, policy, capsys):
    model, (device, host) = model_of(kind), KEEPS[policy]
    assert kept(model, capsys, remat=policy) == (
        device & READ[kind],
        shapes_of(host, model, capsys),
    )


def test_the_table_has_every_policy_and_the_aliases_are_equal():
    assert KEEPS.keys() == remat.POLICIES.keys() and ("none", *KEEPS, "custom") == remat.NAMES
    assert remat.POLICIES["minimal_flash"] == remat.POLICIES["minimal_with_context"]
    for name, saved in remat.POLICIES.items():
        assert not {*saved.device, *saved.host} - remat.TENSORS.keys(), name
        assert ("quantization" in saved.device) == ("quantization" in name)


def test_custom_puts_each_tensor_where_it_is_told(capsys):
    model = model_of("Llama")
    keys, inputs = ["f32[2,2,12,8]"] * 2, ["f32[2,12,32]"] * 2
    assert kept(model, capsys, remat="custom", remat_tensors=CUSTOM) == (
        {"decoder_layer_input", "mlpwi_0"},
        keys,
    )
    tensors = (("decoder_layer_input", "offload"), ("context", "device"))
    assert kept(model, capsys, remat="custom", remat_tensors=tensors) == ({"context"}, inputs)
    # The layer inputs that are in host memory are not in device memory as well.
    result = residuals(model, capsys, remat="custom", remat_tensors=tensors)
    assert [host for shape, host, _ in result if shape == "f32[2,2,12,32]"] == [True]


@pytest.mark.parametrize("policy", ["minimal", "minimal_offloaded"])
def test_scanned_layers_keep_the_same_stacked(policy, capsys):
    model = model_of("Llama")
    one = shapes_of(MINIMAL, model, capsys)[::2]  # of one layer of the two
    result = [
        (shape, host)
        for shape, host, _ in residuals(model, capsys, remat=policy)
        if shape.startswith("f32[2,2,")
    ]
    stacked = [(shape.replace("f32[", "f32[2,"), policy == "minimal_offloaded") for shape in one]
    assert sorted(result) == sorted(
        [*stacked, ("f32[2,2,12,32]", False)]
    )  # and the inputs of the layers


def test_none_keeps_no_value_that_another_gives_number_by_number(capsys):
    """Of each of the two layers: the input, what the norms sum, queries, keys and values before
    their rotation, scores with their maxima and sums, attention, its projection, gate and up."""
    rows, layer = "f32[2,2,12", "f32[2,24,"
    expected = [f"{rows},32]", *[f"{rows}]"] * 2]
    expected += [f"{layer}{width}]" for width in (32, 16, 16, 32, 48, 48)]
    expected += ["f32[2,2,2,2,12,12]", *["f32[2,2,2,2,12]"] * 2, "f32[2,2,4,12,8]"]
    stacked = [
        shape
        for shape, host, _ in residuals(model_of("Llama"), capsys, remat="none")
        if shape.startswith((rows, layer, "f32[2,2,2", "f32[2,2,4")) and not host
    ]
    assert sorted(stacked) == sorted(expected)


@pytest.mark.parametrize("policy", ["none", "minimal_flash"])
def test_attention_by_blocks_is_kept_once(policy, capsys):
    """Its result and the logarithms of its sums, of the two layers; with `none` the queries are
    those before their rotation. 528 tokens are 11 blocks, without padding."""
    model = model_of("Llama")
    graph = Graph(model.config, Runtime(remat=policy, skip_blocks=True), model.graph.layout)
    row = jnp.asarray(tokens(1, 528))

    def hidden(params):
        return graph.decoder(params)(row, make_step(row), None, graph.runtime)[0].sum()

    capsys.readouterr()
    print_saved_residuals(hidden, model.params)
    shapes = [line.split(" ", 1)[0] for line in capsys.readouterr().out.splitlines()]
    assert shapes.count("f32[2,1,2,2,528,8]") == 1 and shapes.count("f32[2,1,2,2,528]") == 1
    assert shapes.count("f32[2,1,4,528,8]") == (policy != "none")


@pytest.mark.slow
def test_every_name_is_the_name_of_some_tensor(capsys):
    every, result = tuple((name, "device") for name in remat.TENSORS), set()
    for kind in KINDS:
        result |= kept(model_of(kind), capsys, remat="custom", remat_tensors=every)[0]
    assert remat.TENSORS.keys() - result == {"quantization"}


def gradients(model, dropout=None, **runtime):
    graph = Graph(model.config, Runtime(**runtime), model.graph.layout)
    rng = np.random.default_rng(1)
    row, segments = jnp.asarray(tokens(2, 14)), jnp.asarray([[1] * 5 + [2] * 9, [1] * 11 + [0] * 3])
    weight = jnp.asarray(rng.normal(size=row.shape), jnp.float32)
    step = make_step(row, None, segments)
    if dropout:
        step = dataclasses.replace(step, dropout=Dropout(row_seeds(0, 0, 2), rate=dropout))

    def loss(params):
        logp, entropy, _ = graph.logprobs(params, row, step, 0.8)
        return jnp.sum(weight * logp + entropy)

    return jax.jit(jax.grad(loss))(model.params)


def assert_equal(actual, expected, what):
    largest = max(float(jnp.abs(each).max()) for each in expected.values())
    for path, want in expected.items():
        scale = max(1e-3 * largest, float(jnp.abs(want).max()))
        np.testing.assert_allclose(
            np.asarray(actual[path]) / scale,
            np.asarray(want) / scale,
            atol=1e-5,
            err_msg=f"{path}, {what}",
        )


FAST = [
    ("none", True),
    ("minimal_offloaded", True),
    ("minimal_with_context", False),
    ("custom", True),
]
# Every policy, scanned and unrolled in turns, and the other way round for every other kind of
# decoder; dropout too.
POLICIES = remat.NAMES
TURNS = [
    [(policy, bool((i + k) % 2)) for i, policy in enumerate(POLICIES)] for k in range(len(KINDS))
]


@pytest.mark.parametrize(
    ("kind", "cases", "dropout"),
    [
        pytest.param("Llama", FAST, 0.3, marks=pytest.mark.slow),
        *(
            pytest.param(kind, TURNS[k], 0.3 * (k % 2), marks=pytest.mark.slow)
            for k, kind in enumerate(KINDS)
        ),
    ],
)
def test_gradients_are_those_of_no_remat(kind, cases, dropout):
    """With chunked queries, two documents in a row and padding; with dropout, all draw the same
    bits."""
    model = model_of(kind)
    expected = gradients(model, dropout, remat="none", scan=False, attention_chunk=5)
    for policy, scan in cases:
        tensors = CUSTOM + (("decoder_layer_input", "offload"),) if policy == "custom" else ()
        result = gradients(
            model, dropout, remat=policy, remat_tensors=tensors, scan=scan, attention_chunk=5
        )
        assert_equal(result, expected, (policy, scan))


@pytest.mark.parametrize(
    ("policy", "tensors", "said"),
    [
        ("minimum", (), "unknown policy 'minimum'; choose one of none, full, minimal"),
        ("minimal", CUSTOM, "minimal takes no tensors"),
        (
            "custom",
            (("qkv_proj", "device"),),
            "unknown tensor 'qkv_proj'; choose among decoder_layer_input",
        ),
        ("custom", (("mlpwo", "disk"),), "mlpwo: 'disk' must be device, offload or remat"),
    ],
)
def test_what_does_not_exist_is_refused(policy, tensors, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        remat.saved(policy, tensors)
