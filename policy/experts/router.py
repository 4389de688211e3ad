"""Routers choose the experts of each token and their weights. The choice can be balanced and
replayed.

B rows, T tokens, N tokens of all rows, E hidden, V vocabulary, S sequence numbers in a row, X
experts, K = k experts per token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from policy.cache.paths import Tree
from policy.cache.step import UNKNOWN, Step
from policy.config import DecoderConfig, Router, Runtime
from policy.experts.capacity import limited
from policy.intermediates import Replayed, Routing
from policy.ops.norms import norm
from policy.ops.parameter import IntegerConstant, RouterBias, normal, ones, weight, zeros

SCORES = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


class ScoredChoice(NamedTuple):
    """The experts of tokens, by the scores of a router; all arrays begin with [N] or [B, T].

    experts: int[..., k]. weights: float32[..., k] of their outputs. scores: float32[..., X] of all
    experts.
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array


class ExpertChoice(NamedTuple):
    """The experts that compute tokens.

    experts: int[B, T, k]. weights: float32[B, T, k] of their outputs. routing: the statistics of
    `routing_statistics`.
    """

    experts: jax.Array
    weights: jax.Array
    routing: Routing


class TopKRouter(nnx.Module):
    """Chooses experts by float32 scores, or by the ids of tokens.

    Weights: `weight` [E, X]; `correction_bias` [X] shifts the choice only and is updated by
    `bias_update`; `token_experts` int32[V, k], the experts of each token id.
    """

    def __init__(self, spec: Router, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        shape = (config.hidden_size, spec.experts)
        self.weight = weight(
            rngs,
            shape,
            ("embed", None),
            normal(config.initializer_range),
            inputs=(0,),
            quantizable=False,
        )
        if spec.bias:
            self.bias = weight(rngs, (spec.experts,), (None,), zeros)
        if spec.correction_bias:
            self.correction_bias = RouterBias(
                jnp.zeros(spec.experts, jnp.float32), out_sharding=(None,)
            )
        if spec.by_token:
            self.token_experts = IntegerConstant(
                _even_table(config.vocab_size, spec), out_sharding=(None, None)
            )
        if spec.input_norm:
            self.input_norm = norm(config.hidden_size, spec.input_norm, rngs)
        if spec.expert_scale:
            self.expert_scale = weight(rngs, (spec.experts,), (None,), ones)

    def __call__(self, x_NE: jax.Array, tokens_N: jax.Array | None = None) -> ScoredChoice:
        """Chooses the experts of tokens by their states or, for a router `by_token`, by their
        ids."""
        spec = self.spec
        scores, choice = self._scores(x_NE)
        if spec.by_token:
            assert tokens_N is not None, "the decoder fills in the tokens"
            experts = self.token_experts[...][tokens_N]
            return ScoredChoice(experts, self.weigh(scores, experts), scores)
        if spec.groups > 1:
            choice = jnp.where(self._eligible(choice), choice, -jnp.inf)
        _, experts = jax.lax.top_k(choice, spec.experts_per_token)
        return ScoredChoice(experts, self.weigh(scores, experts), scores)

    def weigh(self, scores: jax.Array, experts: jax.Array) -> jax.Array:
        """Computes the weights float32[..., k] of experts int[..., k] from the scores of all
        experts, float32[..., X]."""
        spec = self.spec
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if spec.renormalize:
            weights = weights / (
                jnp.sum(weights, axis=-1, keepdims=True)
                + (0.0 if spec.score == "softmax" else 1e-20)
            )
        weights = weights * spec.scale
        return weights * self.expert_scale[...][experts] if spec.expert_scale else weights

    def _scores(self, x_NE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (scores, the numbers that the choice compares), float32[N, X]."""
        spec = self.spec
        x = x_NE.astype(jnp.float32)
        if spec.input_norm:
            x = self.input_norm(x) * x.shape[-1] ** -0.5
        logits = jnp.dot(x, self.weight[...].astype(jnp.float32), precision="highest")
        if spec.bias:
            logits = logits + self.bias[...].astype(jnp.float32)
        scores = SCORES[spec.score](logits)
        # The choice compares logits: a saturated sigmoid or softmax has equal scores in float32
        # where logits differ.
        choice = scores if spec.correction_bias or spec.groups > 1 else logits
        if spec.correction_bias:
            choice = choice + self.correction_bias[...]
        return scores, jax.lax.stop_gradient(choice)

    def _eligible(self, choice_NX: jax.Array) -> jax.Array:
        """Tells which experts are in one of the best `topk_groups` groups, bool[N, X]."""
        spec = self.spec
        grouped = choice_NX.reshape(-1, spec.groups, spec.experts // spec.groups)
        best = (
            jax.lax.top_k(grouped, 2)[0].sum(-1) if spec.group_score == "top2" else grouped.max(-1)
        )
        _, kept = jax.lax.top_k(best, spec.topk_groups)
        mask = jax.nn.one_hot(kept, spec.groups, dtype=jnp.bool_).any(axis=1)
        return jnp.repeat(mask, spec.experts // spec.groups, axis=-1)


def _even_table(tokens: int, spec: Router) -> jax.Array:
    """Returns the experts of each token id in a fresh decoder, int32[tokens, k]: k in a row, from
    where those of the id before end."""
    k = spec.experts_per_token
    return jnp.arange(tokens * k, dtype=jnp.int32).reshape(tokens, k) % spec.experts


def choose(router: TopKRouter, x_BTE: jax.Array, step: Step, runtime: Runtime) -> ExpertChoice:
    """Chooses the experts of the tokens of a step, or replays the choice that it brings, and leaves
    out those beyond the capacity of an expert."""
    B, T, E = x_BTE.shape
    tokens_N = None if step.tokens is None else step.tokens.reshape(-1)
    choice = ScoredChoice(*(a.reshape(B, T, -1) for a in router(x_BTE.reshape(-1, E), tokens_N)))
    choice, replayed = replay(router, choice, step)
    experts = choice.experts
    routing = replace(
        routing_statistics(experts, choice.scores, step.segments, step.tree), replayed=replayed
    )
    if router.spec.by_token:  # the scores do not choose, so nothing balances them
        routing = replace(
            routing, balance=jnp.zeros_like(routing.balance), share=jnp.zeros_like(routing.share)
        )
    if runtime.drops:
        experts, dropped = limited(experts, step.segments, router.spec, runtime)
        routing = replace(routing, dropped=dropped)
    return ExpertChoice(experts, choice.weights, routing)


def routing_statistics(
    experts_BTK: jax.Array, scores_BTX: jax.Array, segments_BT: jax.Array, tree: Tree | None = None
) -> Routing:
    """Computes the statistics of a batch of choices. A token of a tree counts for each of its
    sequences.

    counts: float32[X], choices of each expert, without padding.
    balance: the sequence-wise balance term of arXiv 2412.19437 (eq. 17-20), summed over sequences:
    sum_e f_e P_e with
        f_e = X / (k T) * choices of e, and P_e the mean share of e in the scores. It is 1 for a
        sequence of T tokens that uses its experts evenly; padding adds 0.
    share: float32[X], each expert's share in the scores summed over tokens, for the balance term of
    a mini-batch.
    """
    B, T, k = experts_BTK.shape
    X = scores_BTX.shape[-1]
    valid = (segments_BT != 0).astype(jnp.float32)
    chosen = jax.nn.one_hot(experts_BTK, X, dtype=jnp.float32).sum(axis=2) * valid[..., None]
    share = scores_BTX / (scores_BTX.sum(axis=-1, keepdims=True) + 1e-20) * valid[..., None]
    # Sequences are numbered within their row, from 1; 0 is padding, so S = T + 1 numbers are
    # enough.
    tokens, chosen_BSX, share_BSX = (
        _by_sequence(a, segments_BT, tree) for a in (valid[..., None], chosen, share)
    )
    if tree is not None:
        chosen, share = (a * tree.count[..., None] for a in (chosen, share))
    tokens = jnp.maximum(tokens, 1.0)
    frequency = chosen_BSX * (X / k) / tokens
    return Routing(
        counts=chosen.sum(axis=(0, 1)),
        share=share.sum(axis=(0, 1)),
        balance=jnp.sum(jax.lax.stop_gradient(frequency) * share_BSX / tokens),
    )


def _by_sequence(values_BTX: jax.Array, segments_BT: jax.Array, tree: Tree | None) -> jax.Array:
    """Sums over the tokens of each sequence of a row: [B, T + 1, X], at the number of its segment,
    in a tree at that of the last node of its path; 0 at all other numbers."""
    places = segments_BT.shape[1] + 1
    sum_rows = jax.vmap(partial(jax.ops.segment_sum, num_segments=places))
    sums = sum_rows(values_BTX, segments_BT)
    if tree is None:
        return sums
    # Node n adds its sum to the paths of the nodes n to last: at n, and taken off behind last.
    last = jax.vmap(partial(jax.ops.segment_max, num_segments=places))(tree.last, segments_BT)
    behind = jnp.where(segments_BT == 0, 0, tree.last + 1)
    paths = jnp.cumsum(sums - sum_rows(values_BTX, behind), axis=1)
    return jnp.where((last == jnp.arange(places))[..., None], paths, 0)


def bias_update(bias_X: jax.Array, counts_X: jax.Array, rate: float) -> jax.Array:
    """Returns the selection bias after a step (arXiv 2408.15664): + `rate` for experts chosen less
    than the mean, else
    - `rate`.

    counts: choices in the mini-batch; the last axis is the experts.
    """
    return bias_X + rate * jnp.sign(counts_X.mean(axis=-1, keepdims=True) - counts_X)


def replay(
    router: TopKRouter, own: ScoredChoice, step: Step
) -> tuple[ScoredChoice, Replayed | None]:
    """Returns the router's own choice, [B, T, ...], with `step.routes` in its place where these are
    known, and the counts of replayed choices: of all, and of those that the router would not have
    made, in any order. Without routes the choice is unchanged, and the counts are None.

    Router replay (arXiv 2510.11370): a generator and a trainer that round differently choose
    different experts where two scores are close. With the generator's choice the trainer computes
    the function that was sampled from. The weights still come from the router's own scores, so that
    the gradient reaches the router.
    """
    if step.routes is None:
        return own, None
    given = step.routes.astype(own.experts.dtype)
    known = given != UNKNOWN
    counted = (known & (step.segments != 0)[..., None]).astype(jnp.float32)
    counted = counted if step.tree is None else counted * step.tree.count[..., None]
    agrees = jnp.any(given[..., :, None] == own.experts[..., None, :], axis=-1)
    experts = jnp.where(known, given, own.experts)
    replayed = Replayed(counted.sum(), jnp.sum(counted * ~agrees))
    return own._replace(experts=experts, weights=router.weigh(own.scores, experts)), replayed
