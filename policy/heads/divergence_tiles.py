"""Divergence of a student from a teacher where the output projection of either is cut over the
devices that share the rows.

All rows are compared with one tile of the vocabulary after another (policy/heads/vocab_tiles.py). A
tile has the same tokens on both sides. The forward pass runs twice over the tiles: first it sums
both softmaxes, then the divergence. The backward pass runs over them a third time.

M tokens (rows and positions flattened), E hidden of the student, D of the teacher, V and U their
vocabularies, N tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from policy.config import LogitScaling
from policy.heads.divergence_kinds import Divergence, DivergenceOutputs
from policy.heads.vocab_tiles import Tiles, add_exp


class TileLogits(NamedTuple):
    """What a tile has on both sides.

    student, teacher: logits / temperature, float32[M, N]. slope: derivative of the student's by its
    products, float32[M, N]. weights: of the student, [N, E]. ids: the tokens, int32[N].
    """

    student: jax.Array
    teacher: jax.Array
    slope: jax.Array
    weights: jax.Array
    ids: jax.Array


@dataclass(frozen=True)
class JointTiles:
    """Tiles of the vocabularies of student and teacher with the same numbers of tokens in each.
    Tokens from `shared` on are not compared."""

    student: Tiles
    teacher: Tiles

    @classmethod
    def of(
        cls,
        tiles: Sequence[Tiles | None],
        vocabularies: tuple[int, int],
        scalings: tuple[LogitScaling, LogitScaling],
    ) -> JointTiles:
        """Makes tiles for both sides from the tiles of each alone; of these, one may be None. The
        side that the mesh cuts into more parts keeps its tiles, unless the other vocabulary is
        longer."""
        base = max((each for each in tiles if each is not None), key=lambda each: each.parts)
        base = replace(base, width=-(-max(vocabularies) // (base.parts * base.count)))
        sides = (
            replace(base, vocab=V, scaling=scaling)
            for V, scaling in zip(vocabularies, scalings, strict=True)
        )
        return cls(*sides)

    @property
    def shared(self) -> int:
        """Returns how many tokens are compared."""
        return min(self.student.vocab, self.teacher.vocab)

    def logits(
        self, cuts: tuple[jax.Array, jax.Array], j: jax.Array, states: tuple, temperature: jax.Array
    ) -> TileLogits:
        """Computes the logits of tile j."""
        tile, ids = self.student.tile(cuts[0], j, states[0].dtype)
        other, _ = self.teacher.tile(cuts[1], j, states[1].dtype)
        z, slope = self.student.logits(states[0], tile, ids, temperature)
        t, _ = self.teacher.logits(states[1], other, ids, temperature)
        return TileLogits(z, t, slope, tile, ids)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def divergence(
    student_ME: jax.Array,
    student_head_VE: jax.Array,
    teacher_MD: jax.Array,
    teacher_head_UD: jax.Array,
    temperature: jax.Array,
    spec: Divergence,
    tiles: JointTiles,
) -> DivergenceOutputs:
    """Returns the results of policy/heads/divergence.py:divergence. The divergence is
    differentiable in the student's states and head."""
    return _compared(
        student_ME, student_head_VE, teacher_MD, teacher_head_UD, temperature, spec, tiles
    )[0]


class _Normalisers(NamedTuple):
    """Logarithms of softmax sums, float32[M]: of the student over its vocabulary, and of both over
    the shared tokens. agreement: 1 where both have the same likeliest token."""

    everything: jax.Array
    student: jax.Array
    teacher: jax.Array
    agreement: jax.Array


def _normalisers(cuts, states, temperature, tiles: JointTiles) -> _Normalisers:
    """Sums both softmaxes over all tiles."""
    student = tiles.student
    M = states[0].shape[0]
    none = jnp.iinfo(jnp.int32).max

    def likelier(best, z, ids):
        """Updates (logit, token) of the likeliest token, the lowest among equals."""
        top = z.max(axis=1)
        token = jnp.where(z == top[:, None], ids, none).min(axis=1)
        better = (top > best[0]) | ((top == best[0]) & (token < best[1]))
        return jnp.where(better, top, best[0]), jnp.where(better, token, best[1])

    def one(j, carry):
        full, shared, best = carry
        tile = tiles.logits(cuts, j, states, temperature)
        z = tile.student
        ids = tile.ids
        both = [jnp.where(ids < tiles.shared, each, -jnp.inf) for each in (z, tile.teacher)]
        full = add_exp(full, z) if student.vocab > tiles.shared else full
        shared = [add_exp(sums, each) for sums, each in zip(shared, both, strict=True)]
        return (
            full,
            shared,
            [likelier(each, logits, ids) for each, logits in zip(best, both, strict=True)],
        )

    low, zero, token = (
        student.rows(a) for a in (jnp.full(M, -jnp.inf), jnp.zeros(M), jnp.full(M, none, jnp.int32))
    )
    start = (low, zero), [(low, zero)] * 2, [(low, token)] * 2
    full, shared, best = jax.lax.fori_loop(0, student.count, one, start)
    p, q = (top + jnp.log(total) for top, total in shared)
    everything = full[0] + jnp.log(full[1]) if student.vocab > tiles.shared else p
    return _Normalisers(everything, p, q, (best[0][1] == best[1][1]).astype(jnp.float32))


class _SharedTokens(NamedTuple):
    """log p and log q of a tile, float32[M, N], and which of its numbers are shared tokens,
    bool[N]; of others the logarithms are finite."""

    log_p: jax.Array
    log_q: jax.Array
    shared: jax.Array


def _shared_tokens(tile: TileLogits, normals, tiles: JointTiles) -> _SharedTokens:
    shared = tile.ids < tiles.shared
    log_p, log_q = (
        jnp.where(shared, each, 0.0) - normal[:, None]
        for each, normal in zip((tile.student, tile.teacher), normals, strict=True)
    )
    return _SharedTokens(log_p, log_q, shared)


def _compared(
    student, student_head, teacher, teacher_head, temperature, spec: Divergence, tiles: JointTiles
):
    """Returns (the results of `divergence`, what the backward pass reads: normalisers of p and q,
    sums of slopes)."""
    cuts = (tiles.student.cut(student_head), tiles.teacher.cut(teacher_head))
    states = (student, teacher)
    sums = _normalisers(cuts, states, temperature, tiles)
    normals = sums.student, sums.teacher

    def one(j, totals):
        tile = tiles.logits(cuts, j, states, temperature)
        log_p, log_q, shared = _shared_tokens(tile, normals, tiles)
        each = (
            spec.terms(log_p, log_q),
            spec.slopes(log_p, log_q),
            -jnp.exp(log_p) * log_p,
            -jnp.exp(log_q) * log_q,
        )
        return [
            a + jnp.where(shared, b, 0.0).sum(axis=1) for a, b in zip(totals, each, strict=True)
        ]

    start = [tiles.student.rows(jnp.zeros(student.shape[0]))] * 4
    total, slopes, student_entropy, teacher_entropy = jax.lax.fori_loop(
        0, tiles.student.count, one, start
    )
    outside = -jnp.expm1(sums.student - sums.everything)
    outputs = DivergenceOutputs(total, student_entropy, teacher_entropy, sums.agreement, outside)
    return outputs, (*normals, slopes)


def _forward(student, student_head, teacher, teacher_head, temperature, spec, tiles):
    arrays = student, student_head, teacher, teacher_head, temperature
    results, sums = _compared(*arrays, spec, tiles)
    return results, (arrays, sums)


def _backward(spec: Divergence, tiles: JointTiles, saved, cotangents):
    """Computes the gradients of policy/heads/divergence.py tile by tile."""
    (student, student_head, teacher, teacher_head, temperature), (*normals, slopes) = saved
    own = tiles.student
    states = (student, teacher)
    cuts = own.cut(student_head), tiles.teacher.cut(teacher_head)

    def one(j, carry):
        g_student, g_cut = carry
        tile = tiles.logits(cuts, j, states, temperature)
        log_p, log_q, shared = _shared_tokens(tile, normals, tiles)
        g_z = jnp.where(shared, spec.slopes(log_p, log_q) - jnp.exp(log_p) * slopes[:, None], 0.0)
        g_z = (cotangents.divergence[:, None] * g_z * tile.slope).astype(student.dtype)
        g_student = g_student + own.summed("mn,ne->me", g_z, tile.weights, ("batch", None))
        g_tile = own.summed("mn,me->ne", g_z, student, ("vocab", None))
        g_tile = own.constrain_tiles(g_tile.reshape(own.parts, 1, own.width, -1))
        return g_student, jax.lax.dynamic_update_slice_in_dim(g_cut, g_tile, j, axis=1)

    start = (
        own.rows(jnp.zeros(student.shape, jnp.float32)),
        own.constrain_tiles(jnp.zeros(cuts[0].shape)),
    )
    g_student, g_cut = jax.lax.fori_loop(0, own.count, one, start)
    g_head = own.join(g_cut).astype(student_head.dtype)
    return cast(Any, (g_student.astype(student.dtype), g_head, None, None, None))


divergence.defvjp(_forward, _backward)
