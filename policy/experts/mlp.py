"""Dense feed-forwards. Like every feed-forward they map (x, step, runtime) to (x, LayerAux); the
LayerAux is empty.

E hidden, F width of the feed-forward.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from policy.cache.step import Step
from policy.config import DecoderConfig, Matrix, Mlp, Moe, Runtime
from policy.intermediates import LayerAux
from policy.ops.linear import linear, scaled
from policy.ops.parameter import normal, weight, zeros

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "linear": lambda x: x,
}


def gated(gate: jax.Array, up: jax.Array, spec: Mlp | Moe) -> jax.Array:
    """Returns act(gate) * up, or the ClampedSwiglu of the spec."""
    clamp = spec.clamp
    if clamp is None:
        return ACTIVATIONS[spec.activation](gate) * up
    gate = jnp.minimum(gate, clamp.limit)
    up = jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + clamp.up_offset) * gate * jax.nn.sigmoid(clamp.alpha * gate)


class FeedForward(nnx.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate. Weights [E, F] and [F, E]."""

    def __init__(self, spec: Mlp, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        E = config.hidden_size
        F = spec.width
        init = normal(config.initializer_range)
        for name in self._inputs:
            setattr(self, f"{name}_proj", weight(rngs, (E, F), ("embed", "mlp"), init, inputs=(0,)))
            if spec.bias:
                setattr(self, f"{name}_bias", weight(rngs, (F,), ("mlp",), zeros))
        self.down_proj = weight(rngs, (F, E), ("mlp", "embed"), init, inputs=(0,))
        if spec.bias:
            self.down_bias = weight(rngs, (E,), ("norm",), zeros)

    @property
    def _inputs(self) -> tuple[str, ...]:
        return ("gate", "up") if self.spec.gated else ("up",)

    def __call__(self, x: jax.Array, step: Step, runtime: Runtime) -> tuple[jax.Array, LayerAux]:
        hidden = [
            checkpoint_name(self._linear(x, name, runtime), f"mlpwi_{i}")
            for i, name in enumerate(self._inputs)
        ]
        if self.spec.gated:
            inner = gated(scaled(hidden[0], self.spec.gate_scale), hidden[1], self.spec)
        else:
            inner = ACTIVATIONS[self.spec.activation](hidden[0])
        out = checkpoint_name(self._linear(inner, "down", runtime), "mlpwo")
        return scaled(out, self.spec.out_scale), LayerAux()

    def _linear(self, x: jax.Array, name: str, runtime: Runtime) -> jax.Array:
        out = linear("...e,ei->...i", x, getattr(self, f"{name}_proj")[...], runtime)
        return out + getattr(self, f"{name}_bias")[...].astype(x.dtype) if self.spec.bias else out


class SquareMatrix(nnx.Module):
    """x W with W [E, E]."""

    def __init__(self, spec: Matrix, config: DecoderConfig, rngs: nnx.Rngs):
        E = config.hidden_size
        self.proj = weight(
            rngs, (E, E), ("embed", "mlp"), normal(config.initializer_range), inputs=(0,)
        )

    def __call__(self, x: jax.Array, step: Step, runtime: Runtime) -> tuple[jax.Array, LayerAux]:
        return checkpoint_name(
            linear("...e,ef->...f", x, self.proj[...], runtime), "mlpwo"
        ), LayerAux()
