"""Products of quantised numbers (qwix), for training with `Runtime.quantization` and for quantised
weights.

A quantised array is a `qwix.QArray`: values of 8 or 4 bits, and one scale for all numbers that a
product sums over: the largest absolute value divided by the largest number of the type. For int8
the divisor is 127, not the 127.5 of qwix, with which the largest number lies between two integers
and programs that differ in a last bit round it differently (8e-4 in log-probability between
generator and trainer). All scales are float32, whatever the dtype of the activations.

A stored weight may have several scales for the numbers of a sum, one for each block of them
(`quantize_blocks`), and codes of NormalFloat-4 in the place of numbers. `dequantised` gives back
its floats, by which products multiply.

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

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix
from jax.ad_checkpoint import checkpoint_name

from policy.config import WeightType

TYPES = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}
# The number that each code of NormalFloat-4 stands for (arXiv 2305.14314, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
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


def quantize_blocks(
    array: jax.Array, kind: WeightType, inputs: tuple[int, ...], block: int | None
) -> qwix.QArray:
    """Quantises a weight to `kind`, with a float32 scale for each block of at most `block` numbers
    along `inputs`, the dimensions that products sum over; None: for all of them. nf4: codes uint4.
    """
    array = array.astype(jnp.float32)
    sizes = block_sizes(array.shape, inputs, block)
    if kind == "nf4":
        return _quantize_nf4(array, {dim: array.shape[dim] for dim in inputs} | sizes)
    kept = tuple(dim for dim in range(array.ndim) if dim not in inputs)
    method = _INT8 if kind == "int8" else "absmax"
    return qwix.quantize(
        array, TYPES[kind], channelwise_axes=kept, tiled_axes=sizes, calibration_method=method
    )


def _quantize_nf4(array: jax.Array, sizes: dict[int, int]) -> qwix.QArray:
    """Returns the codes of the nearest numbers of NF4, counted by the means of neighbours that lie
    below. The scale of a block is its largest absolute value, or 1 where all numbers are 0.

    sizes: how many numbers a block has along each dimension; along others it has one.
    """
    scales = tuple(n // sizes.get(dim, 1) for dim, n in enumerate(array.shape))
    blocks = _in_blocks(array, scales)
    within = tuple(range(1, blocks.ndim, 2))
    largest = jnp.abs(blocks).max(within, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest)
    blocks = blocks / scale
    codes = jnp.zeros(blocks.shape, jnp.int32)
    for low, high in itertools.pairwise(NF4):
        codes += blocks > (low + high) / 2
    codes = codes.astype(jnp.uint4).reshape(array.shape)
    return qwix.QArray(codes, scale.reshape(scales), None, "nf4")


def _in_blocks(array: jax.Array, counts: tuple[int, ...]) -> jax.Array:
    """Splits each dimension into (blocks, numbers of a block). counts: of the blocks."""
    pairs = zip(counts, array.shape, strict=True)
    return array.reshape([side for count, n in pairs for side in (count, n // count)])


def block_sizes(
    shape: tuple[int, ...], inputs: tuple[int, ...], block: int | None
) -> dict[int, int]:
    """Returns how many numbers a block has along each dimension of `inputs`; {} if `block` is None.

    A block lies within the last of these dimensions, or takes all of it and a part of the one
    before. Along a dimension it has the largest divisor of its length that fits. Where that is less
    than a quarter of `block`, as for a length that is prime, it has the smallest divisor that is
    larger than `block`, so that no scale belongs to a few numbers only.
    """
    if block is None:
        return {}
    sizes = dict.fromkeys(inputs, 1)
    room = block
    for dim in reversed(inputs):
        length = shape[dim]
        divisors = [size for size in range(1, length + 1) if length % size == 0]
        size = max(size for size in divisors if size <= room)
        if size < length and room == block and 4 * size < block:
            size = min(size for size in divisors if size > block)
        sizes[dim] = size
        room //= size
        if size < length or not room:
            break
    return sizes


def scale_shape(
    shape: tuple[int, ...], inputs: tuple[int, ...], block: int | None
) -> tuple[int, ...]:
    """Returns the shape of the scales of `quantize_blocks`."""
    sizes = {dim: shape[dim] for dim in inputs} | block_sizes(shape, inputs, block)
    return tuple(length // sizes.get(dim, 1) for dim, length in enumerate(shape))


def dequantised(weight: qwix.QArray) -> jax.Array:
    """Returns the float32 numbers of a quantised weight: each value, or the number of its code,
    times the scale of its block. An adapter is merged into these numbers."""
    values = weight.qvalue
    values = _nf4_numbers(values) if weight.qtype == "nf4" else values.astype(jnp.float32)
    counts = weight.scale.shape
    scale = _in_blocks(weight.scale.astype(jnp.float32), counts)
    return (_in_blocks(values, counts) * scale).reshape(weight.shape)


def floats(weight: jax.Array | qwix.QArray) -> jax.Array:
    """Returns the numbers of a weight, dequantised if it is stored quantised."""
    return dequantised(weight) if isinstance(weight, qwix.QArray) else weight


def _nf4_numbers(codes: jax.Array) -> jax.Array:
    """Returns the numbers of codes by four choices, one for each bit: operations on single numbers,
    which become a part of the product that reads them. A lookup in a table would not.

    The first choice, between constants, is a sum with one term that is 0: it is exact, and for a
    `where` a scan under differentiation would keep 16 constants of the size of the weight.
    """
    codes = codes.astype(jnp.int32)
    odd = (codes & 1).astype(jnp.float32)
    even = 1.0 - odd
    pairs = zip(NF4[::2], NF4[1::2], strict=True)
    numbers = [even * low + odd * high for low, high in pairs]
    for bit in range(1, 4):
        is_set = (codes >> bit) & 1 == 1
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        numbers = [jnp.where(is_set, high, low) for low, high in pairs]
    return numbers[0]


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
