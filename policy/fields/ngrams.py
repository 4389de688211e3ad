"""Computes the hash constants of n-gram tables (Engram of policy/specs.py), the multipliers and
primes of their layers, from the section `engram` of a configuration, or from the keys of Qwen4Exp.
Free of jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from policy.config import DecoderConfig, Engram, Norm
from policy.fields.config_fields import UnsupportedModel, first, stacks
from policy.options import option

# Layers draw their multipliers from generators whose seeds differ by this prime
# (deepseek-ai/Engram, engram_demo_v1.py).
SEED_STEP = 10007


@dataclass(frozen=True)
class EngramSection:
    """The section `engram`: the layers (from 0) that have an n-gram table, and its size.

    The number of rows of each head is one of the next primes above `vocab_bases[n - 2]`, for each
    order n = 2..max_ngram. A row has `head_dim` numbers for each of the `heads` heads of an order.
    `ids`: number of classes of tokens (None: one per token), `pad_id`: the class of padding; both
    come from the tokenizer. The other fields have the names of Engram.
    """

    layers: tuple[int, ...] = option(
        min_length=1,
        description="layers with an n-gram table, from 0; each is computed outside of the scan",
    )
    vocab_bases: tuple[int, ...] = option(
        min_length=1,
        description="rows of a head, one number for each length of n-grams from 2 on; the next "
        "unused prime is used",
    )
    max_ngram: int = option(3, ge=2, description="tokens of the longest n-gram")
    heads: int = option(8, ge=1, description="hashes of each n-gram")
    head_dim: int = option(64, ge=1, description="numbers in a row of the table")
    kernel_size: int = option(
        4,
        ge=1,
        description="taps of the convolution over the looked-up values, `max_ngram` tokens apart",
    )
    seed: int = option(0, ge=0, description="seed of the hashes")
    ids: int | None = None
    pad_id: int = 0
    integers: Literal["int32", "int64"] = option(
        "int32", description="type of the hashes; the released demo uses int64"
    )
    norm_eps: float = option(1e-6, gt=0.0, description="epsilon of the norms of keys and streams")
    conv_norm_eps: float = option(
        1e-5, gt=0.0, description="epsilon of the norm before the convolution"
    )
    outer_norm: bool = option(
        False, description="whether the streams pass a norm before the lookup's gate"
    )

    def __post_init__(self):
        if self.max_ngram < 2 or min(self.heads, self.head_dim, self.kernel_size) < 1:
            raise ValueError(
                "max_ngram must be at least 2, and heads, head_dim and kernel_size at least 1"
            )
        if len(self.vocab_bases) != self.max_ngram - 1 or min(self.vocab_bases) < 2:
            raise ValueError(
                "vocab_bases needs a number of at least 2 for each order from 2 to "
                f"{self.max_ngram}"
            )
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise ValueError("layers must name at least one layer, each once, counted from 0")
        if sum(self.vocab_bases) * self.heads >= 2**31:
            raise ValueError("a table has less than 2^31 rows: lower vocab_bases or heads")


def add_engram(config: DecoderConfig, section: EngramSection) -> DecoderConfig:
    """Adds n-gram tables to the layers of the section; each of these layers is a stack of its own.
    Raises ValueError for a layer or class that the decoder does not have."""
    layers = list(config.layers)
    if any(layer.engram is not None for layer in layers):
        raise ValueError("this decoder has n-gram tables of its own (ple_layer_ids)")
    if max(section.layers) >= len(layers):
        raise ValueError(
            f"layers: {max(section.layers)} does not exist, the decoder has layers 0 to "
            f"{len(layers) - 1}"
        )
    ids = section.ids or config.vocab_size
    if not (0 < ids <= config.vocab_size and 0 <= section.pad_id < ids):
        raise ValueError(
            f"ids {ids} must be at most the vocabulary, {config.vocab_size}, and pad_id "
            f"{section.pad_id} below ids"
        )
    unused = _unused_primes()
    for number in section.layers:
        engram = Engram(
            multipliers=multipliers(section, ids, number),
            primes=tuple(tuple(unused(base, section.heads)) for base in section.vocab_bases),
            head_dim=section.head_dim,
            kernel_size=section.kernel_size,
            ids=ids,
            pad_id=section.pad_id,
            integers=section.integers,
            norm=Norm(section.norm_eps),
            conv_norm=Norm(section.conv_norm_eps),
            outer_norm=Norm(section.norm_eps) if section.outer_norm else None,
        )
        layers[number] = replace(layers[number], engram=engram)
    return replace(config, stacks=stacks(layers))


def multipliers(section: EngramSection, ids: int, layer: int) -> tuple[int, ...]:
    """Draws an odd number for each token of the longest n-gram, so small that its product with any
    id fits the integers."""
    bound = np.iinfo(section.integers).max // ids
    drawn = np.random.default_rng(section.seed + SEED_STEP * layer).integers(
        0, max(1, bound // 2), section.max_ngram, np.int64
    )
    return tuple(int(2 * each + 1) for each in drawn)


# The values of absent keys of per-layer embeddings, by the class of transformers.
PER_LAYER_DEFAULTS: dict[str, Any] = {
    "ple_layer_ids": None,
    "ple_embed_dim": None,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 512,
    "eos_token_id": None,
}


def per_layer_embeddings(hf: dict) -> dict[int, Engram]:
    """Reads the per-layer embeddings (PLE) of Qwen4Exp, by the number of their layer from 0:
    `ple_layer_ids` count from
    1. Raises UnsupportedModel for values that make no table."""
    layers = sorted(set(hf["ple_layer_ids"] or ()))
    if outside := [number for number in layers if not 1 <= number <= hf["num_hidden_layers"]]:
        raise UnsupportedModel(
            f"ple_layer_ids: {outside[0]} is none of the layers 1 to {hf['num_hidden_layers']}"
        )
    return {number - 1: _per_layer_embedding(hf, index) for index, number in enumerate(layers)}


def _per_layer_embedding(hf: dict, index: int) -> Engram:
    """Reads table number `index`, as Qwen4ExpTextNGramEmbedding of transformers: the heads of all
    tables take one prime after the other from `ngram_vocab_size_base` on."""
    longest = hf["ngram_size"]
    heads = hf["heads_per_ngram"]
    width = first(hf, "ple_embed_dim", default=hf["hidden_size"])
    if min(longest - 1, heads, width) < 1 or width % ((longest - 1) * heads):
        raise UnsupportedModel(
            f"ple_embed_dim: {width} numbers cannot be cut among heads_per_ngram {heads} for each "
            f"length from 2 to ngram_size {longest}"
        )
    ends = hf["eos_token_id"]
    end = next(iter(ends), None) if isinstance(ends, list) else ends
    if end is None:
        raise UnsupportedModel(
            "eos_token_id: per-layer embeddings (ple_layer_ids) need the token that ends a text"
        )
    if hf["split_ngram_parts"] < 1:
        raise UnsupportedModel(
            f"split_ngram_parts: {hf['split_ngram_parts']} parts of a table, of at least 1"
        )
    count = (longest - 1) * heads
    primes = list(_unused_primes()(hf["ngram_vocab_size_base"], (index + 1) * count))[-count:]
    spec = Engram(
        multipliers=splitmix_multipliers(hf["seed"] + SEED_STEP * index, hf["vocab_size"], longest),
        primes=tuple(tuple(primes[start : start + heads]) for start in range(0, count, heads)),
        head_dim=width // count,
        kernel_size=hf["ple_conv_kernel_size"],
        ids=None,
        pad_id=end,
        integers="int64",
        norm=Norm(hf["rms_norm_eps"], "zero_centred"),
        conv_norm=Norm(hf["rms_norm_eps"], "zero_centred"),
        outer_norm=None,
        bias=False,
        resets=True,
        row_multiple=hf["make_ngram_vocab_size_divisible_by"],
    )
    if spec.table_rows >= 2**31:
        raise UnsupportedModel(
            f"ngram_vocab_size_base: {hf['ngram_vocab_size_base']} makes a table of "
            f"{spec.table_rows} rows, of at most {2**31 - 1}"
        )
    return spec


def hash_tensors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Returns the buffers of Qwen4ExpTextNGramEmbedding of transformers, by stored name."""
    tensors = {}
    for number, layer in enumerate(config.layers):
        if layer.engram is not None:
            prefix = f"model.layers.{number}.ple.ple_embedding."
            rows = layer.engram.rows
            tensors[f"{prefix}layer_multipliers"] = np.array(layer.engram.multipliers, np.int64)
            tensors[f"{prefix}ngram_heads_vocab_sizes"] = np.array(rows, np.int64)
            tensors[f"{prefix}ngram_heads_offsets"] = np.cumsum([0, *rows[:-1]], dtype=np.int64)
    return tensors


def splitmix_multipliers(seed: int, ids: int, count: int) -> tuple[int, ...]:
    """Returns `count` odd numbers, so small that their product with any of `ids` ids fits 64 bits;
    drawn by SplitMix64 (doi 10.1145/2660193.2660195) from `seed`, as _build_layer_multipliers of
    transformers' Qwen4Exp."""
    bound = max(1, (2**63 - 1) // ids // 2)
    return tuple(
        2 * (_splitmix64(seed + _GAMMA * (1 + number)) % bound) + 1 for number in range(count)
    )


_GAMMA = 0x9E3779B97F4A7C15


def _splitmix64(state: int) -> int:
    """Returns the number that SplitMix64 draws in this state."""
    z = (state + _GAMMA) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def _unused_primes() -> Callable[[int, int], Iterator[int]]:
    """Returns a function (base, count) -> the next `count` primes from `base` on that it has not
    returned before."""
    used: set[int] = set()

    def take(base: int, count: int) -> Iterator[int]:
        prime = base - 1
        for _ in range(count):
            prime += 1
            while prime in used or not is_prime(prime):
                prime += 1
            used.add(prime)
            yield prime

    return take


def is_prime(n: int) -> bool:
    """Runs the test of Miller and Rabin, which is exact below 3.2e9 with these bases."""
    bases = (2, 3, 5, 7)
    if n < 2 or any(n % p == 0 for p in bases):
        return n in bases
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    for base in bases:
        x = pow(base, (n - 1) >> twos, n)
        if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
            return False
    return True
