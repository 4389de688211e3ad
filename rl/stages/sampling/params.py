"""How the completions of a stage are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.config.stage import SamplingOptions
from rollout.types import SamplingParams

WITHOUT_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Fields of SamplingParams under which a token is drawn from the full distribution."""


def sampling_params(
    options: SamplingOptions, stop_ids: Sequence[int], **changes: Any
) -> SamplingParams:
    """Returns the parameters of the configuration, with the tokenizer's stop tokens added."""
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "stop": tuple(options.stop),
        "stop_token_ids": tuple(sorted({*options.stop_token_ids, *stop_ids})),
        "min_tokens": options.min_tokens,
        "bad_words": tuple(options.bad_words),
    }
    return SamplingParams(**(settings | changes))


def greedy_params(options: SamplingOptions, stop_ids: Sequence[int]) -> SamplingParams:
    """Returns the parameters of greedy completions that are compared with samples: one of each
    prompt, without filters and forbidden tokens."""
    unfiltered = {**WITHOUT_FILTERS, "min_tokens": 0, "bad_words": ()}
    return sampling_params(options, stop_ids, n=1, temperature=0.0, **unfiltered)
