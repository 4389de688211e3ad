"""Every decoder family in policy/families/, listed from the folder, passes the same checks. Needs
no torch.

tests/contracts/golden/ holds the tree of weights of a tiny model of each kind. A change of those
files changes checkpoints; to write them again after a change that is meant:

    DUET_WRITE_GOLDEN=1 python -m pytest tests/contracts/test_families.py -k tree
"""

import ast
import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from oracles import KINDS, by_kind, random_model, short, tokens

import policy
from policy import families, modes
from policy.cache import cache as caches
from policy.cache.step import Step
from policy.config import DenseAndExperts, LayerSpec, Moe, Router, Runtime
from policy.fields.config_fields import UnsupportedModel
from policy.heads import head
from policy.huggingface import sources
from policy.mesh.sharding import layout
from policy.model import Graph
from policy.modes import make_step

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


# For tests that compile.
of_representative_kinds = pytest.mark.parametrize("kind", by_kind(), scope="module")


@pytest.fixture(scope="module")
def model(kind):
    return random_model(families.read(short(kind)))


def test_every_family_is_put_through_these_checks():
    assert {families.read(short(kind)).family for kind in KINDS} == set(families.known())


@pytest.mark.parametrize("name", families.known())
def test_no_two_families_claim_a_configuration(name):
    family = families.get(name)
    assert family.ARCHITECTURES or family.MODEL_TYPES
    for other in families.known():
        if other != name:
            assert not set(family.ARCHITECTURES) & set(families.get(other).ARCHITECTURES)
            assert not set(family.MODEL_TYPES) & set(families.get(other).MODEL_TYPES)


def code_words(source: str) -> set[str]:
    """Identifiers, and the words of texts that are not docstrings."""
    tree, result = ast.parse(source), set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documents = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, documented)
    }
    for node in ast.walk(tree):
        for text in (getattr(node, field, None) for field in ("id", "attr", "value", "module")):
            if isinstance(text, str) and text not in documents:
                result |= set(re.findall(r"\w+", text))
    return result


def test_no_family_is_named_in_the_code_outside_its_own_file():
    own = {
        n: {n, *families.get(n).ARCHITECTURES, *families.get(n).MODEL_TYPES}
        for n in families.known()
    }
    everything = set().union(*own.values()) - {"default", "simple"}
    assert code_words("if family == 'gemma2': pass") & everything == {"gemma2"}
    for file in sorted(Path(policy.__file__).parent.rglob("*.py")):
        # A family may build on the module of another.
        mine = (
            own.get(file.stem, set()) | set(families.known())
            if file.parent.name == "families"
            else set()
        )
        scalings = {"llama3"}  # a rotary scaling of configurations
        # Of families that are equally near to an unknown model, the plainest is named.
        plainest = {"llama"} if file.stem == "nearest" else set()
        # GGUF has names of its own for what its files describe.
        described = everything if file.parent.name == "gguf" else set()
        others = everything - mine - scalings - plainest - described
        assert not code_words(file.read_text()) & others, file


def test_a_family_is_known_by_architecture_or_by_model_type(kind):
    hf = short(kind)
    expected = families.find(hf).__name__
    assert families.find({"architectures": hf["architectures"]}).__name__ == expected
    if families.find(hf).MODEL_TYPES:
        assert families.find({"model_type": hf["model_type"]}).__name__ == expected


def test_reading_gives_a_frozen_configuration_with_its_layers(kind):
    hf = short(kind)
    config = families.read(hf)
    assert hash(config) == hash(families.read(dict(hf))) and config == families.read(dict(hf))
    assert json.loads(config.hf) == hf
    assert len(config.layers) == (
        hf["num_hidden_layers"] if "num_hidden_layers" in hf else hf["n_layer"]
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].required], scope="module")
def test_a_required_key_that_lacks_is_named(kind):
    for key in KINDS[kind].required:
        hf = short(kind)
        del hf[key]
        with pytest.raises(UnsupportedModel, match=key):
            families.read(hf)


def test_the_tree_of_weights_is_the_golden_one(model, kind):
    graph = model.graph
    tree = {
        path: {"shape": list(graph.shapes[path].shape), "axes": list(graph.axes[path])}
        for path in sorted(graph.paths)
    }
    file = GOLDEN / f"{kind}.json"
    if os.environ.get("DUET_WRITE_GOLDEN"):
        lines = (f" {json.dumps(path)}: {json.dumps(entry)}" for path, entry in tree.items())
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert tree == json.loads(file.read_text())


def test_the_tree_does_not_depend_on_how_it_is_computed(model):
    scanned = model.graph
    unrolled = Graph(model.config, Runtime(scan=False), layout({"fsdp": 1}))
    assert scanned.runtime.scan and not unrolled.runtime.scan
    assert scanned.shapes == unrolled.shapes and scanned.axes == unrolled.axes


def router_of(layer: LayerSpec) -> Router | None:
    part = (
        layer.feed_forward.experts
        if isinstance(layer.feed_forward, DenseAndExperts)
        else layer.feed_forward
    )
    return part.router if isinstance(part, Moe) else None


def test_constants_keep_their_type_and_are_not_trained(kind):
    graph = Graph(families.read(short(kind)), Runtime("bfloat16", "bfloat16"), layout({"fsdp": 1}))
    biased = any(
        (router := router_of(layer)) and router.correction_bias for layer in graph.config.layers
    )
    assert bool(graph.untrained) == (biased or any(layer.scalar for layer in graph.config.layers))
    for path, shape in graph.shapes.items():
        constant = jnp.int32 if path.endswith("token_experts") else jnp.float32
        assert shape.dtype == (constant if path in graph.untrained else jnp.bfloat16), path


def test_saving_and_loading_is_the_identity(model, tmp_path):
    policy.save(model, tmp_path)
    back = policy.load(tmp_path)
    assert dataclasses.replace(back.config, hf="") == dataclasses.replace(model.config, hf="")
    assert back.params.keys() == model.params.keys()
    for path, array in model.params.items():
        np.testing.assert_array_equal(
            np.asarray(back.params[path]), np.asarray(array), err_msg=path
        )


ROWS, WIDTH = 8, 56


def logits_of(model, rows, segments=None) -> np.ndarray:
    """Logits of a few short rows, always computed in one shape, so that the tests of a family share
    one program."""
    rows = np.asarray(rows)
    segments = np.ones_like(rows) if segments is None else segments
    pad = ((0, ROWS - rows.shape[0]), (0, WIDTH - rows.shape[1]))
    logits = np.asarray(model.logits(np.pad(rows, pad), segments=np.pad(segments, pad)))
    assert np.isfinite(logits).all()
    return logits[: rows.shape[0], : rows.shape[1]]


@of_representative_kinds
def test_logits_are_causal_and_padding_is_not_seen(model):
    rows = np.repeat(tokens(1, 10), 3, axis=0)
    rows[1:, 7:] = (rows[1:, 7:] + 1) % 160
    segments = np.ones_like(rows)
    segments[2, 7:] = 0
    plain, changed, padded = logits_of(model, rows, segments)
    np.testing.assert_allclose(changed[:7], plain[:7], atol=1e-5, rtol=0)
    np.testing.assert_allclose(padded[:7], plain[:7], atol=1e-5, rtol=0)
    assert np.abs(changed[7:] - plain[7:]).max() > 0.1


@of_representative_kinds
def test_packed_and_padded_documents_equal_the_documents_alone(model, kind):
    """One batch: three documents packed twice into one row (padding last, padding first), and each
    alone, padded on the right and on the left.
    """
    width, lengths = WIDTH, (9, 1, 14)
    documents = [tokens(1, n, seed=n)[0] for n in lengths]
    rows, segments = np.zeros((ROWS, width), int), np.zeros((ROWS, width), int)
    for number, document in enumerate(documents, 1):
        n, at = len(document), sum(lengths[: number - 1])
        first, again = width - 2 * sum(lengths), sum(lengths) + at
        packed = (
            (0, at, number),
            (0, again, 3 + number),
            (1, first + at, number),
            (1, first + again, 3 + number),
        )
        for row, start, segment in (*packed, (1 + number, 0, 1), (4 + number, width - n, 1)):
            rows[row, start : start + n], segments[row, start : start + n] = document, segment
    logits, tolerance = logits_of(model, rows, segments), KINDS[kind].generator
    for number in range(1, 4):
        expected = logits[1 + number][segments[1 + number] != 0]
        inside = [(row, copy + number) for row in (0, 1) for copy in (0, 3)]
        for row, segment in (*inside, (4 + number, 1)):
            result = logits[row][segments[row] == segment]
            np.testing.assert_allclose(
                result, expected, atol=tolerance, rtol=0, err_msg=f"row {row}"
            )


@of_representative_kinds
def test_prefill_and_decoding_equal_the_full_forward(model, kind):
    """Two rows of different length, prefilled with their first tokens in two calls, then fed one
    token at a time."""
    rows, lengths, start = tokens(2, 10), np.array([10, 8]), 6
    graph, runtime = model.graph, model.graph.runtime
    expected = logits_of(model, rows)

    @jax.jit
    def prefill(params, tokens_BT, first, kv):
        step = make_step(tokens_BT)
        with graph.precision():
            return modes.prefill(
                graph.decoder(params),
                tokens_BT,
                Step(first + step.positions, step.segments),
                kv,
                runtime,
            )

    @jax.jit
    def decode(params, tokens_B, lengths_B, active_B, kv):
        with graph.precision():
            step = modes.next_token_step(lengths_B, active_B)
            decoder = graph.decoder(params)
            states, kv = modes.next_token_states(decoder, tokens_B, step, kv, runtime)
            return modes.logits(decoder, states, runtime), kv

    kv = caches.create(graph.config, 2, 12, jnp.float32, scan=True)
    for first in range(0, start, 3):
        kv = prefill(model.params, rows[:, first : first + 3], first, kv)
    for t in range(start, 10):
        active = t < lengths
        logits, kv = decode(model.params, rows[:, t], np.full(2, t), active, kv)
        np.testing.assert_allclose(
            np.asarray(logits)[active], expected[active, t], atol=KINDS[kind].generator, rtol=0
        )


@of_representative_kinds
def test_log_probabilities_are_those_of_the_logits(model):
    row = tokens(2, 10)
    logits = logits_of(model, row).astype(np.float64) / 0.7
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logp, entropy = (np.asarray(a) for a in model.logprobs(row, temperature=0.7))
    expected = np.take_along_axis(log_p[:, :-1], row[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(logp[:, 1:], expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(
        entropy[:, 1:], -(np.exp(log_p) * log_p).sum(-1)[:, :-1], atol=1e-5, rtol=0
    )
    assert not logp[:, 0].any() and not entropy[:, 0].any()
    assert head.CHUNK_LOGITS >= 160


@of_representative_kinds
def test_router_statistics_count_the_choices(model):
    sparse = [router for layer in model.config.layers if (router := router_of(layer))]
    if not sparse:
        pytest.skip("no mixture of experts")
    row = jnp.asarray(tokens(2, 10))
    segments = jnp.ones_like(row).at[1, 6:].set(0)
    aux = jax.jit(lambda p: model.graph.logprobs(p, row, make_step(row, None, segments), 1.0)[2])(
        model.params
    )
    counts = [np.asarray(result.counts) for result in aux.by_layer("routing").values()]
    assert sum(len(each) for each in counts) == len(sparse)
    for each in counts:
        assert (each.sum(-1) == 16 * sparse[0].experts_per_token).all()


@pytest.mark.slow
def test_presets_of_released_models_have_their_number_of_parameters():
    published = tiny.PUBLISHED
    assert set(sources.presets()) == {
        *published,
        "tiny-deepseek",
        "tiny-deepseek-v32",
        "tiny-vl",
        "tiny-omni",
    }
    for name, count in published.items():
        assert Graph(sources.preset(name), Runtime(), layout({"fsdp": 1})).parameters == count, name
