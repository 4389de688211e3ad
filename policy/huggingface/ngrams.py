"""The hash constants of Engram (policy/config.py): multipliers and primes of its layers, from the section `engram` of a
configuration. Free of jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from policy.config import DecoderConfig, Engram, Norm
from policy.huggingface.hf import stacks
from policy.options import option

# Layers draw their multipliers from generators whose seeds are this prime apart (deepseek-ai/Engram, engram_demo_v1.py).
SEED_STEP = 10007


@dataclass(frozen=True)
class EngramSection:
    """Which layers (from 0) have a memory, and of which size.

    `vocab_bases`: for each order n = 2..max_ngram, what the rows of a head are the next primes above. `head_dim` numbers are
    kept in a row for each of `heads` heads of an order. `ids`: number of classes of tokens (None: each token its own), `pad_id`:
    the class of padding; both come from the tokenizer. The other fields are those of Engram.
    """

    layers: tuple[int, ...] = option(
        min_length=1, description="layers with a table, from 0; each is then computed outside of the scan"
    )
    vocab_bases: tuple[int, ...] = option(
        min_length=1,
        description="rows of a head, one number for each length of n-grams from 2 on; the next unused prime is taken",
    )
    max_ngram: int = option(3, ge=2, description="tokens of the longest n-gram")
    heads: int = option(8, ge=1, description="hashes of each n-gram")
    head_dim: int = option(64, ge=1, description="numbers in a row of the table")
    kernel_size: int = option(
        4, ge=1, description="taps of the convolution over what was found, `max_ngram` tokens apart"
    )
    seed: int = option(0, ge=0, description="of the hashes")
    ids: int | None = None
    pad_id: int = 0
    integers: Literal["int32", "int64"] = option(
        "int32", description="of the hashes; int64 are those of the released demo"
    )
    norm_eps: float = option(1e-6, gt=0.0, description="of the norms of keys and streams")
    conv_norm_eps: float = option(1e-5, gt=0.0, description="of the norm before the convolution")
    outer_norm: bool = option(False, description="whether the streams pass a norm before all that")

    def __post_init__(self):
        if self.max_ngram < 2 or min(self.heads, self.head_dim, self.kernel_size) < 1:
            raise ValueError("max_ngram must be at least 2, and heads, head_dim and kernel_size at least 1")
        if len(self.vocab_bases) != self.max_ngram - 1 or min(self.vocab_bases) < 2:
            raise ValueError(f"vocab_bases needs a number of at least 2 for each order from 2 to {self.max_ngram}")
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise ValueError("layers must name at least one layer, each once, counted from 0")
        if sum(self.vocab_bases) * self.heads >= 2**31:
            raise ValueError("a table has less than 2^31 rows: lower vocab_bases or heads")


def extended(config: DecoderConfig, section: EngramSection) -> DecoderConfig:
    """`config` with a memory in the layers of the section; each of those is a stack of its own. Raises ValueError."""
    layers = list(config.layers)
    if max(section.layers) >= len(layers):
        raise ValueError(f"layers: {max(section.layers)} is not there, the decoder has layers 0 to {len(layers) - 1}")
    ids = section.ids or config.vocab_size
    if not (0 < ids <= config.vocab_size and 0 <= section.pad_id < ids):
        raise ValueError(
            f"ids {ids} must be at most the vocabulary, {config.vocab_size}, and pad_id {section.pad_id} below ids"
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
    """An odd number for each token of the longest n-gram, so small that its product with any id fits the integers."""
    bound = np.iinfo(section.integers).max // ids
    drawn = np.random.default_rng(section.seed + SEED_STEP * layer).integers(
        0, max(1, bound // 2), section.max_ngram, np.int64
    )
    return tuple(int(2 * each + 1) for each in drawn)


def _unused_primes():
    """A function (base, count) -> the next `count` primes from `base` on that it has not given yet."""
    used: set[int] = set()

    def take(base: int, count: int) -> Iterator[int]:
        found = base - 1
        for _ in range(count):
            found += 1
            while found in used or not is_prime(found):
                found += 1
            used.add(found)
            yield found

    return take


def is_prime(n: int) -> bool:
    """The test of Miller and Rabin, which with these bases is exact below 3.2e9."""
    bases = (2, 3, 5, 7)
    if n < 2 or any(n % p == 0 for p in bases):
        return n in bases
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    for base in bases:
        x = pow(base, (n - 1) >> twos, n)
        if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
            return False
    return True
