"""A mixture of experts over a mesh: three schemes bring tokens and experts of different devices
together.

gather: devices along the mesh axis `expert` hold different experts. Each device receives the tokens
of all of them, computes the choices of its own experts, and the results are summed at the owners of
the tokens (all-gather, reduce-scatter). all_to_all: devices hold experts as in gather. Each device
sends one row per choice to the device of its expert and receives the result (two ragged
all-to-alls).
hidden: every device holds a slice of the width of all experts. Tokens travel as in gather; loads
are equal whatever is chosen.

Elements of the hidden state that a device receives per token of its own, in both directions, with p
devices along `expert`, k choices and E hidden: gather and hidden 2 (p - 1) E; all_to_all 2 k E (p -
1) / p on average, less than gather if k < p. Rows of memory per token, if all tokens choose the
experts of one device: gather p k; all_to_all k min(p, X / k), or k times `ragged_buffer_factor`;
hidden p k. On average k of them are used, with hidden all. No choice is dropped for lack of room,
and yet a step rarely pays for the worst case: where no device has more than about twice the mean, a
program with room for that much runs.

Without an axis `expert`, or where the experts cannot be spread evenly, each device computes its own
tokens with all experts. Weights arrive as they are stored and are combined over fsdp here by an
all-gather, so that their gradients are reduce-scattered.

B rows, T tokens, of one device b and t, N = b t; K = k choices of X experts, G of them on this
device; C parts of the tokens, M rows of choices, R rows of an exchange, E hidden, p devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import qwix
from jax.sharding import PartitionSpec

from policy.config import DecoderConfig, Moe, Runtime
from policy.experts import experts
from policy.experts.expert_shards import AXIS, ExpertShards, all_axes, axes_of_dims
from policy.experts.experts import Routed, Weights
from policy.experts.grouped import GroupedRows, block_rows, by_row, dispatch, plan
from policy.experts.ragged_exchange import (
    exchange,
    exchange_uninitialized,
    groups_on_arrival,
    trips,
    trips_by_group,
)
from policy.mesh.explicit import over_devices
from policy.mesh.sharding import Layout
from policy.ops import stacked_kernel
from policy.ops.linear import Weight
from policy.ops.quantization import quantize
from policy.ops.stacked import StackedWeight, in_place, unstacked

# Part of the names of operations by which rl/plan/hlo.py knows a choice between branches of which
# the last one is expected.
EXPECTED_LAST = "expected_last"


def mixture(
    x_BTE: jax.Array,
    experts_BTK: jax.Array,
    weights_BTK: jax.Array,
    weights: Weights,
    spec: Moe,
    runtime: Runtime,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (sum over choices of weight * expert(x) [B, T, E], dropped).

    A choice of X or more names no expert and adds nothing; such choices exist only where the
    runtime drops. `dropped` float32: choices for which the buffer of their device was full; None
    where there is no such limit.
    """
    layout = runtime.layout
    if layout is None or layout.mesh.size == 1:
        platform = layout.platform if layout else jax.default_backend()
        groups = spec.router.experts
        x, chosen, scores = (a.reshape(-1, a.shape[-1]) for a in (x_BTE, experts_BTK, weights_BTK))
        if experts.small_batch(len(x), platform):
            out = experts.through_every(
                (x, chosen, scores), unstacked(weights), groups, spec, runtime
            )
            return out.reshape(x_BTE.shape), None
        block = block_rows(len(x), experts_BTK.shape[-1], groups, platform)
        routed = experts.route(
            (x, chosen, scores), spec, groups=groups, block=block, partial=runtime.drops
        )
        return experts.unroute(experts.compute(weights, routed, spec, runtime)).reshape(
            x_BTE.shape
        ), None
    shards = ExpertShards(spec, runtime, x_BTE.shape)
    body: Callable = all_to_all if shards.exchanges else gather
    weights = (
        unstacked(weights)
        if shards.every
        else {name: in_place(weight) for name, weight in weights.items()}
    )
    specs = shards.places(weights)
    limited = shards.exchanges and runtime.ragged_buffer_factor is not None
    run = over_devices(
        partial(_on_one_device, body=body, shards=shards, specs=specs),
        layout.mesh,
        (
            shards.tokens,
            shards.tokens,
            shards.tokens,
            {name: _stacked(weights[name], specs[name]) for name in specs},
        ),
        (shards.tokens, PartitionSpec() if limited else None),
    )
    return run(x_BTE, experts_BTK, weights_BTK, weights)


def _stacked(weight: Weight, spec: PartitionSpec) -> PartitionSpec | StackedWeight:
    """Returns the sharding of the arrays of a weight. spec: of the weight of one layer."""
    if isinstance(weight, StackedWeight):
        return StackedWeight(PartitionSpec(None, *spec), PartitionSpec())
    return spec


def check(config: DecoderConfig, runtime: Runtime, layout: Layout) -> None:
    """Raises ValueError if the scheme of `runtime` cannot spread the experts of this decoder over
    this mesh."""
    parts = layout.mesh.shape[AXIS]
    for spec in config.layers:
        moe = spec.moe
        if runtime.expert_parallel == "auto" or moe is None:
            continue
        what, size = (
            ("width", moe.width)
            if runtime.expert_parallel == "hidden"
            else ("number", moe.router.experts)
        )
        if size % parts:
            raise ValueError(
                f"expert_parallel {runtime.expert_parallel} cuts the {what} of the experts, "
                f"{size}, over the {parts} devices along the mesh axis expert, which do not "
                "divide it; choose another number of them, or expert_parallel auto"
            )


def _on_one_device(
    x_bte,
    experts_btk,
    weights_btk,
    weights: Weights,
    *,
    body,
    shards: ExpertShards,
    specs: dict[str, PartitionSpec],
):
    tokens = tuple(flat(a, shards) for a in (x_bte, experts_btk, weights_btk))
    ready = gather_weights(weights, specs, shards)
    if shards.expected == shards:
        out, dropped = _in_parts(tokens, ready, body, shards)
    else:
        expected, rare = (
            partial(_in_parts, body=body, shards=each) for each in (shards.expected, shards)
        )
        with jax.named_scope(
            EXPECTED_LAST
        ):  # the branches of a condition are numbered from the false one
            out, dropped = jax.lax.cond(
                _has_room(tokens[1], shards.expected), expected, rare, tokens, ready
            )
    return out.reshape(x_bte.shape), dropped


def _has_room(experts_NK: jax.Array, shards: ExpertShards) -> jax.Array:
    """Tells (bool[]) whether each device has room for its rows in all parts. All devices that
    exchange tokens agree."""
    counts_CX = jax.vmap(partial(jnp.bincount, length=shards.spec.router.experts))(
        experts_NK.reshape(shards.chunks, -1)
    )
    if shards.gathers:
        counts_CX = jax.lax.psum(counts_CX, AXIS)
    rows = counts_CX.reshape(shards.chunks, -1, shards.own_experts).sum(axis=-1)
    return rows.max() <= shards.room(experts_NK.shape[0] // shards.chunks)


def _in_parts(tokens: tuple[jax.Array, ...], ready: Weights, body: Callable, shards: ExpertShards):
    """Returns (out [N, E], dropped) of a scheme, computed in `shards.chunks` parts of the
    tokens."""
    if shards.chunks == 1:
        return body(*tokens, ready, shards)
    ready = unstacked(ready)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), ready)

    # Recomputed in the backward pass, because its residuals are as large as its rows. Gradients of
    # weights add up in float32.
    @jax.checkpoint
    def one(part):
        return body(*part, jax.tree.map(lambda a, like: a.astype(like.dtype), wide, ready), shards)

    out, dropped = jax.lax.map(
        one, tuple(a.reshape(shards.chunks, -1, a.shape[-1]) for a in tokens)
    )
    return out.reshape(tokens[0].shape), None if dropped is None else dropped.sum()


def flat(array_bt: jax.Array, shards: ExpertShards) -> jax.Array:
    """Flattens [b, t, ...] to [N, ...], for a scheme."""
    return _vary(array_bt.reshape(-1, array_bt.shape[-1]), shards.tokens, shards)


def gather_weights(
    weights: Weights, specs: dict[str, PartitionSpec], shards: ExpertShards
) -> Weights:
    """Gathers the weights over the axes that cut them in storage only. Returns them as a device
    uses them."""
    ready: Weights = {}
    for name, array in weights.items():
        if all_axes(specs[name]) - shards.kept_axes:
            array = unstacked(array)
        if isinstance(array, StackedWeight):
            ready[name] = replace(array, array=_vary(array.array, specs[name], shards))
            continue
        array = _vary(array, specs[name], shards)
        for dim, axes in enumerate(axes_of_dims(specs[name])):
            if stored := tuple(axis for axis in axes if axis not in shards.kept_axes):
                array = jax.lax.all_gather(array, stored, axis=dim, tiled=True)
        ready[name] = array
    parts = shards.kept["mlp_moe"]
    if "down_bias" in ready and parts:
        # Devices sum their slices of the width, so only the first one adds the bias.
        first = sum(jax.lax.axis_index(axis) for axis in parts) == 0
        ready["down_bias"] = jnp.where(first, cast(jax.Array, ready["down_bias"]), 0)
    return ready


def _vary(array, spec: PartitionSpec, shards: ExpertShards):
    """Marks the array as varying along all live axes, so that its gradient is summed over the
    devices once, here."""
    missing = shards.live - all_axes(spec)
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def gather(
    x_NE: jax.Array,
    experts_NK: jax.Array,
    weights_NK: jax.Array,
    weights: Weights,
    shards: ExpertShards,
) -> tuple[jax.Array, None]:
    """Computes the schemes gather and hidden on one device: (out [N, E], None)."""
    x_NE, experts_NK, weights_NK = collect((x_NE, experts_NK, weights_NK), shards)
    if shards.every:
        tokens = x_NE, _own(experts_NK, shards), weights_NK
        out_NE = experts.through_every(
            tokens, weights, shards.own_experts, shards.spec, shards.runtime
        )
    else:
        routed = sort(x_NE, experts_NK, weights_NK, shards)
        out_NE = experts.unroute(experts.compute(weights, routed, shards.spec, shards.runtime))
    return hand_back(out_NE, shards), None


def collect(tokens: tuple[jax.Array, ...], shards: ExpertShards) -> tuple[jax.Array, ...]:
    """Gathers arrays per token over the devices along `expert`: [N, ...] each to [p N, ...]."""
    return (
        tuple(jax.lax.all_gather(a, AXIS, axis=0, tiled=True) for a in tokens)
        if shards.gathers
        else tokens
    )


def sort(
    x_NE: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, shards: ExpertShards
) -> Routed:
    """Makes the rows for choices of the experts of this device."""
    own = shards.own_experts
    incomplete = shards.runtime.drops or own < shards.spec.router.experts
    room = None if shards.worst_case else shards.room(x_NE.shape[0] // shards.met)
    tokens = x_NE, _own(experts_NK, shards), weights_NK
    return experts.route(
        tokens, shards.spec, groups=own, room=room, block=shards.block, partial=incomplete
    )


def _own(experts_NK: jax.Array, shards: ExpertShards) -> jax.Array:
    """Renumbers the choices by this device's experts; `own_experts` stands for an expert of another
    device."""
    own = shards.own_experts
    if own == shards.spec.router.experts:
        return experts_NK
    local = experts_NK - own * jax.lax.axis_index(AXIS)
    return jnp.where((local >= 0) & (local < own), local, own)


def hand_back(out_NE: jax.Array, shards: ExpertShards) -> jax.Array:
    """Sums the devices' results for each token, [p N, E], at the owner of the token: [N, E]."""
    if shards.gathers and shards.runtime.expert_gradients is None:
        out_NE = _reduce_scatter(out_NE)
    elif shards.gathers:
        out_NE = _reduce_scatter_rounding_gradients(out_NE, shards.runtime.expert_gradients)
    return jax.lax.psum(out_NE, shards.summed) if shards.summed else out_NE


def _reduce_scatter(out_NE: jax.Array) -> jax.Array:
    """Sums this device's rows over the devices along `expert`."""
    return jax.lax.psum_scatter(out_NE, AXIS, scatter_dimension=0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduce_scatter_rounding_gradients(out_NE: jax.Array, qtype: str) -> jax.Array:
    """Computes `_reduce_scatter`. The all-gather of its gradient moves values of `qtype`, one scale
    per row."""
    return _reduce_scatter(out_NE)


def _rounded_gradient(qtype: str, _, g_NE: jax.Array):
    rounded = quantize(g_NE, jnp.dtype(qtype), inputs=(1,))
    arrived = jax.tree.map(lambda a: jax.lax.all_gather(a, AXIS, axis=0, tiled=True), rounded)
    return (qwix.dequantize(arrived).astype(g_NE.dtype),)


_reduce_scatter_rounding_gradients.defvjp(
    lambda out, qtype: (_reduce_scatter(out), None), _rounded_gradient
)


def all_to_all(
    x_NE: jax.Array,
    experts_NK: jax.Array,
    weights_NK: jax.Array,
    weights: Weights,
    shards: ExpertShards,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the scheme all_to_all on one device: (out [N, E], choices dropped or None)."""
    N, k = experts_NK.shape
    spec = shards.spec
    drops = shards.runtime.drops
    own = shards.own_experts
    room = shards.room(N)
    tokens = x_NE, experts_NK, weights_NK
    if isinstance(weights["up"], StackedWeight) and shards.runtime.ragged_buffer_factor is None:
        return _by_group(tokens, weights, room, shards), None
    leaving = experts.route(tokens, spec, groups=spec.router.experts, block=None, partial=drops)
    trip, arriving = trips(jax.lax.all_gather(leaving.plan.sizes, AXIS), room)
    here = jax.lax.axis_index(AXIS)
    native = shards.layout.platform != "cpu"
    rows_RE = exchange(leaving.rows, trip, (N * k, room), AXIS, native)
    # Rows arrive ordered by sender and are sorted again. Weights stay with the sender, or are in
    # the rows already.
    groups = groups_on_arrival(arriving[:, here], room)[:, None]
    routes = plan(groups, own, block=shards.block, partial=True)
    arrived = Routed(dispatch(rows_RE, routes), routes, (groups < own).astype(jnp.float32))
    done_RE = experts.unroute(experts.compute(weights, arrived, spec, shards.runtime))
    home = cast(jax.Array, exchange(done_RE, trip.back, (room, N * k), AXIS, native))
    out = experts.unroute(Routed(home, leaving.plan, leaving.weights))
    out = jax.lax.psum(out, shards.summed) if shards.summed else out
    if shards.runtime.ragged_buffer_factor is None:
        return out, None
    dropped = (leaving.plan.sizes.sum() - trip.sizes[here].sum()).astype(jnp.float32)
    dropped = jax.lax.pmean(dropped, shards.summed) if shards.summed else dropped
    return out, jax.lax.psum(dropped, tuple(sorted(shards.token_axes)))


def _by_group(
    tokens: tuple[jax.Array, ...], weights: Weights, room: int, shards: ExpertShards
) -> jax.Array:
    """Computes `all_to_all` in decoding on TPU: [N, E]. tokens: (x [N, E], choices [N, k], their
    weights [N, k]).

    Rows arrive in the order of the products, and leave in it: nothing but the exchanges and the
    products writes them. Places without a row hold anything.
    """
    (x_NE, experts_NK, weights_NK), (spec, runtime) = tokens, (shards.spec, shards.runtime)
    leaving = plan(experts_NK, spec.router.experts, block=None, partial=runtime.drops)
    mode = "fill" if runtime.drops else "promise_in_bounds"
    rows = stacked_kernel.halves(x_NE).at[leaving.token].get(mode=mode, fill_value=0)
    if spec.weigh == "input":
        rows = rows * by_row(weights_NK.astype(rows.dtype), leaving)[:, None, None]
        weights_NK = jnp.ones_like(weights_NK)
    trip = trips_by_group(jax.lax.all_gather(leaving.sizes, AXIS), shards.own_experts)
    arrived = stacked_kernel.joined(exchange_uninitialized(rows, trip, room, AXIS), shards.layout)
    place = jnp.arange(room)
    sizes = trip.sizes[:, jax.lax.axis_index(AXIS)].sum(axis=0)
    routed = Routed(
        arrived, GroupedRows(place, place[:, None], sizes, None), jnp.ones((room, 1), jnp.float32)
    )
    done = stacked_kernel.halves(experts.compute(weights, routed, spec, runtime).rows)
    home = stacked_kernel.joined(
        exchange_uninitialized(done, trip.back, len(rows), AXIS), shards.layout
    )
    out = experts.unroute(Routed(home, leaving, weights_NK))
    return jax.lax.psum(out, shards.summed) if shards.summed else out
