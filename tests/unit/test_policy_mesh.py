"""The same model on eight devices: equal first weights, equal logits, and every array where the rules say.

The devices are forced ones of a CPU, in a process of its own. There, programs that overlap can deadlock: each is waited
for.
"""

import json
import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P
from oracles import STANDARD, configuration, random_model, tokens

import policy
from policy import families
from policy.config import Runtime
from policy.sharding import DEFAULT_RULES, Layout, layout

MESHES = {
    "fsdp8": {"fsdp": 8},
    "fsdp4_tensor2": {"fsdp": 4, "tensor": 2},
    "fsdp2_expert4": {"fsdp": 2, "expert": 4},
}


def logits_on_eight_devices() -> dict:
    """mesh -> how far its logits are from those of one device, and how the weights lie."""
    import numpy as np

    config = families.read(configuration("DeepseekV3", **STANDARD["DeepseekV3"] | {"num_hidden_layers": 2}))
    row = tokens(8, 12)
    expected = np.asarray(random_model(config).logits(row))
    found = {}
    for name, degrees in MESHES.items():
        model = random_model(config, mesh=layout(degrees))
        logits = jax.block_until_ready(model.logits(row))
        found[name] = {
            "logits": float(np.abs(np.asarray(logits) - expected).max()),
            "devices": min(len(array.sharding.device_set) for array in model.params.values()),
            "share": max_share(model),
        }
    return found


def weights_on_eight_devices(*kinds: str) -> dict:
    """kind -> "unrolled" or mesh -> how far fresh weights are from those of a scanned model on one device."""
    found = {}
    for kind in kinds:
        config = families.read(configuration(kind, num_hidden_layers=2))
        one = policy.create(config, seed=5)
        found[kind] = {"unrolled": difference(one, policy.create(config, seed=5, runtime=Runtime(scan=False)))}
        for name, degrees in MESHES.items() if kind == "DeepseekV3" else [("fsdp4_tensor2", MESHES["fsdp4_tensor2"])]:
            model = policy.create(config, seed=5, mesh=layout(degrees))
            jax.block_until_ready(model.params)
            assert all(array.sharding == model.graph.sharding(path) for path, array in model.params.items())
            found[kind][name] = difference(one, model)
        found[kind]["another seed"] = difference(one, policy.create(config, seed=6))
    return found


def difference(one, other) -> float:
    import numpy as np

    return max(float(np.abs(np.asarray(a) - np.asarray(other.params[path])).max()) for path, a in one.params.items())


def max_share(model) -> float:
    """The part of all weights that one device holds."""
    held = sum(array.addressable_shards[0].data.nbytes for array in model.params.values())
    return held / sum(array.nbytes for array in model.params.values())


def run(*arguments: str) -> dict:
    """The JSON that this file prints as a program with eight devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_logits_on_a_mesh_equal_those_of_one_device():
    found = run("logits")
    for mesh in MESHES:
        assert found[mesh]["logits"] < 1e-5, mesh
        assert found[mesh]["devices"] == 8
        assert found[mesh]["share"] < 0.4, f"{mesh}: most weights are whole on every device"


def check_fresh_weights(*kinds):
    for found in run("weights", *kinds).values():
        assert found.pop("another seed") > 0.1
        assert len(found) >= 2 and set(found.values()) == {0.0}


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
    mesh.shape = dict.fromkeys(("data", "fsdp", "tensor", "expert", "context"), 1) | (degrees or {"fsdp": 4, "tensor": 2})
    return Layout(mesh, tuple(DEFAULT_RULES.items())).spec(axes, shape)


def test_a_rule_that_does_not_divide_is_dropped():
    assert spec(("embed", "mlp"), (32, 48)) == P(("fsdp",), ("tensor",))
    assert spec(("embed", "mlp"), (30, 48)) == P(None, ("tensor",))
    assert spec(("embed", "mlp"), (32, 47)) == P(("fsdp",), None)
    assert spec((None, "embed"), (32, 32)) == P(None, ("fsdp",))


def test_one_dimension_may_take_several_axes_and_no_axis_is_taken_twice():
    degrees = {"fsdp": 2, "expert": 4}
    assert spec(("embed", "kv"), (32, 3), degrees) == P(("fsdp", "expert"), None)
    assert spec(("exp", "embed_moe", "mlp_moe"), (8, 32, 5), degrees) == P(("expert",), ("fsdp",), None)
    assert spec(("exp", "embed"), (8, 32), degrees) == P(("expert",), ("fsdp",))
    assert spec(("embed", "embed"), (32, 32), degrees) == P(("fsdp", "expert"), None)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"model": 1}, "unknown axis model"),
        ({"fsdp": 3}, "needs 3 devices, there are 1"),
        ({"fsdp": -1, "tensor": -1}, "only one axis may be -1"),
        ({"fsdp": 0}, "at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(degrees, words):
    with pytest.raises(ValueError, match=words):
        layout(degrees, devices=jax.devices()[:1])


def test_a_rule_with_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match=r"mesh.rules.embed: unknown axis \['model'\]"):
        layout({"fsdp": 1}, {"embed": ["model"]}, devices=jax.devices()[:1])


if __name__ == "__main__":
    what, *kinds = sys.argv[1:]
    print(json.dumps(logits_on_eight_devices() if what == "logits" else weights_on_eight_devices(*kinds)))
