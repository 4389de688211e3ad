"""Products of activations with weights that may be quantised.

Every such product goes through `linear`, or through `policy.experts.grouped.product` if groups of
rows have weights of their own. Products that are never quantised do not: routers and gates, norms,
the indexer, embedding and head.

In training a weight is an array of floats, and `Runtime.quantization` names the rule by which its
product is computed (policy/ops/quantization.py). For rollouts (rollout/engine/weights.py), and if
nothing trains it (`Runtime.base_weights`), it may be a `qwix.QArray`, which is multiplied as floats
in the dtype of the activations, or, with a rule, by quantised activations. Its floats exist while
their product is computed: the backward pass makes them again. With an adapter it is an `Adapted`
(policy/ops/adapted.py) over any of these. In decoding on CPU it is a `Projection`, stored for fast
products (policy/ops/projection.py). In decoding on TPU the weights of experts are
`StackedWeight`s, which a kernel reads in place (policy/ops/stacked.py).

M rows, E inputs of a product, F outputs, G groups of rows (experts).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from string import ascii_uppercase
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import qwix
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from policy.config import Runtime
from policy.mesh.explicit import in_explicit_mode, spec_of
from policy.mesh.sharding import Layout
from policy.ops import grouped_kernel, quantization, stacked_kernel
from policy.ops.adapted import SUM, Adapted
from policy.ops.parameter import MatrixDims
from policy.ops.projection import Projection
from policy.ops.stacked import StackedWeight

Weight = jax.Array | qwix.QArray | Projection | StackedWeight | Adapted


def linear(equation: str, x: jax.Array, weight: Weight, runtime: Runtime) -> jax.Array:
    """Computes einsum(equation, x, weight) in x's dtype. In the equation "..." may stand for
    leading dimensions of x."""
    rule = runtime.quantization
    weight = weight.one if isinstance(weight, StackedWeight) else weight
    if isinstance(weight, Adapted):
        return _adapted(_spelled(equation, x), x, weight, runtime)
    if rule is None and isinstance(weight, jax.Array):
        return _of_floats(equation, x, weight.astype(x.dtype), runtime.layout)
    equation = _spelled(equation, x)
    if isinstance(weight, Projection):
        return _project(equation, x, weight)
    if not isinstance(weight, qwix.QArray):
        return quantization.einsum(equation, x, weight, rule)
    if rule is None:
        return _dequantising(equation, x, weight, runtime.layout, _precision())
    letters = equation.split(",")[0]
    outs = equation.split("->")[1]
    inputs = tuple(dim for dim, letter in enumerate(letters) if letter not in outs)
    x_quantized = quantization.quantize(x, quantization.RULES[rule].act_qtype, inputs)
    return qwix.einsum(equation, x_quantized, weight).astype(x.dtype)


def _adapted(equation: str, x: jax.Array, weight: Adapted, runtime: Runtime) -> jax.Array:
    """Computes the einsum with an adapted weight."""

    def product(equation: str, x: jax.Array, factor: jax.Array) -> jax.Array:
        return _of_floats(equation, x, factor.astype(x.dtype), runtime.layout)

    base = weight.base
    _, inputs, outputs = _letters(equation)
    is_matrix = equation.split(",")[1].split("->")[0] == inputs + outputs
    if not (is_matrix and _on_one_cpu(runtime.layout) and isinstance(base, jax.Array | Projection)):
        y = linear(equation, x, base, runtime)
        return weight.with_delta(equation, x, y, product)
    # What is not a row is one dimension in all products, so x and y are transposed once.
    E = math.prod(weight.a.shape[:-1])
    a_Er = weight.a.reshape(E, -1)
    b_rF = weight.b.reshape(weight.b.shape[0], -1)
    flat = replace(
        weight,
        a=a_Er,
        b=b_rF,
        dora_scale=None if weight.dora_scale is None else weight.dora_scale.reshape(-1),
        dims=MatrixDims((0,), (1,)),
    )

    def through(x_ME: jax.Array) -> jax.Array:
        if isinstance(base, Projection):
            y_MF = base.product(x_ME)
        else:
            y_MF = x_ME @ base.astype(x_ME.dtype).reshape(E, -1)
        return flat.with_delta("me,ef->mf", x_ME, y_MF, product)

    return _through(equation, x, weight.b.shape[1:], through)


def _on_one_cpu(layout: Layout | None) -> bool:
    return layout is not None and layout.mesh.size == 1 and layout.platform == "cpu"


def _of_floats(equation: str, x: jax.Array, weight: jax.Array, layout: Layout | None) -> jax.Array:
    if _on_one_cpu(layout):
        return _by_rows(_spelled(equation, x), x, weight)
    return einsum(equation, x, weight, layout)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _dequantising(
    equation: str,
    x: jax.Array,
    weight: qwix.QArray,
    layout: Layout | None,
    precision: str | None,
) -> jax.Array:
    """Computes the einsum with the floats of a quantised weight, which has no gradient.

    precision: of the products, also of those that are traced outside of the caller's context.
    """
    with jax.default_matmul_precision(precision):
        return _of_floats(equation, x, quantization.dequantised(weight).astype(x.dtype), layout)


def _dequantising_forward(equation: str, x, weight, layout, precision):
    return _dequantising(equation, x, weight, layout, precision), weight


def _dequantising_backward(equation: str, layout, precision, weight, g: jax.Array):
    operands, outs = equation.split("->")
    letters, named = operands.split(",")
    # Without the barrier XLA keeps the floats of the forward pass for this one.
    g, weight = jax.lax.optimization_barrier((g, weight))
    backward = f"{outs},{named}->{letters}"
    return _dequantising(backward, g, weight, layout, precision), None


_dequantising.defvjp(_dequantising_forward, _dequantising_backward)


def _precision() -> str | None:
    """Returns the precision of products in the context of the caller."""
    return cast(Any, jax.config).jax_default_matmul_precision


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies x by a factor in x's dtype; by 1 there is no product."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def einsum(
    equation: str,
    x: jax.Array,
    weight: jax.Array,
    layout: Layout | None = None,
    precision: str | None = None,
) -> jax.Array:
    """Computes einsum(equation, x, weight) for activations and a weight that is not quantised.

    In explicit mode an all-gather joins the weight over the axes that shard it for storage only
    (without a layout: over all axes that do not shard x), and dimensions of the result are sharded
    as in x or in the weight.
    """
    if not in_explicit_mode():
        return jnp.einsum(equation, x, weight, precision=precision)
    equation = _spelled(equation, x)
    operands, outs = equation.split("->")
    letters, named = operands.split(",")
    used = [None] * weight.ndim if layout is None else layout.used(spec_of(weight))
    cut = dict(zip(named, used, strict=True)) | dict(zip(letters, spec_of(x), strict=True))
    weight = jax.reshard(weight, PartitionSpec(*(cut[letter] for letter in named)))
    places = PartitionSpec(*(cut[letter] for letter in outs))
    return jnp.einsum(equation, x, weight, precision=precision, out_sharding=places)


def _spelled(equation: str, x: jax.Array) -> str:
    """Replaces the dots of an equation by letters."""
    return equation.replace(
        "...", ascii_uppercase[: x.ndim - len(equation.split(",")[0].replace("...", ""))]
    )


def _by_rows(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes the einsum as one product of matrices if it is one. For rows of several dimensions
    XLA's CPU backend transposes them, and all that is fused into them, before it computes the
    gradient of the weight: a third of the time of a small update (docs/decisions.md)."""
    rows, inputs, outputs = _letters(equation)
    E = math.prod(weight.shape[: len(inputs)])
    outs = weight.shape[len(inputs) :]
    if equation.split(",")[1].split("->")[0] != inputs + outputs:
        return jnp.einsum(equation, x, weight)
    return _through(equation, x, outs, lambda x_ME: x_ME @ weight.reshape(E, -1))


def _project(equation: str, x: jax.Array, weight: Projection) -> jax.Array:
    """Computes the einsum with a weight whose first dimensions, in the order of the equation, are
    summed over."""
    return _through(equation, x, weight.outputs, weight.product)


def _through(
    equation: str, x: jax.Array, outs: tuple[int, ...], product: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Computes `equation` by `product`, which maps [M, E] to [M, F]; `outs` are the dimensions of
    F."""
    letters = equation.split(",")[0]
    out = equation.split("->")[1]
    rows, inputs, outputs = _letters(equation)
    x = jnp.einsum(f"{letters}->{rows}{inputs}", x)
    dims = x.shape[: len(rows)]
    y = product(x.reshape(math.prod(dims), -1)).reshape(*dims, *outs)
    return jnp.einsum(f"{rows}{outputs}->{out}", y)


class ProductLetters(NamedTuple):
    """The letters of an einsum by their part in the product: `rows`, the dimensions of x alone;
    `inputs`, which are summed over; `outputs`, the dimensions of the weight alone."""

    rows: str
    inputs: str
    outputs: str


def _letters(equation: str) -> ProductLetters:
    operands, out = equation.split("->")
    letters, named = operands.split(",")
    return ProductLetters(
        rows="".join(letter for letter in letters if letter not in named),
        inputs="".join(letter for letter in named if letter not in out),
        outputs="".join(letter for letter in named if letter in out and letter not in letters),
    )


def ragged_linear(
    rows_ME: jax.Array, weights_GEF: Weight, sizes_G: jax.Array, runtime: Runtime
) -> jax.Array:
    """Computes rows[m] @ weights[group of m] in rows' dtype: [M, F]. The rows of a group are
    contiguous; `sizes` are their numbers."""
    rule = runtime.quantization
    assert not isinstance(weights_GEF, Projection)  # expert weights are not projected
    if isinstance(weights_GEF, Adapted):
        return _ragged_adapted(rows_ME, weights_GEF, sizes_G, runtime)
    if isinstance(weights_GEF, StackedWeight):
        if rule is None and stacked_kernel.served(rows_ME, weights_GEF, runtime.layout):
            return stacked_kernel.product(rows_ME, weights_GEF, sizes_G)
        weights_GEF = weights_GEF.one
    if rule is None and isinstance(weights_GEF, jax.Array):
        weights = weights_GEF.astype(rows_ME.dtype)
        return _ragged_of_floats(rows_ME, weights, sizes_G, runtime.layout)
    if not isinstance(weights_GEF, qwix.QArray):
        return quantization.ragged_dot(rows_ME, weights_GEF, sizes_G, rule)
    if rule is None:
        return _ragged_dequantising(rows_ME, weights_GEF, sizes_G, runtime.layout, _precision())
    rows = quantization.quantize(rows_ME, quantization.RULES[rule].act_qtype, (1,))
    return qwix.ragged_dot(rows, weights_GEF, sizes_G).astype(rows_ME.dtype)


def _ragged_of_floats(
    rows_ME: jax.Array, weights_GEF: jax.Array, sizes_G: jax.Array, layout: Layout | None
) -> jax.Array:
    served = grouped_kernel.served(rows_ME, weights_GEF, layout)
    return (grouped_kernel.product if served else jax.lax.ragged_dot)(rows_ME, weights_GEF, sizes_G)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ragged_dequantising(
    rows_ME: jax.Array,
    weights_GEF: qwix.QArray,
    sizes_G: jax.Array,
    layout: Layout | None,
    precision: str | None,
) -> jax.Array:
    """Computes `_dequantising` of groups of rows."""
    weights = quantization.dequantised(weights_GEF).astype(rows_ME.dtype)
    with jax.default_matmul_precision(precision):
        return _ragged_of_floats(rows_ME, weights, sizes_G, layout)


def _ragged_dequantising_forward(rows_ME, weights_GEF, sizes_G, layout, precision):
    out = _ragged_dequantising(rows_ME, weights_GEF, sizes_G, layout, precision)
    return out, (weights_GEF, sizes_G)


def _ragged_dequantising_backward(layout, precision, saved, g_MF: jax.Array):
    g_MF, (weights_GEF, sizes_G) = jax.lax.optimization_barrier((g_MF, saved))
    weights_GFE = weights_GEF.swapaxes(1, 2)
    return _ragged_dequantising(g_MF, weights_GFE, sizes_G, layout, precision), None, None


_ragged_dequantising.defvjp(_ragged_dequantising_forward, _ragged_dequantising_backward)


def _ragged_adapted(
    rows_ME: jax.Array, weights: Adapted, sizes_G: jax.Array, runtime: Runtime
) -> jax.Array:
    """Computes `ragged_linear` with adapted weights. A factor that all groups share is multiplied
    as one matrix."""

    def product(x_ME: jax.Array, factor: jax.Array) -> jax.Array:
        if factor.ndim == 2:
            return x_ME @ factor.astype(x_ME.dtype)
        return ragged_linear(x_ME, factor, sizes_G, runtime)

    y_MF = ragged_linear(rows_ME, weights.base, sizes_G, runtime)
    low = product(rows_ME, weights.a)
    y_MF = y_MF + product(low * jnp.asarray(weights.scale, low.dtype), weights.b)
    y_MF = checkpoint_name(y_MF, SUM)
    if weights.dora_scale is None:
        return y_MF
    G = sizes_G.shape[0]
    group_M = jnp.repeat(jnp.arange(G), sizes_G, total_repeat_length=rows_ME.shape[0])
    return y_MF * weights.dora_scale.astype(y_MF.dtype)[group_M]


def rounded(
    array: Weight, inputs: tuple[int, ...], dtype: DTypeLike, runtime: Runtime
) -> jax.Array:
    """Returns the numbers by which `linear` multiplies, as floats of `dtype`, for products that are
    computed in another way. `array` is a weight or an activation, `inputs` are the dimensions that
    `linear` would sum over."""
    # The first two exist in decoding only; products with the third are sums of two.
    assert not isinstance(array, Projection | StackedWeight | Adapted)
    if isinstance(array, qwix.QArray):
        return quantization.dequantised(array).astype(dtype)
    if runtime.quantization is None:
        return array.astype(dtype)
    qtype = quantization.RULES[runtime.quantization].weight_qtype
    return qwix.dequantize(quantization.quantize(array, qtype, inputs)).astype(dtype)
