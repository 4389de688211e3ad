"""Measures decoding of completions of unknown length: the share of computed rows that make a token,
and tokens per second.

Compares the engine, which moves to programs of fewer rows while the last completions drain, with a
fixed number of rows.

256 requests of 32 prompt tokens over 32 slots. Lengths are drawn from a log-normal distribution
with mean 32, cut at 256; the engine is told 256 for each. In both a slot is refilled when its
completion ends.

    python benchmarks/long_tail.py [--models 1m] [--repeats 3]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from models import MODELS, pair
from side_by_side import Row, arguments, in_turns, parse, table

REQUESTS = 256
SLOTS = 32
PROMPT_TOKENS = 32
MEAN = 32
LONGEST = 256
SPREAD = 1.0  # of the logarithm


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, list(MODELS), repeats=3)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        with pair(name) as (model, _):
            rows.append(measure(name, model, options.requests, options.repeats))
    print(table(rows, "tokens/s", rate=True))
    return rows


def lengths(requests: int) -> list[int]:
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, requests)
    return np.clip(np.round(drawn), 1, LONGEST).astype(int).tolist()


def measure(name: str, model, requests: int, repeats: int) -> Row:
    """Measures both programs in turns."""
    import numpy as np

    from rollout import Generator, SamplingParams
    from rollout.engine.cache_manager import CacheGeometry
    from rollout.request import Request

    class Hidden(Request):
        """Ends after `length` tokens, which neither the queue nor the engine sees."""

        @property
        def left(self) -> int:
            return self.length - len(self.tokens)

    class OneSize(CacheGeometry):
        @property
        def batch_sizes(self) -> tuple[int, ...]:
            return (self.slots,)

    targets = lengths(requests)
    prompts = (
        np.random.default_rng(1)
        .integers(0, model.config.vocab_size, (requests, PROMPT_TOKENS))
        .tolist()
    )
    params = SamplingParams(max_new_tokens=LONGEST)
    useful = {}

    def runner(fixed: bool):
        generator = Generator(model, max_length=PROMPT_TOKENS + LONGEST, slots=SLOTS)
        if fixed:
            geometry = generator.engine.runner.geometry
            generator.engine.runner.geometry = OneSize(**dataclasses.asdict(geometry))

        def run() -> None:
            before = dict(generator.engine.counts)
            generator.reset_prefix_cache()
            for i, (prompt, length) in enumerate(zip(prompts, targets, strict=True)):
                request = Hidden(tuple(prompt), params, prompt_id=i)
                request.length = length
                generator.submit(request)
            left = requests
            while left:
                left -= len(generator.step())
            counts = {key: count - before[key] for key, count in generator.engine.counts.items()}
            useful[fixed] = counts["useful"] / counts["rows"]

        return run

    seconds = in_turns(runner(fixed=False), runner(fixed=True), repeats)
    note = f"rows that made a token: {useful[False]:.1%}, with fixed slots {useful[True]:.1%}"
    return Row(
        f"{name}, {requests} requests", f"{SLOTS} fixed slots", sum(targets), *seconds, note=note
    )


if __name__ == "__main__":
    main()
