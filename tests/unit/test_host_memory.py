"""Weights and moments in host memory: the numbers of device memory, in place, and nothing stays on
the device."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import learners
import numpy as np
import pytest
from learners import batch, begin, host, stage
from oracles import configuration, random_model

import policy
from policy import families
from policy.config import Runtime
from policy.mesh.sharding import layout
from policy.model import Graph, Model
from policy.ops import host_memory
from rl.run.checkpoint import Checkpoints
from rollout import Generator, SamplingParams

SIZES = learners.SIZES | {"num_hidden_layers": 2}
EXPERTS = SIZES | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
OFFLOAD = {"optimizer": {"host_memory": True}, "critic": {"host_memory": True}}


def model_of(kind="Llama", sizes=SIZES, **runtime):
    mesh = layout({"fsdp": -1})
    return random_model(
        families.read(configuration(kind, **sizes)), runtime=Runtime(**runtime), mesh=mesh
    )


def little(arrays: dict, names) -> list[str]:
    """Those of `names` whose arrays stay on the device: counters, and what has one dimension in a
    layer."""
    return [name for name in names if arrays[name].ndim < (3 if "stacks." in name else 2)]


def kinds(tree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): leaf.sharding.memory_kind
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def assert_same_updates(kind, sizes, algorithm, **runtime):
    """Two updates with everything in host memory equal those in device memory, and leave every
    array where it was."""
    data, result = batch(rows=4, length=8), {}
    keys = {"micro_batch": 2, "router": {"bias_rate": 0.05}}
    for offload in (False, True):
        model = model_of(kind, sizes, host_parameters=offload, **runtime)
        trainer, state = begin(
            model, stage(algorithm, **keys | (OFFLOAD if offload else {})), fresh=True
        )
        before = jax.tree.map(lambda a: a.sharding, state)
        for _ in range(2):
            state, metrics = trainer.update(state, data)
        assert jax.tree.map(lambda a: a.sharding, state) == before
        result[offload] = (
            host(state) | {name: np.float32(value) for name, value in metrics.items()},
            kinds(state),
        )
        if offload:
            lowered = learners.update_call(trainer, state, data, 2).lower()
            stats = lowered.compile().memory_analysis()
            shards = sum(
                leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.policy)
            )
            # The count of the schedule, which is the number of the update, is not read.
            assert stats.alias_size_in_bytes + stats.host_alias_size_in_bytes == shards - 4
    for name, expected in result[False][0].items():
        np.testing.assert_allclose(
            result[True][0][name], expected, atol=2e-6, rtol=2e-6, err_msg=name
        )
    assert set(result[False][1].values()) == {"device"}
    assert {name for name, where in result[True][1].items() if where == "device"} == set(
        little(result[True][0], result[True][1])
    )


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(("kind", "sizes"), [("Llama", SIZES), ("DeepseekV3", EXPERTS)])
def test_updates_of_policy_and_critic_are_those_of_device_memory(kind, sizes, scan):
    assert_same_updates(kind, sizes, "ppo", scan=scan)


@pytest.mark.slow
def test_moments_alone_in_host_memory_and_an_update_that_is_not_finite():
    data = batch(rows=4, length=8)
    trainer, state = begin(model_of(), stage("grpo", optimizer={"host_memory": True}), fresh=True)
    assert set(kinds(state.policy.params).values()) == {"device"}
    moments = kinds(state.policy.optimizer)
    assert sorted(k for k in moments if moments[k] == "device") == sorted(
        little(host(state.policy.optimizer), moments)
    )
    assert host_memory.HOST in moments.values()
    state, metrics = trainer.update(state, data)
    assert int(state.policy.optimizer[-1].count) == int(state.policy.optimizer[0].count) == 1
    before = host(state)
    poisoned = data.replace(advantages=np.full_like(data.advantages, np.inf))
    state, metrics = trainer.update(state, poisoned)
    assert float(metrics["optim/skipped"]) == 1 and learners.same_bits(host(state), before)


def test_only_a_slice_of_a_stack_is_fetched():
    """No program for the loss holds a stacked weight in device memory: what is fetched has lost the
    axis of the layers.
    """
    model, data = model_of(host_parameters=True), batch(rows=2, length=8)

    def loss(params):
        logp, entropy, _ = model.graph.logprobs(
            params, data.tokens, policy.modes.make_step(data.tokens), 1.0
        )
        return (logp + entropy).sum()

    stacked = {
        a.shape for path, a in model.params.items() if path.startswith("stacks.") and a.ndim > 2
    }
    fetched = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "device_put" and "host" in str(eqn.invars[0].aval):
                fetched.append(eqn.invars[0].aval.shape)
            for inner in jax.tree.leaves(
                eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(jax.grad(loss))(model.params).jaxpr)
    assert len(fetched) >= 2 * len(stacked)  # forward, and again backward
    assert not set(fetched) & stacked


@pytest.mark.slow
def test_generating_loading_saving_and_checkpoints(tmp_path):
    plain = model_of()
    policy.save(plain, tmp_path / "model")
    model = policy.load(tmp_path / "model", runtime=Runtime(host_parameters=True))
    assert sorted(k for k, v in kinds(model.params).items() if v == "device") == sorted(
        little(host(model.params), kinds(model.params))
    )
    prompts, params = [[1, 2, 3], [7, 8]], SamplingParams(max_new_tokens=4, temperature=0.0)
    made = [Generator(m, max_length=16, slots=2).generate(prompts, params) for m in (plain, model)]
    assert [[c.tokens for c in each] for each in made[0]] == [
        [c.tokens for c in each] for each in made[1]
    ]
    policy.save(model, tmp_path / "again")
    assert (tmp_path / "model/model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()
    trainer, state = begin(model_of(host_parameters=True), stage("grpo", **OFFLOAD), fresh=True)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, state, {}, wait=True)
    _, restored, _ = checkpoints.restore(trainer.abstract())
    checkpoints.close()
    assert kinds(restored) == kinds(state) and learners.same_bits(host(restored), host(state))


@pytest.mark.slow
def test_random_weights_are_the_same():
    config = model_of().config
    one, other = (
        policy.create(config, seed=3, runtime=Runtime(host_parameters=host))
        for host in (False, True)
    )
    assert set(kinds(other.params).values()) == {host_memory.HOST, "device"}
    assert learners.same_bits(host(one.params), host(other.params))


def test_without_host_memory_the_model_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Device:
        platform: str = "abacus"

        def addressable_memories(self):
            return []

    class Mesh:
        devices = np.array([Device()])

    class Sharding:
        mesh = Mesh

    with pytest.raises(
        host_memory.NoHostMemory, match="abacus devices have no pinned_host memory.*host_parameters"
    ):
        host_memory.in_host_memory(Sharding)


@pytest.mark.slow
def test_two_devices_hold_their_parts_in_host_memory():
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    }
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    jax.config.update("jax_disable_most_optimizations", True)
    assert len(jax.devices()) == 2
    assert_same_updates("Llama", SIZES, "sft")
    parameters = model_of(host_parameters=True)
    assert isinstance(parameters, Model) and isinstance(parameters.graph, Graph)
    cut = [len({str(s.index) for s in a.addressable_shards}) for a in parameters.params.values()]
    assert max(cut) == 2
