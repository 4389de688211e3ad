"""Divergence of a student from a teacher per token, from the final states of both
(policy/heads/divergence_tiles.py), or from the likeliest tokens of the teacher.

M tokens (rows and positions flattened), E hidden of the student, D of the teacher, V and U their
vocabularies, K targets per token: the likeliest of the teacher.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from policy.config import LogitScaling
from policy.heads import divergence_tiles, head
from policy.heads.adapted_head import Head, joined
from policy.heads.divergence_kinds import Divergence, DivergenceOutputs
from policy.heads.divergence_tiles import JointTiles, Scalings
from policy.heads.head import Tiling
from policy.mesh.explicit import in_explicit_mode, with_explicit_axes

__all__ = ["Divergence", "DivergenceOutputs", "Scalings", "divergence", "top_divergence"]

# Least probability of all tokens outside of the k likeliest: 1 minus a sum of float32 probabilities
# is no more exact.
_LEAST_REST = 2.0**-23


def divergence(
    student_ME: jax.Array,
    student_head_VE: Head,
    teacher_MD: jax.Array,
    teacher_head_UD: Head,
    spec: Divergence,
    temperature: ArrayLike,
    scalings: Scalings = (LogitScaling(), LogitScaling()),
    tiling: Tiling = Tiling(),
) -> DivergenceOutputs:
    """Returns the divergence of softmax(student logits / temperature) from softmax(teacher logits /
    temperature).

    Where the vocabularies are padded to different widths, both softmaxes are over the first min(V,
    U) tokens. With `spec.top_k` the tokens are the teacher's likeliest, and without renormalisation
    the student's probabilities are normalised over its full vocabulary.

    The divergence is differentiable in the student's states and head. Teacher and temperature have
    no gradient.
    """
    # Here and not only in the backward pass: devices would sum a zero gradient of the teacher's
    # head.
    student_ME, student_head_VE = joined(student_ME, student_head_VE)
    teacher = joined(teacher_MD, teacher_head_UD)
    teacher_MD, teacher_head_UD = jax.lax.stop_gradient((teacher.hidden, teacher.weight))
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    arrays = student_ME, student_head_VE, teacher_MD, teacher_head_UD, temperature
    if spec.top_k is not None:
        return _over_likeliest(*arrays, spec, scalings, tiling)
    layout = tiling.layout
    M = student_ME.shape[0]
    if layout is not None and layout.explicit and not in_explicit_mode():
        rows = layout.spec(("batch",), (M,))
        heads = [
            layout.spec(("vocab", "embed_vocab"), weight.shape)
            for weight in (student_head_VE, teacher_head_UD)
        ]
        specs = rows, heads[0], rows, heads[1], PartitionSpec()
        run = with_explicit_axes(partial(_joint, spec, scalings, tiling), layout.mesh, specs)
    else:
        run = partial(_joint, spec, scalings, tiling)
    outputs = cast(DivergenceOutputs, run(*arrays))
    return replace(jax.lax.stop_gradient(outputs), divergence=outputs.divergence)


def _joint(
    spec: Divergence, scalings: Scalings, tiling: Tiling, *arrays: jax.Array
) -> DivergenceOutputs:
    """Compares all tokens that both vocabularies have."""
    student, student_head, _, teacher_head, _ = arrays
    M = student.shape[0]
    heads = (student_head, teacher_head)
    tiles = JointTiles.on_mesh(tiling, M, heads, scalings)
    if tiles is not None:
        return divergence_tiles.divergence(*arrays, spec, tiles)
    vocabularies = (student_head.shape[0], teacher_head.shape[0])

    def local(*arrays):
        tiles = JointTiles.on_device(tiling, arrays[0].shape[0], vocabularies, scalings)
        return divergence_tiles.divergence(*arrays, spec, tiles)

    return tiling.spread(local, M, True, False, True, False, False)(*arrays)


def _over_likeliest(
    student, student_head, teacher, teacher_head, temperature, spec, scalings, tiling
):
    """Compares the k likeliest tokens of the teacher."""
    V = min(student_head.shape[0], teacher_head.shape[0])
    top = head.top_and_rest(
        teacher, teacher_head, min(spec.top_k, V), temperature, scalings[1], tiling, vocab=V
    )
    student_MK, entropy_M = head.logprobs(
        student, student_head, top.ids, temperature, scalings[0], tiling
    )
    outputs = top_divergence(student_MK, top.logp, top.rest, spec)
    return DivergenceOutputs(
        outputs.divergence,
        jax.lax.stop_gradient(entropy_M),
        student_mass=outputs.student_mass,
        teacher_mass=outputs.teacher_mass,
    )


def top_divergence(
    student_MK: jax.Array, teacher_MK: jax.Array, rest_M: jax.Array | None, spec: Divergence
) -> DivergenceOutputs:
    """Returns the divergence over K tokens for each of M tokens, differentiable in the student's
    log-probabilities.

    student_MK, teacher_MK: log-probabilities of the same K tokens, normalised over the vocabulary.
    With `renormalise` those of a token may be off by a constant, so the stored log-probabilities of
    a teacher divided by t are those at temperature t. rest_M: logarithm of the teacher's
    probability of all other tokens; None: that of 1 minus the sum of the K.
    """
    student = student_MK.astype(jnp.float32)
    teacher = jax.lax.stop_gradient(teacher_MK.astype(jnp.float32))
    masses = [jax.lax.stop_gradient(jnp.exp(logp).sum(axis=-1)) for logp in (student, teacher)]
    if spec.tail == "renormalise":
        student, teacher = (jax.nn.log_softmax(logp, axis=-1) for logp in (student, teacher))
    elif spec.tail == "tail":
        rest = (
            _log_rest(teacher)
            if rest_M is None
            else jnp.maximum(rest_M.astype(jnp.float32), jnp.log(_LEAST_REST))
        )
        student = jnp.concatenate([student, _log_rest(student)[:, None]], axis=-1)
        teacher = jnp.concatenate([teacher, jax.lax.stop_gradient(rest)[:, None]], axis=-1)
    total = spec.terms(student, teacher).sum(axis=-1)
    return DivergenceOutputs(total, student_mass=masses[0], teacher_mass=masses[1])


def _log_rest(logp_MK: jax.Array) -> jax.Array:
    """Returns the logarithm of 1 - sum(exp(logp)), float32[M]."""
    return jnp.log1p(-jnp.minimum(jnp.exp(logp_MK).sum(axis=-1), 1.0 - _LEAST_REST))
