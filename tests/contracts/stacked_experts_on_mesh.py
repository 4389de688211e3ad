"""A mixture that exchanges rows by expert, as decoding on TPU does, on CPU devices: run by
test_experts_on_a_mesh.py.

    python stacked_experts_on_mesh.py '[[{"expert": 4}, {}], [{"fsdp": 2, "expert": 2}, {"weigh":
    "input"}], ...]'

Prints a JSON list with the largest difference of each case from one device, as a share of the
largest number. CPUs have no ragged exchange: a simulation by its definition takes its place, with
numbers that no row has where none arrives.
"""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from policy.config import Moe, Router, Runtime
from policy.experts import expert_parallel
from policy.experts.ragged_exchange import Trip
from policy.mesh.sharding import layout
from policy.ops.stacked import StackedWeight, unstacked

B, E, F, R, X, K = 8, 16, 12, 3, 8, 3


def simulated(rows, trip: Trip, room: int, axis: str):
    everywhere, here = jax.lax.all_gather(rows, axis), jax.lax.axis_index(axis)
    sizes, source, target = (a[:, here][..., None] for a in (trip.sizes, trip.source, trip.target))
    place = jnp.arange(room)
    arrives = (target <= place) & (place < target + sizes)  # bool[P, G, room]
    sender, origin = jnp.arange(len(everywhere))[:, None, None], source + place - target
    pick = [jnp.sum(jnp.where(arrives, a, 0), axis=(0, 1)) for a in (sender, origin)]
    came = arrives.any(axis=(0, 1)).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(came, everywhere[pick[0], pick[1]], 1e6).astype(rows.dtype)


def difference(degrees: dict, changes: dict) -> float:
    expert_parallel.exchange_uninitialized = simulated
    spec = replace(Moe(Router(X, K), F), **{"bias": False} | changes)
    rng = np.random.default_rng(0)
    shapes = {"gate": (X, E, F), "up": (X, E, F), "down": (X, F, E)}
    if spec.bias:
        shapes |= {"gate_bias": (X, F), "up_bias": (X, F), "down_bias": (X, E)}
    weights = {
        name: jnp.asarray(rng.normal(0, 0.5, (R, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }
    layer = {
        name: StackedWeight(array, jnp.int32(1)) if array.ndim == 4 else array[1]
        for name, array in weights.items()
    }
    x = jnp.asarray(rng.normal(size=(B, 1, E)), jnp.float32)
    chosen = jnp.asarray(np.stack([rng.permutation(X)[:K] for _ in range(B)]), jnp.int32)[:, None]
    scores = jnp.asarray(rng.random((B, 1, K)), jnp.float32)
    one = layout({"fsdp": 1}, devices=jax.devices()[:1])
    expected, _ = expert_parallel.mixture(
        x, chosen, scores, unstacked(layer), spec, Runtime(layout=one)
    )
    mesh = layout(degrees).for_experts("all_to_all")
    runtime = Runtime(layout=mesh, expert_parallel="all_to_all")
    x, chosen, scores = (
        jax.device_put(a, NamedSharding(mesh.mesh, mesh.spec(("batch", None, None), a.shape)))
        for a in (x, chosen, scores)
    )
    with jax.default_matmul_precision("highest"):
        result, _ = jax.jit(lambda *a: expert_parallel.mixture(*a, spec, runtime))(
            x, chosen, scores, layer
        )
    return float(
        np.abs(np.asarray(result) - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max()
    )


print(json.dumps([difference(*case) for case in json.loads(sys.argv[1])]))
