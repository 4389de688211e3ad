"""Updates of `distill`: what the loss is, what it does not depend on, and that no logits of all
tokens are there."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from learners import QUICK, VOCAB, batch, dense, experts, host, same_bits, stage
from oracles import configuration, random_model

import rl.algorithms
from policy import families, modes
from policy.heads.features import by_number
from policy.model import Graph, Model
from rl.algorithms.distill import ALPHA, FEATURES, TEMPERATURE
from rl.training.batch import Batch
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.teacher import ModelTeacher, StoredTeacher
from rl.training.teachers.vocabulary import probability_outside
from rl.training.trainer import Trainer
from rl.training.weights import WeightGroup


@functools.cache
def wider():
    """A llama of two layers with another width, and a vocabulary that is padded further."""
    sizes = {
        "vocab_size": VOCAB + 8,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
    }
    return random_model(families.read(configuration("Llama", **sizes)), runtime=QUICK)


def learner(model, teacher, algorithm="distill", steps=10, **keys):
    """(trainer, first state) of a stage whose teacher is this model."""
    options = {"name": algorithm} | keys.pop("options", {})
    made = stage(options, steps=steps, **keys)
    loss = rl.algorithms.get(made.algorithm.name, **made.algorithm.model_extra)
    frozen = None
    if teacher is not None:
        frozen = ModelTeacher(FrozenModel(teacher.graph), loss)
        frozen.params = teacher.params
    trainer = Trainer(model.graph, made, loss, teacher=frozen)
    return trainer, trainer.start(
        jax.tree.map(lambda a: jax.device_put(np.array(a), a.sharding), model.params), seed=3
    )


def updated(trainer, state, data, updates=1):
    """(all arrays, metrics of the last update)."""
    for _ in range(updates):
        state, metrics = trainer.update(
            state, data, adaptive_coefs=trainer.algorithm.adaptive_coefs
        )
    return host(state), {key: float(value) for key, value in metrics.items()}


def inputs(data):
    """What a teacher reads of a batch."""
    return Batch(tokens=data.tokens, segments=data.segments, mask=None, prompt=None)


@functools.cache
def reverse():
    """A trainer of the reverse KL alone; tests set the teacher's weights."""
    return learner(
        dense(),
        dense(),
        options={"divergence": "reverse", "alpha": 1.0},
        optimizer={"learning_rate": 3e-2},
    )


def test_a_teacher_equal_to_the_policy_gives_no_divergence_and_no_gradient():
    trainer, state = reverse()
    before = host(trainer.policy_update.main_step.start(state.policy.params).params)
    state = dataclasses.replace(
        state, policy=trainer.policy_update.main_step.start(jax.tree.map(np.array, dense().params))
    )
    arrays, metrics = updated(trainer, state, batch())
    assert abs(metrics["distill/reverse_kl"]) < 1e-6 and metrics["optim/grad_norm"] < 1e-6
    assert metrics["distill/agreement"] == 1.0 and metrics["nll"] > 1
    after = {
        path.removeprefix(".policy.params"): array
        for path, array in arrays.items()
        if ".policy.params" in path
    }
    for path, array in before.items():
        np.testing.assert_allclose(after[path], array, atol=1e-6)


@pytest.mark.slow
def test_the_policy_learns_one_batch_of_another_model():
    """Until the reverse KL of each token is below a hundredth of a nat in the mean."""
    trainer, _ = reverse()
    other = Graph(dense().config, dense().graph.runtime, dense().graph.layout).init(7)
    trainer.teacher.params = other
    state = trainer.start(jax.tree.map(np.array, dense().params), seed=3)
    first = updated(trainer, state, batch())[1]["distill/reverse_kl"]
    state = trainer.start(jax.tree.map(np.array, dense().params), seed=3)
    last = updated(trainer, state, batch(), updates=300)[1]["distill/reverse_kl"]
    assert first > 0.1 and last < 0.01, (first, last)


def test_the_frozen_weights_stay_and_the_loss_is_that_of_the_formula():
    """Against log-probabilities of both models over their shared tokens, in numpy."""
    tau, alpha = 2.0, 0.25
    options = {
        "divergence": "forward",
        "alpha": alpha,
        "temperature": tau,
        "temperature_squared": True,
    }
    trainer, state = learner(dense(), wider(), options=options)
    data, before = batch(), host(trainer.teacher.params)
    _, metrics = updated(trainer, state, data)
    assert same_bits(before, host(trainer.teacher.params))

    def log_softmax(z):
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    logits = [
        np.asarray(model.logits(data.tokens, segments=data.segments), np.float64)[:, :-1, :VOCAB]
        for model in (dense(), wider())
    ]
    p, q = (log_softmax(z / tau) for z in logits)
    mask = data.mask[:, 1:] * (data.segments[:, 1:] != 0)
    soft = ((np.exp(q) * (q - p)).sum(-1) * mask).sum() / data.mask.sum()
    nll = -(
        np.take_along_axis(log_softmax(logits[0]), data.tokens[:, 1:, None], -1)[..., 0] * mask
    ).sum()
    nll /= data.mask.sum()
    np.testing.assert_allclose(metrics["distill/forward_kl"], soft, rtol=2e-5)
    np.testing.assert_allclose(metrics["nll"], nll, rtol=2e-5)
    np.testing.assert_allclose(
        metrics["loss"], alpha * tau**2 * soft + (1 - alpha) * nll, rtol=2e-5
    )
    entropy = (-(np.exp(q) * q).sum(-1) * mask).sum() / data.mask.sum()
    np.testing.assert_allclose(metrics["distill/teacher_entropy"], entropy, rtol=2e-5)


@pytest.mark.slow
def test_hard_targets_alone_are_sft():
    """Up to the rounding of another program, which also computes the teacher."""
    one, metrics = updated(*learner(dense(), dense(), options={"alpha": 0.0}), batch(), updates=2)
    other, expected = updated(*learner(dense(), None, "sft"), batch(), updates=2)
    for path, array in one.items():
        np.testing.assert_allclose(array, other[path], atol=1e-6, err_msg=path)
    assert metrics["loss"] == metrics["nll"] and metrics["distill/forward_kl"] > 0
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)


@pytest.mark.slow
def test_rows_micro_batches_and_packing_change_nothing():
    options = {"alpha": 0.5, "features_coef": 0.3}
    data = batch(rows=6)
    full, metrics = updated(*learner(dense(), dense(), options=options), data)
    assert metrics["distill/features"] == pytest.approx(0.0, abs=1e-6) and metrics["nll"] > 1
    shuffled = data.rows(np.array([3, 0, 5, 1, 4, 2]))
    for rows, cut in ((shuffled, None), (data, 2)):
        arrays, other = updated(*learner(dense(), dense(), options=options, micro_batch=cut), rows)
        for path, array in arrays.items():
            np.testing.assert_allclose(array, full[path], atol=1e-5, err_msg=path)
        for name in (
            "loss",
            "nll",
            "distill/forward_kl",
            "distill/teacher_entropy",
            "distill/features",
        ):
            np.testing.assert_allclose(other[name], metrics[name], atol=1e-5, err_msg=name)


def slopes_of_features(s, t, maps, pairs, weight, kind):
    """(loss, its gradients in the features of the student and in the matrices), in float64.

    s, t: features [B, T, E] and [B, T, D] by layer; weight: [B, T], the weight of the state at each
    token.
    """
    loss, g_s, g_maps = 0.0, {n: np.zeros(a.shape) for n, a in s.items()}, []
    for (n, m), map_ in zip(pairs, maps, strict=True):
        a, b = s[n] @ map_, t[m]
        if kind == "squared":
            rows, slope = np.square(a - b).mean(-1), 2 * (a - b) / a.shape[-1]
        else:
            norms = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b)]
            cosine = (a * b).sum(-1, keepdims=True) / norms[0] / norms[1]
            rows, slope = 1 - cosine[..., 0], cosine * a / norms[0] ** 2 - b / norms[0] / norms[1]
        slope = slope * weight[..., None] / len(pairs)
        loss += (rows * weight).sum() / len(pairs)
        g_s[n] += slope @ map_.T
        g_maps.append(np.einsum("bte,btd->ed", s[n], slope))
    return loss, g_s, g_maps


@pytest.mark.parametrize("kind", ["squared", pytest.param("cosine", marks=pytest.mark.slow)])
def test_features_of_another_width_are_projected_and_the_projections_learn(kind):
    """A teacher with other width and depth. The gradients of an update against formulas in float64,
    behind which the gradients of the policy follow from the features by its own vjp. Two
    micro-batches."""
    pairs, coef = [[0, 1], [0, 0]], 0.7
    options = {"alpha": 1.0, "features_coef": coef, "features_loss": kind, "features_layers": pairs}
    how = {"optimizer": {"beta1": 0.9, "clip_norm": None}, "micro_batch": 4}
    trainer, state = learner(dense(), wider(), options=options, **how)
    maps = [
        np.asarray(state.projections.params[f"teacher.projection.{n}.{m}"], np.float64)
        for n, m in pairs
    ]
    assert [a.shape for a in maps] == [(16, 24)] * 2 and np.std(maps) == pytest.approx(
        0.25, rel=0.1
    )
    data = batch()

    def features(params, graph):
        tokens, segments = jax.numpy.asarray(data.tokens), jax.numpy.asarray(data.segments)
        aux = graph.with_runtime(record=("mixed",)).aux(
            params, tokens, modes.make_step(tokens, segments=segments)
        )
        return by_number(aux, graph.config, "mixed")

    s, pull = jax.vjp(lambda params: features(params, dense().graph), dense().params)
    weight = (
        np.pad(data.mask[:, 1:] * (data.segments[:, 1:] != 0), ((0, 0), (0, 1))) / data.mask.sum()
    )
    wide = [
        {n: np.asarray(a, np.float64) for n, a in each.items()}
        for each in (s, features(wider().params, wider().graph))
    ]
    loss, g_s, g_maps = slopes_of_features(*wide, maps, pairs, coef * weight, kind)
    (expected,) = pull({n: np.float32(a) for n, a in g_s.items()})

    plain, start = learner(dense(), wider(), options={"alpha": 1.0}, **how)
    soft, _ = plain.update(start, data)
    arrays, metrics = updated(trainer, state, data)
    np.testing.assert_allclose(coef * metrics["distill/features"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], metrics["distill/forward_kl"] + loss, rtol=1e-5)
    # The first moment after one update is 0.1 of the gradient.
    norms = 0.0
    for (n, m), g in zip(pairs, g_maps, strict=True):
        moment = arrays[f".projections.optimizer[0].mu['teacher.projection.{n}.{m}']"]
        np.testing.assert_allclose(10 * moment, g, atol=2e-6 * np.abs(g).max() + 1e-9)
        norms += np.square(g).sum()
    np.testing.assert_allclose(
        metrics["distill/projections/optim/grad_norm"], np.sqrt(norms), rtol=1e-5
    )
    for path, moment in soft.policy.optimizer[0].mu.items():
        both = arrays[f".policy.optimizer[0].mu['{path}']"]
        np.testing.assert_allclose(10 * (both - moment), expected[path], atol=3e-6, err_msg=path)
    assert not any("projection" in path for path in arrays if path.startswith(".policy"))
    assert metrics["distill/projections/optim/update_norm"] > 0


@pytest.mark.slow
def test_projections_learn_to_map_the_features_and_equal_widths_have_none():
    options = {
        "alpha": 0.0,
        "features_coef": 1.0,
        "features_loss": "squared",
        "features_layers": [[0, 1]],
    }
    trainer, state = learner(dense(), wider(), options=options)
    again = trainer.start(jax.tree.map(np.array, dense().params), seed=3)
    assert same_bits(host(again.projections), host(state.projections))
    losses = []
    for _ in range(30):
        state, metrics = trainer.update(
            state, batch(), adaptive_coefs=trainer.algorithm.adaptive_coefs
        )
        losses.append(float(metrics["distill/features"]))
    assert losses[-1] < 0.5 * losses[0], losses
    trainer, state = learner(dense(), dense(), options={"features_coef": 1.0})
    assert state.projections is None and WeightGroup.PROJECTIONS not in trainer.optimizer_steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3", "Qwen3Next"])
def test_features_of_every_mixer_are_compared_whether_layers_are_scanned_or_not(kind):
    """Attention, latent attention, and delta nets among attention; with the gradient that
    follows."""
    config = families.read(configuration(kind, vocab_size=VOCAB))
    results = []
    for runtime in (QUICK, dataclasses.replace(QUICK, scan=True, remat="full")):
        model = random_model(config, runtime=runtime)
        frozen = Model(model.graph, model.graph.init(11))
        options = {"alpha": 0.0, "features_coef": 1.0, "features_loss": "squared"}
        arrays, metrics = updated(*learner(model, frozen, options=options), batch())
        assert metrics["distill/features"] > 1e-4
        np.testing.assert_allclose(
            metrics["loss"], metrics["nll"] + metrics["distill/features"], rtol=1e-5
        )
        results.append((arrays, metrics))
    (one, first), (other, second) = results
    np.testing.assert_allclose(first["distill/features"], second["distill/features"], rtol=1e-4)
    assert one.keys() == other.keys()
    for path, array in one.items():
        np.testing.assert_allclose(array, other[path], atol=5e-5, err_msg=path)


def test_no_array_of_all_logits_is_there():
    """Where one such array would take more memory than everything else."""
    sizes = {"vocab_size": 20_000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    runtime = dataclasses.replace(QUICK, num_vocab_tiling=64)
    graph = random_model(families.read(configuration("Llama", **sizes)), runtime=runtime)
    trainer, state = learner(
        graph, graph, options={"divergence": "jsd", "alpha": 1.0}, micro_batch=16
    )
    data = dataclasses.replace(batch(rows=16, length=32), dropout=None)
    updated(trainer, state, data)
    (memory,) = trainer.policy_update.executable.memory.values()
    logits, head = 4 * 16 * 32 * 20_000, 4 * 20_000 * 8
    assert memory.temporaries < logits / 2 + 4 * head, (memory.temporaries, logits)


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {"tail": "tail"})),
        {"top_k": 5, "divergence": "reverse", "tail": "tail"},
    ],
    ids=str,
)
def test_stored_numbers_are_those_of_the_live_teacher(options):
    """All tokens of the vocabulary, and the five likeliest with a symbol for the others."""
    keys = options | {"alpha": 1.0}
    trainer, state = learner(dense(), wider(), options=keys)
    data, k = batch(), keys.get("top_k", VOCAB)
    logp, ids, rest = map(
        np.asarray, trainer.teacher.top(k, VOCAB)(trainer.teacher.params, inputs(data))
    )
    stored = data.replace(
        teacher_ids=ids, teacher_top=logp, teacher_rest=np.maximum(rest, np.log(2.0**-23))
    )
    one, expected = updated(trainer, state, data)
    reader, state = learner(dense(), None, options=keys)
    reader = Trainer(
        dense().graph, reader.stage, reader.algorithm, teacher=StoredTeacher(reader.algorithm)
    )
    other, metrics = updated(
        reader, reader.start(jax.tree.map(np.array, dense().params), 3), stored
    )
    name = f"distill/{keys.get('divergence', 'forward')}_kl"
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        metrics["distill/student_entropy"], expected["distill/student_entropy"], rtol=1e-5
    )
    for path, array in one.items():
        np.testing.assert_allclose(other[path], array, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_weights_of_few_bits_and_in_host_memory_compute_the_same_teacher():
    data, results = batch(), {}
    for weights, hosted in ((None, False), (None, True), ("int8", False), ("int8", True)):
        runtime = dataclasses.replace(
            experts().graph.runtime,
            base_weights=weights,
            base_block=None,
            host_parameters=hosted,
            remat="full",
        )
        graph = Graph(experts().config, runtime, experts().graph.layout)
        teacher = ModelTeacher(FrozenModel(graph, seed=5), rl.algorithms.get("distill"))
        teacher.read()
        for path, abstract in teacher.abstract.items():
            same = jax.tree.map(
                lambda a, b: (
                    (a.shape, a.dtype, a.sharding.memory_kind)
                    == (b.shape, b.dtype, b.sharding.memory_kind)
                ),
                teacher.params[path],
                abstract,
            )
            assert all(jax.tree.leaves(same)), path
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(teacher.params)}
        assert ("pinned_host" in kinds) == hosted
        logp, ids, _ = teacher.top(VOCAB, VOCAB)(teacher.params, inputs(data))
        in_order = np.take_along_axis(
            np.asarray(logp), np.argsort(np.asarray(ids), axis=-1), axis=-1
        )
        results[weights, hosted] = in_order[data.segments != 0]
    np.testing.assert_array_equal(results[None, True], results[None, False])
    np.testing.assert_array_equal(results["int8", True], results["int8", False])
    difference = np.abs(results["int8", False] - results[None, False])
    assert 1e-5 < difference.max() < 0.3 and difference.mean() < 0.05, (
        difference.max(),
        difference.mean(),
    )


def test_alpha_and_temperature_follow_their_schedules():
    algorithm = rl.algorithms.get(
        "distill", alpha=1.0, alpha_end=0.0, temperature=4.0, temperature_end=1.0
    )
    assert algorithm.adaptive_coefs == {ALPHA: 1.0, TEMPERATURE: 4.0}
    assert algorithm.scheduled_coefs(0.5) == {ALPHA: 0.5, TEMPERATURE: 2.5}
    cosine = dataclasses.replace(
        algorithm, schedule="cosine", features_coef=2.0, features_coef_end=0.0
    )
    np.testing.assert_allclose(
        list(cosine.scheduled_coefs(0.25).values())[0], 0.5 + np.cos(np.pi / 4) / 2
    )
    assert cosine.scheduled_coefs(1.0) == {ALPHA: 0.0, TEMPERATURE: 1.0, FEATURES: 0.0}
    trainer, state = learner(dense(), wider(), options={"alpha": 1.0, "alpha_end": 0.0})
    data = batch()
    for coef in (1.0, 0.25):
        start = trainer.start(jax.tree.map(np.array, dense().params), seed=3)
        coefs = trainer.algorithm.adaptive_coefs | {ALPHA: coef}
        metrics = trainer.update(start, data, adaptive_coefs=coefs)[1]
        expected = coef * metrics["distill/forward_kl"] + (1 - coef) * metrics["nll"]
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_the_probability_of_ids_that_the_teacher_lacks_is_measured():
    trainer, state = learner(wider(), dense(), options={"alpha": 1.0})
    data = batch()
    outside = probability_outside(wider().graph, wider().params, data, VOCAB)
    logits = np.asarray(wider().logits(data.tokens, segments=data.segments), np.float64)[:, :-1]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = (p[..., VOCAB:].sum(-1) * data.mask[:, 1:]).sum() / data.mask.sum()
    np.testing.assert_allclose(outside, expected, rtol=1e-4)
    assert trainer.teacher.vocabulary(wider().graph) == VOCAB
    _, metrics = updated(trainer, state, data)
    np.testing.assert_allclose(metrics["distill/outside"], expected, rtol=1e-4)


def test_ids_that_only_the_policy_has_do_not_spoil_the_loss():
    """A sample may hold an id that is padding in the policy's vocabulary, and none of the
    teacher's."""
    trainer, state = learner(wider(), dense(), "gkd")
    data = batch()
    data = data.replace(tokens=np.where(data.tokens % 5 == 0, VOCAB + 3, data.tokens))
    arrays, metrics = updated(trainer, state, data)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert all(np.isfinite(array).all() for array in arrays.values())
