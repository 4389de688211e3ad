"""Measures the cost of `exact: true`: tokens per second of exact and of plain generation with the
same prompts and weights.

Both take prompts of 32 tokens and write the same number of tokens, sampled at temperature 1;
nothing ends a completion early. The note says how many of the decoder's tokens were replaced, over
all turns, and how many tokens the scoring programs computed per written token.

    python benchmarks/exact.py [--models 1m 25m] [--repeats 3] [--batches 1 8 64] [--new-tokens 128]
"""

from __future__ import annotations

from collections.abc import Sequence

from models import MODELS
from side_by_side import Row, arguments, in_turns, parse, table

PROMPT_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, list(MODELS), repeats=3)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        for batch in options.batches:
            rows.append(measure(name, batch, options.new_tokens, options.repeats))
            print(table(rows[-1:], "tokens/s", rate=True), flush=True)
    print("\nall:\n" + table(rows, "tokens/s", rate=True))
    return rows


def measure(name: str, batch: int, new: int, repeats: int) -> Row:
    """Measures both programs in turns."""
    import numpy as np

    from policy import create, families
    from rollout import Generator, GeneratorOptions, SamplingParams

    model = create(families.read(MODELS[name]))
    prompts = (
        np.random.default_rng(0)
        .integers(0, model.config.vocab_size, (batch, PROMPT_TOKENS))
        .tolist()
    )
    params = SamplingParams(max_new_tokens=new)
    length = PROMPT_TOKENS + new
    exact, plain = (
        Generator(model, max_length=length, slots=batch, options=GeneratorOptions(exact=on))
        for on in (True, False)
    )
    seconds = in_turns(
        lambda: exact.generate(prompts, params), lambda: plain.generate(prompts, params), repeats
    )
    counts = exact.counts
    share = exact.counts["scored"] / exact.counts["checked"]
    note = (
        f"{counts['replaced']} of {counts['checked']} tokens replaced, {share:.1f} scored for each"
    )
    return Row(f"{name} batch {batch}", "plain", batch * new, *seconds, note=note)


if __name__ == "__main__":
    main()
