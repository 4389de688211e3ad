"""The routed experts of one device: rows sorted by expert, three grouped products, and sums per
token.

Small batches go through every expert instead. The steps are separate functions, so that a schedule
can put the collectives of one part of a batch between the products of another.

N tokens, K = k experts per token, G experts on the device, M rows of the sorted layout, E hidden, F
width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
import qwix
from jax.ad_checkpoint import checkpoint_name

from policy.config import Moe, Runtime
from policy.experts.grouped import Block, GroupedRows, by_row, combine, dispatch, plan, product
from policy.experts.mlp import ACTIVATIONS, gated
from policy.ops.adapted import Adapted
from policy.ops.linear import Weight, linear
from policy.ops.parameter import MatrixDims

# Logical axes of the weights of experts, by name. Biases [G, F] and [G, E] are small: `down_bias`
# is stored with a full last axis.
AXES = {
    "gate": ("exp", "embed_moe", "mlp_moe"),
    "up": ("exp", "embed_moe", "mlp_moe"),
    "down": ("exp", "mlp_moe", "embed_moe"),
    "gate_bias": ("exp", "mlp_moe"),
    "up_bias": ("exp", "mlp_moe"),
    "down_bias": ("exp", None),
}
Weights = dict[str, Weight]
"""By the names of AXES, and of an adapter of weight `w`: `w_a` [G, E, r] and `w_b` [G, r, F],
multiplied by its scale, and `w_dora_scale` [G, F] (policy/ops/adapted.py). Of factors that all
experts share G is left out."""

# At most so many tokens go through every expert on TPU: reading the weights bounds the time of
# these products, and a grouped product with one layer of stacked weights starts with a copy of
# them.
EVERY_TOKENS = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routed:
    """Rows [M, E] (inside an expert [M, F]) sorted by expert.

    plan: the token of each row. weights: the weight of each choice in the sum, float32[N, k].
    """

    rows: jax.Array
    plan: GroupedRows
    weights: jax.Array


def axes_of(name: str, ndim: int) -> tuple[str | None, ...]:
    """Returns the logical axes of the entry `name` of Weights, which has `ndim` dimensions."""
    if name in AXES:
        return AXES[name]
    weight, _, part = name.partition("_")
    exp, rows, columns = AXES[weight]
    axes = {"a": (exp, rows, None), "b": (exp, None, columns), "dora_scale": (exp, columns)}[part]
    return axes[len(axes) - ndim :]


def entries(name: str, weight: Weight) -> Weights:
    """Returns the entries of Weights for the weight `name`."""
    if not isinstance(weight, Adapted):
        return {name: weight}
    adapter = {f"{name}_a": weight.a, f"{name}_b": weight.b * weight.scale}
    dora_scale = {} if weight.dora_scale is None else {f"{name}_dora_scale": weight.dora_scale}
    return {name: weight.base} | adapter | dora_scale


def _adapted(weights: Weights, name: str) -> Weight:
    """Returns the weight `name` with its adapter, if it has one."""
    if f"{name}_a" not in weights:
        return weights[name]
    return Adapted(
        weights[name],
        a=weights[f"{name}_a"],
        b=weights[f"{name}_b"],
        dora_scale=weights.get(f"{name}_dora_scale"),
        scale=1.0,
        dims=MatrixDims(rows=(1,), columns=(2,)),
    )


def route(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    spec: Moe,
    *,
    groups: int,
    block: Block,
    partial: bool = False,
    room: int | None = None,
) -> Routed:
    """Makes a row for every choice of one of the experts 0 .. groups - 1.

    tokens: (x [N, E], choices int[N, k], their weights float32[N, k]). `grouped.plan` explains
    `block`, `partial` and `room`.
    """
    x_NE, experts_NK, weights_NK = tokens
    routes = plan(experts_NK, groups, block=block, partial=partial, room=room)
    rows = dispatch(x_NE, routes)
    if spec.weigh == "input":
        rows = rows * by_row(weights_NK.astype(rows.dtype), routes)[:, None]
        weights_NK = jnp.ones_like(weights_NK)
    return Routed(rows, routes, weights_NK)


def compute(weights: Weights, routed: Routed, spec: Moe, runtime: Runtime) -> Routed:
    """Computes down(act(gate(x)) * up(x)) of the expert of each row, with ClampedSwiglu for act and
    product if it is set."""
    return down(weights, gate_and_up(weights, routed, spec, runtime), runtime)


def gate_and_up(weights: Weights, routed: Routed, spec: Moe, runtime: Runtime) -> Routed:
    """Computes the first two products and the activation: rows [M, F]."""
    products = [
        checkpoint_name(_linear(weights, name, routed, runtime), f"mlpwi_{i}")
        for i, name in enumerate(inputs(spec))
    ]
    return replace(routed, rows=_inner(products, spec))


def inputs(spec: Moe) -> tuple[str, ...]:
    """Returns the names of the weights that read the input of an expert."""
    return ("gate", "up") if spec.gated else ("up",)


def _inner(products: list[jax.Array], spec: Moe) -> jax.Array:
    """Returns act(gate) * up, in the form that the spec says, or act(up) of experts without a
    gate."""
    if not spec.gated:
        return ACTIVATIONS[spec.activation](products[0])
    gate, up = products
    return gated(gate, up, spec)


def down(weights: Weights, inner: Routed, runtime: Runtime) -> Routed:
    """Computes the third product: rows [M, E]."""
    return replace(inner, rows=checkpoint_name(_linear(weights, "down", inner, runtime), "mlpwo"))


def _linear(weights: Weights, name: str, routed: Routed, runtime: Runtime) -> jax.Array:
    bias = cast(jax.Array | None, weights.get(f"{name}_bias"))
    return product(routed.rows, _adapted(weights, name), routed.plan, runtime, bias)


def unroute(routed: Routed) -> jax.Array:
    """Computes the weighted sum over the choices of each token that have a row: [N, E]."""
    return combine(routed.rows, routed.weights, routed.plan)


def small_batch(tokens: int, platform: str) -> bool:
    """Tells whether so many tokens go `through_every` expert."""
    return platform == "tpu" and tokens <= EVERY_TOKENS


def through_every(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    weights: Weights,
    groups: int,
    spec: Moe,
    runtime: Runtime,
) -> jax.Array:
    """Sends all tokens through all experts: [N, E], the result of the steps above without rows of
    choices.

    tokens: (x [N, E], choices int[N, k], their weights float32[N, k]). An expert that a token has
    not chosen has weight 0 in its sum. Each weight is read once, and nothing of size [G, N, E] is
    stored: G is large where devices hold slices of the width.
    """
    x_NE, experts_NK, weights_NK = tokens
    weight_GN1 = _by_expert(weights_NK, experts_NK, groups)
    names = inputs(spec)
    products = [linear("ne,gef->gnf", x_NE, _adapted(weights, name), runtime) for name in names]
    if spec.weigh == "input":  # which these products are linear in
        products = [each * weight_GN1.astype(each.dtype) for each in products]
        weight_GN1 = _by_expert(jnp.ones_like(weights_NK), experts_NK, groups)
    if "up_bias" in weights:
        biases = [_bias(weights, name).astype(products[0].dtype)[:, None] for name in names]
        products = [each + bias for each, bias in zip(products, biases, strict=True)]
    inner_GNF = _inner(
        [checkpoint_name(each, f"mlpwi_{i}") for i, each in enumerate(products)], spec
    )
    inner_GNF = jnp.where(weight_GN1 != 0, inner_GNF * weight_GN1, 0.0).astype(inner_GNF.dtype)
    down = _adapted(weights, "down")
    if "down_dora_scale" in weights or _quantised(weights["down"], runtime):
        # Scales of numbers differ between experts.
        out_NE = linear("gnf,gfe->gne", inner_GNF, down, runtime).sum(axis=0)
    else:
        out_NE = linear("gnf,gfe->ne", inner_GNF, down, runtime)
    if "down_bias" in weights:
        bias_NE = jnp.einsum(
            "gn,ge->ne", weight_GN1[..., 0], _bias(weights, "down").astype(jnp.float32)
        )
        out_NE = out_NE + bias_NE.astype(out_NE.dtype)
    return checkpoint_name(out_NE, "mlpwo")


def _quantised(weight: Weight, runtime: Runtime) -> bool:
    """Tells whether products with a weight have numbers with scales."""
    return runtime.quantization is not None or isinstance(weight, qwix.QArray)


def _bias(weights: Weights, name: str) -> jax.Array:
    return cast(jax.Array, weights[f"{name}_bias"])


def _by_expert(weights_NK: jax.Array, experts_NK: jax.Array, groups: int) -> jax.Array:
    """Returns the weight of each expert 0 .. groups - 1 for each token, float32[G, N, 1]."""
    token = jnp.arange(len(weights_NK))[:, None]
    wide = (
        jnp.zeros((groups, len(weights_NK)), jnp.float32)
        .at[experts_NK, token]
        .add(weights_NK.astype(jnp.float32), mode="drop")
    )
    return wide[..., None]
