"""Rotary position embedding (arXiv 2104.09864) and its rescalings for longer contexts; sinusoids to
add to an embedding.

B rows, T tokens, H heads, D head dimension.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from policy.config import (
    LinearScaling,
    Llama3Scaling,
    LongRope,
    ProportionalScaling,
    Rope,
    YarnScaling,
)


def wavelengths(theta: float, dim: int) -> np.ndarray:
    """Computes theta^(2i / dim), float32[dim / 2]: how many positions each pair takes for one
    radian.

    Exponents, powers and what follows from them are rounded to float32 one by one, as in
    transformers and in the engines that models were trained with. At position 100,000 the last bit
    of a frequency turns a pair by 1e-2.
    """
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def frequencies(rope: Rope, longest: int | jax.Array | None = None) -> np.ndarray | jax.Array:
    """Computes the angle per position of each rotated pair, float32[dim / 2]. `longest`: the tokens
    of the longest sequence, which LongRoPE needs."""
    lengths = wavelengths(rope.theta, rope.dim)
    base = 1 / lengths
    match rope.scaling:
        case None:
            return base
        case LinearScaling(factor):
            return base / np.float32(factor)
        case Llama3Scaling():
            return _llama3(base, rope.scaling)
        case YarnScaling():
            return _yarn(lengths, rope, rope.scaling)
        case ProportionalScaling(fraction, factor):
            turning = np.arange(rope.dim // 2) < int(fraction * rope.dim // 2)
            return np.where(turning, base / np.float32(factor), np.float32(0))
        case LongRope(short, long, original):
            assert longest is not None, "LongRoPE chooses its factors by the longest sequence"
            sets = [1 / (np.asarray(factors, np.float32) * lengths) for factors in (short, long)]
            if isinstance(longest, int):
                return sets[longest > original]
            return jnp.where(longest > original, sets[1], sets[0])


def _llama3(base: np.ndarray, s: Llama3Scaling) -> np.ndarray:
    """Divides low frequencies by the factor, keeps high ones and interpolates those between."""
    wavelength = np.float32(2 * math.pi) / base
    divided = base / np.float32(s.factor)
    longest = s.original_max_position / s.low_freq_factor
    shortest = s.original_max_position / s.high_freq_factor
    span = np.float32(s.high_freq_factor - s.low_freq_factor)
    smooth = (
        (np.float32(s.original_max_position) / wavelength - np.float32(s.low_freq_factor)) / span
        if span
        else 0 * base
    )
    between = (1 - smooth) * divided + smooth * base
    return np.where(wavelength < shortest, base, np.where(wavelength > longest, divided, between))


def _yarn(lengths: np.ndarray, rope: Rope, s: YarnScaling) -> np.ndarray:
    """NTK-by-parts (arXiv 2309.00071): keeps high frequencies and divides low ones."""

    def dimension(rotations: float) -> float:
        return (
            rope.dim
            * math.log(s.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = dimension(s.beta_fast)
    high = dimension(s.beta_slow)
    if s.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(rope.dim // 2).astype(np.float32)
    kept = 1 - np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    return 1 / (np.float32(s.factor) * lengths) * (1 - kept) + 1 / lengths * kept


def rotation(
    rope: Rope,
    positions_BT: jax.Array,
    turns_BT3: jax.Array | None = None,
    longest: int | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the rotation table of these positions: (cos, sin), float32[B, T, dim / 2]. A rotary
    embedding with sections turns by `turns`, if they are given; LongRoPE needs the tokens of the
    longest sequence."""
    positions = positions_BT[..., None]
    if rope.sections is not None and turns_BT3 is not None:
        positions = turns_BT3[..., _axes(rope.dim // 2, rope.sections, rope.blocks)]
    angles = positions.astype(jnp.float32) * frequencies(rope, longest)
    factor = (
        rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongRope) else 1.0
    )
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _axes(count: int, sections: tuple[int, int, int], blocks: bool) -> np.ndarray:
    """Returns which position each frequency turns by, int[count]: 0 time, 1 height, 2 width."""
    if blocks:
        return np.repeat(np.arange(3), sections)
    number = np.arange(count)
    axis = number % 3
    return np.where(number < 3 * np.asarray(sections)[axis], axis, 0)


def materialized(table: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Multiplies a rotation table by the identity, into which XLA fuses nothing. Otherwise XLA on
    CPU computes cosine and sine again wherever they are used, forward and backward, for every head
    of every layer: a fifth of a small decoding step (docs/decisions.md)."""
    cos, sin = table
    both = jnp.matmul(
        jnp.concatenate([cos, sin]), jnp.eye(cos.shape[-1], dtype=jnp.float32), precision="highest"
    )
    return both[: len(cos)], both[len(cos) :]


def rotate(x_BHTD: jax.Array, rope: Rope, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the first `rope.dim` of the last dimension of x; the rest passes through. float32
    inside, x.dtype outside."""
    cos, sin = (t[:, None] for t in table)
    turned = x_BHTD[..., : rope.dim].astype(jnp.float32)
    rest = x_BHTD[..., rope.dim :]
    if rope.interleaved:
        pairs = turned.reshape(*turned.shape[:-1], rope.dim // 2, 2)
        u = pairs[..., 0]
        v = pairs[..., 1]
        out = jnp.stack([u * cos - v * sin, v * cos + u * sin], axis=-1).reshape(turned.shape)
    else:
        u, v = jnp.split(turned, 2, axis=-1)
        out = jnp.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)
    out = out.astype(x_BHTD.dtype)
    return jnp.concatenate([out, rest], axis=-1) if rest.shape[-1] else out


def sinusoids(positions_BT: jax.Array, dim: int) -> jax.Array:
    """Computes float32[B, T, dim]: [sin | cos] of position / wavelength, with wavelengths spaced
    evenly in logarithm from 1 to 1e4."""
    half = dim // 2
    inverse = np.exp(-np.arange(half) * math.log(1e4) / max(half - 1, 1)).astype(np.float32)
    angles = positions_BT[..., None].astype(jnp.float32) * inverse
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
