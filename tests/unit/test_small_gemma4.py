"""Embeddings for each layer and keys that layers share: tables in host memory, trained weights,
entries of a cache, the work of a prefill, and files. tests/parity and tests/contracts compare the
small Gemma 4 with transformers.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from learners import host
from oracles import random_model, short, tokens
from safetensors.numpy import load_file, save_file

import policy
from policy import families, modes
from policy.cache import cache as caches
from policy.config import Attention, Runtime
from policy.huggingface import sources
from policy.huggingface.tensorfiles import ModelFileError
from policy.layers.layer_embeddings import TABLE
from policy.mesh.sharding import layout
from policy.model import Graph
from rl.config.run import RunConfig
from rl.plan.estimate import WeightSizes
from rl.plan.programs import planned as programs_of
from rl.plan.programs import stages
from rl.run import build
from rl.training.host_memory import copied
from rollout import Generator, SamplingParams

CLIPPED = {"clip_norm": 0.1, "weight_decay": 0.1}
QUICK = {"remat": "none", "scan": False}


@pytest.fixture(scope="module")
def config():
    return families.read(short("Gemma4Small"))


def is_jaxpr(value) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def on_device_outputs(jaxpr) -> list:
    """Types of all arrays that a program makes outside the computations of the host."""
    result = []
    for eqn in jaxpr.eqns:
        inside = [
            inner for inner in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr) if is_jaxpr(inner)
        ]
        if eqn.primitive.name.startswith("compute_on"):
            continue
        for inner in inside:
            result += on_device_outputs(getattr(inner, "jaxpr", inner))
        result += [var.aval for var in eqn.outvars]
    return [aval for aval in result if "<host>" not in str(aval)]


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_a_table_in_host_memory_gives_the_same_numbers_and_learns_the_same(config, trained):
    """Two updates with weight decay and clipping; a frozen table keeps its bits and has no
    moments."""
    data, result = learners.batch(4), {}
    for memory in ("device", "host"):
        runtime = Runtime(table_memory=memory, train_layer_embeddings=trained, **QUICK)
        model = random_model(config, runtime=runtime)
        before = np.asarray(model.params[TABLE])
        trainer, state = learners.begin(
            model, learners.stage(micro_batch=2, optimizer=CLIPPED), fresh=True
        )
        for _ in range(2):
            state, metrics = trainer.update(state, data)
        places = {
            path
            for path, a in state.policy.params.items()
            if a.sharding.memory_kind == "pinned_host"
        }
        assert places == ({TABLE} if memory == "host" else set())
        arrays = host(state)
        tables = [array for array in arrays.values() if array.shape == before.shape]
        assert len(tables) == (3 if trained else 1)
        assert (np.asarray(state.policy.params[TABLE]).tobytes() == before.tobytes()) != trained
        result[memory] = arrays | host(metrics)
    for key, array in result["device"].items():
        np.testing.assert_allclose(result["host"][key], array, atol=1e-6, err_msg=key)


def test_no_program_makes_an_array_as_large_as_a_table_in_host_memory():
    """Neither an update nor the copies for a reference and a critic of their own."""
    config = families.read(short("Gemma4Small", vocab_size_per_layer_input=2000))
    model, data = (
        random_model(config, runtime=Runtime(table_memory="host", **QUICK)),
        learners.batch(2),
    )
    options = learners.stage({"name": "ppo", "kl_coef": 0.1}, micro_batch=2)
    trainer, state = learners.begin(model, options, fresh=True)
    for copy in (state.reference, state.critic.params):
        assert copy[TABLE].sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(np.asarray(copy[TABLE]), np.asarray(model.params[TABLE]))
    renewed = trainer._renewed.trace(state.reference, state.policy.params, np.float32(0.5))
    start = jax.jit(partial(copied, tables=model.graph.host_tables)).trace(model.params)
    call = learners.update_call(trainer, state, data, 2)
    update = trainer.policy_update.executable.jitted.trace(
        call.learners, call.arguments, micro_rows=2
    )
    for program in (update, start, renewed):
        largest = max(on_device_outputs(program.jaxpr.jaxpr), key=lambda aval: aval.size)
        assert largest.size < model.graph.shapes[TABLE].size, largest


@pytest.mark.slow
def test_a_generator_reads_a_table_in_host_memory(config):
    prompts, sampling = [[3, 1, 4, 1, 5], [9, 2]], SamplingParams(max_new_tokens=6, temperature=0)
    result = []
    for memory in ("device", "host"):
        model = random_model(config, runtime=Runtime(table_memory=memory))
        out = Generator(model, max_length=16, slots=2, seed=5).generate(prompts, sampling)
        result.append([(completion.tokens, completion.logprobs) for (completion,) in out])
    for (tokens_, logps), (others, other_logps) in zip(*result, strict=True):
        assert tokens_ == others
        np.testing.assert_allclose(logps, other_logps, atol=1e-6, rtol=0)


def test_layers_that_share_keys_store_no_entries():
    """Of the 35 layers of E2B, 12 sliding and 3 full ones have keys and values, of one head."""
    config = sources.preset("gemma4-e2b")
    assert caches.bytes_per_token(config, jnp.bfloat16) == 2 * 2 * (12 * 256 + 3 * 512)
    sharers = [number for number, spec in enumerate(config.layers) if spec.shares]
    assert sharers == list(range(15, 35))
    assert [(len(s.pattern), s.repeats) for s in config.stacks] == [
        (5, 2),
        (1, 3),
        (1, 1),
        (1, 1),
        (5, 4),
    ]
    assert {spec.feed_forward.width for spec in config.layers[15:]} == {12288}
    e4b = sources.preset("gemma4-e4b")
    assert [(len(s.pattern), s.repeats) for s in e4b.stacks] == [
        (6, 3),
        (1, 4),
        (1, 1),
        (1, 1),
        (6, 3),
    ]


@pytest.mark.slow
def test_a_prefill_computes_only_the_layers_that_fill_the_cache():
    """Wider feed-forwards of the layers that share keys change the work of a forward pass and not
    that of a prefill."""

    def work(wide: bool) -> tuple[float, float]:
        config = families.read(short("Gemma4Small", use_double_wide_mlp=wide))
        graph, row = Graph(config, Runtime(**QUICK), layout({"fsdp": 1})), tokens(1, 8)

        def prefill(params, kv):
            return modes.prefill(
                graph.decoder(params), row, modes.make_step(row), kv, graph.runtime
            )

        kv = jax.eval_shape(lambda: caches.create(config, 1, 8, jnp.float32, scan=False))
        programs = (
            (prefill, kv),
            (
                lambda params, _: graph.decoder(params)(
                    row, modes.make_step(row), None, graph.runtime
                )[0],
                kv,
            ),
        )
        return tuple(
            jax.jit(f).lower(graph.shapes, kv).compile().cost_analysis()["flops"]
            for f, kv in programs
        )

    (prefill, forward), (narrow_prefill, narrow_forward) = work(True), work(False)
    assert prefill == narrow_prefill and forward > narrow_forward


def test_stored_keys_of_layers_that_share_are_passed_over(config, tmp_path):
    model = random_model(config)
    policy.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    keys = stored["model.layers.0.self_attn.k_proj.weight"]
    assert not any(name.startswith("model.layers.2.self_attn.k_") for name in stored)
    extra = {
        f"model.layers.2.self_attn.{name}.weight": keys for name in ("k_proj", "v_proj", "k_norm")
    }
    save_file(stored | extra, file)
    back = policy.load(tmp_path)
    for path, array in model.params.items():
        np.testing.assert_array_equal(
            np.asarray(back.params[path]), np.asarray(array), err_msg=path
        )
    save_file(stored | {"model.layers.2.self_attn.x_proj.weight": keys}, file)
    with pytest.raises(
        ModelFileError, match=r"unexpected tensors model.layers.2.self_attn.x_proj.weight"
    ):
        policy.load(tmp_path)


def test_a_prediction_module_has_keys_of_its_own_and_reads_no_embeddings_for_each_layer():
    section = {"multi_token_prediction": {"depth": 1}}
    layer = families.read(short("Gemma4Small", duet=section)).multi_token_prediction.layer
    assert (layer.shares, layer.layer_embedding) == (None, None)


def test_keys_are_kept_once_and_before_they_are_shared(config):
    (first, *rest), attention = config.stacks, Attention(4, 2, 4, 1.0)
    sharer = dataclasses.replace(
        first.pattern[0], mixer=dataclasses.replace(attention, shares="full")
    )
    with pytest.raises(
        ValueError, match="layer 0 shares the keys 'full', which no layer before it keeps"
    ):
        dataclasses.replace(config, stacks=(dataclasses.replace(first, pattern=(sharer,)), *rest))
    with pytest.raises(
        ValueError, match="keeps the keys 'sliding_attention', as a layer before it does"
    ):
        dataclasses.replace(config, stacks=(first, *config.stacks))


def test_a_plan_counts_a_frozen_table_once_and_only_in_device_memory():
    """E2B: the table has 262,144 rows of 35 x 256 numbers and neither gradient nor moments."""
    table, resident = 262144 * 35 * 256, {}
    for memory in ("device", "host"):
        model = {
            "source": "gemma4-e2b",
            "param_dtype": "bfloat16",
            "dtype": "bfloat16",
            "table_memory": memory,
        }
        stage = {"algorithm": "sft", "steps": 1, "sampling": {"max_new_tokens": 2}}
        keys = {"model": model, "data": {"task": "arithmetic"}, "stages": [stage], "max_length": 16}
        config = RunConfig.model_validate(
            keys | {"tokenizer": {"source": "characters", "alphabet": "0123456789+="}}
        )
        (planned, _), *_ = stages(config, build.on_mesh(config, jax.devices()[:1]), None)
        resident[memory] = planned.bytes
        estimated = WeightSizes(planned.graph)
        assert estimated.local == planned.graph.parameters - table * (memory == "host")
        (update,) = (each for each in programs_of(planned, None) if each.kind == "update")
        factors = len(planned.graph.config.layers)  # one of each layer, which is not trained
        assert update.gradient == 4 * (planned.graph.parameters - table - factors)
    assert resident["device"] - resident["host"] == 2 * table
    # In bfloat16 with a float32 master copy and two moments, except the factor of each layer, which
    # is not trained.
    assert 14 * (planned.graph.parameters - table) == pytest.approx(resident["host"], rel=1e-6)
