"""Says which features of a decoder and its runtime are incompatible. Free of jax, so that a run's
file is refused before anything starts.

A feature is named by the key of a run's YAML file that switches it on, or by the part of the model
that it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from policy.config import (
    Attention,
    CompressedAttention,
    DecoderConfig,
    GatedResidual,
    HyperConnections,
    Runtime,
)

LATENT = "experts that read a latent (moe_latent_size)"
SPLIT = "model.batch_split"
EXCHANGE = "model.expert_parallel: all_to_all"
GRADIENTS = "model.expert_gradients"
HYPER = "hyper-connections"
INDEXER = "an indexer of keys"
BLOCKS = "an indexer of blocks"
BOUNDED = "a window, sinks or a soft cap in the same layer"
ENGRAM = "n-gram tables"
RING = "model.context_parallel: ring"
ULYSSES = "model.context_parallel: ulysses"
BALANCE = "model.context_load_balance"
COMPRESSED = "compressed attention"
RECURRENT = "a recurrent mixer"
CAPACITY = "stages.N.router.capacity_factor"
WARMUP = "stages.N.indexer.training: dense_warmup"
MODULES = "stages.N.mtp"
EXPLICIT = "mesh.shard_mode: explicit"
FEW_BITS = "model.quantization"
WEIGHTS_AWAY = "model.host_parameters"
KEPT_AWAY = "a policy of model.remat that offloads"
EMBEDDINGS = "embeddings for each layer"
TABLES_AWAY = "model.table_memory: host"
GATED = "gated residual streams"
MEDIA = "pictures or sounds"
LOOKS_AHEAD = "attention to later parts of a picture"
DEEPSTACK = "deepstack features"
ADAPTER = "model.adapter"

# Unordered pairs of features that are refused, and the reason.
INCOMPATIBLE: dict[tuple[str, str], str] = {
    (SPLIT, EXCHANGE): "the schedule interleaves the collectives of the schemes gather and hidden",
    (
        GRADIENTS,
        EXCHANGE,
    ): "it is the type of the sums that the schemes gather and hidden send back",
    (
        SPLIT,
        HYPER,
    ): "the schedule carries one state for each token between layers, not several streams",
    (
        SPLIT,
        GATED,
    ): "the schedule carries one state for each token between layers, not several streams",
    (
        SPLIT,
        ENGRAM,
    ): "the schedule begins with the mixer, and has no place for a table lookup before it",
    (
        SPLIT,
        LATENT,
    ): "the schedule hands the input of the layer to the experts, not what is projected from it",
    (SPLIT, INDEXER): "the schedule has no form for a choice of keys",
    (RING, INDEXER): "an indexer chooses among all keys of a row at once; use all_gather",
    (ULYSSES, INDEXER): "an indexer chooses among all keys of a row at once; use all_gather",
    (RING, COMPRESSED): "an entry is a sum over neighbouring tokens of a row; use all_gather",
    (ULYSSES, COMPRESSED): "an entry is a sum over neighbouring tokens of a row; use all_gather",
    (
        ULYSSES,
        BALANCE,
    ): "every device has full sequences of some heads, so the loads are even without it",
    (BLOCKS, BOUNDED): "attention to the blocks that an indexer chooses computes none of them",
    (
        HYPER,
        EMBEDDINGS,
    ): "a layer adds to one residual vector of a token; to which of several is not defined",
    (
        BALANCE,
        INDEXER,
    ): "among keys with equal scores an indexer takes those that are earlier in the row",
    (BALANCE, COMPRESSED): "an entry is a sum over neighbouring tokens of a row",
    (BALANCE, RECURRENT): "its state passes through the tokens in order",
    (BALANCE, ENGRAM): "its n-grams and its convolution read neighbouring tokens",
    (
        BALANCE,
        CAPACITY,
    ): "an expert takes the first tokens of a row that choose it, in the order of the row",
    (WARMUP, MODULES): "a dense warm-up computes no head and trains indexers only",
    (EXPLICIT, SPLIT): "the schedule decides itself when data moves, on a mesh with Auto axes",
    (
        EXPLICIT,
        ENGRAM,
    ): "its table lookups declare no shardings, and its table may be in host memory; use auto",
    (EXPLICIT, FEW_BITS): "qwix does not declare the sharding of its products; use auto",
    (EXPLICIT, WEIGHTS_AWAY): "shardings cannot be declared for arrays in host memory; use auto",
    (EXPLICIT, KEPT_AWAY): "shardings cannot be declared for arrays in host memory; use auto",
    (EXPLICIT, TABLES_AWAY): "shardings cannot be declared for arrays in host memory; use auto",
    (
        MEDIA,
        MODULES,
    ): "a prediction module embeds the next token, which may stand for a part of a picture",
    (MEDIA, ENGRAM): "n-grams of placeholders say nothing about a picture",
    (
        MEDIA,
        INDEXER,
    ): "which tokens of a picture an indexer chooses was not compared with transformers",
    (
        MEDIA,
        SPLIT,
    ): "the schedule halves the rows of arrays, and the table of pictures has no rows of the batch",
    (MEDIA, EXPLICIT): "reads of the table of pictures declare no shardings; use auto",
    (
        ADAPTER,
        FEW_BITS,
    ): "it rounds what the weights and their adapters add up to, which is not there",
    (ADAPTER, SPLIT): "the schedule exchanges weights of experts without their adapters",
    (ADAPTER, EXPLICIT): "the products of adapters declare no shardings; use auto",
    (DEEPSTACK, HYPER): "which of the residual streams gets the features is not defined",
    (LOOKS_AHEAD, RING): "a picture may be cut between devices; use all_gather or ulysses",
    (LOOKS_AHEAD, BALANCE): "a picture may be cut between early and late parts of a sequence",
}


class Conflict(ValueError):
    """Two features are incompatible; the message names both and gives the reason."""


def features(
    config: DecoderConfig, runtime: Runtime, *, explicit: bool = False, media: bool = False
) -> frozenset[str]:
    """Returns the names of the features that are on. `explicit`: shardings will be explicit,
    whatever the layout of `runtime` says. `media`: calls will have pictures or sounds."""
    attentions = (spec.attention for spec in config.layers)
    block_indexers = [each for each in attentions if each is not None and each.indexer is not None]
    on = {
        SPLIT: runtime.batch_split,
        EXCHANGE: runtime.expert_parallel == "all_to_all",
        GRADIENTS: runtime.expert_gradients is not None,
        HYPER: isinstance(config.hyper_connections, HyperConnections),
        GATED: isinstance(config.hyper_connections, GatedResidual),
        ENGRAM: any(spec.engram is not None for spec in config.layers),
        EMBEDDINGS: config.layer_embedding is not None,
        TABLES_AWAY: config.layer_embedding is not None and runtime.table_memory == "host",
        INDEXER: any(spec.chooses_keys for spec in config.layers),
        BLOCKS: bool(block_indexers),
        BOUNDED: any(_is_bounded(attention) for attention in block_indexers),
        RING: runtime.context_parallel == "ring",
        ULYSSES: runtime.context_parallel == "ulysses",
        BALANCE: runtime.context_load_balance,
        LATENT: any(spec.moe is not None and spec.moe.latent is not None for spec in config.layers),
        COMPRESSED: any(isinstance(spec.mixer, CompressedAttention) for spec in config.layers),
        RECURRENT: any(spec.is_recurrent for spec in config.layers),
        CAPACITY: runtime.capacity_factor is not None,
        WARMUP: runtime.indexer == "dense_warmup",
        MODULES: runtime.mtp is not None,
        EXPLICIT: explicit or (runtime.layout is not None and runtime.layout.explicit),
        FEW_BITS: runtime.quantization is not None,
        WEIGHTS_AWAY: runtime.host_parameters,
        KEPT_AWAY: runtime.remat.endswith("_offloaded")
        or "offload" in dict(runtime.remat_tensors).values(),
        MEDIA: media,
        LOOKS_AHEAD: media and config.looks_ahead,
        ADAPTER: runtime.adapter is not None,
        DEEPSTACK: media and any(spec.deepstack for spec in config.layers),
    }
    return frozenset(name for name, is_on in on.items() if is_on)


def _is_bounded(attention: Attention) -> bool:
    has_bounds = attention.lookback is not None or attention.softcap is not None
    return has_bounds or attention.sinks or attention.looks_ahead


def conflicts(
    config: DecoderConfig, runtime: Runtime, *, explicit: bool = False, media: bool = False
) -> Iterator[str]:
    """Yields one message for each incompatible pair of features that is on."""
    on = features(config, runtime, explicit=explicit, media=media)
    for (one, other), reason in INCOMPATIBLE.items():
        if {one, other} <= on:
            yield f"{one} does not go with {other}: {reason}"


def check(config: DecoderConfig, runtime: Runtime, *, media: bool = False) -> None:
    """Raises Conflict for the first incompatible pair. `media`: calls will have pictures or
    sounds."""
    for text in conflicts(config, runtime, media=media):
        raise Conflict(text)
