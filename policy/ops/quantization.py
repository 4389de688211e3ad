"""Products of quantised numbers (qwix), for training with `Runtime.quantization` and for quantised
weights.

A quantised array is a `qwix.QArray`: values of 8 or 4 bits, and one scale for all numbers that a
product sums over: the largest absolute value divided by the largest number of the type. For int8
the divisor is 127, not the 127.5 of qwix, with which the largest number lies between two integers
and programs that differ in a last bit round it differently (8e-4 in log-probability between
generator and trainer). All scales are float32, whatever the dtype of the activations.

Training follows qwix's rule for quantised training, through its public functions: its provider
identifies weights by shape, which fails in a layer with three weights of one shape. With s_x, s_w
the scales of

    y = sum_i x_i w_i = s_x s_w sum_i q(x_i) q(w_i)

the gradients in x and w ignore the rounding and use the same q(x) and q(w), and a quantised
gradient g of y: dx = q(g s_w) q(w), dw = q(g s_x) q(x). q(x) and q(w) have the name "quantization"
for remat policies.

M rows, E inputs of a product, F outputs, G groups of rows (experts).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix
from jax.ad_checkpoint import checkpoint_name

TYPES = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}
# Types of weights, activations and gradients in training.
_INT8 = f"absmax,{127.5 / 127}"
RULES = {
    "int8": qwix.QtRule(
        weight_qtype=jnp.int8,
        act_qtype=jnp.int8,
        bwd_qtype=jnp.int8,
        weight_calibration_method=_INT8,
        act_calibration_method=_INT8,
        bwd_calibration_method=_INT8,
    ),
    "fp8": qwix.QtRule(
        weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn, bwd_qtype=jnp.float8_e4m3fn
    ),
    "fp8_full": qwix.QtRule(
        weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn, bwd_qtype=jnp.float8_e5m2
    ),
}


def quantize(array: jax.Array, qtype: Any, inputs: tuple[int, ...]) -> qwix.QArray:
    """Quantises `array` to `qtype` with a float32 scale for each position of the dimensions that
    are not in `inputs`. Where all numbers are 0 the scale is 1."""
    summed = {dim % array.ndim for dim in inputs}
    kept = tuple(dim for dim in range(array.ndim) if dim not in summed)
    method = _INT8 if qtype == jnp.int8 else "absmax"
    return qwix.quantize(
        array.astype(jnp.float32), qtype, channelwise_axes=kept, calibration_method=method
    )


def quantize_tiles(array: jax.Array, qtype: Any, tiles: int) -> qwix.QArray:
    """Quantises `array` to `qtype` with float32 scales [..., tiles], one for each of `tiles` equal
    pieces of the last dimension."""
    kept = tuple(range(array.ndim - 1))
    last = array.ndim - 1
    size = array.shape[-1] // tiles
    return qwix.quantize(
        array.astype(jnp.float32), qtype, channelwise_axes=kept, tiled_axes={last: size}
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(equation: str, x: jax.Array, weight: jax.Array, rule: str) -> jax.Array:
    """Computes einsum(equation, x, weight) by the training rule `rule`. The equation has no dots,
    and every letter once per operand."""
    return _einsum_forward(equation, x, weight, rule)[0]


def _einsum_forward(equation: str, x: jax.Array, weight: jax.Array, rule: str):
    xs, ws, _ = _letters(equation)
    qx = _named(quantize(x, RULES[rule].act_qtype, _missing(xs, equation)))
    qw = _named(quantize(weight, RULES[rule].weight_qtype, _missing(ws, equation)))
    return qwix.einsum(equation, qx, qw).astype(x.dtype), (
        qx,
        qw,
        jnp.empty(0, x.dtype),
        jnp.empty(0, weight.dtype),
    )


def _einsum_backward(equation: str, rule: str, saved, g: jax.Array):
    qx, qw, like_x, like_w = saved
    xs, ws, outs = _letters(equation)
    gradient = partial(_gradient, g.astype(jnp.float32), outs, qtype=RULES[rule].bwd_qtype)
    return gradient(qw, ws, xs).astype(like_x.dtype), gradient(qx, xs, ws).astype(like_w.dtype)


einsum.defvjp(_einsum_forward, _einsum_backward)


def _gradient(
    g: jax.Array, outs: str, other: qwix.QArray, others: str, letters: str, *, qtype
) -> jax.Array:
    """Computes the gradient with the dimensions `letters` from the gradient g of the output and the
    other operand. The other operand's scales belong to letters that are summed over here, so g is
    multiplied by them before it is quantised."""
    kept = [letter for letter in outs if letter in others]
    scale = jnp.einsum(
        f"{others}->{''.join(kept)}", other.scale
    )  # the dropped letters have length 1
    sizes = dict(zip(outs, g.shape, strict=True))
    g = g * scale.reshape([sizes[letter] if letter in kept else 1 for letter in outs])
    equation = f"{outs},{others}->{letters}"
    return qwix.einsum(equation, quantize(g, qtype, _missing(outs, equation)), other.qvalue)


class EinsumLetters(NamedTuple):
    """The letters of an einsum of two operands: those of each operand and of the result."""

    left: str
    right: str
    outs: str


def _letters(equation: str) -> EinsumLetters:
    operands, outs = equation.split("->")
    left, right = operands.split(",")
    return EinsumLetters(left, right, outs)


def _missing(letters: str, equation: str) -> tuple[int, ...]:
    """Returns the dimensions of an operand that the result does not have, which are summed over."""
    outs = _letters(equation).outs
    return tuple(dim for dim, letter in enumerate(letters) if letter not in outs)


def _named(array: qwix.QArray) -> qwix.QArray:
    return jax.tree.map(lambda a: checkpoint_name(a, "quantization"), array)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged_dot(
    rows_ME: jax.Array, weights_GEF: jax.Array, sizes_G: jax.Array, rule: str
) -> jax.Array:
    """Computes jax.lax.ragged_dot by the training rule `rule`; a weight has one scale for each
    group and channel."""
    return _ragged_forward(rows_ME, weights_GEF, sizes_G, rule)[0]


def _ragged_forward(rows_ME, weights_GEF, sizes_G, rule: str):
    rows = _named(quantize(rows_ME, RULES[rule].act_qtype, (1,)))
    weights = _named(quantize(weights_GEF, RULES[rule].weight_qtype, (1,)))
    out = qwix.ragged_dot(rows, weights, sizes_G).astype(rows_ME.dtype)
    return out, (rows, weights, sizes_G, jnp.empty(0, weights_GEF.dtype))


_SUM_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _ragged_backward(rule: str, saved, g_MF: jax.Array):
    rows, weights, sizes, like = saved
    g = g_MF.astype(jnp.float32)
    qtype = RULES[rule].bwd_qtype
    group = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=g.shape[0])
    for_rows = quantize(g * weights.scale[group, 0], qtype, (1,))
    d_rows = qwix.ragged_dot(for_rows, weights.qvalue.swapaxes(1, 2), sizes)
    for_weights = quantize(g * rows.scale, qtype, (0,))
    d_weights = qwix.ragged_dot_general(
        rows.qvalue, for_weights, sizes, dimension_numbers=_SUM_OVER_ROWS
    )
    return d_rows.astype(g_MF.dtype), d_weights.astype(like.dtype), None


ragged_dot.defvjp(_ragged_forward, _ragged_backward)
