"""Products of activations with weights that may be quantised.

Every such product goes through `linear` (or `policy.layers.grouped.product` where the rows of a product have weights of their
own). Products that stay as they are do not: routers and gates, norms, the indexer, embedding and head.

A weight is quantised in one of two ways. In training it is an array of floats, and `Runtime.quantization` names the rule by which
its product is computed (policy/layers/quantization.py). For rollouts it may be a `qwix.QArray` (rollout/weights.py): then it is
multiplied as floats, in the dtype of the activations, or, with a rule, quantised like the activations. While decoding on CPU it is
a `Projection`, laid out for that (policy/layers/projection.py).
"""

from __future__ import annotations

import math
from string import ascii_uppercase

import jax
import jax.numpy as jnp
import qwix

from policy.config import Runtime
from policy.layers import quantization
from policy.layers.projection import Projection

Weight = jax.Array | qwix.QArray | Projection


def linear(equation: str, x: jax.Array, weight: Weight, runtime: Runtime) -> jax.Array:
    """einsum(equation, x, weight) in x's dtype. The equation names leading dimensions that only x has "...", or not at all."""
    rule = runtime.quantization
    if rule is None and not isinstance(weight, (qwix.QArray, Projection)):
        return jnp.einsum(equation, x, weight.astype(x.dtype))
    equation = equation.replace("...", ascii_uppercase[: x.ndim - len(equation.split(",")[0].replace("...", ""))])
    if isinstance(weight, Projection):
        return _project(equation, x, weight)
    if not isinstance(weight, qwix.QArray):
        return quantization.einsum(equation, x, weight, rule)
    if rule is None:
        return qwix.einsum(equation, x, weight.astype(x.dtype))
    letters, outs = equation.split(",")[0], equation.split("->")[1]
    inputs = tuple(dim for dim, letter in enumerate(letters) if letter not in outs)
    x_quantized = quantization.quantize(x, quantization.RULES[rule].act_qtype, inputs)
    return qwix.einsum(equation, x_quantized, weight).astype(x.dtype)


def _project(equation: str, x: jax.Array, weight: Projection) -> jax.Array:
    """The same with a weight whose first dimensions, in the order of the equation, are summed over."""
    (letters, named), out = equation.split("->")[0].split(","), equation.split("->")[1]
    inputs, outputs = named[: len(weight.inputs)], named[len(weight.inputs) :]
    rows = "".join(letter for letter in letters if letter not in inputs)
    x = jnp.einsum(f"{letters}->{rows}{inputs}", x)
    dims = x.shape[: len(rows)]
    y = weight.product(x.reshape(math.prod(dims), -1)).reshape(*dims, *weight.outputs)
    return jnp.einsum(f"{rows}{outputs}->{out}", y)


def ragged_linear(rows_ME: jax.Array, weights_GEF: Weight, sizes_G: jax.Array, runtime: Runtime) -> jax.Array:
    """rows[m] @ weights[group of m], in rows' dtype: [M, F]. The rows of a group lie next to each other, `sizes` of them."""
    rule = runtime.quantization
    if rule is None and not isinstance(weights_GEF, qwix.QArray):
        return jax.lax.ragged_dot(rows_ME, weights_GEF.astype(rows_ME.dtype), sizes_G)
    if not isinstance(weights_GEF, qwix.QArray):
        return quantization.ragged_dot(rows_ME, weights_GEF, sizes_G, rule)
    if rule is None:
        return qwix.ragged_dot(rows_ME, weights_GEF.astype(rows_ME.dtype), sizes_G)
    rows = quantization.quantize(rows_ME, quantization.RULES[rule].act_qtype, (1,))
    return qwix.ragged_dot(rows, weights_GEF, sizes_G).astype(rows_ME.dtype)


def rounded(array: Weight, inputs: tuple[int, ...], dtype, runtime: Runtime) -> jax.Array:
    """The numbers that `linear` multiplies by, as floats, where a product has to be taken in another way. `array` is a weight or
    an activation, `inputs` are the dimensions that `linear` would sum over."""
    if isinstance(array, qwix.QArray):
        return qwix.dequantize(array.astype(dtype))
    if runtime.quantization is None:
        return array.astype(dtype)
    qtype = quantization.RULES[runtime.quantization].weight_qtype
    return qwix.dequantize(quantization.quantize(array, qtype, inputs)).astype(dtype)
