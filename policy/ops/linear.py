"""Products of activations with weights that may be quantised.

Every such product goes through `linear` (or `policy.experts.grouped.product` where the rows of a product have weights of their
own). Products that stay as they are do not: routers and gates, norms, the indexer, embedding and head.

A weight is quantised in one of two ways. In training it is an array of floats, and `Runtime.quantization` names the rule by which
its product is computed (policy/ops/quantization.py). For rollouts it may be a `qwix.QArray` (rollout/engine/weights.py): then it is
multiplied as floats, in the dtype of the activations, or, with a rule, quantised like the activations. While decoding on CPU it is
a `Projection`, laid out for that (policy/ops/projection.py).
"""

from __future__ import annotations

import math
from string import ascii_uppercase

import jax
import jax.numpy as jnp
import qwix
from jax.sharding import PartitionSpec

from policy.config import Runtime
from policy.experts import grouped_kernel
from policy.mesh.explicit import in_explicit_mode, spec_of
from policy.mesh.sharding import Layout
from policy.ops import quantization
from policy.ops.projection import Projection

Weight = jax.Array | qwix.QArray | Projection


def linear(equation: str, x: jax.Array, weight: Weight, runtime: Runtime) -> jax.Array:
    """einsum(equation, x, weight) in x's dtype. The equation names leading dimensions that only x has "...", or not at all."""
    rule = runtime.quantization
    plain = rule is None and not isinstance(weight, (qwix.QArray, Projection))
    one_cpu = runtime.layout is not None and runtime.layout.mesh.size == 1 and runtime.layout.platform == "cpu"
    if plain and not one_cpu:
        return einsum(equation, x, weight.astype(x.dtype), runtime.layout)
    equation = _spelled(equation, x)
    if plain:
        return _by_rows(equation, x, weight.astype(x.dtype))
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


def einsum(equation: str, x: jax.Array, weight: jax.Array, layout: Layout | None = None, precision=None) -> jax.Array:
    """einsum(equation, x, weight), of activations and a weight that stays as it is. Where shardings are stated, the weight is
    gathered over the axes that cut it for storage only (without a layout: over all that do not cut x), and dimensions of the
    result are cut as they are in x, or in the weight."""
    if not in_explicit_mode():
        return jnp.einsum(equation, x, weight, precision=precision)
    equation = _spelled(equation, x)
    (letters, named), outs = equation.split("->")[0].split(","), equation.split("->")[1]
    used = [None] * weight.ndim if layout is None else layout.used(spec_of(weight))
    cut = dict(zip(named, used, strict=True)) | dict(zip(letters, spec_of(x), strict=True))
    weight = jax.reshard(weight, PartitionSpec(*(cut[letter] for letter in named)))
    places = PartitionSpec(*(cut[letter] for letter in outs))
    return jnp.einsum(equation, x, weight, precision=precision, out_sharding=places)


def _spelled(equation: str, x: jax.Array) -> str:
    """The equation with letters in place of dots."""
    return equation.replace("...", ascii_uppercase[: x.ndim - len(equation.split(",")[0].replace("...", ""))])


def _by_rows(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same as one product of matrices where nothing else is asked for. XLA's CPU backend computes the gradient of a weight from
    rows of several dimensions by transposing them first, together with all that is fused into them: of an update of 1M weights a
    third (137 ms of 768 tokens in place of 96)."""
    rows, inputs, outputs = _letters(equation)
    K, outs = math.prod(weight.shape[: len(inputs)]), weight.shape[len(inputs) :]
    if equation.split(",")[1].split("->")[0] != inputs + outputs:
        return jnp.einsum(equation, x, weight)
    return _through(equation, x, outs, lambda x_MK: x_MK @ weight.reshape(K, -1))


def _project(equation: str, x: jax.Array, weight: Projection) -> jax.Array:
    """The same with a weight whose first dimensions, in the order of the equation, are summed over."""
    return _through(equation, x, weight.outputs, weight.product)


def _through(equation: str, x: jax.Array, outs: tuple[int, ...], product) -> jax.Array:
    """`equation` by way of `product`, from [M, K] to [M, N]; `outs` are the dimensions of N."""
    letters, out = equation.split(",")[0], equation.split("->")[1]
    rows, inputs, outputs = _letters(equation)
    x = jnp.einsum(f"{letters}->{rows}{inputs}", x)
    dims = x.shape[: len(rows)]
    y = product(x.reshape(math.prod(dims), -1)).reshape(*dims, *outs)
    return jnp.einsum(f"{rows}{outputs}->{out}", y)


def _letters(equation: str) -> tuple[str, str, str]:
    """(rows, inputs, outputs): dimensions of x alone, those summed over, dimensions of the weight alone."""
    (letters, named), out = equation.split("->")[0].split(","), equation.split("->")[1]
    inputs = "".join(letter for letter in named if letter not in out)
    rows = "".join(letter for letter in letters if letter not in named)
    return rows, inputs, "".join(letter for letter in named if letter in out and letter not in letters)


def ragged_linear(rows_ME: jax.Array, weights_GEF: Weight, sizes_G: jax.Array, runtime: Runtime) -> jax.Array:
    """rows[m] @ weights[group of m], in rows' dtype: [M, F]. The rows of a group lie next to each other, `sizes` of them."""
    rule = runtime.quantization
    if rule is None and not isinstance(weights_GEF, qwix.QArray):
        weights = weights_GEF.astype(rows_ME.dtype)
        served = grouped_kernel.served(rows_ME, weights, runtime.layout)
        return (grouped_kernel.product if served else jax.lax.ragged_dot)(rows_ME, weights, sizes_G)
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
