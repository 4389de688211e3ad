"""What a forward pass finds besides hidden states, in one typed structure. B rows, T tokens, E hidden, X experts, R repeats.

Every part of a layer returns a `LayerAux`, with None for what it does not find; the decoder gathers them in an `Aux`, with the
same shapes whether the layers are scanned or unrolled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def _pytree(cls):
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))


@_pytree
class Routing:
    """`counts` float32[X]: choices of each expert, padding left out. `balance`: the sequence-wise balance term over the rows.
    `share` float32[X]: share of each expert in the scores, summed over tokens. `dropped`: choices that no expert computed; None
    where none can be dropped."""

    counts: jax.Array
    balance: jax.Array
    share: jax.Array
    dropped: jax.Array | None = None


@_pytree
class Activations:
    """Mean, standard deviation and share of exact zeros of a layer's output, over tokens that are not padding; float32."""

    mean: jax.Array
    std: jax.Array
    fraction_zero: jax.Array


@_pytree
class LayerAux:
    """Of one layer. `hidden` [B, T, E] is its output; it and `activations` are there where `Runtime.record` names them."""

    routing: Routing | None = None
    activations: Activations | None = None
    hidden: jax.Array | None = None

    def also(self, other: LayerAux) -> LayerAux:
        """This with what `other` found laid over it."""
        fields = ((f.name, getattr(other, f.name)) for f in dataclasses.fields(other))
        return dataclasses.replace(self, **{name: value for name, value in fields if value is not None})


@_pytree
class Aux:
    """Of a whole decoder. `layers` is keyed by the path of the layer's weights ("stacks.1.layers.0"); its arrays have the repeats
    of the stack in front: [R, ...]."""

    layers: dict[str, LayerAux]

    def found(self, name: str) -> dict[str, jax.Array]:
        """The field `name` of every layer that has it, by path."""
        return {path: value for path, layer in self.layers.items() if (value := getattr(layer, name)) is not None}


def observe(x_BTE: jax.Array, segments_BT: jax.Array, record: tuple[str, ...]) -> LayerAux:
    """Of the output of a layer, what `Runtime.record` asks for."""
    activations = None
    if "activations" in record:
        x = x_BTE.astype(jnp.float32)
        axes = tuple(range(2, x.ndim))
        valid = jnp.expand_dims(segments_BT != 0, axes)
        count = jnp.maximum(valid.sum() * (x.size // segments_BT.size), 1)

        def mean(values):
            return jnp.sum(jnp.where(valid, values, 0.0)) / count

        centre = mean(x)
        activations = Activations(centre, jnp.sqrt(mean(jnp.square(x - centre))), mean(x == 0))
    return LayerAux(activations=activations, hidden=x_BTE if "hidden" in record else None)
