"""How the next token is drawn. S slots, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """What to draw: `n` completions of each prompt, of at most `max_new_tokens` tokens.

    temperature 0 takes the most likely token (the lowest id among equals). top_k keeps the k most likely tokens (0: all), top_p
    the fewest most likely ones whose probabilities reach it, min_p those at least min_p times as likely as the likeliest; in this
    order. A completion ends with a token of `stop_token_ids`, or with the token that completes a string of `stop`.
    """

    n: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        checks = {
            "n must be at least 1": self.n >= 1,
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "temperature must be 0 or more": self.temperature >= 0,
            "top_k must be 0 (all) or more": self.top_k >= 0,
            "top_p must lie in (0, 1]": 0 < self.top_p <= 1,
            "min_p must lie in [0, 1]": 0 <= self.min_p <= 1,
            "stop must not hold an empty string": all(self.stop),
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"SamplingParams: {message}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be left out, which needs a sort of the vocabulary."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def uniforms(seed: jax.Array, prompt_ids_S, samples_S, positions_S) -> jax.Array:
    """One number in [0, 1) for each slot, a function of (seed, prompt id, sample index, position) only."""

    def one(prompt_id, sample, position):
        key = jax.random.key(seed)
        for number in (prompt_id, sample, position):
            key = jax.random.fold_in(key, number)
        return jax.random.uniform(key)

    return jax.vmap(one)(prompt_ids_S, samples_S, positions_S)


def keep(logits_SV: jax.Array, top_k, top_p, min_p) -> jax.Array:
    """bool[S, V]: tokens that top-k, top-p and min-p leave. A token as likely as the last one that is kept is kept too."""
    V = logits_SV.shape[-1]
    ranked = -jnp.sort(-logits_SV, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    least = jax.lax.dynamic_index_in_dim(ranked, k - 1, axis=-1)
    probs = jax.nn.softmax(jnp.where(ranked >= least, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The sum over a large vocabulary may pass 1 before its end, which must not cut anything off at top_p 1.
    likely = (before < top_p) | (top_p >= 1)
    least = jnp.min(jnp.where(likely & (ranked >= least), ranked, jnp.inf), axis=-1, keepdims=True)
    return (logits_SV >= least) & (logits_SV >= ranked[:, :1] + jnp.log(min_p))


def draw(logits_SV: jax.Array, uniforms_S: jax.Array, filters: tuple | None) -> jax.Array:
    """int[S]: the token where the cumulative probability passes `uniforms`. One number a row and a cumulative sum cost a quarter
    of one Gumbel number for each token. `filters` is (top_k, top_p, min_p), or None to keep every token."""
    if filters is not None:
        logits_SV = jnp.where(keep(logits_SV, *filters), logits_SV, -jnp.inf)
    probs = jax.nn.softmax(logits_SV, axis=-1)
    # The sum is taken in blocks, whose rounding may raise it at a token of probability 0: those are passed over.
    cumulative = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)
    passed = cumulative > uniforms_S[:, None] * jnp.max(cumulative, axis=-1, keepdims=True)
    last = logits_SV.shape[-1] - 1
    return jnp.min(jnp.where(passed, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """How tokens are drawn, scalars. `filters` (top_k, top_p, min_p) or None: another program, without the sort they need."""

    seed: np.ndarray
    temperature: np.ndarray
    filters: tuple | None

    @classmethod
    def of(cls, sampling: SamplingParams, seed: int) -> Draws | None:
        """None: the likeliest token, nothing is drawn."""
        if sampling.greedy:
            return None
        filters = np.int32(sampling.top_k), np.float32(sampling.top_p), np.float32(sampling.min_p)
        return cls(np.uint32(seed % 2**32), np.float32(sampling.temperature), filters if sampling.filtered else None)


def choose(logits_SV: jax.Array, numbers: tuple, draws: Draws | None) -> tuple[jax.Array, jax.Array]:
    """(token int[S], its log-probability float32[S] before any filter). `numbers` int[S] each: prompt id, sample index and position
    of the token, of which its draw is a function."""
    if draws is None:
        new = jnp.argmax(logits_SV, axis=-1).astype(jnp.int32)
    else:
        logits_SV = logits_SV / draws.temperature
        new = draw(logits_SV, uniforms(draws.seed, *numbers), draws.filters)
    return new, jnp.take_along_axis(jax.nn.log_softmax(logits_SV), new[:, None], axis=-1)[:, 0]
