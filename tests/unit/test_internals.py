"""Intermediate values: the same scanned and unrolled, padding left out, and what a stage logs of
them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from learners import batch, begin, stage
from oracles import KINDS, by_kind, configuration, random_model, short, tokens

from policy import families
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.model import Graph
from policy.modes import make_step
from rl.training.diagnostics import PARTS, not_finite, part

RECORD = ("hidden", "mixed", "activations")


def graph_of(kind, **runtime):
    mesh = layout({"fsdp": 1}, devices=jax.devices()[:1])
    return Graph(families.read(short(kind)), Runtime(**runtime), mesh)


@pytest.mark.parametrize("kind", by_kind())
def test_intermediate_values_have_the_same_types_scanned_and_unrolled(kind):
    """For every family, what is recorded or not: the same tree, shapes and dtypes; one entry for
    each layer of each pattern.
    """
    rows = jnp.zeros((2, 8), jnp.int32)
    for record in ((), RECORD):
        graphs = [
            graph_of(kind, scan=scan, remat=remat, record=record)
            for scan, remat in ((True, "full"), (False, "none"))
        ]
        scanned, unrolled = (
            jax.eval_shape(
                lambda params, graph=graph: graph.logprobs(params, rows, make_step(rows), 1.0)[2],
                graph.shapes,
            )
            for graph in graphs
        )
        assert jax.tree.structure(scanned) == jax.tree.structure(unrolled)
        assert [(a.shape, a.dtype) for a in jax.tree.leaves(scanned)] == [
            (a.shape, a.dtype) for a in jax.tree.leaves(unrolled)
        ]
        stacks = dict(enumerate(graphs[0].config.stacks))
        assert set(scanned.layers) == {
            f"stacks.{s}.layers.{i}"
            for s, stack in stacks.items()
            for i in range(len(stack.pattern))
        }
        for path, layer in scanned.layers.items():
            stack = stacks[int(path.split(".")[1])]
            repeats, spec = stack.repeats, stack.pattern[int(path.split(".")[3])]
            assert (layer.activations is not None) == (layer.hidden is not None) == bool(record)
            assert (layer.mixed is not None) == (bool(record) and spec.mixer is not None)
            assert {a.shape[0] for a in jax.tree.leaves(layer)} <= {repeats}


@pytest.mark.parametrize("kind", by_kind(always=("Llama",)))
def test_what_nobody_reads_changes_no_program(kind):
    """The gradient of log-probabilities is the same program, line by line, with and without a
    record of mixers."""
    rows, texts = jnp.zeros((2, 8), jnp.int32), []
    for record in ((), ("mixed",)):
        graph = graph_of(kind, record=record)
        step = jax.grad(
            lambda p, g=graph: g.logprobs(p, rows, make_step(rows), 1.0)[0].sum(), allow_int=True
        )
        texts.append(jax.jit(step).lower(graph.shapes).as_text())
    assert texts[0] == texts[1]


@functools.cache
def hybrid():
    """Two stacks, one of them with a pattern of two layers and experts."""
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    return random_model(families.read(configuration("Qwen3Next", **layers)), seed=4)


@pytest.mark.slow
def test_activations_are_those_of_the_hidden_states_without_padding():
    model, rows = hybrid(), jnp.asarray(tokens(2, 9))
    segments = jnp.asarray([[1] * 4 + [2] * 5, [0] * 2 + [1] * 3 + [0] * 4])
    result = []
    for how in ({}, {"scan": False, "remat": "none"}):
        graph = Graph(model.config, Runtime(record=RECORD, **how), model.graph.layout)
        run = jax.jit(
            lambda p, graph=graph: graph.logprobs(p, rows, make_step(rows, None, segments), 1.0)[2]
        )
        result.append(run(model.params))
    for path, layer in result[0].layers.items():
        for r, hidden in enumerate(np.asarray(layer.hidden, np.float64)):
            values = hidden[np.asarray(segments) != 0]
            np.testing.assert_allclose(layer.activations.mean[r], values.mean(), atol=1e-6)
            np.testing.assert_allclose(layer.activations.std[r], values.std(), rtol=1e-5)
            assert float(layer.activations.fraction_zero[r]) == (values == 0).mean()
        for one, other in zip(
            jax.tree.leaves(layer), jax.tree.leaves(result[1].layers[path]), strict=True
        ):
            np.testing.assert_allclose(one, other, atol=2e-5)
    # Layers in their order: those of a pattern take turns.
    order = np.stack(
        [result[0].layers[f"stacks.0.layers.{i}"].hidden[r] for r in range(2) for i in range(2)]
    )
    np.testing.assert_allclose(model.hidden_states(rows, segments=segments), order, atol=2e-5)
    assert [model.config.layer_numbers(f"stacks.0.layers.{i}") for i in range(2)] == [
        [0, 2],
        [1, 3],
    ]


@pytest.mark.slow
def test_a_stage_logs_them_layer_by_layer_for_any_micro_batch():
    model, data = learners.experts(), batch()
    segments = np.asarray(data.segments)
    graph = model.graph.with_runtime(record=RECORD)
    aux = jax.jit(
        lambda p: graph.logprobs(p, data.tokens, make_step(data.tokens, None, segments), 1.0)[2]
    )(model.params)
    values = np.asarray(aux.layers["stacks.0.layers.0"].hidden[0], np.float64)[segments != 0]
    for micro_batch in (None, 3):
        trainer, state = begin(model, stage(diagnostics=True, micro_batch=micro_batch))
        _, metrics = trainer.update(state, data)
        expected = {"mean": values.mean(), "std": values.std(), "zeros": 0.0}
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[f"activation/{name}/0"], value, rtol=1e-4, atol=1e-6)
        parts = {
            name: float(value) for name, value in metrics.items() if name.startswith("grad_norm/")
        }
        assert parts.keys() == {
            f"grad_norm/{p}" for p in ("embedding", "mixer", "experts", "router", "norms", "head")
        }
        assert all(value > 0 for value in parts.values())
        np.testing.assert_allclose(
            sum(v**2 for v in parts.values()), float(metrics["optim/grad_norm"]) ** 2, rtol=1e-5
        )


def test_every_weight_of_every_family_belongs_to_a_part():
    seen = {}
    for kind in KINDS:
        graph = graph_of(kind)
        for path in set(graph.paths) - graph.untrained:
            seen.setdefault(part(path), set()).add(path.rpartition("layers.")[2])
    usual = {"embedding", "mixer", "indexer", "feed_forward", "experts", "router", "norms", "head"}
    assert seen.keys() == usual | {"hyper_connections", "engram"}
    embeddings = {path for path in seen["embedding"] if "layer_embedding" not in path}
    assert {"embed_tokens", "embed_positions"} == embeddings < seen["embedding"] and {
        "lm_head"
    } == seen["head"]
    assert all(".router." in path for path in seen["router"]) and all(
        ".mixer." in path for path in seen["mixer"]
    )
    assert {"norm.weight", "norm.bias"} <= seen["norms"] and "0.input_layernorm.weight" in seen[
        "norms"
    ]
    assert part("value_head") == "head" and set(PARTS) >= seen.keys()
    with pytest.raises(ValueError, match="quux belongs to no part"):
        part("quux")


def test_numbers_that_are_not_finite_are_looked_for_in_weights_and_moments():
    trainer, state = begin(learners.dense(), stage("sft"))
    assert not_finite(state) is None and not_finite({"ids": jnp.zeros(2, jnp.int32)}) is None
    for value in (np.nan, np.inf, -np.inf):
        weight = {"a": jnp.ones(3), "b": {"c": jnp.ones((2, 2), jnp.bfloat16).at[1, 0].set(value)}}
        assert not_finite(weight) == "b.c"
    sick = jax.tree.map(lambda a: a.at[-1].set(np.nan) if a.ndim else a, state.policy.optimizer)
    assert "optimizer" in not_finite(
        dataclasses.replace(state, policy=dataclasses.replace(state.policy, optimizer=sick))
    )
