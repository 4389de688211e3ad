"""Tokens per second of generation, beside `transformers.generate` on the same weights.

Both take the same prompts of 32 tokens, one call for the whole batch, and write the same number of tokens greedily in
float32; nothing ends a completion early. Duet has one slot for each prompt and also returns the log-probability of every
token. transformers runs as it comes: eager, its dynamic cache, torch's own choice of threads. Prefill counts on both sides,
compilation (Duet's first call) does not. `same tokens` is the share of tokens on which both agree: less than all where two
logits are closer than float32 rounding.

The floor of one decoding step is the time to read the weights once (4 bytes each: 100 MB for 25m, 4 MB for 1m, which stays
in the processor's cache); what is above it at batch 1 is the cost of starting operations, which XLA's compiled loop pays once for
16 tokens and eager torch at every operation. At batch 64 the matrix products rule, and the two libraries' kernels.

    python benchmarks/generate.py [--models 1m 25m] [--repeats 3] [--torch-threads 1] [--batches 1 8 64] [--new-tokens 64]
"""

from __future__ import annotations

from collections.abc import Sequence

from models import MODELS, pair
from side_by_side import Row, arguments, in_turns, parse, table

PROMPT_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = arguments(__doc__, list(MODELS), repeats=3)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        with pair(name) as models:
            rows += [measure(name, models, batch, options.new_tokens, options.repeats) for batch in options.batches]
    print(table(rows, "tokens/s", rate=True))
    return rows


def measure(name: str, models: tuple, batch: int, new_tokens: int, repeats: int) -> Row:
    import numpy as np
    import torch

    from rollout import Generator, SamplingParams

    ours, theirs = models
    prompts = np.random.default_rng(0).integers(0, ours.config.vocab_size, (batch, PROMPT_TOKENS))
    generator = Generator(ours, max_length=PROMPT_TOKENS + new_tokens, slots=batch)
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0)
    given = {"input_ids": torch.from_numpy(prompts), "attention_mask": torch.ones(prompts.shape, dtype=torch.long)}

    def duet() -> np.ndarray:
        return np.asarray([group[0].tokens for group in generator.generate(prompts.tolist(), params)])

    def transformers() -> np.ndarray:
        with torch.inference_mode():
            made = theirs.generate(**given, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
        return made[:, PROMPT_TOKENS:].numpy()

    same = np.mean(duet() == transformers())
    seconds = in_turns(duet, transformers, repeats)
    return Row(f"{name} batch {batch}", "transformers", batch * new_tokens, *seconds, note=f"same tokens {same:.0%}")


if __name__ == "__main__":
    main()
