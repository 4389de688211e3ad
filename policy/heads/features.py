"""Losses between recorded features of a student and of a teacher: outputs of layers or of their
mixers.

B rows, T tokens, E hidden of the student, D of the teacher.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from policy.config import DecoderConfig
from policy.intermediates import Aux

# Least norm in a cosine.
_LEAST_NORM = 1e-6


def by_number(
    aux: Aux, config: DecoderConfig, name: Literal["hidden", "mixed"]
) -> dict[int, jax.Array]:
    """Returns the recorded arrays [B, T, ...] of each layer that has them, by the number of the
    layer from 0.

    A layer without a mixer has no "mixed".
    """
    layers = {
        n: a[r]
        for path, a in aux.by_layer(name).items()
        for r, n in enumerate(config.layer_numbers(path))
    }
    return dict(sorted(layers.items()))


def pairs_of(
    student: Collection[int],
    teacher: Collection[int],
    pairs: Sequence[tuple[int, int]] | None = None,
) -> list[tuple[int, int]]:
    """Returns the pairs (layer of the student, layer of the teacher) that are compared.

    student, teacher: numbers of the layers that have features. pairs: None for equal numbers.

    Raises ValueError if a pair names a layer without features, if None is given and the numbers
    differ, and without any pair.
    """
    if pairs is None:
        if set(student) != set(teacher):
            raise ValueError(
                f"features: the student has them at layers {sorted(student)} and the teacher at "
                f"{sorted(teacher)}; name the pairs of layers"
            )
        pairs = [(n, n) for n in student]
    if not pairs:
        raise ValueError("features: no pair of layers to compare; record them, or name the pairs")
    for who, layers, at in (("student", student, 0), ("teacher", teacher, 1)):
        if missing := sorted({pair[at] for pair in pairs}.difference(layers)):
            raise ValueError(
                f"features: the {who} has none at layer {missing[0]}; it has them at "
                f"{sorted(layers)}"
            )
    return list(pairs)


def feature_loss(
    student: Mapping[int, jax.Array],
    teacher: Mapping[int, jax.Array],
    mask_BT: jax.Array,
    kind: Literal["cosine", "squared"] = "cosine",
    pairs: Sequence[tuple[int, int]] | None = None,
    projection: Sequence[jax.Array] | None = None,
) -> jax.Array:
    """Returns the loss per token, float32[B, T]: the mean over the pairs of layers; 0 where the
    mask is 0.

    student, teacher: features [B, T, E] and [B, T, D] by the number of the layer (`by_number`).
    cosine: 1 - cos(s, t), with norms of at least 1e-6. squared: the mean over the features of (s -
    t)^2. projection: for each pair a matrix [E, D] that maps the student's features; needed where
    the widths differ. The loss is differentiable in the student's features and in the projections.
    The caller sums it and divides by the masked tokens of the mini-batch.

    Raises ValueError as `pairs_of` does, and for widths that differ without a projection.
    """
    chosen = pairs_of(student, teacher, pairs)
    if projection is not None and len(projection) != len(chosen):
        raise ValueError(
            f"features: {len(projection)} projections for {len(chosen)} pairs of layers"
        )
    total = jnp.zeros(mask_BT.shape, jnp.float32)
    for i, (n, m) in enumerate(chosen):
        s = student[n].astype(jnp.float32)
        t = jax.lax.stop_gradient(teacher[m].astype(jnp.float32))
        if projection is not None:
            s = jnp.einsum("bte,ed->btd", s, projection[i].astype(jnp.float32))
        if s.shape[-1] != t.shape[-1]:
            raise ValueError(
                f"features: layer {n} of the student has width {s.shape[-1]}, layer {m} of the "
                f"teacher {t.shape[-1]}; a projection is needed"
            )
        total += _cosine(s, t) if kind == "cosine" else jnp.square(s - t).mean(axis=-1)
    return jnp.where(mask_BT != 0, total / len(chosen), 0.0)


def _cosine(s: jax.Array, t: jax.Array) -> jax.Array:
    """Returns 1 - cos(s, t) along the last dimension. Squares are bounded before the root, whose
    slope at 0 is infinite."""
    norms = (jnp.sqrt(jnp.maximum(jnp.square(a).sum(axis=-1), _LEAST_NORM**2)) for a in (s, t))
    product = (s * t).sum(axis=-1)
    for norm in norms:
        product = product / norm
    return 1.0 - product
