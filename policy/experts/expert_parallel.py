"""A mixture of experts over a mesh: three ways to bring tokens and experts of different devices together.

gather: devices along the mesh axis `expert` hold different experts. Each gets the tokens of all of them, computes the choices
of its own experts, and the results are summed back to the owners of the tokens (all-gather, reduce-scatter).
all_to_all: experts are held alike. Each device sends a row for every choice to the device of its expert and gets the result
back (two ragged all-to-alls).
hidden: every device holds a slice of the width of all experts. Tokens travel as in gather; loads are equal whatever is chosen.

Elements of the hidden state that a device receives for each token of its own, there and back, with p devices along `expert`,
k choices and E hidden: gather and hidden 2 (p - 1) E; all_to_all 2 k E (p - 1) / p on average, less than gather where k < p.
Rows of memory for each token, if all tokens choose the experts of one device: gather p k; all_to_all k min(p, X / k), or k times
`ragged_buffer_factor`; hidden p k. Of these k are filled in the mean, of hidden all. No choice is dropped for want of room, and yet
a step rarely pays for all of it: where no device has more than about twice the mean, one with room for that much runs instead.

Without an axis `expert`, or where the experts cannot be spread evenly, each device computes its own tokens with all experts.
Weights arrive as they are stored and are gathered over fsdp here, so that their gradients are reduce-scattered.

b rows and t tokens of one device, N = b t; k choices of X experts, G held here; M rows of choices, E hidden, p devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import jax
import jax.numpy as jnp
import qwix
from jax.sharding import PartitionSpec

from policy.config import DecoderConfig, Moe, Runtime
from policy.experts import experts
from policy.experts.experts import Routed, Weights
from policy.experts.grouped import Block, block_rows, dispatch, plan
from policy.experts.ragged_exchange import exchange, groups_on_arrival, trips
from policy.mesh.explicit import over_devices
from policy.mesh.sharding import Layout, axes_of
from policy.ops.quantization import quantize

AXIS = "expert"

# Bytes of the rows that a device has room for at once. Its tokens are worked through in parts where the worst case needs more: 64
# devices of DeepSeek-V3 hold 4 experts each and may all choose those of one, for 4,096 tokens each a million rows, 14 GiB in
# bfloat16 for each copy of them.
ROOM = 1 << 30
# The usual room of a device, in rows: so many times the mean, and so many more, of which few tokens deviate the most.
USUAL, SPARE = 2, 64
# Part of the names of operations by which rl/plan/hlo.py knows a choice between branches of which the last is usual.
USUALLY_LAST = "usually_last"


def mixture(
    x_BTE: jax.Array, experts_BTK: jax.Array, weights_BTK: jax.Array, weights: Weights, spec: Moe, runtime: Runtime
):
    """(sum over choices of weight * expert(x) [B, T, E], dropped). Choices of expert X or more are of no expert and add nothing;
    there may be such only where the runtime drops. `dropped` float32: choices that found the buffer of their device full; None
    where there is no such limit."""
    layout = runtime.layout
    if layout is None or layout.mesh.size == 1:
        platform, groups = layout.platform if layout else jax.default_backend(), spec.router.experts
        tokens = tuple(a.reshape(-1, a.shape[-1]) for a in (x_BTE, experts_BTK, weights_BTK))
        if experts.few(len(tokens[0]), platform):
            return experts.through_every(tokens, weights, groups, spec, runtime).reshape(x_BTE.shape), None
        block = block_rows(len(tokens[0]), experts_BTK.shape[-1], groups, platform)
        routed = experts.route(*tokens, spec, groups=groups, block=block, partial=runtime.drops)
        return experts.unroute(experts.compute(weights, routed, spec, runtime)).reshape(x_BTE.shape), None
    cut = Cut(spec, runtime, x_BTE.shape)
    body = all_to_all if cut.exchanges else gather
    places = cut.places(weights)
    limited = cut.exchanges and runtime.ragged_buffer_factor is not None
    run = over_devices(
        partial(_on_one_device, body=body, cut=cut, places=places),
        layout.mesh,
        (cut.tokens, cut.tokens, cut.tokens, places),
        (cut.tokens, PartitionSpec() if limited else None),
    )
    return run(x_BTE, experts_BTK, weights_BTK, weights)


def check(config: DecoderConfig, runtime: Runtime, layout: Layout) -> None:
    """Raises ValueError where the scheme that `runtime` names cannot spread the experts of this decoder over this mesh."""
    parts = layout.mesh.shape[AXIS]
    for spec in config.layers:
        moe = spec.moe
        if runtime.expert_parallel == "auto" or moe is None:
            continue
        what, size = ("width", moe.width) if runtime.expert_parallel == "hidden" else ("number", moe.router.experts)
        if size % parts:
            raise ValueError(
                f"expert_parallel {runtime.expert_parallel} cuts the {what} of the experts, {size}, over the {parts} devices along "
                f"the mesh axis expert, which do not divide it; choose another number of them, or expert_parallel auto"
            )


@dataclass(frozen=True)
class Cut:
    """How one call is cut over the mesh: what each device has of the tokens and of the experts. `roomy`: there is room for the
    case that all tokens choose the experts of one device."""

    spec: Moe
    runtime: Runtime
    shape: tuple[int, ...]
    roomy: bool = True

    @property
    def layout(self) -> Layout:
        return self.runtime.layout

    @cached_property
    def tokens(self) -> PartitionSpec:
        """Mesh axes of the dimensions of x [B, T, E]."""
        return self.layout.spec(("batch", "length", None), self.shape)

    @cached_property
    def token_axes(self) -> frozenset[str]:
        return _axes(self.tokens)

    @cached_property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """Mesh axes over which experts stay cut while they are used, by logical axis: `expert`, `tensor`, and those that cut their
        width where they are stored, in that order, if all devices along them have the same tokens."""
        mesh, kept = self.layout.mesh.shape, {"exp": (), "mlp_moe": ()}
        hidden = self.runtime.expert_parallel == "hidden"
        sizes = {"exp": self.spec.router.experts, "mlp_moe": self.spec.width}
        width = [axis for axis in dict.fromkeys((*dict(self.layout.rules)["mlp_moe"], "tensor")) if axis != AXIS]
        for name, axis in (("mlp_moe" if hidden else "exp", AXIS), *(("mlp_moe", axis) for axis in width)):
            parts = math.prod(mesh[a] for a in kept[name]) * mesh[axis]
            if mesh[axis] > 1 and sizes[name] % parts == 0 and (axis == AXIS or axis not in self.token_axes):
                kept[name] = (*kept[name], axis)
        return kept

    @cached_property
    def kept_axes(self) -> frozenset[str]:
        return frozenset(chain(*self.kept.values()))

    @property
    def gathers(self) -> bool:
        """Whether tokens travel along the axis `expert`; not where every device of it has the same ones (few rows, decoding)."""
        return AXIS in self.kept_axes and AXIS in self.token_axes

    @property
    def exchanges(self) -> bool:
        return self.gathers and self.runtime.expert_parallel == "all_to_all"

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes along which devices have the same tokens and a part of their result each."""
        return tuple(sorted(self.kept_axes - self.token_axes))

    @property
    def live(self) -> frozenset[str]:
        """Axes along which devices compute different things."""
        return self.token_axes | self.kept_axes

    @property
    def own_experts(self) -> int:
        """Experts of a device."""
        return self.spec.router.experts // math.prod(self.layout.mesh.shape[axis] for axis in self.kept["exp"])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """That of x on a device."""
        mesh = self.layout.mesh.shape
        return tuple(
            n // math.prod(mesh[axis] for axis in axes) for n, axes in zip(self.shape, _dims(self.tokens), strict=True)
        )

    def room(self, N: int) -> int:
        """Rows that a device has room for when it and those that it meets work on N tokens each."""
        k, limit = self.spec.router.experts_per_token, self.runtime.ragged_buffer_factor
        most = self.met * N * (min(k, self.own_experts) if self.exchanges else k)
        if self.exchanges and limit is not None:
            return min(most, math.ceil(N * k * limit))
        return most if self.roomy else min(most, USUAL * math.ceil(self._mean(N)) + SPARE)

    @property
    def met(self) -> int:
        """Devices whose tokens come together."""
        return self.layout.mesh.shape[AXIS] if self.gathers else 1

    def _mean(self, N: int) -> float:
        """Rows of a device in the mean, of N tokens of each that it meets."""
        return self.met * N * self.spec.router.experts_per_token * self.own_experts / self.spec.router.experts

    @cached_property
    def usually(self) -> Cut:
        """This with room for what devices nearly always have, if that is at most half."""
        few, N = replace(self, roomy=False), math.prod(self.local_shape[:2])
        return few if 2 * few.room(N) <= self.room(N) and not self.every else self

    @property
    def filled(self) -> float:
        """Share of the rows that a device computes in the mean: the others belong to other devices, or are there for the case that
        more tokens choose its experts."""
        N = math.prod(self.local_shape[:2]) // self.chunks
        return self._mean(N) / self.room(N)

    @cached_property
    def chunks(self) -> int:
        """Equal parts of the tokens of a device, the fewest that have room each."""
        N, E = math.prod(self.local_shape[:2]), self.shape[-1]
        size = self.room(N) * E * jnp.dtype(self.runtime.dtype).itemsize
        return next((n for n in range(max(1, -(-size // ROOM)), N + 1) if N % n == 0), N)

    @property
    def block(self) -> Block:
        """Rows of a block of the grouped products; their mean number for one expert does not depend on the scheme."""
        router = self.spec.router
        return block_rows(self._tokens, router.experts_per_token, router.experts, self.layout.platform)

    @property
    def every(self) -> bool:
        """Whether tokens go through every expert of a device. Rows that were exchanged are of one choice each: they stay apart."""
        return not self.exchanges and experts.few(self._tokens, self.layout.platform)

    @property
    def _tokens(self) -> int:
        """Those of all devices that meet, in one part."""
        mesh = self.layout.mesh.shape
        parts = math.prod(mesh[axis] for axis in self.token_axes - ({AXIS} if self.gathers else set())) * self.chunks
        return math.prod(self.shape[:2]) // parts

    def places(self, weights: Weights) -> dict[str, PartitionSpec]:
        """Where the weights of the experts lie when a device starts: cut as they will be used, and on top of that as they are
        stored over axes along which tokens differ."""
        return {name: self._place(name, array.shape) for name, array in weights.items()}

    def _place(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        names, dims = experts.AXES[name], []
        for logical, stored, size in zip(names, _dims(self.layout.spec(names, shape)), shape, strict=True):
            kept = self.kept.get(logical, ())
            extra = tuple(axis for axis in stored if axis in self.token_axes - self.kept_axes)
            if size % math.prod(self.layout.mesh.shape[axis] for axis in kept + extra):
                extra = ()
            dims.append(kept + extra or None)
        return PartitionSpec(*dims)


def _dims(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension."""
    return tuple(map(axes_of, spec))


def _axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes of all dimensions."""
    return frozenset(chain.from_iterable(_dims(spec)))


def _on_one_device(
    x_bte, experts_btk, weights_btk, weights: Weights, *, body, cut: Cut, places: dict[str, PartitionSpec]
):
    tokens, ready = tuple(flat(a, cut) for a in (x_bte, experts_btk, weights_btk)), held(weights, places, cut)
    if cut.usually == cut:
        out, dropped = _in_parts(tokens, ready, body, cut)
    else:
        usual, rare = (partial(_in_parts, body=body, cut=each) for each in (cut.usually, cut))
        with jax.named_scope(USUALLY_LAST):  # the branches of a condition are numbered from that of false
            out, dropped = jax.lax.cond(_has_room(tokens[1], cut.usually), usual, rare, tokens, ready)
    return out.reshape(x_bte.shape), dropped


def _has_room(experts_NK: jax.Array, cut: Cut) -> jax.Array:
    """bool: no device is given more rows than it has room for, in any of its parts. The same on all devices that meet."""
    counts_CX = jax.vmap(partial(jnp.bincount, length=cut.spec.router.experts))(experts_NK.reshape(cut.chunks, -1))
    if cut.gathers:
        counts_CX = jax.lax.psum(counts_CX, AXIS)
    rows = counts_CX.reshape(cut.chunks, -1, cut.own_experts).sum(axis=-1)
    return rows.max() <= cut.room(experts_NK.shape[0] // cut.chunks)


def _in_parts(tokens: tuple[jax.Array, ...], ready: Weights, body, cut: Cut):
    """(out [N, E], dropped) of a scheme, over as many parts of the tokens as have room."""
    if cut.chunks == 1:
        return body(*tokens, ready, cut)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), ready)

    # Computed again in the backward pass, for which it would keep as much as its rows. Gradients of weights add up in float32.
    @jax.checkpoint
    def one(part):
        return body(*part, jax.tree.map(lambda a, like: a.astype(like.dtype), wide, ready), cut)

    out, dropped = jax.lax.map(one, tuple(a.reshape(cut.chunks, -1, a.shape[-1]) for a in tokens))
    return out.reshape(tokens[0].shape), None if dropped is None else dropped.sum()


def flat(array_bt: jax.Array, cut: Cut) -> jax.Array:
    """[b, t, ...] as [N, ...], for a scheme."""
    return _vary(array_bt.reshape(-1, array_bt.shape[-1]), cut.tokens, cut)


def held(weights: Weights, places: dict[str, PartitionSpec], cut: Cut) -> Weights:
    """The weights as a device uses them: what is cut for storage only is gathered."""
    ready = {}
    for name, array in weights.items():
        array = _vary(array, places[name], cut)
        for dim, axes in enumerate(_dims(places[name])):
            if stored := tuple(axis for axis in axes if axis not in cut.kept_axes):
                array = jax.lax.all_gather(array, stored, axis=dim, tiled=True)
        ready[name] = array
    if "down_bias" in ready and (
        parts := cut.kept["mlp_moe"]
    ):  # one of the devices that add up their slices of the width adds it
        first = sum(jax.lax.axis_index(axis) for axis in parts) == 0
        ready["down_bias"] = jnp.where(first, ready["down_bias"], 0)
    return ready


def _vary(array: jax.Array, spec: PartitionSpec, cut: Cut) -> jax.Array:
    """Marks the array as differing along all the axes that matter, so that its gradient is summed over the devices once, here."""
    missing = cut.live - _axes(spec)
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def gather(x_NE, experts_NK, weights_NK, weights: Weights, cut: Cut):
    """The schemes gather and hidden, on one device: (out [N, E], None)."""
    x_NE, experts_NK, weights_NK = collect((x_NE, experts_NK, weights_NK), cut)
    if cut.every:
        tokens = x_NE, _own(experts_NK, cut), weights_NK
        out_NE = experts.through_every(tokens, weights, cut.own_experts, cut.spec, cut.runtime)
    else:
        routed = sort(x_NE, experts_NK, weights_NK, cut)
        out_NE = experts.unroute(experts.compute(weights, routed, cut.spec, cut.runtime))
    return hand_back(out_NE, cut), None


def collect(tokens: tuple[jax.Array, ...], cut: Cut) -> tuple[jax.Array, ...]:
    """With those of the other devices: [N, ...] each to [p N, ...]."""
    return tuple(jax.lax.all_gather(a, AXIS, axis=0, tiled=True) for a in tokens) if cut.gathers else tokens


def sort(x_NE, experts_NK, weights_NK, cut: Cut) -> Routed:
    """Rows for the choices of the experts of this device."""
    own = cut.own_experts
    how = {"block": cut.block, "partial": cut.runtime.drops or own < cut.spec.router.experts}
    room = None if cut.roomy else cut.room(x_NE.shape[0] // cut.met)
    return experts.route(x_NE, _own(experts_NK, cut), weights_NK, cut.spec, groups=own, room=room, **how)


def _own(experts_NK: jax.Array, cut: Cut) -> jax.Array:
    """The choices by the number that an expert has on this device; their number for those of other devices."""
    own = cut.own_experts
    if own == cut.spec.router.experts:
        return experts_NK
    local = experts_NK - own * jax.lax.axis_index(AXIS)
    return jnp.where((local >= 0) & (local < own), local, own)


def hand_back(out_NE: jax.Array, cut: Cut) -> jax.Array:
    """Adds up what the devices made of each token, [p N, E], where the token came from: [N, E]."""
    if cut.gathers and cut.runtime.expert_gradients is None:
        out_NE = _summed(out_NE)
    elif cut.gathers:
        out_NE = _summed_with_rounded_gradients(out_NE, cut.runtime.expert_gradients)
    return jax.lax.psum(out_NE, cut.summed) if cut.summed else out_NE


def _summed(out_NE: jax.Array) -> jax.Array:
    """The sum over devices of the rows that are this device's."""
    return jax.lax.psum_scatter(out_NE, AXIS, scatter_dimension=0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed_with_rounded_gradients(out_NE: jax.Array, qtype: str) -> jax.Array:
    """As `_summed`; its gradient is gathered as values of `qtype`, each row with a scale of its own that travels with it."""
    return _summed(out_NE)


def _rounded_gradient(qtype: str, _, g_NE: jax.Array):
    rounded = quantize(g_NE, jnp.dtype(qtype), inputs=(1,))
    arrived = jax.tree.map(lambda a: jax.lax.all_gather(a, AXIS, axis=0, tiled=True), rounded)
    return (qwix.dequantize(arrived).astype(g_NE.dtype),)


_summed_with_rounded_gradients.defvjp(lambda out, qtype: (_summed(out), None), _rounded_gradient)


def all_to_all(x_NE, experts_NK, weights_NK, weights: Weights, cut: Cut):
    """The scheme all_to_all, on one device: (out [N, E], choices dropped or None)."""
    N, k = experts_NK.shape
    spec, drops, own = cut.spec, cut.runtime.drops, cut.own_experts
    room = cut.room(N)
    leaving = experts.route(x_NE, experts_NK, weights_NK, spec, groups=spec.router.experts, block=None, partial=drops)
    trip, arriving = trips(jax.lax.all_gather(leaving.plan.sizes, AXIS), room)
    here, native = jax.lax.axis_index(AXIS), cut.layout.platform != "cpu"
    rows_RE = exchange(leaving.rows, trip, (N * k, room), AXIS, native)
    # A second sort: rows arrive by sender. Weights stay with the sender, or are in the rows already.
    groups = groups_on_arrival(arriving[:, here], room)[:, None]
    routes = plan(groups, own, block=cut.block, partial=True)
    arrived = Routed(dispatch(rows_RE, routes), routes, (groups < own).astype(jnp.float32))
    done_RE = experts.unroute(experts.compute(weights, arrived, spec, cut.runtime))
    home = exchange(done_RE, trip.back, (room, N * k), AXIS, native)
    out = experts.unroute(Routed(home, leaving.plan, leaving.weights))
    out = jax.lax.psum(out, cut.summed) if cut.summed else out
    if cut.runtime.ragged_buffer_factor is None:
        return out, None
    dropped = (leaving.plan.sizes.sum() - trip.sizes[here].sum()).astype(jnp.float32)
    return out, jax.lax.psum(
        jax.lax.pmean(dropped, cut.summed) if cut.summed else dropped, tuple(sorted(cut.token_axes))
    )
