"""Tables of n-gram vectors, looked up by a hash of the last tokens: Engram (arXiv 2601.07372) and
the per-layer embedding of Qwen4Exp (Qwen4ExpTextPLELayer of transformers).

B rows, T tokens, V vocabulary, E hidden, G streams, H heads of all orders, J numbers that all heads
look up for a token, X any size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from policy.cache.layer_cache import LayerCache, LayerOutput
from policy.cache.paths import before as entries_before
from policy.cache.paths import number_documents
from policy.cache.step import Step
from policy.config import DecoderConfig, Engram, Norm, Runtime
from policy.intermediates import LayerAux
from policy.mesh import processes
from policy.mesh.explicit import in_explicit_mode, spec_of
from policy.mesh.sharding import Layout, constrain
from policy.ops.host_memory import on_host, to_device
from policy.ops.norms import RMSNorm, stream_norm
from policy.ops.parameter import IntegerConstant, RowTable, normal, ones, weight, zeros
from policy.recurrent.convolution import convolve, convolve_paths


class History:
    """The inputs that precede the tokens of a call, and the cache with the inputs of the call
    added.

    `real` bool[B, T]: the tokens that are not padding, which comes after them. A `tentative` call
    (policy/cache/cache.py) leaves the cache as it is, and `states` holds the cache entries after
    each token.
    """

    def __init__(self, cache: LayerCache | None, real_BT: jax.Array, tentative: bool):
        self.cache = cache
        self.real = real_BT
        self._tentative = tentative
        self.states = {}

    def before(self, name: str, new_BTX: jax.Array, count: int) -> jax.Array:
        """Returns the `count` rows that precede `new`, followed by `new`: [B, count + T, X].

        The preceding rows are the cache entry `name`, or 0 without a cache. The state after t
        tokens of the call is rows[:, t : t + count]; the cache stores the state after the last real
        token.
        """
        if self.cache is None:
            return jnp.pad(new_BTX, ((0, 0), (count, 0), (0, 0)))
        array = cast(jax.Array, self.cache.arrays[name])
        T = new_BTX.shape[1]
        rows = jnp.concatenate(
            [array[self.cache.index][:, 0].astype(new_BTX.dtype), new_BTX], axis=1
        )
        if self._tentative:
            self.states[name] = jnp.stack(
                [rows[:, None, t + 1 : t + 1 + count] for t in range(T)], axis=1
            )
            return rows
        end = jnp.max(jnp.where(self.real, 1 + jnp.arange(T), 0), axis=1)
        last = jnp.take_along_axis(rows, (end[:, None] + jnp.arange(count))[..., None], axis=1)
        arrays = self.cache.arrays | {
            name: array.at[self.cache.index].set(last[:, None].astype(array.dtype))
        }
        self.cache = replace(self.cache, arrays=arrays)
        return rows


class NgramLookup(nnx.Module):
    """An n-gram table with the gate and convolution of its values.

    Weights: table [rows, head_dim]; key_proj [G, J, E]; value_proj [J, E]; key_norm, query_norm,
    conv_norm [G, E]; conv [kernel, G, E]; and if configured key_bias [G, E], value_bias [E],
    outer_norm [E], and classes int32[V], the class of each token. `table` may hold the rows that
    the tokens of a call without a cache look up, [B, T, H, head_dim], instead of the table. Without
    several residual streams G = 1. Norms and gates are float32.
    """

    def __init__(self, spec: Engram, config: DecoderConfig, rngs: nnx.Rngs):
        self.spec = spec
        G = 1 if config.hyper_connections is None else config.hyper_connections.streams
        E = config.hidden_size
        J = len(spec.rows) * spec.head_dim
        init = normal(config.initializer_range)
        self.table = weight(
            rngs, (spec.table_rows, spec.head_dim), (None, "engram_row"), init, RowTable
        )
        self.key_proj = weight(
            rngs, (G, J, E), (None, "engram_dim", "embed"), init, inputs=(1,), quantizable=False
        )
        self.value_proj = weight(
            rngs, (J, E), ("engram_dim", "embed"), init, inputs=(0,), quantizable=False
        )
        if spec.bias:
            self.key_bias = weight(rngs, (G, E), (None, None), zeros)
            self.value_bias = weight(rngs, (E,), (None,), zeros)
        self.key_norm = _norm_weight(rngs, spec.norm, (G, E))
        self.query_norm = _norm_weight(rngs, spec.norm, (G, E))
        self.conv_norm = _norm_weight(rngs, spec.conv_norm, (G, E))
        # Zero, so that a fresh lookup adds its gated values alone.
        self.conv = weight(rngs, (spec.kernel_size, G, E), (None, None, "embed"), zeros)
        if spec.outer_norm is not None:
            self.outer_norm = RMSNorm(E, spec.outer_norm, rngs)
        if spec.ids is not None:
            classes = jnp.arange(config.vocab_size, dtype=jnp.int32) % spec.ids
            self.classes = IntegerConstant(classes, out_sharding=(None,))

    def __call__(
        self, x: jax.Array, step: Step, cache: LayerCache | None, runtime: Runtime
    ) -> LayerOutput:
        """Computes the update that is added to x. x is [B, T, E] or [B, T, G,
        E]. Documents of a row do not see each other, tokens of trees see what their paths hold;
        with a cache the first document continues the cached one. Padding leaves the cache as it is.
        """
        spec = self.spec
        assert step.tokens is not None
        x_BTGE = x[:, :, None] if x.ndim == 3 else x
        documents = number_documents(step.segments)
        history = History(cache, step.segments != 0, runtime.tentative)
        vectors = self.table[...]
        if (
            vectors.ndim == 2
        ):  # otherwise the rows were read before the call (policy/execution/row_tables.py)
            classes = None if spec.ids is None else self.classes[...]
            vectors = look_up(vectors, ngram_rows(spec, classes, step, history), x.dtype, runtime)
        vectors_BTJ = vectors.reshape(*step.tokens.shape, -1)
        key = jnp.einsum("btj,gje->btge", vectors_BTJ, self.key_proj[...].astype(x.dtype))
        value = jnp.einsum("btj,je->bte", vectors_BTJ, self.value_proj[...].astype(x.dtype))
        if spec.bias:
            key = key + self.key_bias[...].astype(x.dtype)
            value = value + self.value_bias[...].astype(x.dtype)
        query = x_BTGE if spec.outer_norm is None else self.outer_norm(x_BTGE)
        normed = stream_norm(key, self.key_norm[...], spec.norm) * stream_norm(
            query, self.query_norm[...], spec.norm
        )
        score = jnp.sum(normed, axis=-1) / math.sqrt(x.shape[-1])
        gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
        value_BTGE = gate[..., None].astype(x.dtype) * value[:, :, None]
        convolved = self._convolved(value_BTGE, documents, step, history)
        out = checkpoint_name(value_BTGE + jax.nn.silu(convolved).astype(x.dtype), "engram")
        aux = LayerAux(states=history.states or None)
        return LayerOutput(out.reshape(x.shape), history.cache, aux)

    def _convolved(
        self, value_BTGE: jax.Array, documents_BT: jax.Array, step: Step, history: History
    ) -> jax.Array:
        """Computes the convolution of the normed values, with taps as many tokens apart as the
        longest n-gram has: float32[B, T, G, E]. In trees tokens count along the path."""
        spec = self.spec
        shape = value_BTGE.shape
        order = len(spec.multipliers)
        normed = jnp.where(
            history.real[..., None, None],
            stream_norm(value_BTGE, self.conv_norm[...], spec.conv_norm),
            0,
        )
        inputs = normed.astype(value_BTGE.dtype).reshape(*shape[:2], -1)
        kernel = self.conv[...].astype(jnp.float32).reshape(spec.kernel_size, -1).T[None]
        if step.tree is not None:
            return convolve_paths(inputs[:, None], kernel, step.tree, order).reshape(shape)
        inputs = history.before("ngram_conv", inputs, spec.history)
        return convolve(inputs[:, None], kernel, documents_BT, order).reshape(shape)


def set_classes(params: dict[str, jax.Array], classes: np.ndarray) -> dict[str, jax.Array]:
    """Returns `params` with the token classes of every n-gram table set to `classes` int32[V]
    (rollout/text/classes.py)."""

    def put(array):
        return processes.device_put_global(
            np.broadcast_to(classes.astype(np.int32), array.shape), array.sharding
        )

    return {
        path: put(array) if path.endswith(".lookup.classes") else array
        for path, array in params.items()
    }


def _norm_weight(rngs: nnx.Rngs, norm: Norm, shape: tuple[int, int]) -> nnx.Param:
    """Creates the weight [G, E] of a norm of each stream."""
    return weight(rngs, shape, (None, "norm"), zeros if norm.scale == "zero_centred" else ones)


def ngram_rows(
    spec: Engram, classes_V: jax.Array | None, step: Step, history: History | None = None
) -> jax.Array:
    """Returns int32[B, T, H]: the table rows that the tokens of a step look up. `classes` are those
    of each token, None if a token is its own class. Without a `history` no token precedes them."""
    history = History(None, step.segments != 0, False) if history is None else history
    assert step.tokens is not None
    documents_BT = number_documents(step.segments)
    order = len(spec.multipliers)
    T = step.tokens.shape[1]
    classes_BT = step.tokens if classes_V is None else classes_V[step.tokens]
    ids = jnp.where(history.real, classes_BT + 1, 0)  # from 1, as 0 in an empty cache is no token
    if step.tree is not None:
        shifted = [ids, *(entries_before(ids, step.tree, times) for times in range(1, order))]
        return table_rows(spec, [jnp.where(each > 0, each - 1, spec.pad_id) for each in shifted])
    ids = history.before("ngram_ids", ids[..., None], order - 1)
    sources = jnp.pad(documents_BT, ((0, 0), (order - 1, 0)))
    shifted = []
    for j in range(order):
        back = slice(order - 1 - j, order - 1 - j + T)
        seen = (sources[:, back] == documents_BT) & (ids[:, back, 0] > 0)
        shifted.append(jnp.where(seen, ids[:, back, 0] - 1, spec.pad_id))
    return table_rows(spec, shifted)


def look_up(table: jax.Array, rows_BTH: jax.Array, dtype: DTypeLike, runtime: Runtime) -> jax.Array:
    """Returns table[rows], [B, T, H, head_dim] of `dtype`. The table is sharded along its row
    dimension, so every device reads its part of the rows of the full batch, and only these parts
    are exchanged, never the table."""
    layout = runtime.layout
    batch = None if _is_sharded(table, layout) else "batch"
    rows_BTH = constrain(rows_BTH, (batch, None, None), layout)
    if in_explicit_mode() and layout is not None:
        places = PartitionSpec(
            *spec_of(rows_BTH), layout.spec((None, "engram_row"), table.shape)[1]
        )
        vectors = table.at[rows_BTH].get(out_sharding=places).astype(dtype)
    else:
        read = _read_on_host if runtime.table_memory == "host" else _read
        vectors = constrain(read(table, rows_BTH, dtype), (batch, None, None, "engram_row"), layout)
    return constrain(vectors, ("batch", None, None, None), layout)


def _is_sharded(table: jax.Array, layout: Layout | None) -> bool:
    return layout is not None and layout.spec((None, "engram_row"), table.shape)[1] is not None


def _read(table: jax.Array, rows: jax.Array, dtype) -> jax.Array:
    return table[rows].astype(dtype)


def _read_on_host(table: jax.Array, rows: jax.Array, dtype) -> jax.Array:
    """Reads rows of a table in host memory on the host: on a TPU the program then holds the rows
    and no copy of the table."""
    return to_device(on_host(partial(_read, dtype=dtype), table, rows))


def table_rows(spec: Engram, shifted: list[jax.Array]) -> jax.Array:
    """Returns int32[B, T, H]: the table row of each head for the n-grams that end at each token.
    shifted[j] int32[B, T] is the class of the token j places back. Exact for both types of
    integers."""
    shifted = _within_text(shifted, spec.pad_id) if spec.resets else shifted
    hashed: Any = None
    rows = []
    wide = spec.integers == "int64"
    for j, ids in enumerate(shifted):
        product = (
            _wide_product(ids, spec.multipliers[j])
            if wide
            else ids * jnp.int32(spec.multipliers[j])
        )
        hashed = product if hashed is None else jax.tree.map(jnp.bitwise_xor, hashed, product)
        if j > 0:
            primes = spec.primes[j - 1]
            rows.append(
                _wide_remainder(hashed, primes)
                if wide
                else hashed[..., None] % np.array(primes, np.int32)
            )
    offsets = np.cumsum([0, *spec.rows[:-1]]).astype(np.int32)
    return jnp.concatenate(rows, axis=-1) + offsets


def _within_text(shifted: list[jax.Array], end: int) -> list[jax.Array]:
    """Returns the classes of the tokens j places back, with `end` for those before an `end` that
    precedes the token."""
    within = True
    result = shifted[:1]
    for ids in shifted[1:]:
        within = within & (ids != end)
        result.append(jnp.where(within, ids, end))
    return result


def _wide_product(ids: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Computes ids * factor < 2^64 as (high, low) uint32: jax has 64-bit integers only if they are
    enabled for everything."""
    x = ids.astype(jnp.uint32)
    low = factor % 2**32
    x0 = x & 0xFFFF
    x1 = x >> 16
    f0 = np.uint32(low & 0xFFFF)
    f1 = np.uint32(low >> 16)
    middle = x1 * f0 + ((x0 * f0) >> 16)  # below 2^32, as (2^16 - 1)^2 + 2^16 - 1 is
    carry = (x0 * f1 + (middle & 0xFFFF)) >> 16
    high = x1 * f1 + (middle >> 16) + carry
    return high + x * np.uint32(factor >> 32), x * np.uint32(low)


def _wide_remainder(number: tuple[jax.Array, jax.Array], primes: tuple[int, ...]) -> jax.Array:
    """Returns int32[..., len(primes)]: the remainders of (high, low), by long division in as many
    bits at a time as fit in uint32."""
    p = np.array(primes, np.uint32)
    room = 32 - max(primes).bit_length()
    remainder = jnp.zeros((*number[0].shape, len(primes)), jnp.uint32)
    for word in number:
        for top in range(32, 0, -room):
            size = min(room, top)
            digit = (word >> np.uint32(top - size)) & np.uint32(2**size - 1)
            remainder = ((remainder << np.uint32(size)) | digit[..., None]) % p
    return remainder.astype(jnp.int32)
