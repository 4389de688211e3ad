"""The batch-split schedule: two micro-batches in one layer, so that the collectives of one run
under the products of the other.

Row b of a device belongs to micro-batch b mod 2. A layer with a mixture of experts runs in the
order

    mix 0 | mix 1 | gate and up 0 | down 0 | gate and up 1 | down 1
            |       |                        |
            |       gather 1 (ends by down 0)
            gather 0 (ends by gate and up 0) scatter 0 (ends by down 1)

where gather brings the tokens of other devices (all-gather over the mesh axis `expert`) and scatter
returns the results (reduce-scatter). Barriers keep that order and nothing else. The gradient of a
barrier is a barrier, so the backward pass runs down 1, gate and up 1, down 0, gate and up 0: the
gather that is the gradient of scatter 0 overlaps gate and up 1, and the scatter that is the
gradient of gather 1 overlaps gate and up 0. The weights pass through the barriers too, so that
their gradients, which are products as well, are computed in this layer and not in another. Each
half thus has a gather and a scatter that overlap products of the other half: gather 1 and scatter 0
in the forward pass, gather 0 and scatter 1 in the backward pass.

The results equal the plain layer's, up to the order in which gradients of weights are summed.

B rows, T tokens, E hidden, N tokens of a device, p devices along the axis `expert`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.cache.step import Step
from policy.config import DecoderConfig, LayerSpec, Moe, Runtime
from policy.experts import expert_parallel, experts
from policy.experts.expert_shards import ExpertShards
from policy.experts.experts import Routed, Weights
from policy.intermediates import LayerAux, Routing, observe
from policy.layers.layer import Layer
from policy.layers.residual import Mix, Residual
from policy.mesh.sharding import constrain

PARTS = 2
# Hidden states [B, T, E], or those of each micro-batch.
Hidden = jax.Array | tuple[jax.Array, ...]


def check(config: DecoderConfig, runtime: Runtime) -> None:
    """Raises ValueError if the runtime asks for the schedule and no layer can run in it."""
    if not runtime.batch_split:
        return
    if not any(_fits(spec) for spec in config.layers):
        raise ValueError(
            "batch_split is a schedule of layers with a mixture of experts; this decoder has none "
            "that it can split"
        )


def compiler_options(runtime: Runtime) -> dict[str, str] | None:
    """Returns the options with which XLA overlaps the schedule's collectives with products on a
    TPU.

    By default XLA runs these collectives synchronously. On the sparse cores they have a start and
    an end, with products in between. The cores run one collective at a time, so collectives below a
    MiB (choices, small weights) are left out. The options raise the latency that the scheduler
    expects of the others; with the default latency it moves few products under them.
    """
    if not runtime.batch_split or runtime.layout is None or runtime.layout.platform != "tpu":
        return None
    offloaded = ("all_gather", "reduce_scatter", "2d_all_gather")
    options = {f"enable_sparse_core_collective_offload_{kind}": "true" for kind in offloaded}
    for kind in ("all_gather", "reduce_scatter"):
        options |= {
            f"sparse_core_{kind}_offload_min_size_in_bytes": str(2**20),
            f"sparse_core_{kind}_latency_multiplier": "8",
        }
    return {f"xla_tpu_{name}": value for name, value in options.items()}


def applies(layers: Sequence[Layer], shape_BTE: tuple[int, ...], runtime: Runtime) -> bool:
    """Tells whether a stack runs in this schedule. Other stacks run without it, with the same
    result.

    Every layer of the pattern must be a mixer and a mixture of experts, and every device must have
    an even number of rows.
    """
    if not runtime.batch_split or not all(_fits(layer.spec) and _plain(layer) for layer in layers):
        return False
    B, T, E = shape_BTE
    spec = layers[0].spec.feed_forward
    assert isinstance(spec, Moe)  # as _fits says
    if B % PARTS:
        return False
    half, full = (ExpertShards(spec, runtime, (rows, T, E)) for rows in (B // PARTS, B))
    return half.token_axes == full.token_axes


def _fits(spec: LayerSpec) -> bool:
    indexed = getattr(spec.mixer, "indexer", None) is not None
    further = spec.scalar or spec.layer_embedding is not None or spec.shares is not None
    return (
        isinstance(spec.feed_forward, Moe)
        and spec.mixer is not None
        and not indexed
        and not further
    )


def _plain(layer: Layer) -> bool:
    return type(layer.mixer_residual) is type(layer.feed_forward_residual) is Residual


def split(x_BTE: jax.Array, runtime: Runtime) -> tuple[jax.Array, ...]:
    """Returns the rows of each micro-batch; no row leaves its device."""
    return tuple(
        constrain(_part(x_BTE, i), ("batch", "length", None), runtime.layout) for i in range(PARTS)
    )


def merge(parts: Hidden) -> jax.Array:
    """Returns the batch [B, T, E] of the micro-batches of `split`; an array is a batch already."""
    if isinstance(parts, jax.Array):
        return parts
    stacked = jnp.stack(parts, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def _part(array_B: jax.Array, i: int) -> jax.Array:
    return array_B.reshape(-1, PARTS, *array_B.shape[1:])[:, i]


def _step(step: Step, i: int) -> Step:
    """Returns the step of micro-batch `i`. Every array but the number of the layer has one entry
    per row."""
    rows = step.segments.shape[0]
    return jax.tree.map(lambda a: _part(a, i) if jnp.ndim(a) and a.shape[0] == rows else a, step)


def run(
    layer: Layer, parts: tuple[jax.Array, ...], step: Step, runtime: Runtime
) -> tuple[tuple[jax.Array, ...], LayerAux]:
    """Runs one layer on both micro-batches: ((x, x), LayerAux summed over both)."""
    x0, x1 = parts
    steps = [_step(step, i) for i in range(PARTS)]
    # The scopes tell the micro-batches apart in a profile.
    first = partial(jax.named_scope, "micro_0")
    second = partial(jax.named_scope, "micro_1")
    stages = Stages(ExpertShards(layer.feed_forward.spec, runtime, x0.shape))
    weights = stages.gather_weights(layer.feed_forward.weights(x0.dtype, runtime))

    with first():
        half0 = _mix(layer, x0, steps[0], runtime)
    x1, read0, shared0 = _behind_barrier(x1, half0.read, half0.shared)
    with first():
        chosen0, routing0 = _choose(layer, read0, steps[0], runtime)
        tokens0 = stages.collect(chosen0)
    with second():
        half1 = _mix(layer, x1, steps[1], runtime)
    tokens0, read1, shared1, weights = _behind_barrier(tokens0, half1.read, half1.shared, weights)
    with second():
        chosen1, routing1 = _choose(layer, read1, steps[1], runtime)
        tokens1 = stages.collect(chosen1)
    with first():
        inner0 = stages.gate_and_up(weights, stages.sort(tokens0))
    inner0, tokens1 = _behind_barrier(inner0, tokens1)
    with first():
        sums0 = stages.unroute(stages.down(weights, inner0))
    sums0, tokens1, weights = _behind_barrier(sums0, tokens1, weights)
    with first():
        out0 = stages.hand_back(sums0)
    with second():
        inner1 = stages.gate_and_up(weights, stages.sort(tokens1))
    out0, inner1 = _behind_barrier(out0, inner1)
    with second():
        out1 = stages.hand_back(stages.unroute(stages.down(weights, inner1)))

    x0 = _leave(layer, half0, out0, shared0, steps[0])
    x1 = _leave(layer, half1, out1, shared1, steps[1])
    aux = LayerAux(routing=jax.tree.map(jnp.add, routing0, routing1))
    if runtime.record:
        aux = aux.merge(observe(merge((x0, x1)), step.segments, runtime.record))
    if half0.mixed is not None and half1.mixed is not None:
        aux = aux.merge(LayerAux(mixed=merge((half0.mixed, half1.mixed))))
    return (x0, x1), aux


class HalfMixed(NamedTuple):
    """A micro-batch after the mixer of a layer: `hidden` and `mix`, the inputs of `Layer.leave`;
    `read`, the input of the experts; `shared`, the sum of the shared experts; `mixed`, the output
    of the mixer where it is recorded."""

    hidden: jax.Array
    mix: Mix
    read: jax.Array
    shared: jax.Array | None
    mixed: jax.Array | None


def _mix(layer: Layer, x: jax.Array, step: Step, runtime: Runtime) -> HalfMixed:
    after = layer.mix(x, step, None, runtime)
    read, mix = layer.enter(after.hidden, after.normed, after.mix)
    shared = layer.feed_forward.shared_experts(read, step, runtime)
    return HalfMixed(after.hidden, mix, read, shared, after.aux.mixed)


def _choose(
    layer: Layer, read: jax.Array, step: Step, runtime: Runtime
) -> tuple[tuple[jax.Array, ...], Routing]:
    choice = layer.feed_forward.choose(read, step, runtime)
    return (read, choice.experts, choice.weights), choice.routing


def _leave(
    layer: Layer, half: HalfMixed, out: jax.Array, shared: jax.Array | None, step: Step
) -> jax.Array:
    return layer.leave(half.hidden, out if shared is None else out + shared, step, half.mix)


def _behind_barrier(*values):
    """Returns the values behind a barrier: none is used before all are ready."""
    return jax.lax.optimization_barrier(values)


@dataclass(frozen=True)
class Stages:
    """The schemes gather and hidden in stages.

    The result of a stage stays on its device for the next stage: outside of a stage it is the
    concatenation of the pieces of all devices along axis 0.
    """

    shards: ExpertShards

    def gather_weights(self, weights: Weights) -> Weights:
        """Gathers the weights once for all micro-batches."""
        specs = self.shards.places(weights)
        gather = partial(expert_parallel.gather_weights, specs=specs, shards=self.shards)
        return self._on_devices(gather, (specs,), self._here)(weights)

    def collect(self, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Gathers hidden states, choices and their weights, [B, T, ...] each, from all devices: [p
        N, ...] each."""

        def collect(*tokens):
            return expert_parallel.collect(
                tuple(expert_parallel.flat(a, self.shards) for a in tokens), self.shards
            )

        return self._on_devices(collect, (self.shards.tokens,) * len(tokens), self._here)(*tokens)

    def sort(self, tokens: tuple[jax.Array, ...]) -> Routed:
        """Makes a row for every choice."""
        stage = partial(expert_parallel.sort, shards=self.shards)
        return self._on_devices(stage, (self._here,) * len(tokens), self._here)(*tokens)

    def gate_and_up(self, weights: Weights, routed: Routed) -> Routed:
        """Computes the first two products of the experts."""
        stage = partial(experts.gate_and_up, spec=self.shards.spec, runtime=self.shards.runtime)
        return self._on_devices(stage, (self._here, self._here), self._here)(weights, routed)

    def down(self, weights: Weights, inner: Routed) -> Routed:
        """Computes the third product of the experts, back to the hidden size."""
        stage = partial(experts.down, runtime=self.shards.runtime)
        return self._on_devices(stage, (self._here, self._here), self._here)(weights, inner)

    def unroute(self, routed: Routed) -> jax.Array:
        """Sums over the choices of each token: [p N, E]."""
        return self._on_devices(experts.unroute, (self._here,), self._here)(routed)

    def hand_back(self, sums: jax.Array) -> jax.Array:
        """Sums over devices at the owners of the tokens: [B, T, E]."""

        def hand_back(sums):
            return expert_parallel.hand_back(sums, self.shards).reshape(
                *self.shards.local_shape[:2], -1
            )

        return self._on_devices(hand_back, (self._here,), self.shards.tokens)(sums)

    @property
    def _here(self) -> PartitionSpec:
        return PartitionSpec(tuple(sorted(self.shards.live)))

    def _on_devices(self, stage: Callable, in_specs, out_specs) -> Callable:
        if self.shards.layout.mesh.size == 1:
            return stage
        return jax.shard_map(
            stage, mesh=self.shards.layout.mesh, in_specs=in_specs, out_specs=out_specs
        )
