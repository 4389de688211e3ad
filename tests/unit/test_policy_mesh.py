"""The same model on eight devices: equal first weights, equal logits, and every array where the
rules say.

The devices are forced ones of a CPU, in a process of its own. There, programs that overlap can
deadlock: each is waited for.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import pytest
from jax.sharding import PartitionSpec as P
from oracles import STANDARD, configuration, random_model, tokens

import policy
from policy import families
from policy.attention import context_parallel
from policy.config import Runtime
from policy.mesh.axes import AXES, DEFAULT_RULES, STATIONARY_RULES
from policy.mesh.sharding import Layout, layout
from policy.model import Graph
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.run import build

MESHES = {
    "fsdp8": {"fsdp": 8},
    "fsdp4_tensor2": {"fsdp": 4, "tensor": 2},
    "fsdp2_expert4": {"fsdp": 2, "expert": 4},
}


def logits_on_eight_devices() -> dict:
    """mesh -> how far its logits are from those of one device, and how the weights lie."""
    import numpy as np

    config = families.read(
        configuration("DeepseekV3", **STANDARD["DeepseekV3"] | {"num_hidden_layers": 2})
    )
    row = tokens(8, 12)
    expected = np.asarray(random_model(config).logits(row))
    result = {}
    for name, degrees in MESHES.items():
        model = random_model(config, mesh=layout(degrees))
        logits = jax.block_until_ready(model.logits(row))
        result[name] = {
            "logits": float(np.abs(np.asarray(logits) - expected).max()),
            "devices": min(len(array.sharding.device_set) for array in model.params.values()),
            "share": max_share(model),
        }
    return result


def weights_on_eight_devices(*kinds: str) -> dict:
    """kind -> "unrolled" or mesh -> how far fresh weights are from those of a scanned model on one
    device."""
    result = {}
    for kind in kinds:
        config = families.read(configuration(kind, num_hidden_layers=2))
        one = policy.create(config, seed=5)
        result[kind] = {
            "unrolled": difference(one, policy.create(config, seed=5, runtime=Runtime(scan=False)))
        }
        for name, degrees in (
            MESHES.items() if kind == "DeepseekV3" else [("fsdp4_tensor2", MESHES["fsdp4_tensor2"])]
        ):
            model = policy.create(config, seed=5, mesh=layout(degrees))
            jax.block_until_ready(model.params)
            assert all(
                array.sharding == model.graph.sharding(path) for path, array in model.params.items()
            )
            result[kind][name] = difference(one, model)
        result[kind]["another seed"] = difference(one, policy.create(config, seed=6))
    return result


def difference(one, other) -> float:
    import numpy as np

    return max(
        float(np.abs(np.asarray(a) - np.asarray(other.params[path])).max())
        for path, a in one.params.items()
    )


def max_share(model) -> float:
    """The part of all weights that one device holds."""
    held = sum(array.addressable_shards[0].data.nbytes for array in model.params.values())
    return held / sum(array.nbytes for array in model.params.values())


def run(*arguments: str) -> dict:
    """The JSON that this file prints as a program with eight devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ
        | {
            "XLA_FLAGS": flags,
            "PJRT_NPROC": "64",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_logits_on_a_mesh_equal_those_of_one_device():
    result = run("logits")
    for mesh in MESHES:
        assert result[mesh]["logits"] < 1e-5, mesh
        assert result[mesh]["devices"] == 8
        assert result[mesh]["share"] < 0.4, f"{mesh}: most weights are replicated on every device"


def check_fresh_weights(*kinds):
    for result in run("weights", *kinds).values():
        assert result.pop("another seed") > 0.1
        assert len(result) >= 2 and set(result.values()) == {0.0}


@pytest.mark.slow
def test_fresh_weights_depend_on_the_seed_only():
    check_fresh_weights("Llama")


@pytest.mark.slow
def test_fresh_weights_of_experts_depend_on_the_seed_only():
    check_fresh_weights("DeepseekV3")


class EightDevices:
    """Stands for eight devices where only the arithmetic of a layout is looked at."""

    shape = {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1, "context": 1}


def spec(axes, shape, degrees=None):
    mesh = EightDevices()
    mesh.shape = dict.fromkeys(("data", "fsdp", "tensor", "expert", "context"), 1) | (
        degrees or {"fsdp": 4, "tensor": 2}
    )
    return Layout(mesh, tuple(DEFAULT_RULES.items())).spec(axes, shape)


def test_a_rule_that_does_not_divide_is_dropped():
    assert spec(("embed", "mlp"), (32, 48)) == P(("fsdp",), ("tensor",))
    assert spec(("embed", "mlp"), (30, 48)) == P(None, ("tensor",))
    assert spec(("embed", "mlp"), (32, 47)) == P(("fsdp",), None)
    assert spec((None, "embed"), (32, 32)) == P(None, ("fsdp",))


def test_one_dimension_may_take_several_axes_and_no_axis_is_taken_twice():
    degrees = {"fsdp": 2, "expert": 4}
    assert spec(("embed", "kv"), (32, 3), degrees) == P(("fsdp", "expert"), None)
    assert spec(("exp", "embed_moe", "mlp_moe"), (8, 32, 5), degrees) == P(
        ("expert",), ("fsdp",), None
    )
    assert spec(("exp", "embed"), (8, 32), degrees) == P(("expert",), ("fsdp",))
    assert spec(("embed", "embed"), (32, 32), degrees) == P(("fsdp", "expert"), None)


def test_under_stationary_rules_outputs_are_cut_and_no_row_along_the_same_axis():
    mesh = EightDevices()
    mesh.shape = {"data": 2, "fsdp": 4, "tensor": 2, "expert": 2, "context": 1}
    plain = Layout(mesh, tuple(DEFAULT_RULES.items()))
    assert (
        not plain.cache_rows_differ
        and not plain.for_rollouts({"mlp": ["fsdp"]}, "auto").cache_rows_differ
    )
    sharded = plain.for_rollouts(STATIONARY_RULES, "auto")
    assert sharded.cache_rows_differ and sharded.spec(("batch", "length", None), (16, 1, 32)) == P(
        ("data", "expert"), None, None
    )
    assert sharded.spec(("layers", "embed", "mlp"), (2, 32, 48)) == P(
        None, None, ("tensor", "fsdp")
    )
    assert sharded.spec(("heads", "kv", "embed"), (8, 6, 32)) == P(("tensor", "fsdp"), None, None)
    assert sharded.spec(("embed", "kv_heads", "kv"), (32, 2, 6)) == P(None, ("tensor",), None)
    assert sharded.spec(("exp", "embed_moe", "mlp_moe"), (8, 32, 16)) == P(
        ("expert",), None, ("tensor", "fsdp")
    )
    assert sharded.spec(("cache_batch", "cache_heads"), (16, 2)) == P(
        ("data", "expert", "fsdp"), ("tensor",)
    )
    hidden = plain.for_rollouts(STATIONARY_RULES, "hidden").spec(
        ("exp", "mlp_moe", "embed_moe"), (8, 16, 32)
    )
    assert hidden == P(None, ("expert", "tensor", "fsdp"), None)
    with pytest.raises(ValueError, match=r"generator.rules.mlp: unknown axis \['model'\]"):
        plain.for_rollouts({"mlp": ["model"]}, "auto")


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"model": 1}, "unknown axis model"),
        ({"stage": 2}, "mesh.stage: 2 devices, but only 1 is possible: .* use fsdp"),
        ({"fsdp": 3}, "needs 3 devices, there are 1"),
        ({"fsdp": -1, "tensor": -1}, "only one axis may be -1"),
        ({"fsdp": 0}, "at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(degrees, words):
    with pytest.raises(ValueError, match=words):
        layout(degrees, devices=jax.devices()[:1])


@dataclass(frozen=True)
class Device:
    """Stands for a device of several slices."""

    id: int
    slice_index: int = 0
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.parametrize("told_by", ["slice_index", "process_index", None])
def test_slices_stand_side_by_side_along_their_axes(told_by):
    """Two slices of four, whose devices come mixed unless nothing tells them apart."""
    devices = [Device(n, **({told_by: n % 2} if told_by else {})) for n in range(8)]
    result = layout({"fsdp": -1, "tensor": 2, "stage": 1}, devices=devices, dcn={"data": 2}).mesh
    assert dict(result.shape) == {"data": 2, "fsdp": 2, "tensor": 2, "expert": 1, "context": 1}
    slices = [[device.id for device in one.flat] for one in result.devices]
    assert slices == ([[0, 2, 4, 6], [1, 3, 5, 7]] if told_by else [[0, 1, 2, 3], [4, 5, 6, 7]])
    both = layout({"fsdp": 4}, devices=devices, dcn={"fsdp": 2}).mesh
    assert (
        both.shape["fsdp"] == 8
        and [device.id for device in both.devices.flat] == slices[0] + slices[1]
    )
    if told_by:
        assert layout({"fsdp": 4}, devices=devices, dcn={"data": -1}).mesh.shape["data"] == 2


def test_slices_that_do_not_fit_are_refused():
    devices = [Device(n) for n in range(8)]
    with pytest.raises(ValueError, match="needs 3 slices"):
        layout({"fsdp": -1}, devices=devices, dcn={"data": 3})
    with pytest.raises(ValueError, match=r"mesh.dcn: only one axis may be -1"):
        layout({"fsdp": -1}, devices=devices, dcn={"data": -1, "fsdp": -1})


@pytest.mark.parametrize(
    ("dcn", "words"), [(None, "1 slice by its sizes"), ({"data": 4}, "4 slices by its sizes")]
)
def test_tpus_in_slices_that_the_mesh_does_not_know_are_refused(dcn, words):
    """Or a slow network would join the parts of a layer's weights. Other devices may be joined
    anyhow."""
    devices = [Device(n, slice_index=n // 4, platform="tpu") for n in range(8)]
    with pytest.raises(
        ValueError, match=rf"mesh.dcn: {words}, but the TPUs are in 2, .*`dcn: {{data: 2}}`"
    ):
        layout({"fsdp": -1}, devices=devices, dcn=dcn)
    assert (
        layout({"fsdp": -1}, devices=[Device(n, slice_index=n // 4) for n in range(8)]).mesh.shape[
            "fsdp"
        ]
        == 8
    )


def test_the_mode_of_a_run_reaches_the_mesh_of_several_devices():
    stages = [{"algorithm": "sft", "steps": 1}]
    run = {
        "model": {"source": "tiny-deepseek"},
        "data": {"task": "arithmetic"},
        "stages": stages,
        "tokenizer": "bytes",
    }
    explicit, auto = (
        RunConfig.model_validate(run | {"mesh": {"shard_mode": mode}})
        for mode in ("explicit", "auto")
    )
    devices = [Device(n) for n in range(8)]
    assert build.on_mesh(explicit, devices).explicit and not build.on_mesh(auto, devices).explicit
    assert not build.on_mesh(explicit, jax.devices()[:1]).explicit  # nothing is cut


def moment_spec(axes, shape, degrees):
    mesh = EightDevices()
    mesh.shape = dict.fromkeys(("data", "fsdp", "tensor", "expert", "context"), 1) | degrees
    return Layout(
        jax.sharding.AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape)), RULES, True
    ).moment_spec(axes, shape)


RULES = tuple(DEFAULT_RULES.items())


def test_moments_are_cut_over_data_where_their_weights_are_replicated():
    degrees = {"data": 2, "fsdp": 2, "tensor": 2}
    assert moment_spec(("embed", "mlp"), (32, 48), {"data": 8}) == P(("data",), None)
    assert moment_spec(("layers", "embed", "mlp"), (2, 32, 48), degrees) == P(
        None, ("fsdp", "data"), ("tensor",)
    )
    assert moment_spec(("layers", "embed", "q_heads", "kv"), (2, 32, 4, 6), degrees) == P(
        None, ("fsdp",), ("tensor",), ("data",)
    )
    assert moment_spec(("norm",), (3,), {"data": 8}) == P(None)


def test_weights_that_stay_replicated_are_listed():
    """Of 30 x 47 numbers none is cut; norms are within the tolerance."""
    sizes = {
        "hidden_size": 30,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 6,
        "intermediate_size": 47,
    }
    mesh = Layout(jax.sharding.AbstractMesh((1, 4, 2, 1, 1), AXES), RULES)
    graph = Graph(families.read(configuration("Llama", **sizes)), Runtime(), mesh)
    with pytest.raises(
        ConfigError,
        match=r"of the weights would be .* on every device, "
        r".*stacks.0.layers.0.feed_forward.down_proj \(4230\)",
    ):
        build.check_cut(graph, 0.02)
    assert build.check_cut(graph, 1.0) is graph
    even = Graph(
        families.read(configuration("Llama", hidden_size=64, intermediate_size=128)),
        Runtime(),
        mesh,
    )
    assert even.replicated and build.check_cut(even, 0.02) is even


def test_ulysses_wants_heads_that_divide():
    mesh = Layout(jax.sharding.AbstractMesh((1, 2, 1, 1, 4), AXES), RULES)
    config = families.read(configuration("Llama"))
    with pytest.raises(
        ValueError, match="cuts the 2 key-value heads .* 4 devices along the mesh axis context"
    ):
        context_parallel.check(config, Runtime(context_parallel="ulysses"), mesh)
    context_parallel.check(config, Runtime(context_parallel="ring"), mesh)


def test_a_rule_with_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match=r"mesh.rules.embed: unknown axis \['model'\]"):
        layout({"fsdp": 1}, {"embed": ["model"]}, devices=jax.devices()[:1])


if __name__ == "__main__":
    what, *kinds = sys.argv[1:]
    print(
        json.dumps(
            logits_on_eight_devices() if what == "logits" else weights_on_eight_devices(*kinds)
        )
    )
