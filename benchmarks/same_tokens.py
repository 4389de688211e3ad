"""Counts the tokens that differ between two ways of decoding the same prompts with the same draws.

Without `exact: true` they may differ where rounding decides between two tokens. Of every completion
only what stands before the first difference, and that token, is counted: what follows is of another
text. `gap` is the largest difference between the log-probabilities that the two ways give to the
same token.

    python benchmarks/same_tokens.py [--models 1m 25m] [--prompts 64] [--new-tokens 128]
"""

from __future__ import annotations

from collections.abc import Sequence

from models import MODELS, pair
from side_by_side import arguments, parse

PROMPT_TOKENS = 32
FIRST = {"slots": 64}
WAYS = {
    "alone": {"slots": 1},
    "3 slots, prompts 7 tokens at a time": {"slots": 3, "prefill_chunk": 7},
    "pages of 5 tokens": {"slots": 64, "cache": "paged", "page_size": 5},
    "pages for a quarter, so that requests pause": {
        "slots": 64,
        "cache": "paged",
        "page_size": 8,
        "pages": 320,
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, list(MODELS), repeats=1)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parse(parser, argv)
    for name in options.models:
        with pair(name) as (model, _):
            for temperature in (1.0, 0.0):
                first = completions(model, options, temperature, **FIRST)
                for way, how in WAYS.items():
                    differ, tokens, gap = compare(
                        first, completions(model, options, temperature, **how)
                    )
                    counts = f"{differ} of {tokens:,} tokens differ; gap {gap:.1e}"
                    print(f"{name}, temperature {temperature:g}, {way}: {counts}", flush=True)


def completions(model, options, temperature: float, slots: int, **cache) -> list:
    import numpy as np

    from rollout import Generator, GeneratorOptions, SamplingParams

    shape = options.prompts, PROMPT_TOKENS
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, shape).tolist()
    length = PROMPT_TOKENS + options.new_tokens
    generator = Generator(
        model,
        max_length=length,
        slots=slots,
        options=GeneratorOptions(tokens_per_dispatch=32, **cache),
    )
    params = SamplingParams(max_new_tokens=options.new_tokens, temperature=temperature)
    return [group[0] for group in generator.generate(prompts, params)]


def compare(first: list, second: list) -> tuple[int, int, float]:
    """(completions that part, tokens up to there, largest difference of log-probabilities of equal
    tokens)."""
    differ = 0
    tokens = 0
    gap = 0.0
    for a, b in zip(first, second, strict=True):
        parted = next(
            (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), None
        )
        same = len(a.tokens) if parted is None else parted
        differ = differ + (parted is not None)
        tokens = tokens + same + (parted is not None)
        gap = max(
            [gap, *(abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True))]
        )
    return differ, tokens, gap


if __name__ == "__main__":
    main()
