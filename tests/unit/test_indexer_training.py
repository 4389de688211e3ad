"""Stages with an indexer: what moves, what the loss is, and that it does not depend on how rows or
arrays are cut."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from learners import batch, begin, host, stage
from oracles import random_model, short, tokens

from policy import families, modes
from policy.attention.indexer import IndexedMask
from policy.cache.cache import AXES
from policy.cache.layer_cache import LayerCache, Visible, gather_entries
from policy.config import Indexer
from policy.mesh.sharding import layout
from rl.config.run import RunConfig
from rl.run.checks import faults
from rollout import Generator, SamplingParams

ROUTER = {"bias_rate": 0.1, "balance_coef": 0.3}
DECAY = {"weight_decay": 0.5}


def updated(options, data, model=None, updates=1):
    """(weights before, weights after, metrics of the last update, paths with moments)."""
    trainer, state = begin(model or learners.indexed(), options)
    before = host(state.policy.params)
    for _ in range(updates):
        state, metrics = trainer.update(state, data)
    moments = {
        entry.key
        for path, _ in jax.tree.leaves_with_path(state.policy.optimizer)
        for entry in path
        if hasattr(entry, "key")
    }
    return before, host(state.policy.params), jax.device_get(metrics), moments


def moved(before, after):
    return {path.strip("[']") for path in before if before[path].tobytes() != after[path].tobytes()}


def divergence(model, data, indexer):
    """Its mean over the tokens that are not padding, by a forward pass."""
    graph = model.graph.with_runtime(indexer=indexer)
    aux = jax.jit(graph.aux)(
        model.params, data.tokens, modes.make_step(jnp.asarray(data.tokens), segments=data.segments)
    )
    [result] = aux.by_layer("indexing").values()
    return float(result.divergence[0]) / (data.segments != 0).sum()


@pytest.mark.slow
def test_without_training_the_indexer_stays_bit_by_bit():
    before, after, metrics, moments = updated(
        stage(optimizer=DECAY, router=ROUTER), batch(), updates=2
    )
    indexer = {path for path in learners.indexed().params if ".indexer." in path}
    assert len(indexer) == 5 and moved(before, after) == learners.indexed().params.keys() - indexer
    assert (
        not indexer & moments
        and not any(name.startswith("indexer/") for name in metrics)
        and metrics["nll"] > 0
    )


def test_the_dense_warm_up_moves_indexers_only_and_computes_no_head(monkeypatch):
    monkeypatch.setattr(modes, "logprobs", None)  # the only way to the head
    data, options = (
        batch(seed=3),
        stage(optimizer=DECAY, router=ROUTER, indexer={"training": "dense_warmup", "coef": 0.5}),
    )
    before, after, metrics, moments = updated(options, data, updates=2)
    indexer = {path for path in learners.indexed().params if ".indexer." in path}
    assert moved(before, after) == indexer == moments & learners.indexed().params.keys()
    assert metrics["loss"] == pytest.approx(0.5 * metrics["indexer/kl"], rel=1e-6)
    assert 0 < metrics["indexer/recall"] < 1 and "nll" not in metrics
    first = updated(options, data)[2]["indexer/kl"]
    assert first == pytest.approx(divergence(learners.indexed(), data, "dense_warmup"), rel=1e-5)
    assert metrics["indexer/kl"] < first


def test_layers_that_share_an_index_see_its_choice_and_during_a_warm_up_all_keys():
    """The second layer has no indexer of its own, and nothing to learn one from."""
    text = tokens(2, 17)

    def outputs(topk, indexer):
        keys = short("GlmMoeDsa") | {"index_topk": topk}
        model = random_model(families.read(keys), seed=3)
        graph = model.graph.with_runtime(indexer=indexer, record=("hidden",), attention_chunk=6)
        aux = jax.jit(graph.aux)(model.params, text, modes.make_step(jnp.asarray(text)))
        hidden = aux.by_layer("hidden")
        return hidden[max(hidden)], list(aux.by_layer("indexing"))

    seen, taught = outputs(4, "off")
    everything, _ = outputs(100, "off")
    assert taught == [] and np.abs(seen - everything).max() > 1e-3
    trained, taught = outputs(4, "sparse")
    assert taught == ["stacks.0.layers.0"]
    np.testing.assert_allclose(trained, seen, atol=1e-5, rtol=0)
    warmed, taught = outputs(4, "dense_warmup")
    assert taught == ["stacks.0.layers.0"]
    np.testing.assert_allclose(warmed, everything, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_sparse_training_adds_the_divergence_however_the_rows_are_cut(algorithm):
    data = batch(rows=7).without_rows(np.arange(7) == 2)
    how = {
        "router": ROUTER,
        "optimizer": {"clip_norm": None},
        "indexer": {"training": "sparse", "coef": 2.0},
    }
    before, after, metrics, _ = updated(stage(algorithm, **how), data)
    assert moved(before, after) == learners.indexed().params.keys()
    assert metrics["indexer/kl"] == pytest.approx(
        divergence(learners.indexed(), data, "sparse"), rel=1e-5
    )
    main = metrics["nll" if algorithm == "sft" else "policy_loss"]
    assert metrics["loss"] == pytest.approx(
        main + 0.3 * metrics["moe/balance"] + 2 * metrics["indexer/kl"], rel=1e-5
    )
    assert "indexer/recall" not in metrics
    cut_after, cut = updated(stage(algorithm, micro_batch=3, **how), data)[1:3]
    for path in before:
        np.testing.assert_allclose(cut_after[path], after[path], atol=2e-6, err_msg=path)
    assert cut["indexer/kl"] == pytest.approx(metrics["indexer/kl"], rel=1e-5)


def test_a_critic_never_moves_its_indexer():
    trainer, _ = begin(learners.indexed(), stage("ppo", indexer={"training": "sparse"}))
    trained = trainer.critic_update.main_step.split(trainer.value_model.axes)[0]
    assert not any(".indexer." in path for path in trained) and len(trained) > 10


def check_meshes(*meshes):
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, __file__, json.dumps(meshes)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    exchanged, result = json.loads(done.stdout.splitlines()[-1])
    assert len(result) == len(meshes) and max(map(max, result)) < 1e-5, result
    assert exchanged == [], "selecting and gathering are a row's own business"


@pytest.mark.slow
def test_two_devices_learn_what_one_does():
    check_meshes({"fsdp": 2})


@pytest.mark.slow
def test_two_devices_learn_what_one_does_on_other_meshes():
    check_meshes({"tensor": 2}, {"expert": 2})


def on_two_devices(meshes) -> list:
    """mesh by mesh: how far the divergence, the weights after an update, and the log-probabilities
    of greedy decoding are from those on one device."""
    options = stage("sft", indexer={"training": "sparse"})
    _, expected, metrics, _ = updated(options, batch())
    said, result = generated(learners.indexed()), []
    for mesh in meshes:
        model = learners.indexed(mesh=layout(mesh))
        _, after, there, _ = updated(options, batch(), model=model)
        worst = max(float(np.abs(after[path] - expected[path]).max()) for path in expected)
        decoded = float(np.abs(generated(model) - said).max())
        result.append(
            (abs(float(there["indexer/kl"]) - float(metrics["indexer/kl"])), worst, decoded)
        )
    return result


def exchanges() -> list[str]:
    """The collectives of a program that selects keys and gathers latents of rows that two devices
    share."""
    B, C, topk, mesh = 4, 16, 3, layout({"fsdp": 2})
    step = modes.make_step(jnp.zeros((B, C)))
    mask = IndexedMask(
        step,
        Visible({"index": jnp.zeros((B, 1, C, 2))}, step.positions, step.segments),
        (),
        Indexer(1, 2, topk, None),
        mesh,
    )

    def run(scores, latents):
        chosen, counts = mask.best(scores > 0, scores)
        return (
            gather_entries(LayerCache({"latent": latents}, 1), "latent", chosen, jnp.float32),
            counts,
            mask.kept(scores > 0, scores),
        )

    scores = jax.ShapeDtypeStruct(
        (B, 2, C), jnp.float32, sharding=mesh.sharding(("batch", None, None), (B, 2, C))
    )
    shape = (3, B, 1, C, 5)
    latents = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=mesh.sharding(AXES, shape))
    return re.findall(
        r"all-gather|all-reduce|all-to-all|collective-permute",
        jax.jit(run).lower(scores, latents).compile().as_text(),
    )


def generated(model):
    """Log-probabilities of 6 greedy tokens after each of two prompts."""
    prompts, greedy = [[1, 2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_new_tokens=6, temperature=0)
    out = Generator(model, max_length=16, slots=2).generate(prompts, greedy)
    return np.array([completion.logprobs for (completion,) in out])


def config(source="tiny-deepseek-v32", **stage) -> RunConfig:
    """A run of one stage on a tiny preset."""
    model = {"source": source}
    data = {"task": "arithmetic"}
    stages = [{"algorithm": "sft", "steps": 1, "sampling": {"max_new_tokens": 2}} | stage]
    tokenizer = {"source": "characters", "alphabet": "0123456789+="}
    keys = {
        "model": model,
        "data": data,
        "stages": stages,
        "tokenizer": tokenizer,
        "max_length": 16,
    }
    return RunConfig.model_validate(keys | {"rewards": {"functions": ["exact_answer"]}})


def test_what_cannot_be_trained_is_refused():
    warm, sparse = ({"indexer": {"training": training}} for training in ("dense_warmup", "sparse"))
    assert (
        faults(config(**warm)) == faults(config(**sparse)) == faults(config("tiny-deepseek")) == []
    )
    [fault] = faults(config(algorithm="grpo", **warm))
    assert fault.key == ("stages", 0, "indexer", "training") and "use sft" in fault.text
    [fault] = faults(config("tiny-deepseek", **warm))
    assert fault.key == ("stages", 0, "indexer", "training") and fault.text.startswith(
        "dense_warmup, but this model has no indexer"
    )
    short = config(**sparse).model_copy(update={"max_length": 6})
    [fault] = faults(short)
    assert (
        fault.key == ("stages", 0, "indexer", "training")
        and "select 6; raise max_length" in fault.text
    )


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps((exchanges(), on_two_devices(json.loads(sys.argv[1])))))
