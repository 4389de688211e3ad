"""The outputs of a forward pass besides hidden states, in one typed structure.

Every part of a layer returns a `LayerAux`, with None for an output that it does not have; the
decoder collects them in an `Aux`, with the same shapes whether the layers are scanned or unrolled.

B rows, T tokens, E hidden, X experts, R repeats of a stack, L prediction modules, k chosen keys or
experts of a token, K heads of an entry of the cache, C its length, D head dimension.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.mesh.explicit import auto_axes

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def _pytree(cls: type[T]) -> type[T]:
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))


@_pytree
class Replayed:
    """Counts of the expert choices that were replayed, padding left out, and of the choices among
    them that the router would not have made; float32."""

    given: jax.Array
    disagreed: jax.Array


@_pytree
class Routing:
    """`counts` float32[X]: how often each expert was chosen, padding left out. `balance`: the
    sequence-wise balance term over the segments. `share` float32[X]: share of each expert in the
    scores, summed over tokens. `dropped`: choices that no expert computed; None if none can be
    dropped. `replayed`: counts of replayed choices, if routes are given (policy/experts/router.py).
    """

    counts: jax.Array
    balance: jax.Array
    share: jax.Array
    dropped: jax.Array | None = None
    replayed: Replayed | None = None


@_pytree
class ActivationStatistics:
    """Mean, standard deviation and share of exact zeros of a layer's output, over tokens that are
    not padding; float32."""

    mean: jax.Array
    std: jax.Array
    fraction_zero: jax.Array


@_pytree
class Indexing:
    """The training signal of an indexer of keys: sums over the queries that are not padding,
    float32. `divergence` is KL(p || q) of its softmax q from the attention weights p of the main
    path, in nats. `recall` is the share of p on the keys that it would select; None if attention
    sees those keys only, where it is 1."""

    divergence: jax.Array
    recall: jax.Array | None = None


@_pytree
class LayerAux:
    """The outputs of one layer.

    `indexing` is set if an indexer is trained. `hidden` [B, T, E] is the layer's output, with
    hyper-connections [B, T, streams, E]. `mixed` [B, T, E] is the output of its mixer's output
    projection, before any norm, dropout and the residual; None without a mixer. `selection`
    int32[B, T, k]: the keys that an indexer selected for each query, by column (with a cache: by
    position), -1 where there are fewer. `routes` int32[B, T, k]: the experts that computed each
    token. These four and `activations` are set if `Runtime.record` names them. `states`: the
    layer's states of fixed size after each token of a tentative call (policy/cache/cache.py), [B,
    T, K, C, D] by entry. `kept`: keys and values [B, K, T, D] by the name under which the mixer
    keeps them for later layers; the decoder takes them out of its Aux.
    """

    routing: Routing | None = None
    indexing: Indexing | None = None
    activations: ActivationStatistics | None = None
    hidden: jax.Array | None = None
    mixed: jax.Array | None = None
    selection: jax.Array | None = None
    routes: jax.Array | None = None
    states: dict[str, jax.Array] | None = None
    kept: dict[str, tuple[jax.Array, jax.Array]] | None = None

    def merge(self, other: LayerAux) -> LayerAux:
        """Returns this with the fields that `other` has in place of its own, and the states of
        fixed size of both."""
        fields = ((f.name, getattr(other, f.name)) for f in dataclasses.fields(cast(Any, other)))
        changes: dict[str, Any] = {name: value for name, value in fields if value is not None}
        if self.states and other.states:
            changes["states"] = self.states | other.states
        return dataclasses.replace(cast(Any, self), **changes)


@_pytree
class Predictions:
    """Outputs of the prediction modules d = 1..L (policy/heads/multi_token_prediction.py),
    float32[L, B, T] at the token that is predicted: `logp`, and `agrees`, 1 where the likeliest
    token of the module equals the decoder's. Both are 0 at the first d + 1 tokens of a segment and
    on padding."""

    logp: jax.Array
    agrees: jax.Array


@_pytree
class Aux:
    """The outputs of a decoder.

    `layers` is keyed by the path of the layer's weights ("stacks.1.layers.0"); its arrays have the
    repeats of the stack in front: [R, ...]. `mtp_input` [B, T, E]: the hidden states that
    prediction modules read. `predictions` is set if `Runtime.mtp` asks for it. `states` [B, T, E]:
    the final hidden states, if log-probabilities were computed from them.
    """

    layers: dict[str, LayerAux]
    mtp_input: jax.Array | None = None
    predictions: Predictions | None = None
    states: jax.Array | None = None

    def by_layer(self, name: str) -> dict[str, jax.Array]:
        """Returns the field `name` of every layer that has it, by path."""
        return {
            path: value
            for path, layer in self.layers.items()
            if (value := getattr(layer, name)) is not None
        }


def observe(x_BTE: jax.Array, segments_BT: jax.Array, record: tuple[str, ...]) -> LayerAux:
    """Returns the statistics of a layer's output that `Runtime.record` asks for."""
    activations = None
    if "activations" in record:
        activations = cast(
            ActivationStatistics, auto_axes(_activations, PartitionSpec(), x_BTE, segments_BT)
        )
    return LayerAux(activations=activations, hidden=x_BTE if "hidden" in record else None)


def _activations(x_BTE: jax.Array, segments_BT: jax.Array) -> ActivationStatistics:
    x = x_BTE.astype(jnp.float32)
    axes = tuple(range(2, x.ndim))
    valid = jnp.expand_dims(segments_BT != 0, axes)
    count = jnp.maximum(valid.sum() * (x.size // segments_BT.size), 1)

    def mean(values):
        return jnp.sum(jnp.where(valid, values, 0.0)) / count

    centre = mean(x)
    return ActivationStatistics(centre, jnp.sqrt(mean(jnp.square(x - centre))), mean(x == 0))
