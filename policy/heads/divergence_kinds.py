"""Divergences of a student's next-token distribution p from a teacher's q, as formulas on
log-probabilities.

- forward: KL(q || p) = sum q (log q - log p); covers what the teacher does.
- reverse: KL(p || q) = sum p (log p - log q); avoids what the teacher does not do.
- jsd: beta KL(q || m) + (1 - beta) KL(p || m), with m = (1 - beta) p + beta q (arXiv 2306.13649).

M tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Kind = Literal["forward", "reverse", "jsd"]
Tail = Literal["none", "renormalise", "tail"]


@dataclass(frozen=True)
class Divergence:
    """A divergence per token, in nats. Raises ValueError for a value out of range.

    beta: weight of the teacher in the mixture m of `jsd`, between 0 and 1; the other kinds ignore
    it. top_k: how many of the teacher's likeliest tokens are compared; None: all. tail: what
    becomes of the other tokens under `top_k`. `renormalise` compares softmaxes over the k tokens.
    `tail` adds one symbol with the probability of all other tokens. `none` sums over the k tokens
    as they are, which is no divergence: it may be negative.
    """

    kind: Kind = "reverse"
    beta: float = 0.5
    top_k: int | None = None
    tail: Tail = "renormalise"

    def __post_init__(self):
        for name, value, known in (("kind", self.kind, Kind), ("tail", self.tail, Tail)):
            if value not in get_args(known):
                raise ValueError(f"{name}: {value!r} must be one of {', '.join(get_args(known))}")
        if self.kind == "jsd" and not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"beta: {self.beta} must lie between 0 and 1; for the limits use kind forward or "
                "reverse"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: {self.top_k} must be at least 1")

    @classmethod
    def generalised(
        cls, beta: float, top_k: int | None = None, tail: Tail = "renormalise"
    ) -> Divergence:
        """Returns the generalised Jensen-Shannon divergence of GKD and TRL: 0 is the forward, 1 the
        reverse KL."""
        kind: Kind = "forward" if beta == 0.0 else "reverse" if beta == 1.0 else "jsd"
        return cls(kind, 0.5 if kind != "jsd" else beta, top_k, tail)

    def terms(self, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        """Returns the summand of each token: their sum over the vocabulary is the divergence."""
        if self.kind == "forward":
            return jnp.exp(log_q) * (log_q - log_p)
        if self.kind == "reverse":
            return jnp.exp(log_p) * (log_p - log_q)
        log_m = self._log_mixture(log_p, log_q)
        of_teacher = self.beta * jnp.exp(log_q) * (log_q - log_m)
        return of_teacher + (1.0 - self.beta) * jnp.exp(log_p) * (log_p - log_m)

    def slopes(self, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        """Returns g, the derivative of the divergence by log p up to a multiple of p.

        The derivative by the logits divided by the temperature is then g - p sum(g), in which the
        multiple cancels.
        """
        if self.kind == "forward":  # with p added, so that equal distributions give exactly 0
            return jnp.exp(log_p) - jnp.exp(log_q)
        if self.kind == "reverse":
            return jnp.exp(log_p) * (log_p - log_q)
        return (1.0 - self.beta) * jnp.exp(log_p) * (log_p - self._log_mixture(log_p, log_q))

    def _log_mixture(self, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        return jnp.logaddexp(log_p + math.log1p(-self.beta), log_q + math.log(self.beta))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DivergenceOutputs:
    """Numbers per token, float32[M]; None: not computed. Only `divergence` has a gradient.

    Entropies are in nats, of the distributions that are compared. agreement: 1 where both have the
    same likeliest token. outside: the student's probability of tokens that the teacher's vocabulary
    does not have. With top_k, student_mass and teacher_mass are the probabilities of the k tokens,
    and the student's entropy is that of its full vocabulary.
    """

    divergence: jax.Array
    student_entropy: jax.Array | None = None
    teacher_entropy: jax.Array | None = None
    agreement: jax.Array | None = None
    outside: jax.Array | None = None
    student_mass: jax.Array | None = None
    teacher_mass: jax.Array | None = None
