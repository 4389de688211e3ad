"""The batch-split schedule: two micro-batches in one layer, so that the collectives of one run under the products of the other.

Row b of a device belongs to micro-batch b mod 2. Of every layer with a mixture of experts the order is

    mix 0 | gather 0 | mix 1 | gather 1 | experts 0 | scatter 0 | experts 1 | scatter 1

where gather brings the tokens of other devices (all-gather over the mesh axis `expert`) and scatter takes the results back
(reduce-scatter). Barriers keep mix 1 behind mix 0, experts 0 behind mix 1 and experts 1 behind experts 0; nothing else is tied, so
gather 0 can run under mix 1, gather 1 under experts 0 and scatter 0 under experts 1. The gradient of a barrier is a barrier:
backwards the gather of micro-batch 0's cotangent can run under the products of 1, and the scatter of 1's under those of 0.

The numbers are those of the plain layer, up to the order in which gradients of weights are summed.
B rows, T tokens, E hidden, N tokens of a device, M rows of choices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.cache import Step
from policy.config import DecoderConfig, LayerSpec, Moe, Runtime
from policy.intermediates import LayerAux
from policy.layers import expert_parallel, experts
from policy.layers.expert_parallel import Cut
from policy.layers.experts import Routed, Weights
from policy.layers.residual import Residual
from policy.sharding import constrain

PARTS = 2


def check(config: DecoderConfig, runtime: Runtime) -> None:
    """Raises ValueError where the schedule is asked for and cannot be had."""
    if not runtime.batch_split:
        return
    if not any(_fits(spec) for spec in config.layers):
        raise ValueError("batch_split is a schedule of layers with a mixture of experts; this decoder has none that it can split")


def compiler_options(runtime: Runtime) -> dict[str, str] | None:
    """What XLA has to be told for the schedule to pay on a TPU: left to itself it runs these collectives at once, with nothing
    beside them. On the sparse cores they have a start and an end, and products in between; the last option is for groups of devices
    that span two dimensions of the torus."""
    if not runtime.batch_split or runtime.layout.platform != "tpu":
        return None
    prefix = "xla_tpu_enable_sparse_core_collective_offload_"
    return {prefix + name: "true" for name in ("all_gather", "reduce_scatter", "2d_all_gather")}


def applies(layers, shape_BTE: tuple[int, int, int], runtime: Runtime) -> bool:
    """Whether a stack runs in this schedule: every layer of its pattern is a mixer and a mixture of experts, and every device has
    an even number of rows. What does not fit runs plainly, with the same result."""
    if not runtime.batch_split or runtime.record or not all(_fits(layer.spec) and _plain(layer) for layer in layers):
        return False
    B, T, E = shape_BTE
    spec = layers[0].spec.feed_forward
    return B % PARTS == 0 and Cut(spec, runtime, (B // PARTS, T, E)).token_axes == Cut(spec, runtime, (B, T, E)).token_axes


def _fits(spec: LayerSpec) -> bool:
    indexed = getattr(spec.mixer, "indexer", None) is not None
    return isinstance(spec.feed_forward, Moe) and spec.mixer is not None and not indexed and not spec.scalar


def _plain(layer) -> bool:
    return type(layer.mixer_residual) is type(layer.feed_forward_residual) is Residual


def split(x_BTE: jax.Array, runtime: Runtime) -> tuple[jax.Array, ...]:
    """The rows of each micro-batch; no row leaves its device."""
    return tuple(constrain(_part(x_BTE, i), ("batch", "length", None), runtime.layout) for i in range(PARTS))


def merge(parts: tuple[jax.Array, ...]) -> jax.Array:
    """The inverse of `split`."""
    stacked = jnp.stack(parts, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def _part(array_B: jax.Array, i: int) -> jax.Array:
    return array_B.reshape(-1, PARTS, *array_B.shape[1:])[:, i]


def _step(step: Step, i: int) -> Step:
    """The rows of micro-batch `i`: everything but the number of the layer has one entry for each row."""
    rows = step.segments.shape[0]
    return jax.tree.map(lambda a: _part(a, i) if jnp.ndim(a) and a.shape[0] == rows else a, step)


def run(layer, parts: tuple[jax.Array, jax.Array], step: Step, runtime: Runtime):
    """One layer on both micro-batches: ((x, x), None, LayerAux of both together)."""
    moe, (x0, x1) = layer.feed_forward, parts
    first, second = partial(jax.named_scope, "micro_0"), partial(jax.named_scope, "micro_1")  # tells them apart in a profile
    steps = [_step(step, i) for i in range(PARTS)]
    stages = Stages(Cut(moe.spec, runtime, x0.shape))
    weights = stages.hold(moe.weights(x0.dtype, runtime))

    with first():
        x0, read0, mix0 = _mix(layer, x0, steps[0], runtime)
    x1, read0 = jax.lax.optimization_barrier((x1, read0))
    with first():
        chosen0 = moe.choose(read0, steps[0], runtime)
        routed0 = stages.route(read0, *chosen0[:2])
    with second():
        x1, read1, mix1 = _mix(layer, x1, steps[1], runtime)
    routed0, read1 = _tied(routed0, read1)
    with second():
        chosen1 = moe.choose(read1, steps[1], runtime)
        routed1 = stages.route(read1, *chosen1[:2])
    with first():
        done0 = stages.compute(weights, routed0)
    routed1, rows0 = _tied(routed1, done0.rows)
    with first():
        out0 = stages.unroute(replace(done0, rows=rows0))
    with second():
        out1 = stages.unroute(stages.compute(weights, routed1))

    ends = []
    for x, read, out, mix, at in ((x0, read0, out0, mix0, steps[0]), (x1, read1, out1, mix1, steps[1])):
        shared = moe.beside(read, at, runtime)
        ends.append(layer.leave(x, out if shared is None else out + shared, at, mix))
    routing = jax.tree.map(jnp.add, chosen0[2], chosen1[2])
    return tuple(ends), None, LayerAux(routing=routing)


def _mix(layer, x, step: Step, runtime: Runtime):
    """(x after the mixer, what the feed-forward reads, what `leave` needs besides)."""
    x, normed, mix, _, _ = layer.mix(x, step, None, runtime)
    return x, *layer.enter(x, normed, mix)


def _tied(routed: Routed, other: jax.Array) -> tuple[Routed, jax.Array]:
    """Both, neither of them before the other is ready."""
    rows, other = jax.lax.optimization_barrier((routed.rows, other))
    return replace(routed, rows=rows), other


@dataclass(frozen=True)
class Stages:
    """The schemes gather and hidden in stages. What a stage leaves on a device stays there for the next: seen from outside, the
    pieces of all devices one after the other along axis 0."""

    cut: Cut

    def hold(self, weights: Weights) -> Weights:
        """The weights ready for use, gathered once for all micro-batches."""
        places = self.cut.places(weights)
        return self._on_devices(partial(expert_parallel.held, places=places, cut=self.cut), (places,), self._here)(weights)

    def route(self, x_BTE: jax.Array, experts_BTK: jax.Array, weights_BTK: jax.Array) -> Routed:
        """Gathers the tokens and sorts their choices."""

        def route(*arrays):
            x, chosen, weights = (expert_parallel.flat(a, self.cut) for a in arrays)
            return expert_parallel.gathered(x, chosen, weights, self.cut)

        return self._on_devices(route, (self.cut.tokens,) * 3, self._here)(x_BTE, experts_BTK, weights_BTK)

    def compute(self, weights: Weights, routed: Routed) -> Routed:
        """The products of the experts."""
        compute = partial(experts.compute, spec=self.cut.spec, runtime=self.cut.runtime)
        return self._on_devices(compute, (self._here, self._here), self._here)(weights, routed)

    def unroute(self, routed: Routed) -> jax.Array:
        """Sums over choices and devices, back with the owners of the tokens: [B, T, E]."""

        def unroute(routed):
            out = expert_parallel.scattered(routed, self.cut)
            return out.reshape(*self.cut.local_shape[:2], -1)

        return self._on_devices(unroute, (self._here,), self.cut.tokens)(routed)

    @property
    def _here(self) -> PartitionSpec:
        return PartitionSpec(tuple(sorted(self.cut.live)))

    def _on_devices(self, stage, places_in, places_out):
        if self.cut.layout.mesh.size == 1:
            return stage
        return jax.shard_map(stage, mesh=self.cut.layout.mesh, in_specs=places_in, out_specs=places_out)
