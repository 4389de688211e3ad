"""The routed experts of one device: rows sorted by expert, three grouped products, and back to the tokens.

N tokens, k experts per token, G experts that the device holds, M rows, E hidden, F expert width. The steps are apart so that a
schedule can put the collectives of one part of a batch between the products of another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from policy.config import Moe, Runtime
from policy.layers.grouped import Plan, by_row, combine, dispatch, plan, product
from policy.layers.linear import Weight
from policy.layers.mlp import ACTIVATIONS

# Logical axes of the weights of experts, by name. Biases [G, F] and [G, E] are small: stored, their last axis is whole.
AXES = {
    "gate": ("exp", "embed_moe", "mlp_moe"),
    "up": ("exp", "embed_moe", "mlp_moe"),
    "down": ("exp", "mlp_moe", "embed_moe"),
    "gate_bias": ("exp", "mlp_moe"),
    "up_bias": ("exp", "mlp_moe"),
    "down_bias": ("exp", None),
}

Weights = dict[str, Weight]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routed:
    """Rows [M, E] (inside an expert [M, F]) sorted by expert, where they came from, and the weight float32[N, k] of each choice
    in the sum."""

    rows: jax.Array
    plan: Plan
    weights: jax.Array


def route(x_NE: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, spec: Moe, *, groups: int, **how) -> Routed:
    """A row for every choice of one of the experts 0 .. groups - 1. `how` is `block`, `partial` and `room` of `grouped.plan`."""
    routes = plan(experts_NK, groups, **how)
    rows = dispatch(x_NE, routes)
    if spec.weigh == "input":
        rows = rows * by_row(weights_NK.astype(rows.dtype), routes)[:, None]
        weights_NK = jnp.ones_like(weights_NK)
    return Routed(rows, routes, weights_NK)


def compute(weights: Weights, routed: Routed, spec: Moe, runtime: Runtime) -> Routed:
    """Every row through its expert: down(act(gate(x)) * up(x)), or ClampedSwiglu in place of act and product."""
    return down(weights, gate_and_up(weights, routed, spec, runtime), runtime)


def gate_and_up(weights: Weights, routed: Routed, spec: Moe, runtime: Runtime) -> Routed:
    """The first two products, with rows [M, F] of what the third one reads."""
    gate = checkpoint_name(_linear(weights, "gate", routed, runtime), "mlpwi_0")
    up = checkpoint_name(_linear(weights, "up", routed, runtime), "mlpwi_1")
    if spec.clamp is None:
        inner = ACTIVATIONS[spec.activation](gate) * up
    else:
        gate, up = jnp.minimum(gate, spec.clamp.limit), jnp.clip(up, -spec.clamp.limit, spec.clamp.limit)
        inner = (up + 1.0) * gate * jax.nn.sigmoid(spec.clamp.alpha * gate)
    return replace(routed, rows=inner)


def down(weights: Weights, inner: Routed, runtime: Runtime) -> Routed:
    """The third product: rows [M, E]."""
    return replace(inner, rows=checkpoint_name(_linear(weights, "down", inner, runtime), "mlpwo"))


def _linear(weights: Weights, name: str, routed: Routed, runtime: Runtime) -> jax.Array:
    return product(routed.rows, weights[name], routed.plan, runtime, weights.get(f"{name}_bias"))


def unroute(routed: Routed) -> jax.Array:
    """The weighted sum over the choices of each token that have a row: [N, E]."""
    return combine(routed.rows, routed.weights, routed.plan)
