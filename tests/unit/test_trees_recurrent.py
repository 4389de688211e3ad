"""Gated delta net and Engram over trees of sequences with equal beginnings, against the same
sequences alone.

B rows, L places of a row, S sequences, T tokens of a sequence, E hidden.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
import shared_prefixes
from flax import nnx
from oracles import random_model, short
from test_delta_net import E, a_config, a_layer, a_step, random_weights
from test_ngram_memory import configured, remembering

from policy import families, modes
from policy.cache import cache as caches
from policy.cache.layer_cache import LayerCache
from policy.cache.paths import Tree
from policy.config import Runtime
from policy.layers.engram import NgramLookup, ngram_rows
from policy.modes import make_step
from policy.recurrent import delta_rule
from policy.recurrent.delta_rule import CHUNK
from rl.training.packing.packing import plan_packing
from rl.training.packing.trees import Sharing, plan_trees


class Forest(NamedTuple):
    """Trees in rows. row, place: int[S, T], where each token of each sequence stands, -1 behind its
    end. first: bool[S, T], true once for each place."""

    tree: Tree
    row: np.ndarray
    place: np.ndarray
    first: np.ndarray

    def alone(self, x_BL):
        """The entries of each sequence, [S, T, ...]; 0 behind its end."""
        real = (self.place >= 0).reshape(*self.place.shape, *[1] * (x_BL.ndim - 2))
        return jnp.where(real, jnp.asarray(x_BL)[self.row, self.place], 0)

    @property
    def segments(self):
        return (self.place >= 0).astype(np.int32)


def forest(L: int, *rows) -> Forest:
    """A row lists trees, (tokens of the root, those of each leaf, ...), and paddings, negative
    numbers."""
    names = ("node", "last", "position", "before", "count")
    arrays, sequences = {name: np.zeros((len(rows), L), np.int32) for name in names}, []
    arrays["before"] -= 1
    for b, trees in enumerate(rows):
        at = node = 0

        def run(places, **values):
            for name, value in values.items():
                arrays[name][b, places] = value  # noqa: B023

        for tree in trees:
            if isinstance(tree, int):
                at -= tree
                continue
            (size, *leaves), root = tree, np.arange(at, at + tree[0])
            node, at, last = node + 1, at + size, node + 1 + len(leaves)
            run(
                root,
                node=node,
                last=last,
                position=root - root[0],
                before=root - 1,
                count=max(1, len(leaves)),
            )
            run(root[:1], before=-1)
            for leaf in leaves:
                places = np.arange(at, at + leaf)
                node, at = node + 1, at + leaf
                run(
                    places,
                    node=node,
                    last=node,
                    position=size + places - places[0],
                    before=places - 1,
                    count=1,
                )
                run(places[:1], before=root[-1])
                sequences.append((b, np.concatenate([root, places])))
            if not leaves:
                sequences.append((b, root))
        assert at <= L
    T = max(len(places) for _, places in sequences)
    place, row = np.full((len(sequences), T), -1), np.zeros((len(sequences), T), int)
    first, taken = np.zeros(place.shape, bool), set()
    for s, (b, places) in enumerate(sequences):
        place[s, : len(places)], row[s] = places, b
        first[s, : len(places)] = [(b, p) not in taken for p in places]
        taken |= {(b, p) for p in places}
    return Forest(Tree(**arrays), row, place, first)


@functools.cache
def several_chunks() -> Forest:
    """Roots that end inside a chunk of 64, at its border, just behind it, in the chunk of another
    root and after several; leaves of a token, of more than a chunk, and at the end of a chunk;
    sequences alone; padding between trees and at the end."""
    assert CHUNK == 64
    return forest(
        230,
        [(30, 5, 40, 3, 1), (20,), (1, 4, 70, 6), -9, (7, 2, 9)],
        [(64, 10, 70, 3), -2, (62, 3, 4)],
        [(150, 20, 19, 1), (10,), (8, 3, 6)],
        [(10, 3, 5), (20, 8, 90, 60), (2, 30)],
        [(20, 8, 97, 20), (45, 2, 3), -20],
        [(60,), (7, 70, 5), (1,)],
    )


def close(actual, expected, tolerance, name=""):
    """Relative to the norm of `expected`."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.isfinite(actual).all() and np.linalg.norm(expected) > 0, name
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected), name


def both(grown: Forest, call, weights, x_BLE, cotangent_STE):
    """((outputs of the sequences [S, T, E], gradients) of trees, those of the sequences alone).
    `call` computes outputs from weights, inputs and a tree or None."""

    def gradients(compute):
        (_, out), grads = jax.jit(
            jax.value_and_grad(
                lambda w, x: (jnp.sum((out := compute(w, x)) * cotangent_STE), out),
                (0, 1),
                has_aux=True,
            )
        )(weights, x_BLE)
        return out, grads

    together = gradients(lambda w, x: grown.alone(call(w, x, grown.tree)))
    return together, gradients(lambda w, x: call(w, grown.alone(x), None))


def test_a_delta_net_goes_on_from_the_state_at_the_end_of_the_root():
    grown, weights = several_chunks(), random_weights()
    rng = np.random.default_rng(1)
    x = rng.normal(size=(*grown.tree.node.shape, E)).astype(np.float32)
    cotangent = (
        rng.normal(size=(*grown.place.shape, E)).astype(np.float32) * grown.segments[..., None]
    )

    def call(weights, x, tree):
        step = (
            a_step(grown.segments)
            if tree is None
            else make_step(grown.tree.node, tree=jax.tree.map(jnp.asarray, tree))
        )
        return a_layer()[0](weights, x, step)[0]

    (out, grads), (expected, expected_grads) = both(grown, call, weights, x, cotangent)
    for s in range(len(out)):
        close(out[s], expected[s], 2e-5, f"sequence {s}")
    for name, grad in expected_grads[0].items():
        close(grads[0][name], grad, 1e-4, name)
    close(grads[1], expected_grads[1], 1e-4)


MEMORY = {"max_ngram": 4, "vocab_bases": [50, 70, 90], "kernel_size": 3}


@functools.cache
def memory(streams=2):
    """The model of an n-gram memory and the path of its layer."""
    return remembering(
        configured(streams=streams, ids=90, outer_norm=True, **MEMORY), runtime=learners.QUICK
    )


def memory_spec(model):
    spec = model.graph.config.layers[1].engram
    assert spec is not None
    return spec


def a_step_of(grown: Forest, tokens_BL, tree):
    tokens = jnp.asarray(tokens_BL) if tree is not None else grown.alone(tokens_BL)
    step = make_step(tokens, segments=None if tree is not None else grown.segments, tree=tree)
    return replace(step, tokens=tokens)


@pytest.mark.parametrize("resets", [False, True])
def test_ngrams_are_of_the_path(resets):
    grown, model = several_chunks(), memory()
    spec = replace(memory_spec(model), resets=resets)
    classes = (
        model.params["stacks.1.layers.0.lookup.classes"][0] % 9
    )  # the one that ends a text is often met
    tokens = np.random.default_rng(2).integers(
        0, model.graph.config.vocab_size, grown.tree.node.shape
    )
    rows = jax.jit(lambda tree: ngram_rows(spec, classes, a_step_of(grown, tokens, tree)))
    together, alone = grown.alone(rows(jax.tree.map(jnp.asarray, grown.tree))), rows(None)
    real = grown.place >= 0
    np.testing.assert_array_equal(np.asarray(together)[real], np.asarray(alone)[real])


@pytest.mark.parametrize("streams", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_a_memory_reads_the_path(streams):
    grown, model = several_chunks(), memory(streams)
    config, rng = model.graph.config, np.random.default_rng(3)
    path, shape = "stacks.1.layers.0.lookup.", grown.tree.node.shape
    with nnx.use_eager_sharding(False):
        structure, state = nnx.split(
            nnx.eval_shape(lambda: NgramLookup(memory_spec(model), config, nnx.Rngs(0)))
        )
    names = [".".join(map(str, name)) for name, _ in nnx.to_flat_state(state)]
    weights = {name: model.params[path + name][0] for name in names}
    constants = {"classes": weights.pop("classes")}
    tokens = rng.integers(0, config.vocab_size, shape)
    inner = (config.hidden_size,) if streams is None else (streams, config.hidden_size)
    x = rng.normal(size=(*shape, *inner)).astype(np.float32)
    cotangent = rng.normal(size=(*grown.place.shape, *inner)).astype(np.float32)
    cotangent *= grown.segments.reshape(*grown.place.shape, *[1] * len(inner))

    def call(weights, x, tree):
        leaves = [(weights | constants)[name] for name in names]
        layer = nnx.merge(structure, jax.tree.unflatten(jax.tree.structure(state), leaves))
        return layer(x, a_step_of(grown, tokens, tree), None, Runtime())[0]

    (out, grads), (expected, expected_grads) = both(grown, call, weights, x, cotangent)
    real = grown.place >= 0
    np.testing.assert_allclose(np.asarray(out)[real], np.asarray(expected)[real], atol=1e-5, rtol=0)
    for name, grad in expected_grads[0].items():
        close(grads[0][name], grad, 5e-5, name)  # CPUs add in other orders
    close(grads[1], expected_grads[1], 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["device", "host"])
def test_an_update_moves_a_table_as_sequences_alone_do(memory):
    """Trees of several levels, through the trainer; the rows of a table in host memory are read
    before the loss."""
    config = configured(depth=2, outer_norm=True, **MEMORY)
    model = remembering(config, runtime=Runtime(table_memory=memory, remat="none", scan=False))
    data, moved = shared_prefixes.groups(config.vocab_size), []
    for trainer, state in shared_prefixes.pair(model, learners.stage("grpo")):
        before = jax.tree.map(np.array, state.policy.params)  # an update gives its arrays away
        logp, _ = trainer.logprobs(state.policy.params, data)
        state, metrics = trainer.update(state, data)
        moved.append(
            (logp, {path: np.asarray(a) - before[path] for path, a in state.policy.params.items()})
        )
    assert metrics["perf/shared_prefix"] > 1.2
    (expected, plain), (logp, trees) = moved
    np.testing.assert_allclose(logp, expected, atol=1e-5, rtol=0)
    for path, change in plain.items():
        if not path.endswith("classes"):
            close(trees[path], change, 1e-4, path)


def test_a_cache_holds_no_trees():
    arrays = caches.create(a_config(), 1, 7, "float32", scan=True)[0][0][0]
    step = make_step(
        jnp.ones((1, 3), int), tree=jax.tree.map(jnp.asarray, forest(3, [(1, 1, 1)]).tree)
    )
    with pytest.raises(ValueError, match="a cache holds no trees"):
        LayerCache.of(arrays, 0, step, None)


RUNTIMES = {"unrolled": learners.QUICK, "scanned_and_recomputed": Runtime(remat="full", scan=True)}
KIND = "Qwen3Next"


def sequences():
    return shared_prefixes.groups(short(KIND)["vocab_size"])


def learned(runtime, packing):
    """([log-probabilities, entropies] [S, T], gradients by path) of the packed sequences."""
    model, packed = (
        random_model(families.read(short(KIND)), runtime=runtime),
        packing.batch(sequences()),
    )
    graph = model.graph
    weights = {path: array for path, array in model.params.items() if path not in graph.untrained}

    @jax.jit
    def run(weights, packed):
        def loss(weights):
            step = make_step(packed.tokens, segments=packed.segments, tree=packed.tree)
            decoder = graph.decoder(model.params | weights)
            logp, entropy, _ = modes.logprobs(decoder, packed.tokens, step, 1.0, graph.runtime)
            return jnp.sum((logp + 0.1 * entropy) * packed.advantages * packed.mask), (
                logp,
                entropy,
            )

        with graph.precision():
            return jax.grad(loss, has_aux=True)(weights)

    grads, outputs = run(weights, jax.tree.map(jnp.asarray, packed))
    return [packing.unpack(a) for a in outputs], grads


@functools.cache
def learned_alone():
    return learned(learners.QUICK, plan_packing(sequences().segments, 16))


@pytest.mark.slow  # test_shared_prefix.py has the plain case
@pytest.mark.parametrize("how", RUNTIMES)
def test_a_decoder_with_delta_nets_scores_and_learns_as_from_sequences_alone(how, monkeypatch):
    """Packed by the trainer's packings, with states handed over between chunks of 16 tokens."""
    monkeypatch.setattr(delta_rule, "CHUNK", 16)
    trees = plan_trees(sequences(), 16, Sharing(length_factor=2, one_level=True))
    assert trees.distinct < 0.8 * len(trees.source) and trees.shape[1] == 40
    (logp, entropy), grads = learned(RUNTIMES[how], trees)
    (expected, expected_entropy), expected_grads = learned_alone()
    np.testing.assert_allclose(logp, expected, atol=5e-5, rtol=0)
    np.testing.assert_allclose(entropy, expected_entropy, atol=5e-5, rtol=0)
    for path, grad in expected_grads.items():
        close(grads[path], grad, 2e-4, path)
