"""The options of a generator, the parameters of a call, and the completions that it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from policy.config import StoredType
from policy.options import option


@dataclass(frozen=True)
class GeneratorOptions:
    """Options of a generator. The section `generator` of the YAML schema is made from them.

    Raises ValueError for values out of range and for options that exclude each other.
    """

    cache: Literal["contiguous", "paged"] = option(
        "contiguous",
        description="contiguous: max_length tokens for every slot; paged: pages of page_size "
        "tokens that slots allocate as they need them.",
    )
    page_size: int = option(32, ge=1, description="Tokens of a page.")
    pages: int | None = option(
        None,
        ge=2,
        description="Number of pages; null: as many as full slots need, or as half of the memory "
        "that is left has room for.",
    )
    sliding_window_cache: bool = option(
        False,
        description="Sliding-window cache: layers with a window keep only the tokens that it can "
        "see (docs/caches.md).",
    )
    prefill_chunk: int = option(256, ge=1, description="Prompt tokens of one prefill call.")
    tokens_per_dispatch: int = option(
        128,
        ge=1,
        description="Most decoding steps of one multi-step decode (num_scheduler_steps): the host "
        "looks at the tokens after so many.",
    )
    prefill_budget: int | None = option(
        None,
        ge=1,
        description="Prompt tokens, with padding, prefilled between two multi-step decodes "
        "(max_num_batched_tokens); the last call may exceed it. null: as many as a decode of all "
        "slots samples.",
    )
    batch_sizes: Sequence[int] | None = option(
        None,
        description="Numbers of rows, besides all slots, that a decode program is compiled for; "
        "null: 1, 4, 8, 16 and so on.",
    )
    speculative: int = option(
        0,
        ge=0,
        description="Tokens that the model's prediction modules draft at each step; 0: no "
        "speculative decoding. Samples stay the same.",
    )
    weights: StoredType | None = option(
        None,
        description="Type in which the weights of matrix products are stored for decoding; null: "
        "as they are trained.",
    )
    kv_cache: StoredType | None = option(
        None,
        description="Type in which keys, values and latents are stored; null: the dtype of the "
        "model.",
    )
    rules: Mapping[str, Sequence[str]] | None = option(
        None,
        description="Mesh axes by logical axis while the generator computes, on top of the rules "
        "of the mesh (docs/meshes.md); weights whose sharding they change are copied when they "
        "have changed. null: the generator reads the model's own arrays.",
    )
    exact: bool = option(
        False,
        description="Completions depend on the weights, the prompt and (seed, prompt id, sample) "
        "only, to the last bit, and log-probabilities equal Model.logprobs: the scoring programs "
        "verify each completion (docs/exact.md).",
    )
    record_routes: bool = option(
        False,
        description="Completions say which experts computed each of their tokens (models with a "
        "mixture of experts only).",
    )
    record_values: bool = option(
        False,
        description="Completions have the value of the state that each token was drawn from, by "
        "the head of Generator.set_value_head.",
    )
    record_kept: int = option(
        0,
        ge=0,
        description="Most ids that the filters of a completion (top_k, top_p, min_p) leave which "
        "it has for each token, and then its log-probability among them; 0: none.",
    )

    @property
    def prefills_completions(self) -> bool:
        """Whether a completion may be prefilled like a prompt, after a preemption or after a token
        was replaced."""
        return self.exact or self.cache == "paged"

    def __post_init__(self) -> None:
        for name in ("weights", "kv_cache"):
            if getattr(self, name) not in (None, *get_args(StoredType)):
                raise ValueError(
                    f"GeneratorOptions.{name}: {getattr(self, name)!r} is none of "
                    f"{', '.join(get_args(StoredType))}"
                )
        if self.cache not in ("contiguous", "paged"):
            raise ValueError(
                f"GeneratorOptions.cache: {self.cache!r} is neither 'contiguous' nor 'paged'"
            )
        if self.page_size < 1 or (self.pages is not None and self.pages < 2):
            raise ValueError("GeneratorOptions: page_size must be at least 1 and pages at least 2")
        if self.prefill_chunk < 1 or self.tokens_per_dispatch < 1:
            raise ValueError(
                "GeneratorOptions: prefill_chunk and tokens_per_dispatch must be at least 1"
            )
        if any(size < 1 for size in self.batch_sizes or ()):
            raise ValueError("GeneratorOptions: batch_sizes must be at least 1 each")
        if self.speculative < 0 or self.record_kept < 0:
            raise ValueError(
                "GeneratorOptions: speculative and record_kept must be 0 (none) or more"
            )
        if self.exact and self.record_routes:
            raise ValueError(
                "GeneratorOptions: exact completions use the model's own routes; leave "
                "record_routes out"
            )
        if self.record_values and (self.exact or self.speculative):
            raise ValueError(
                "GeneratorOptions: record_values goes neither with exact nor with speculative"
            )
        if self.exact and (self.weights or self.kv_cache):
            raise ValueError(
                "GeneratorOptions: exact gives the tokens of the trained weights; leave weights "
                "and kv_cache out"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one call: how many completions, how long, and how their tokens are drawn.

    The logits of a token become its probability in this order (docs/generator.md): logit_bias,
    bad_words and min_tokens, repetition_penalty, frequency_penalty, presence_penalty, temperature,
    top_k, top_p, min_p. Raises ValueError for values out of range.
    """

    n: int = option(1, ge=1, description="Completions per prompt (num_generations).")
    max_new_tokens: int = option(64, ge=1, description="Most tokens of a completion.")
    temperature: float = option(
        1.0,
        ge=0.0,
        description="Divides the logits; 0 takes the most likely token, of equal ones the lowest "
        "id.",
    )
    top_k: int = option(0, ge=0, description="Keeps the k most likely tokens; 0: all.")
    top_p: float = option(
        1.0,
        gt=0.0,
        le=1.0,
        description="Keeps the fewest most likely tokens whose probabilities add up to top_p.",
    )
    min_p: float = option(
        0.0,
        ge=0.0,
        le=1.0,
        description="Keeps tokens at least min_p times as likely as the most likely one.",
    )
    stop_token_ids: tuple[int, ...] = option(
        (), description="A completion ends with one of these tokens."
    )
    stop: tuple[str, ...] = option(
        (), description="A completion ends with the token that completes one of these strings."
    )
    min_tokens: int = option(
        0,
        ge=0,
        description="Until a completion has so many tokens, stop_token_ids and the end of sequence "
        "are not drawn, and strings of stop do not count (min_new_tokens).",
    )
    bad_words: tuple[str, ...] = option(
        (),
        description="Texts that a completion does not hold, each with and without a blank in "
        "front: the last token of one is never drawn after its other tokens.",
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        description="Numbers from -100 to 100 that are added to the logits of tokens, by token id.",
    )
    repetition_penalty: float = option(
        1.0,
        gt=0.0,
        description="Logits of tokens in prompt or completion are divided by it where they are "
        "positive, else multiplied; 1: none.",
    )
    presence_penalty: float = option(
        0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted from the logits of tokens that the completion has.",
    )
    frequency_penalty: float = option(
        0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted from the logits of tokens as many times as the completion has "
        "them.",
    )

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            object.__setattr__(self, name, (texts,) if isinstance(texts, str) else tuple(texts))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        biases = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", biases or None)
        checks = {
            "n must be at least 1": self.n >= 1,
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "temperature must be a finite number from 0 on": 0 <= self.temperature < math.inf,
            "top_k must be 0 (all) or more": self.top_k >= 0,
            "top_p must lie in (0, 1]": 0 < self.top_p <= 1,
            "min_p must lie in [0, 1]": 0 <= self.min_p <= 1,
            "stop must not hold an empty string": all(self.stop),
            "min_tokens must be 0 or more, and at most max_new_tokens": 0
            <= self.min_tokens
            <= self.max_new_tokens,
            "bad_words must not hold an empty string or blanks alone": all(
                map(str.strip, self.bad_words)
            ),
            "logit_bias must hold numbers from -100 to 100": all(
                -100 <= bias <= 100 for bias in biases.values()
            ),
            "repetition_penalty must be a finite number above 0": 0
            < self.repetition_penalty
            < math.inf,
            "presence_penalty must lie in [-2, 2]": -2 <= self.presence_penalty <= 2,
            "frequency_penalty must lie in [-2, 2]": -2 <= self.frequency_penalty <= 2,
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"SamplingParams: {message}")

    @property
    def has_filter(self) -> bool:
        """Whether tokens are drawn from a part of the distribution: top_k, top_p, min_p, bad_words
        or min_tokens leaves out others."""
        forbids = bool(self.bad_words or (self.min_tokens and self.stop_token_ids))
        return self.temperature > 0 and (
            self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or forbids
        )

    @property
    def has_penalty(self) -> bool:
        """Whether a token's logit depends on how often the token occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


CHANGES_OF_RATIOS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The fields of SamplingParams that change ratios of probabilities of tokens."""
LOGITS_PROCESSORS = ("min_tokens", "bad_words", *CHANGES_OF_RATIOS)
"""The fields of SamplingParams that change the logits of a token (rollout/logits_processors.py)."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion.

    tokens: without the prompt, with the stop token. logprobs: log softmax(logits / temperature) of
    each token, of the model's own logits: before penalties, biases and forbidden tokens, and before
    any filter. (vLLM's default, `raw_logprobs`, is before the temperature too.) Under temperature
    0: log softmax(logits).
    finish: "stop" or "length".
    text: with a tokenizer, without special tokens; else None.
    raw: the text with its special tokens, but for the one that ended the completion; None without a
    tokenizer. steps: decoder passes that produced it: fewer than tokens if drafts were accepted.
    routes: under GeneratorOptions.record_routes, the experts of each token of prompt and completion
    except the last, which is never fed: int[tokens, R, k] by path of the layer, for the R repeats
    of its stack.
    values: under GeneratorOptions.record_values, the value of the state that each token was drawn
    from. filtered_logprobs, kept, kept_counts: under GeneratorOptions.record_kept, of a completion
    that was sampled with a filter, bad_words or min_tokens, else None: the log-probability of each
    token in the distribution that they left; the ids that they left, int32[tokens, K] in ascending
    order, padded with -1; and how many they were. Of more than record_kept ids only the first are
    in `kept`; or, where bad_words or min_tokens leave out at most record_kept ids, those, id i as
    -2 - i.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str
    text: str | None
    steps: int = 0
    routes: dict[str, np.ndarray] | None = None
    values: list[float] | None = None
    raw: str | None = None
    filtered_logprobs: list[float] | None = None
    kept: np.ndarray | None = None
    kept_counts: list[int] | None = None
