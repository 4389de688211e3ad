"""Divergence of a student from a teacher, with one tile of the vocabulary after another.

A tile has the same tokens on both sides. The forward pass runs twice over the tiles: first it sums
both softmaxes, then the divergence, whose terms need the sums. The backward pass runs over them
once. Each pass needs the products of states and heads. They are computed once where `tiles.keeps`
says so, 8 bytes for a row and token. Elsewhere the backward pass computes them a second time; the
forward pass then takes a chunk of rows at a time, whose products it holds from its first to its
second run. Rows that devices share are not cut into chunks: the second run computes the products
again.

M tokens (rows and positions flattened), E hidden of the student, D of the teacher, V and U their
vocabularies, N tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from policy.config import LogitScaling
from policy.heads.divergence_kinds import Divergence, DivergenceOutputs
from policy.heads.head import Tiling, in_chunks
from policy.heads.tiled import LocalTiles
from policy.heads.vocab_tiles import Tile, Tiles, add_exp, products

# How the logits of student and teacher are scaled.
Scalings = tuple[LogitScaling, LogitScaling]

_LOWEST = jnp.finfo(jnp.float32).min  # not -inf: the first tiles may have no token of a sum


@dataclass(frozen=True)
class JointTiles:
    """Tiles of the vocabularies of student and teacher with the same numbers of tokens in each.

    shared: tokens below it are compared. others: tiles with the student's other tokens; None: there
    are none. is_masked: tiles of `student` and `teacher` have numbers that are not compared. chunk:
    rows of a chunk; None: the rows stay together.
    """

    student: Tiles | LocalTiles
    teacher: Tiles | LocalTiles
    shared: int
    others: Tiles | LocalTiles | None
    is_masked: bool
    chunk: int | None

    @property
    def keeps(self) -> bool:
        """Whether the products of all tiles are kept for the backward pass."""
        return self.student.keeps

    @classmethod
    def on_device(
        cls,
        tiling: Tiling,
        M: int,
        vocabularies: tuple[int, int],
        scalings: Scalings,
    ) -> JointTiles:
        """Makes tiles of heads that each device has in full, for the rows of a device."""
        V = vocabularies[0]
        shared = min(vocabularies)
        student = replace(tiling.local(M, shared, scalings[0]), keeps=tiling.keeps(2 * M, shared))
        teacher = replace(student, scaling=scalings[1])
        others = None
        if shared < V:
            others = replace(tiling.local(M, V - shared, scalings[0]), first=shared)
        return cls(student, teacher, shared, others, False, tiling.rows(M, shared))

    @classmethod
    def on_mesh(
        cls,
        tiling: Tiling,
        M: int,
        heads: tuple[jax.Array, jax.Array],
        scalings: Scalings,
    ) -> JointTiles | None:
        """Makes tiles where devices share either head; None: they do not. The side that the mesh
        cuts into more parts keeps its tiles, unless the other vocabulary is longer."""
        each = [tiling.of_vocabulary(M, head, LogitScaling(), any_cut=True) for head in heads]
        cut = [tiles for tiles in each if tiles is not None]
        if not cut:
            return None
        V, U = (head.shape[0] for head in heads)
        base = max(cut, key=lambda tiles: tiles.parts)
        width = -(-max(V, U) // (base.parts * base.count))
        rows = base.layout.sharding(("batch",), (M,)).shard_shape((M,))[0]
        keeps = tiling.keeps(2 * rows, base.count * width)
        student, teacher = (
            replace(base, width=width, vocab=vocab, scaling=scaling, keeps=keeps)
            for vocab, scaling in zip((V, U), scalings, strict=True)
        )
        others = student if V > U else None
        is_masked = student.is_padded or V != U
        return cls(student, teacher, min(V, U), others, is_masked, None)

    def log_p_and_q(self, logits: TileLogits, tile: Tile, normals: Sides) -> Sides:
        """Returns log p and log q of a tile, float32[M, N]; of numbers that are not compared they
        are finite."""

        def log_softmax(z_MN, normal_M):
            finite = jnp.where(tile.ids < self.shared, z_MN, 0.0) if self.is_masked else z_MN
            return finite - normal_M[:, None]

        return Sides(
            log_softmax(logits.student, normals.student),
            log_softmax(logits.teacher, normals.teacher),
        )

    def compared(self, values_MN: jax.Array, tile: Tile, other: float = 0.0) -> jax.Array:
        """Returns the values of a tile with `other` in place of tokens that are not compared."""
        if not self.is_masked:
            return values_MN
        return jnp.where(tile.ids < self.shared, values_MN, other)


class Sides(NamedTuple):
    """Something of the student and of the teacher."""

    student: Any
    teacher: Any


class TileLogits(NamedTuple):
    """What a tile has on both sides.

    student, teacher: logits / temperature, float32[M, N]. slope: derivative of the student's by its
    products, float32[M, N].
    """

    student: jax.Array
    teacher: jax.Array
    slope: jax.Array


class _Result(NamedTuple):
    """The results of `divergence`, and what the backward pass reads. normals: logarithms of the
    softmax sums over the tokens that are compared, float32[M]. slopes: their sums, float32[M].
    kept: the products of all tiles, or None."""

    outputs: DivergenceOutputs
    normals: Sides
    slopes: jax.Array
    kept: Any


class _Arrays(NamedTuple):
    """The arguments of `divergence` that are arrays."""

    student: jax.Array
    student_head: jax.Array
    teacher: jax.Array
    teacher_head: jax.Array
    temperature: jax.Array

    @property
    def states(self) -> Sides:
        return Sides(self.student, self.teacher)

    def scan(self, tiles: JointTiles, one: Any, carry: Any, kept: Any) -> tuple:
        """As `Tiles.scan`, with `one(carry, tile, products of both sides, logits)`. kept: products
        of an earlier scan; None: they are computed."""
        cuts = Sides(tiles.student.cut(self.student_head), tiles.teacher.cut(self.teacher_head))

        def with_logits(carry, tile, product):
            if product is None:
                product = Sides(*map(products, self.states, tile.weights))
            ids, temperature = tile.ids, self.temperature
            z, slope = tiles.student.scaled(product.student, ids, temperature, None)
            t, _ = tiles.teacher.scaled(product.teacher, ids, temperature, None)
            return one(carry, tile, product, TileLogits(z, t, slope))

        types = Sides(self.student.dtype, self.teacher.dtype)
        return tiles.student.scan(with_logits, carry, cuts, types, kept)


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
    arrays = _Arrays(student_ME, student_head_VE, teacher_MD, teacher_head_UD, temperature)
    return _compared(arrays, spec, tiles).outputs


def _compared(arrays: _Arrays, spec: Divergence, tiles: JointTiles) -> _Result:
    """Compares all rows, chunk by chunk where their products are not kept."""
    M = arrays.student.shape[0]
    if tiles.keeps or tiles.chunk is None:
        return _of_rows(arrays, spec, tiles, holds=tiles.keeps)
    if tiles.chunk >= M:
        return _of_rows(arrays, spec, tiles, holds=True)._replace(kept=None)

    def one(states):
        chunk = arrays._replace(student=states[0], teacher=states[1])
        return _of_rows(chunk, spec, tiles, holds=True)._replace(kept=None)

    results = jax.lax.map(one, in_chunks(tiles.chunk, *arrays.states))
    return jax.tree.map(lambda a: a.reshape(-1)[:M], results)


def _of_rows(arrays: _Arrays, spec: Divergence, tiles: JointTiles, *, holds: bool) -> _Result:
    """Compares rows in two runs over the tiles. holds: the second run, and the result, have the
    products of the first."""
    sums, kept = _softmax_sums(arrays, tiles, holds)
    normals = sums.normals

    def one(totals, tile, _, logits):
        log_p, log_q = tiles.log_p_and_q(logits, tile, normals)
        each = (
            spec.terms(log_p, log_q),
            spec.slopes(log_p, log_q),
            -jnp.exp(log_p) * log_p,
            -jnp.exp(log_q) * log_q,
        )
        sums_of_tile = [tiles.compared(values, tile).sum(axis=1) for values in each]
        return [a + b for a, b in zip(totals, sums_of_tile, strict=True)], None

    start = [tiles.student.rows(jnp.zeros(arrays.student.shape[0]))] * 4
    totals, _ = arrays.scan(tiles, one, start, kept if holds else None)
    total, slopes, student_entropy, teacher_entropy = totals
    outside = _outside(arrays, tiles, normals.student)
    outputs = DivergenceOutputs(total, student_entropy, teacher_entropy, sums.agreement, outside)
    return _Result(outputs, normals, slopes, kept)


class _SoftmaxSums(NamedTuple):
    """normals: as in `_Result`. agreement: 1 where both sides have the same likeliest token,
    float32[M]."""

    normals: Sides
    agreement: jax.Array


def _softmax_sums(arrays: _Arrays, tiles: JointTiles, holds: bool) -> tuple[_SoftmaxSums, Any]:
    """Returns (sums over all tiles, the products of the tiles if it `holds` them)."""
    M = arrays.student.shape[0]
    none = jnp.iinfo(jnp.int32).max

    def likelier(best, z, ids):
        """Updates (logit, token) of the likeliest token, the lowest among equals."""
        top = z.max(axis=1)
        token = jnp.where(z == top[:, None], ids, none).min(axis=1)
        better = (top > best[0]) | ((top == best[0]) & (token < best[1]))
        return jnp.where(better, top, best[0]), jnp.where(better, token, best[1])

    def one(carry, tile, product, logits):
        sums, best = carry
        both = [tiles.compared(z, tile, -jnp.inf) for z in (logits.student, logits.teacher)]
        sums = [add_exp(side, z) for side, z in zip(sums, both, strict=True)]
        best = [likelier(side, z, tile.ids) for side, z in zip(best, both, strict=True)]
        return (sums, best), product if holds else None

    rows = tiles.student.rows
    low, zero = rows(jnp.full(M, _LOWEST)), rows(jnp.zeros(M))
    token = rows(jnp.full(M, none, jnp.int32))
    (sums, best), kept = arrays.scan(tiles, one, ([(low, zero)] * 2, [(low, token)] * 2), None)
    normals = Sides(*(top + jnp.log(total) for top, total in sums))
    agreement = (best[0][1] == best[1][1]).astype(jnp.float32)
    return _SoftmaxSums(normals, agreement), kept


def _outside(arrays: _Arrays, tiles: JointTiles, normal: jax.Array) -> jax.Array:
    """Returns the student's probability of tokens that are not compared, float32[M]. normal: the
    logarithm of the sum over those that are."""
    others = tiles.others
    if others is None:
        return jnp.zeros_like(normal)

    def one(sums, tile, _):
        product = products(arrays.student, tile.weights)
        z, _ = others.scaled(product, tile.ids, arrays.temperature, None)
        return add_exp(sums, jnp.where(tile.ids < tiles.shared, -jnp.inf, z)), None

    rows = others.rows
    start = rows(jnp.full(normal.shape, _LOWEST)), rows(jnp.zeros(normal.shape))
    cut = others.cut(arrays.student_head)
    (top, total), _ = others.scan(one, start, cut, arrays.student.dtype, None)
    return jax.nn.sigmoid(top + jnp.log(total) - normal)


def _forward(student, student_head, teacher, teacher_head, temperature, spec, tiles):
    arrays = _Arrays(student, student_head, teacher, teacher_head, temperature)
    result = _compared(arrays, spec, tiles)
    return result.outputs, (arrays, result._replace(outputs=None))


def _backward(spec: Divergence, tiles: JointTiles, saved, cotangents):
    """Computes the gradients of the student's states and head.

    With u = z / temperature and g the slopes of the divergence, du = g - p sum(g); the scaling of
    logits adds the factor `slope`. The other results are metrics and have no gradient.
    """
    arrays, (_, normals, slopes, kept) = saved
    own = tiles.student
    student, head = arrays.student, arrays.student_head
    g_total = cotangents.divergence[:, None]

    def one(carry, tile, _, logits):
        g_student, g_cut = carry
        log_p, log_q = tiles.log_p_and_q(logits, tile, normals)
        g_u = spec.slopes(log_p, log_q) - jnp.exp(log_p) * slopes[:, None]
        g_z = (g_total * tiles.compared(g_u, tile) * logits.slope).astype(student.dtype)
        weights = tile.weights.student
        g_student = g_student + own.summed("mn,ne->me", g_z, weights, ("batch", None))
        return (g_student, own.with_gradient(g_cut, g_z, student, tile)), None

    start = (
        own.rows(jnp.zeros(student.shape, jnp.float32)),
        own.no_gradient(own.cut(head), head.dtype),
    )
    (g_student, g_cut), _ = arrays.scan(tiles, one, start, kept)
    return cast(Any, (g_student.astype(student.dtype), own.join(g_cut), None, None, None))


divergence.defvjp(_forward, _backward)
