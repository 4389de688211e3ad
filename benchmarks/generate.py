"""Measures tokens per second of generation against `transformers.generate` and a plain JAX loop on
the same weights.

All take the same prompts of 32 tokens, one call for the full batch, and write the same number of
tokens greedily in float32; nothing ends a completion early. Duet has one slot for each prompt and
also returns the log-probability of every token. transformers runs with its defaults: eager, its
dynamic cache, torch's own choice of threads. The plain loop is one jitted program
(benchmarks/plain_loop.py). Prefill counts for all, compilation (the first calls) does not. `same`
is the share of tokens on which Duet and the peer agree: less than all where two logits are closer
than float32 rounding.

The bound of a decoding step, measured in the same run, is the longer of two times: to read the
weights and the live part of the cache once, at the rate of torch's matrix-vector product over as
many bytes as the weights have (those of 1m stay in the processor's caches), and to multiply, 2
operations for each weight and row at the rate of its largest product.

    python benchmarks/generate.py [--models 1m 25m] [--repeats 3] [--torch-threads 1] [--batches 1 8
    64] [--new-tokens 128]
        [--tokens-per-dispatch 128]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from models import MODELS, pair
from side_by_side import Row, arguments, parse, table

PROMPT_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, list(MODELS), repeats=3)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--tokens-per-dispatch", type=int, default=128)
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        with pair(name) as models:
            for batch in options.batches:
                rows += measure(name, models, batch, options)
                print(table(rows[-2:], "tokens/s", rate=True), flush=True)
    print("\nall:\n" + table(rows, "tokens/s", rate=True))
    return rows


def measure(name: str, models: tuple, batch: int, options) -> list[Row]:
    """Returns a row for each peer, with the share of the bound in the note."""
    import numpy as np
    import torch
    from plain_loop import PlainLoop

    from rollout import Generator, GeneratorOptions, SamplingParams

    (ours, theirs), new = models, options.new_tokens
    prompts = np.random.default_rng(0).integers(0, ours.config.vocab_size, (batch, PROMPT_TOKENS))
    choices = GeneratorOptions(tokens_per_dispatch=options.tokens_per_dispatch)
    generator = Generator(ours, max_length=PROMPT_TOKENS + new, slots=batch, options=choices)
    params = SamplingParams(max_new_tokens=new, temperature=0)
    given = {
        "input_ids": torch.from_numpy(prompts),
        "attention_mask": torch.ones(prompts.shape, dtype=torch.long),
    }
    loop = PlainLoop(ours, MODELS[name], new)

    def duet() -> np.ndarray:
        return np.asarray(
            [group[0].tokens for group in generator.generate(prompts.tolist(), params)]
        )

    def transformers() -> np.ndarray:
        with torch.inference_mode():
            made = theirs.generate(**given, do_sample=False, min_new_tokens=new, max_new_tokens=new)
        return made[:, PROMPT_TOKENS:].numpy()

    programs = {
        "duet": duet,
        "transformers": transformers,
        "plain loop": lambda: loop.generate(prompts),
    }
    made = {peer: program() for peer, program in programs.items()}
    seconds = {peer: [] for peer in programs}
    bounds = []
    for _ in range(options.repeats):
        for peer, program in programs.items():
            seconds[peer].append(_seconds(program))
        bounds.append(bound(MODELS[name], ours.graph.parameters, batch, PROMPT_TOKENS + new / 2))
    share = batch * new / statistics.median(seconds["duet"]) / max(bounds)
    note = f"bound {max(bounds):,.0f}, Duet at {share:.0%} of it"
    return [
        Row(
            f"{name} batch {batch}",
            peer,
            batch * new,
            tuple(seconds["duet"]),
            tuple(seconds[peer]),
            note=f"same {same:.0%}; {note}",
        )
        for peer in ("transformers", "plain loop")
        for same in [np.mean(made["duet"] == made[peer])]
    ]


def bound(spec: dict, weights: int, batch: int, live: float) -> float:
    """Tokens per second that no program on this machine exceeds, with `live` tokens of each row in
    the cache. The embedding is not read but for one row a token."""
    import torch

    read = weights - spec["vocab_size"] * spec["hidden_size"]
    entry = 2 * spec["num_hidden_layers"] * spec["num_key_value_heads"] * spec["head_dim"]
    matrix = torch.randn(read // 1024, 1024)
    vector = torch.randn(1024)
    square = torch.randn(1024, 1024)
    bandwidth = 4 * matrix.numel() / min(_seconds(lambda: matrix @ vector) for _ in range(20))
    rate = 2 * 1024**3 / min(_seconds(lambda: square @ square) for _ in range(5))
    step = max(4 * (read + batch * live * entry) / bandwidth, 2 * read * batch / rate)
    return batch / step


def _seconds(program: Callable[[], object]) -> float:
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
