"""Mixture of experts.

B rows, T tokens, N tokens of all rows, k experts per token, X experts, E hidden, L latent width, F
width of an expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import qwix
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from policy.cache.step import Step
from policy.config import DecoderConfig, Moe, Runtime
from policy.experts.expert_parallel import mixture
from policy.experts.experts import AXES, Weights, entries, inputs
from policy.experts.mlp import FeedForward
from policy.experts.router import ExpertChoice, TopKRouter, choose
from policy.intermediates import LayerAux
from policy.mesh.explicit import auto_axes, in_explicit_mode, spec_of
from policy.ops.linear import Weight, einsum, linear, rounded
from policy.ops.parameter import normal, split_module, weight, zeros
from policy.ops.stacked import StackedWeight


class MixtureOfExperts(nnx.Module):
    """Sums weight * down(act(gate(x)) * up(x)) over the chosen experts, and adds the shared
    experts."""

    def __init__(self, spec: Moe, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        X = spec.router.experts
        E = config.hidden_size
        F = spec.width
        L = E if spec.latent is None else spec.latent
        init = normal(config.initializer_range)
        self.router = TopKRouter(spec.router, config, rngs)
        for name in (*inputs(spec), "down"):
            shape = (X, F, L) if name == "down" else (X, L, F)
            array = weight(rngs, shape, AXES[name], init, inputs=(1,), counts=(0,))
            setattr(self, f"expert_{name}_proj", array)
            if spec.bias:
                setattr(
                    self, f"expert_{name}_bias", weight(rngs, (X, shape[-1]), ("exp", None), zeros)
                )
        if spec.latent is not None:
            self.latent_in_proj = weight(rngs, (E, L), ("embed", None), init, inputs=(0,))
            self.latent_out_proj = weight(rngs, (L, E), (None, "embed"), init, inputs=(0,))
        if spec.shared:
            self.shared = FeedForward(spec.shared, config, rngs)
        if spec.shared_gate:
            self.shared_gate = weight(
                rngs, (E, 1), ("embed", None), init, inputs=(0,), quantizable=False
            )

    def __call__(
        self, x_BTE: jax.Array, step: Step, runtime: Runtime, router_input: jax.Array | None = None
    ) -> tuple[jax.Array, LayerAux]:
        """Returns (x_BTE, LayerAux of the router). The router scores `router_input`, by default
        x."""
        choice = self.choose(x_BTE if router_input is None else router_input, step, runtime)
        read = x_BTE
        if self.spec.latent is not None:
            read = linear("bte,el->btl", x_BTE, self.latent_in_proj[...], runtime)
        weights = self.weights(x_BTE.dtype, runtime)
        out, lost = mixture(read, choice.experts, choice.weights, weights, self.spec, runtime)
        if self.spec.latent is not None:
            out = linear("btl,le->bte", out, self.latent_out_proj[...], runtime)
        routing = choice.routing
        if lost is not None:
            assert routing.dropped is not None, "the runtime drops choices"
            routing = replace(routing, dropped=routing.dropped + lost)
        shared = self.shared_experts(x_BTE, step, runtime)
        routes = choice.experts if "routes" in runtime.record else None
        aux = LayerAux(routing=routing, routes=routes)
        return out if shared is None else out + shared, aux

    def choose(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> ExpertChoice:
        """Chooses the experts of the tokens of a step."""
        if not in_explicit_mode():
            return choose(self.router, x_BTE, step, runtime)
        weights, router = split_module(self.router)

        def run(weights, x_BTE, step):
            return choose(cast(TopKRouter, router(weights)), x_BTE, step, runtime)

        rows = spec_of(x_BTE)
        specs: Any = ExpertChoice(*cast(Any, (rows, rows, PartitionSpec())))
        return auto_axes(run, specs, weights, x_BTE, step)

    def shared_experts(self, x_BTE: jax.Array, step: Step, runtime: Runtime) -> jax.Array | None:
        """Returns the sum of the shared experts [B, T, E]; None without shared experts."""
        if not self.spec.shared:
            return None
        # Where rows are cut along their length, rows and tokens cannot be flattened to one
        # dimension.
        x = x_BTE if in_explicit_mode() else x_BTE.reshape(-1, x_BTE.shape[-1])
        shared, _ = self.shared(x, step, runtime)
        if self.spec.shared_gate:
            shared = shared * jax.nn.sigmoid(
                einsum("...e,ex->...x", x, self.shared_gate[...].astype(x.dtype), runtime.layout)
            )
        return shared.reshape(x_BTE.shape)

    def weights(self, dtype: DTypeLike, runtime: Runtime) -> Weights:
        """Returns the weights of the routed experts, by the names of `AXES`."""
        parts = (*inputs(self.spec), "down")
        names = {name: f"expert_{name}_proj" for name in parts}
        if self.spec.bias:
            names |= {f"{name}_bias": f"expert_{name}_bias" for name in parts}
        weights: Weights = {}
        for name, path in names.items():
            weights |= entries(name, getattr(self, path)[...])
        return {name: _ready(each, dtype, runtime) for name, each in weights.items()}


def _ready(weight: Weight, dtype: DTypeLike, runtime: Runtime) -> Weight:
    """Returns a weight as the products read it: floats in `dtype`, or quantised on one device.

    Several devices do not exchange scales, so there a quantised weight becomes floats.
    """
    if isinstance(weight, StackedWeight):
        return weight if weight.dtype == dtype else weight.one.astype(dtype)
    if isinstance(weight, qwix.QArray):
        alone = runtime.layout is None or runtime.layout.mesh.size == 1
        return weight if alone else rounded(weight, (1,), dtype, runtime)
    return cast(jax.Array, weight).astype(dtype)
