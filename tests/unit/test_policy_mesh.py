"""The same model on eight devices: equal first weights, equal logits, and every array where the rules say.

The devices are forced ones of a CPU, in a process of its own. There, programs that overlap can deadlock: each is waited for.
"""

import json
import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P
from oracles import STANDARD, configuration, tokens

from policy.sharding import layout

MESHES = {
    "fsdp8": {"fsdp": 8},
    "fsdp4_tensor2": {"fsdp": 4, "tensor": 2},
    "fsdp2_expert4": {"fsdp": 2, "expert": 4},
}


def on_eight_devices() -> dict:
    """What the tests below look at, computed in this process: mesh -> differences and shardings."""
    import numpy as np

    import policy
    from policy import families
    from policy.config import Runtime

    config = families.read(configuration("DeepseekV3", **STANDARD["DeepseekV3"]))
    one = policy.create(config, seed=5)
    row = tokens(8, 12)
    expected = np.asarray(one.logits(row))
    unrolled = policy.create(config, seed=5, runtime=Runtime(scan=False))
    found = {"unrolled": {"weights": difference(one, unrolled)}}
    for name, degrees in MESHES.items():
        model = policy.create(config, seed=5, mesh=layout(degrees))
        jax.block_until_ready(model.params)
        logits = jax.block_until_ready(model.logits(row))
        found[name] = {
            "weights": difference(one, model),
            "logits": float(np.abs(np.asarray(logits) - expected).max()),
            "devices": min(len(array.sharding.device_set) for array in model.params.values()),
            "share": max_share(model),
            "as_told": all(array.sharding == model.graph.sharding(path) for path, array in model.params.items()),
        }
    return found


def difference(one, other) -> float:
    import numpy as np

    return max(float(np.abs(np.asarray(a) - np.asarray(other.params[path])).max()) for path, a in one.params.items())


def max_share(model) -> float:
    """The part of all weights that one device holds."""
    held = sum(array.addressable_shards[0].data.nbytes for array in model.params.values())
    return held / sum(array.nbytes for array in model.params.values())


@pytest.fixture(scope="module")
def results():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_first_weights_do_not_depend_on_scan(results):
    assert results["unrolled"]["weights"] == 0.0


@pytest.mark.parametrize("mesh", MESHES)
def test_first_weights_do_not_depend_on_the_mesh(results, mesh):
    assert results[mesh]["weights"] == 0.0


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_on_a_mesh_equal_those_of_one_device(results, mesh):
    assert results[mesh]["logits"] < 1e-5


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_are_spread_as_the_rules_say(results, mesh):
    assert results[mesh]["devices"] == 8 and results[mesh]["as_told"]
    assert results[mesh]["share"] < 0.4, "most weights are whole on every device"


class EightDevices:
    """Stands for eight devices where only the arithmetic of a layout is looked at."""

    shape = {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1, "context": 1}


def spec(axes, shape, degrees=None):
    from policy.sharding import DEFAULT_RULES, Layout

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
    print(json.dumps(on_eight_devices()))
