"""Mixture of experts. N tokens, k experts per token, X experts, E hidden, F expert width."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.sharding import PartitionSpec

from policy.cache import Step
from policy.config import DecoderConfig, Moe, Router, Runtime
from policy.explicit import inferred, spec_of, stated
from policy.intermediates import LayerAux, Routing
from policy.layers.capacity import limited
from policy.layers.expert_parallel import mixture
from policy.layers.experts import AXES, Weights
from policy.layers.linear import Weight, einsum, rounded
from policy.layers.mlp import FeedForward
from policy.layers.norms import norm
from policy.layers.parameter import RouterBias, apart, normal, ones, weight, zeros
from policy.layers.replay import replay


class TopKRouter(nnx.Module):
    """Chooses experts by float32 scores. `weight` [E, X]; `correction_bias` [X] shifts the choice only and learns by
    `bias_update`."""

    def __init__(self, spec: Router, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        shape = (config.hidden_size, spec.experts)
        self.weight = weight(rngs, shape, ("embed", None), normal(config.initializer_range))
        if spec.bias:
            self.bias = weight(rngs, (spec.experts,), (None,), zeros)
        if spec.correction_bias:
            self.correction_bias = RouterBias(jnp.zeros(spec.experts, jnp.float32), out_sharding=(None,))
        if spec.input_norm:
            self.input_norm = norm(config.hidden_size, spec.input_norm, rngs)
        if spec.expert_scale:
            self.expert_scale = weight(rngs, (spec.experts,), (None,), ones)

    def __call__(self, x_NE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(experts int[N, k], weights float32[N, k], scores float32[N, X])."""
        spec = self.spec
        scores, choice = self._scores(x_NE)
        if spec.groups > 1:
            choice = jnp.where(self._eligible(choice), choice, -jnp.inf)
        _, experts = jax.lax.top_k(choice, spec.experts_per_token)
        return experts, self.weigh(scores, experts), scores

    def weigh(self, scores: jax.Array, experts: jax.Array) -> jax.Array:
        """float32[..., k]: the weights of these experts, int[..., k], by the scores of all, float32[..., X]."""
        spec = self.spec
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if spec.renormalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (1e-20 if spec.score == "sigmoid" else 0.0))
        weights = weights * spec.scale
        return weights * self.expert_scale[...][experts] if spec.expert_scale else weights

    def _scores(self, x_NE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(scores, what the choice goes by), float32[N, X]."""
        spec = self.spec
        x = x_NE.astype(jnp.float32)
        if spec.input_norm:
            x = self.input_norm(x) * x.shape[-1] ** -0.5
        logits = jnp.dot(x, self.weight[...].astype(jnp.float32), precision="highest")
        if spec.bias:
            logits = logits + self.bias[...].astype(jnp.float32)
        scores = jax.nn.sigmoid(logits) if spec.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        # By logits: scores of a saturated sigmoid or softmax are equal in float32 where their logits differ.
        choice = scores if spec.correction_bias or spec.groups > 1 else logits
        if spec.correction_bias:
            choice = choice + self.correction_bias[...]
        return scores, jax.lax.stop_gradient(choice)

    def _eligible(self, choice_NX: jax.Array) -> jax.Array:
        """bool[N, X]: experts whose group is among the best `topk_groups`."""
        spec = self.spec
        grouped = choice_NX.reshape(-1, spec.groups, spec.experts // spec.groups)
        best = jax.lax.top_k(grouped, 2)[0].sum(-1) if spec.group_score == "top2" else grouped.max(-1)
        _, kept = jax.lax.top_k(best, spec.topk_groups)
        mask = jax.nn.one_hot(kept, spec.groups, dtype=jnp.bool_).any(axis=1)
        return jnp.repeat(mask, spec.experts // spec.groups, axis=-1)


class MixtureOfExperts(nnx.Module):
    """sum over the chosen experts of weight * down(act(gate(x)) * up(x)), plus the shared experts."""

    def __init__(self, spec: Moe, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        X, E, F = spec.router.experts, config.hidden_size, spec.width
        init = normal(config.initializer_range)
        self.router = TopKRouter(spec.router, config, rngs)
        for name, shape in (("gate", (X, E, F)), ("up", (X, E, F)), ("down", (X, F, E))):
            setattr(self, f"expert_{name}_proj", weight(rngs, shape, AXES[name], init, inputs=(1,)))
            if spec.bias:
                setattr(self, f"expert_{name}_bias", weight(rngs, (X, shape[-1]), ("exp", None), zeros))
        if spec.shared:
            self.shared = FeedForward(spec.shared, config, rngs)
        if spec.shared_gate:
            self.shared_gate = weight(rngs, (E, 1), ("embed", None), init)

    def __call__(
        self, x_BTE: jax.Array, step: Step, runtime: Runtime, router_input: jax.Array | None = None
    ) -> tuple[jax.Array, LayerAux]:
        """(x_BTE, what the router did). The router scores `router_input`, by default x."""
        experts, weights, routing = self.choose(x_BTE if router_input is None else router_input, step, runtime)
        out, lost = mixture(x_BTE, experts, weights, self.weights(x_BTE.dtype, runtime), self.spec, runtime)
        if lost is not None:
            routing = replace(routing, dropped=routing.dropped + lost)
        shared = self.beside(x_BTE, step, runtime)
        found = LayerAux(routing=routing, routes=experts if "routes" in runtime.record else None)
        return out if shared is None else out + shared, found

    def choose(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> tuple[jax.Array, jax.Array, Routing]:
        """(experts int[B, T, k], their weights float32[B, T, k], see `routing_statistics`)."""
        if not stated():
            return chosen(self.router, x_BTE, step, runtime)
        weights, router = apart(self.router)

        def run(weights, x_BTE, step):
            return chosen(router(weights), x_BTE, step, runtime)

        return inferred(run, (spec_of(x_BTE), spec_of(x_BTE), PartitionSpec()), weights, x_BTE, step)

    def beside(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array | None:
        """What the shared experts add, if there are any."""
        if not self.spec.shared:
            return None
        # The tokens of rows that are cut along their length have no place in one dimension with the rows.
        x = x_BTE if stated() else x_BTE.reshape(-1, x_BTE.shape[-1])
        shared, _ = self.shared(x, step, runtime)
        if self.spec.shared_gate:
            shared = shared * jax.nn.sigmoid(einsum("...e,ex->...x", x, self.shared_gate[...].astype(x.dtype), runtime.layout))
        return shared.reshape(x_BTE.shape)

    def weights(self, dtype, runtime: Runtime) -> Weights:
        """Those of the routed experts, by the names of `AXES`."""
        names = {name: f"expert_{name}_proj" for name in ("gate", "up", "down")}
        if self.spec.bias:
            names |= {f"{name}_bias": f"expert_{name}_bias" for name in ("gate", "up", "down")}
        return {name: _ready(getattr(self, path)[...], dtype, runtime) for name, path in names.items()}


def _ready(weight: Weight, dtype, runtime: Runtime) -> Weight:
    """As products take it: floats in `dtype`; quantised as it is, but on several devices, between which scales are not passed."""
    if isinstance(weight, qwix.QArray):
        alone = runtime.layout is None or runtime.layout.mesh.size == 1
        return weight if alone else rounded(weight, (1,), dtype, runtime)
    return weight.astype(dtype)


def chosen(router: TopKRouter, x_BTE: jax.Array, step: Step, runtime: Runtime) -> tuple[jax.Array, jax.Array, Routing]:
    """What `router` chooses for these tokens: see `MixtureOfExperts.choose`."""
    B, T, E = x_BTE.shape
    experts, weights, scores = (a.reshape(B, T, -1) for a in router(x_BTE.reshape(-1, E)))
    experts, weights, replayed = replay(router, (experts, weights, scores), step)
    routing = replace(routing_statistics(experts, scores, step.segments), replayed=replayed)
    if runtime.drops:
        experts, dropped = limited(experts, step.segments, router.spec, runtime)
        routing = replace(routing, dropped=dropped)
    return experts, weights, routing


def routing_statistics(experts_BTK: jax.Array, scores_BTX: jax.Array, segments_BT: jax.Array) -> Routing:
    """`counts` float32[X]: choices of each expert, padding left out. `balance`: the sequence-wise balance term of
    arXiv 2412.19437 (eq. 17-20), summed over sequences: sum_e f_e P_e with f_e = X / (k T) * choices of e, and P_e the mean share
    of e in the scores. 1 for a sequence of T tokens that uses its experts evenly; padding adds 0. `share` float32[X]: the sum over
    tokens of each expert's share in the scores, for the balance term of a whole batch."""
    B, T, k = experts_BTK.shape
    X = scores_BTX.shape[-1]
    valid = (segments_BT != 0).astype(jnp.float32)
    chosen = jax.nn.one_hot(experts_BTK, X, dtype=jnp.float32).sum(axis=2) * valid[..., None]
    share = scores_BTX / (scores_BTX.sum(axis=-1, keepdims=True) + 1e-20) * valid[..., None]
    # By sequence, numbered within its row; S = T + 1 of them have room.
    tokens, chosen_BSX, share_BSX = (_by_segment(a, segments_BT) for a in (valid[..., None], chosen, share))
    tokens = jnp.maximum(tokens, 1.0)
    frequency = chosen_BSX * (X / k) / tokens
    return Routing(
        counts=chosen.sum(axis=(0, 1)),
        share=share.sum(axis=(0, 1)),
        balance=jnp.sum(jax.lax.stop_gradient(frequency) * share_BSX / tokens),
    )


def _by_segment(values_BTX: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """[B, T + 1, X]: sums over the tokens of each segment of a row, which are numbered up to T."""
    places = segments_BT.shape[1] + 1
    return jax.vmap(lambda values, ids: jax.ops.segment_sum(values, ids, num_segments=places))(values_BTX, segments_BT)


def bias_update(bias_X: jax.Array, counts_X: jax.Array, rate: float) -> jax.Array:
    """The selection bias after a step (arXiv 2408.15664): up by `rate` for experts chosen less than the mean, down for others.

    `counts` are those of the whole optimiser batch; the last axis is the experts.
    """
    return bias_X + rate * jnp.sign(counts_X.mean(axis=-1, keepdims=True) - counts_X)
