"""Mixtures of experts on a mesh of CPU devices against one device: run by test_experts_on_a_mesh.py.

    python experts_on_mesh.py '[["layer", {"expert": 2}, "gather", "groups", {}], ...]'

Prints a JSON list with the findings of each case: the largest differences, as a share of the largest number.
"""

import json
import sys
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from policy.cache import Step
from policy.config import ClampedSwiglu, DecoderConfig, Mlp, Moe, Norm, Router, Runtime
from policy.layers.moe import MixtureOfExperts
from policy.sharding import layout

E = 16
GROUPS = {"score": "sigmoid", "correction_bias": True, "groups": 4, "topk_groups": 2, "group_score": "top2", "scale": 2.5}
MIXTURES = {
    "groups": Moe(Router(8, 3, **GROUPS), 12, shared=Mlp(8)),
    "biases": Moe(Router(8, 2, bias=True), 12, bias=True, clamp=ClampedSwiglu(1.0)),
    "input": Moe(Router(8, 1, score="sigmoid", renormalize=False), 12, weigh="input"),
    "narrow": Moe(Router(8, 2), 9, bias=True),
    "six": Moe(Router(6, 2), 12),
}


def mixture(name: str, skew: float):
    """(graph, numpy weights) of a mixture; a large `skew` sends all tokens to the last experts."""
    with nnx.use_eager_sharding(False):
        module = MixtureOfExperts(MIXTURES[name], DecoderConfig(16, E, (), Norm(), "none", "{}"), nnx.Rngs(0))
    graph, state = nnx.split(module)
    rng = np.random.default_rng(1)
    weights = jax.tree.map(lambda a: rng.normal(0, 0.5, a.shape).astype(np.float32), state)
    for bias in ("bias", "correction_bias"):
        if bias in weights["router"] and skew:
            weights["router"][bias] = weights["router"][bias].replace(skew * np.arange(MIXTURES[name].router.experts, dtype=np.float32))
    return graph, weights


def rows(B: int, T: int):
    """(x, cotangent, segments with two packed texts and padding)."""
    rng = np.random.default_rng(2)
    x, cotangent = rng.normal(size=(2, B, T, E)).astype(np.float32)
    segments = np.where(np.arange(T) < T // 2, 1, 2) * (np.arange(T) < rng.integers(1, T + 1, (B, 1)))
    return x, cotangent, segments.astype(np.int32)


@cache
def computed(name: str, degrees: str, shape: tuple[int, int], skew: float, how: str) -> dict:
    """Everything that a mixture computes, by name, on a mesh (null: one device)."""
    graph, weights = mixture(name, skew)
    degrees, how = json.loads(degrees), json.loads(how)
    mesh = layout(degrees) if degrees else layout({"fsdp": 1}, devices=jax.devices()[:1])
    runtime = Runtime(**how)
    runtime = replace(runtime, layout=mesh.for_experts(runtime.expert_parallel))

    def run(weights, x, cotangent, segments):
        def forward(weights, x):
            step = Step(jnp.zeros_like(segments), segments)
            out, aux = nnx.merge(graph, weights)(x.astype(runtime.dtype), step, runtime)
            return out.astype(jnp.float32), aux.routing

        with jax.default_matmul_precision("highest"):
            out, back, routing = jax.vjp(forward, weights, x, has_aux=True)
            return out, *back(cotangent), routing

    out, d_weights, d_x, routing = jax.block_until_ready(jax.jit(run)(weights, *rows(*shape)))
    found = {"out": out, "d_x": d_x, "counts": routing.counts, "balance": routing.balance, "share": routing.share}
    found |= {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(d_weights)}
    if routing.dropped is not None:
        found["dropped"] = routing.dropped
    return {name: np.asarray(a) for name, a in found.items()}


def layer(degrees: dict, scheme: str, name: str, options: dict) -> dict:
    """name of an array -> its largest difference from one device, as a share of its largest number (at least 1e-3)."""
    options = {"shape": (8, 6), "skew": 0.0, "one": {}, "how": {}} | options
    case = tuple(options["shape"]), options["skew"]
    one = computed(name, "null", *case, json.dumps(options["how"] | options["one"]))
    many = computed(name, json.dumps(degrees), *case, json.dumps(options["how"] | {"expert_parallel": scheme}))
    return {
        key: float(np.abs(many[key] - one[key]).max() / max(np.abs(one[key]).max(), 1e-3)) for key in one if key in many
    } | {f"#{key}": float(many[key]) for key in ("dropped",) if key in many}


if __name__ == "__main__":
    print(json.dumps([globals()[what](*arguments) for what, *arguments in json.loads(sys.argv[1])]))
