"""Logits of hidden states, and log-probabilities and entropies computed without the logits of all
tokens at once.

M tokens (rows and positions flattened), E hidden, V vocabulary, K targets per token, I ids that a
filter names per token, X any size. All logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.config import LogitScaling
from policy.heads import adapted_head, tiled, vocab_tiles
from policy.heads.adapted_head import Head, joined
from policy.heads.logit_scaling import scaled
from policy.heads.tiled import LocalTiles
from policy.heads.vocab_tiles import Tiles, TopTokens
from policy.mesh.device_memory import GIB, MIB, total_memory
from policy.mesh.explicit import in_explicit_mode, over_devices, with_explicit_axes
from policy.mesh.sharding import Layout, axes_of
from policy.ops.adapted import Adapted
from policy.ops.projection import Projection

_Pair = tuple[jax.Array, jax.Array]

# Largest number of logits of a chunk unless the number of chunks is set: 2^24 float32 are 64 MiB.
CHUNK_LOGITS = 1 << 24

# The same of a tile of the vocabulary on a CPU, whose caches hold the 4 MiB, and the least tokens
# of a tile unless the number of tiles is set.
CPU_TILE_LOGITS = 1 << 20
LEAST_TOKENS = 512

# Share of a device's memory up to which the logits of a call are kept for its backward pass.
KEPT_SHARE = 1 / 16


def kept_logits_mib(memory: float | None) -> int:
    """Returns the MiB of logits that a call may keep on a device with so many bytes of memory, of
    which full GiB count; 0 if they are unknown."""
    return 0 if memory is None else int(KEPT_SHARE * (memory // GIB) * (GIB // MIB))


def logits(
    hidden_ME: jax.Array,
    weight_VE: Head | Projection,
    scaling: LogitScaling = LogitScaling(),
) -> jax.Array:
    """Computes the logits hidden @ weight^T in float32, scaled, for any leading dimensions."""
    return scaled(_products(hidden_ME, weight_VE), scaling)


def _products(hidden_ME: jax.Array, weight_VE: Head | Projection) -> jax.Array:
    """Computes hidden @ weight^T in float32, for any leading dimensions."""
    if isinstance(weight_VE, Adapted):
        z = _products(hidden_ME, weight_VE.base)
        z = z + _products(adapted_head.low(hidden_ME, weight_VE), weight_VE.b.T)
        return z if weight_VE.dora_scale is None else z * weight_VE.dora_scale
    if isinstance(weight_VE, Projection):
        E = hidden_ME.shape[-1]
        return weight_VE.product(hidden_ME.reshape(-1, E)).reshape(*hidden_ME.shape[:-1], -1)
    return jnp.einsum(
        "...e,ve->...v",
        hidden_ME,
        weight_VE.astype(hidden_ME.dtype),
        preferred_element_type=jnp.float32,
    )


@dataclass(frozen=True)
class Tiling:
    """The parts in which logits are computed.

    tiles: number of parts; None: chosen by size. Parts are tiles of the vocabulary for
    log-probabilities and divergences, and chunks of rows elsewhere, of which the last is padded if
    they do not divide. layout: the devices that share the rows. Each computes its own rows with the
    full weight, or with its part of the vocabulary. kept_mib: the logits of a device are kept for
    the backward pass where they take at most so many MiB; None: 0 if `tiles` is set, else
    KEPT_SHARE of the memory of a device.
    """

    tiles: int | None = None
    layout: Layout | None = None
    kept_mib: int | None = None

    def rows(self, M: int, V: int) -> int:
        """Returns the rows of a chunk."""
        return max(1, min(M, CHUNK_LOGITS // V) if self.tiles is None else -(-M // self.tiles))

    def keeps(self, M: int, V: int) -> bool:
        """Returns whether a device keeps its M V logits. It follows from the sizes alone."""
        most = self.kept_mib
        if most is None:
            most = 0 if self.tiles is not None else kept_logits_mib(total_memory(self._devices))
        return most * MIB >= 4 * M * V

    def local(self, M: int, V: int, scaling: LogitScaling) -> LocalTiles:
        """Returns the tiles of the vocabulary where each device has the full weight."""
        most = CPU_TILE_LOGITS if self._devices[0].platform == "cpu" else CHUNK_LOGITS
        least = -(-V // max(LEAST_TOKENS, most // M)) if self.tiles is None else self.tiles
        return LocalTiles.of(V, min(least, V), scaling, self.keeps(M, V))

    def of_vocabulary(
        self, M: int, weight_VE: jax.Array, scaling: LogitScaling, any_cut: bool = False
    ) -> Tiles | None:
        """Returns tiles of the vocabulary, where devices share the weight; else None.

        They do where the devices that share the rows also share E. In explicit mode, or with
        `any_cut`, they do where devices share any part of the weight.
        """
        if self.layout is None:
            return None
        cut = self.layout.spec(("vocab", "embed_vocab"), weight_VE.shape)
        if cut[1] is None and not ((any_cut or in_explicit_mode()) and cut[0]):
            return None
        V = weight_VE.shape[0]
        rows = self.layout.sharding(("batch",), (M,)).shard_shape((M,))[0]
        own = self.layout.sharding(("vocab",), (V,)).shard_shape((V,))[0]
        least = self.tiles or -(-rows * V // CHUNK_LOGITS)
        return Tiles.of(self.layout, V, least, scaling, self.keeps(rows, own))

    @property
    def _devices(self) -> list[Any]:
        """The devices that compute; without a layout one of this process."""
        if self.layout is None:
            return jax.local_devices()[:1]
        return list(self.layout.mesh.devices.flat)

    def spread(self, function: Callable, M: int, *row_inputs: bool) -> Callable:
        """Returns `function` run by every device on its own rows.

        row_inputs: which arguments have rows; all results have rows.

        The partitioner would cut the chunks over the devices, not the rows: the devices would then
        sum the logits of every chunk, M V numbers twice per step, where one weight of V E numbers
        is enough.
        """
        axes = None if self.layout is None else self.layout.spec(("batch",), (M,))[0]
        if self.layout is None or (not axes and not in_explicit_mode()):
            return function
        rows = PartitionSpec(axes)
        replicated = PartitionSpec()
        specs = tuple(rows if has else replicated for has in row_inputs)
        if in_explicit_mode():
            return over_devices(function, self.layout.mesh, specs, rows, check_vma=False)
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=specs,
            out_specs=rows,
            axis_names=set(axes_of(axes)),
            check_vma=False,
        )


def logprobs(
    hidden_ME: jax.Array,
    weight_VE: Head,
    targets: jax.Array,
    temperature: jax.typing.ArrayLike,
    scaling: LogitScaling = LogitScaling(),
    tiling: Tiling = Tiling(),
    left_out_MI: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp, entropy), float32, of the distribution softmax(logits / temperature).

    targets: int[M], or int[M, K] for several tokens per place; logp has their shape. entropy: [M].
    left_out_MI: int32, ids whose logits are -inf, padded with -1: the distribution is over the
    others; None: over all.

    The tokens are computed with one tile of the vocabulary after another (policy/heads/tiled.py),
    and nothing of size [M, V] is stored but the logits for the backward pass, where
    `tiling.keeps`. Both results are differentiable in hidden and weight.
    """

    def local(hidden, weight, targets, temperature, *left_out):
        tiles = tiling.local(hidden.shape[0], weight.shape[0], scaling)
        left_out = left_out[0] if left_out else None
        return tiled.logprobs(hidden, weight, targets, temperature, left_out, tiles)

    M = hidden_ME.shape[0]
    hidden_ME, weight_VE = joined(hidden_ME, weight_VE)
    temperature = jnp.asarray(temperature, jnp.float32)
    left_out = () if left_out_MI is None else (left_out_MI,)
    if tiling.layout is not None and tiling.layout.explicit and not in_explicit_mode():
        rows = tiling.layout.spec(("batch",), (M,))
        weight_spec = tiling.layout.spec(("vocab", "embed_vocab"), weight_VE.shape)
        specs = rows, weight_spec, rows, PartitionSpec(), *[rows for _ in left_out]

        def in_types(hidden, weight, targets, temperature, *left_out):
            return logprobs(hidden, weight, targets, temperature, scaling, tiling, *left_out)

        explicit = with_explicit_axes(in_types, tiling.layout.mesh, specs)
        return cast(_Pair, explicit(hidden_ME, weight_VE, targets, temperature, *left_out))
    inputs = hidden_ME, weight_VE, targets.reshape(M, -1), temperature
    if (tiles := tiling.of_vocabulary(M, weight_VE, scaling, any_cut=True)) is not None:
        run = tiled.logprobs(*inputs, left_out_MI, tiles)
        logp, entropy = cast(_Pair, run)
    else:
        run = tiling.spread(local, M, True, False, True, False, *[True for _ in left_out])
        logp, entropy = run(*inputs, *left_out)
    return logp.reshape(targets.shape), entropy


def top_logprobs(
    hidden_ME: jax.Array,
    weight_VE: Head,
    k: int,
    temperature: jax.typing.ArrayLike,
    scaling: LogitScaling = LogitScaling(),
    tiling: Tiling = Tiling(),
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp float32[M, k], ids int32[M, k]) of the k likeliest tokens, likeliest first,
    lowest id first among equals.

    They are computed in chunks of rows, or in tiles of the vocabulary where devices share the
    weight. The result is not differentiable: for gradients pass `ids` to `logprobs`.
    """
    top = top_and_rest(hidden_ME, weight_VE, k, temperature, scaling, tiling)
    return top.logp, top.ids


def top_and_rest(
    hidden_ME: jax.Array,
    weight_VE: Head,
    k: int,
    temperature: jax.typing.ArrayLike,
    scaling: LogitScaling = LogitScaling(),
    tiling: Tiling = Tiling(),
    vocab: int | None = None,
    targets_M: jax.Array | None = None,
) -> TopTokens:
    """Returns the k likeliest tokens as `top_logprobs`, and the rest.

    vocab: the distribution is over the first so many tokens; None: over all. The logarithm of the
    rest is summed over the other tokens, so it is exact where the likeliest have a probability near
    1. targets_M: int32, a token of each place; its log-probability is `TopTokens.target`, the same
    float as among the likeliest if it is one of them.
    """

    def local(hidden, weight, temperature, *targets):
        def one(arrays):
            h, *its_targets = arrays
            logp = _log_softmax(logits(h, weight, scaling)[:, :vocab], temperature)
            top, ids = jax.lax.top_k(logp, k)
            others = logp.at[jnp.arange(h.shape[0])[:, None], ids].set(-jnp.inf)
            at = [jnp.take_along_axis(logp, each, axis=-1)[:, 0] for each in its_targets]
            return TopTokens(top, ids, jax.nn.logsumexp(others, axis=-1), *at)

        M = hidden.shape[0]
        columns = [each[:, None] for each in targets]
        chunks = in_chunks(tiling.rows(M, weight.shape[0]), hidden, *columns)
        top = jax.lax.map(one, chunks)
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:M], top)

    M = hidden_ME.shape[0]
    hidden_ME, weight_VE = joined(hidden_ME, weight_VE)
    given = jax.lax.stop_gradient((hidden_ME, weight_VE, jnp.asarray(temperature, jnp.float32)))
    if (tiles := tiling.of_vocabulary(M, weight_VE, scaling, any_cut=True)) is not None:
        return vocab_tiles.top_and_rest(
            *given[:2], k, given[2], tiles, min(vocab or tiles.vocab, tiles.vocab), targets_M
        )
    targets = () if targets_M is None else (targets_M,)
    return tiling.spread(local, M, True, False, False, *[True for _ in targets])(*given, *targets)


def in_chunks(rows: int, *arrays: jax.Array) -> list[jax.Array]:
    """Cuts each array [M, X] into chunks [n, rows, X], padded with zeros."""
    return [
        jnp.pad(a, ((0, -a.shape[0] % rows), (0, 0))).reshape(-1, rows, a.shape[1]) for a in arrays
    ]


def likeliest(
    hidden_ME: jax.Array,
    weight_VE: Head,
    scaling: LogitScaling = LogitScaling(),
    tiling: Tiling = Tiling(),
) -> jax.Array:
    """Returns the token of the largest logit, int32[M], computed in chunks of rows. It has no
    gradient."""

    def local(hidden, weight):
        M = hidden.shape[0]
        best = jax.lax.map(
            lambda h: jnp.argmax(logits(h, weight, scaling), axis=-1),
            *in_chunks(tiling.rows(M, weight.shape[0]), hidden),
        )
        return best.reshape(-1)[:M].astype(jnp.int32)

    hidden_ME, weight_VE = joined(hidden_ME, weight_VE)
    run = tiling.spread(local, hidden_ME.shape[0], True, False)
    return run(*jax.lax.stop_gradient((hidden_ME, weight_VE)))


def _log_softmax(z, temperature):
    z = z / temperature
    return z - jax.nn.logsumexp(z, axis=-1, keepdims=True)
