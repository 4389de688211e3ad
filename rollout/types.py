"""What a generator is configured with, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from policy.config import StoredType
from policy.ops.quantization import TYPES


@dataclass(frozen=True)
class GeneratorOptions:
    """cache: `contiguous`, max_length tokens for every slot, or `paged`: pages of `page_size` tokens that slots take as they need
    them. pages: how many there are; None: as many as full slots need, or as half of the memory that is left has room for. rings:
    layers with a window keep only what it can see (docs/caches.md).

    prefill_chunk: prompt tokens of one prefill call. tokens_per_dispatch: most decoding steps between two looks of the host.
    prefill_budget: prompt tokens that are read in between two dispatches while others decode; None: as many as a dispatch of all
    slots makes. batch_sizes: numbers of rows, besides all slots, that a decode program is compiled for; None: powers of two.

    speculative: tokens that the model's prediction modules draft at each step, 0 for none; a step then makes 1 to
    1 + `speculative` tokens, the same as without (rollout/engine/speculative.py). weights, kv_cache: types in which the weights of
    products, and keys, values and latents, are kept; None: as floats. rules: mesh axes by logical axis, laid over those of the
    mesh while the generator computes (docs/meshes.md); weights that they put elsewhere are copied there when they have changed.
    None: the model's own arrays are read where they lie. record_routes: completions tell which experts computed each of their
    tokens (models with a mixture of experts only). record_values: completions tell the value, by `Generator.value_head`, of the
    state that each of their tokens was drawn in.

    exact: completions are a function of the weights, the prompt and (seed, prompt id, sample) to the last bit, whatever the other
    options are, and log-probabilities are those of `Model.logprobs`, bit for bit: what is decoded is checked by the scoring
    programs before it is handed out (rollout/engine/exact.py), which compute about three tokens for each of prompt and completion.
    """

    cache: Literal["contiguous", "paged"] = "contiguous"
    page_size: int = 32
    pages: int | None = None
    rings: bool = False
    prefill_chunk: int = 256
    tokens_per_dispatch: int = 128
    prefill_budget: int | None = None
    batch_sizes: Sequence[int] | None = None
    speculative: int = 0
    weights: StoredType | None = None
    kv_cache: StoredType | None = None
    rules: Mapping[str, Sequence[str]] | None = None
    exact: bool = False
    record_routes: bool = False
    record_values: bool = False

    @property
    def rereads(self) -> bool:
        """Whether a completion may go on as a prompt of any length, after it paused for want of pages or a token was replaced."""
        return self.exact or self.cache == "paged"

    def __post_init__(self):
        for name in ("weights", "kv_cache"):
            if getattr(self, name) not in (None, *TYPES):
                raise ValueError(f"GeneratorOptions.{name}: {getattr(self, name)!r} is none of {', '.join(TYPES)}")
        if self.cache not in ("contiguous", "paged"):
            raise ValueError(f"GeneratorOptions.cache: {self.cache!r} is neither 'contiguous' nor 'paged'")
        if self.page_size < 1 or (self.pages is not None and self.pages < 2):
            raise ValueError("GeneratorOptions: page_size must be at least 1 and pages at least 2")
        if self.prefill_chunk < 1 or self.tokens_per_dispatch < 1:
            raise ValueError("GeneratorOptions: prefill_chunk and tokens_per_dispatch must be at least 1")
        if any(size < 1 for size in self.batch_sizes or ()):
            raise ValueError("GeneratorOptions: batch_sizes must be at least 1 each")
        if self.speculative < 0:
            raise ValueError("GeneratorOptions: speculative must be 0 (none) or more")
        if self.exact and self.record_routes:
            raise ValueError(
                "GeneratorOptions: exact completions are of the model's own routes; leave record_routes out"
            )
        if self.record_values and (self.exact or self.speculative):
            raise ValueError("GeneratorOptions: record_values goes neither with exact nor with speculative")
        if self.exact and (self.weights or self.kv_cache):
            raise ValueError(
                "GeneratorOptions: exact gives the tokens of the trained weights; leave weights and kv_cache out"
            )


@dataclass(frozen=True)
class Completion:
    """`tokens` without the prompt, with the stop token; `logprobs` of each; `finish`: stop or length; `text` with a tokenizer;
    `steps`: forward passes of the decoder that made it, fewer than tokens where drafts were accepted; `routes`: where
    GeneratorOptions.record_routes asks for them, the experts of each token of prompt and completion but the last, which is never
    fed: int[tokens, R, k] by path of the layer, for the repeats of its stack; `values`: where GeneratorOptions.record_values asks
    for them, of the states that the tokens were drawn in."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    text: str | None
    steps: int = 0
    routes: dict[str, np.ndarray] | None = None
    values: list[float] | None = None
