"""The arrays that each layer stores in a cache: their names, shapes and dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from policy.config import (
    Attention,
    CompressedAttention,
    Compression,
    DecoderConfig,
    Engram,
    GatedDeltaNet,
    Indexer,
    KimiDeltaAttention,
    LatentAttention,
    LayerSpec,
    Mamba2,
    Recurrent,
    ShortConv,
    StoredType,
)
from policy.ops.quantization import TYPES

# The experts of each token: an entry by position of layers with a mixture of experts.
ROUTES = "routes"


@dataclass(frozen=True)
class Entry:
    """One array of a layer, [heads, length, dim] per slot.

    length: None for one entry per token (the length of the cache); a number for a state of fixed
    size.
    dtype: None for the dtype of the cache.
    tile: how many numbers of a token share one scale when the cache is quantised; None: never
    quantised.
    window: how many tokens a query looks back at most, itself included; None: no limit.
    rate: how many tokens one entry stands for, if `length` is None (policy/cache/blocks.py); None:
    one.
    has_several_queries: whether these are keys of which each head is read by several query heads, so
    that products with the transposed keys are faster on CPU (policy/cache/transposed_keys.py).
    """

    heads: int
    dim: int
    length: int | None = None
    dtype: str | None = None
    tile: int | None = None
    window: int | None = None
    rate: int | None = None
    has_several_queries: bool = False

    def places(self, length: int) -> int:
        """Returns the entries of so many tokens."""
        if self.length is not None:
            return self.length
        return length if self.rate is None else -(-length // self.rate)

    @property
    def bits(self) -> int:
        """Returns the bits of one number. `dtype` must be set."""
        dtype = jnp.dtype(self.dtype)
        return 4 if dtype == jnp.int4 else 8 * dtype.itemsize


def entries(spec: LayerSpec, config: DecoderConfig) -> dict[str, Entry]:
    """Lists the entries of a layer by name, before dtypes and quantisation are decided."""
    stored: dict[str, Entry] = {}
    for mixer in spec.mixers:
        stored |= _mixer_entries(mixer, config)
    return stored | _engram_entries(spec.engram, config)


def stored_entries(
    spec: LayerSpec,
    config: DecoderConfig,
    dtype: DTypeLike,
    quantization: StoredType | None,
    routes: bool = False,
) -> dict[str, Entry]:
    """Lists the entries of a layer with known dtypes. A quantised entry "k" has its scales under
    "k.scale".

    routes: whether the experts of each token are stored too.
    """
    stored = _routes_entry(spec) if routes else {}
    for name, entry in entries(spec, config).items():
        if quantization is None or entry.tile is None:
            stored[name] = replace(entry, dtype=entry.dtype or jnp.dtype(dtype).name)
        else:
            stored[name] = replace(entry, dtype=jnp.dtype(TYPES[quantization]).name)
            stored[f"{name}.scale"] = Entry(
                entry.heads, entry.dim // entry.tile, dtype="float32", window=entry.window
            )
    return stored


def _engram_entries(engram: Engram | None, config: DecoderConfig) -> dict[str, Entry]:
    if engram is None:
        return {}
    streams = 1 if config.hyper_connections is None else config.hyper_connections.streams
    ids = Entry(1, 1, len(engram.multipliers) - 1, "int32")
    return {"ngram_ids": ids, "ngram_conv": Entry(1, streams * config.hidden_size, engram.history)}


def _mixer_entries(
    mixer: Attention | LatentAttention | CompressedAttention | Recurrent, config: DecoderConfig
) -> dict[str, Entry]:
    match mixer:
        case Attention(shares=str()):
            return {}
        case Attention(kv_heads=heads, head_dim=dim, lookback=back, indexer=indexer):
            entry = Entry(heads, dim, tile=dim, window=back)
            if indexer is not None:
                return {"k": entry, "v": entry, "index": Entry(1, indexer.head_dim)}
            return {"k": replace(entry, has_several_queries=mixer.heads > heads), "v": entry}
        case LatentAttention(kv_lora_rank=rank, rope=rope, indexer=indexer):
            keys = {"index": Entry(1, indexer.head_dim)} if isinstance(indexer, Indexer) else {}
            # No tile holds numbers of both the normed latent and the rotated key, which differ in
            # size.
            return {"latent": Entry(1, rank + rope.dim, tile=math.gcd(rank, rope.dim))} | keys
        case CompressedAttention(head_dim=dim, window=window, compression=compression):
            tokens = {"kv": Entry(1, dim, window=window)}
            return tokens if compression is None else tokens | _compressed_entries(dim, compression)
        case KimiDeltaAttention(heads=heads, head_dim=dim, conv_width=width):
            return {
                "conv": Entry(1, 3 * heads * dim, width - 1),
                "state": Entry(heads, dim, dim, "float32"),
            }
        case Mamba2(heads=heads, head_dim=dim, conv_width=width):
            channels = heads * dim + 2 * mixer.groups * mixer.state
            return {
                "conv": Entry(1, channels, width - 1),
                "state": Entry(heads, dim, mixer.state, "float32"),
            }
        case GatedDeltaNet(value_heads=heads, value_dim=dim, conv_width=width):
            channels = 2 * mixer.key_heads * mixer.key_dim + heads * dim
            return {
                "conv": Entry(1, channels, width - 1),
                "state": Entry(heads, dim, mixer.key_dim, "float32"),
            }
        case ShortConv(conv_width=width):
            return {"conv": Entry(1, config.hidden_size, width - 1)}
    return {}


def _compressed_entries(dim: int, compression: Compression) -> dict[str, Entry]:
    """Lists the entries of blocks, and what each token adds to them: two vectors, twice with an
    overlap."""
    dims = {"": dim} | (
        {} if compression.indexer is None else {"index_": compression.indexer.head_dim}
    )
    spans = 1 + compression.overlap
    stored: dict[str, Entry] = {}
    for prefix, dim in dims.items():
        stored[f"{prefix}parts"] = Entry(1, 2 * spans * dim, window=spans * compression.rate)
        stored[f"{prefix}entries"] = Entry(1, dim, rate=compression.rate)
    return stored


def _routes_entry(spec: LayerSpec) -> dict[str, Entry]:
    if spec.moe is None:
        return {}
    router = spec.moe.router
    return {
        ROUTES: Entry(
            1, router.experts_per_token, dtype="int8" if router.experts <= 128 else "int16"
        )
    }
