"""What `exact: true` costs: tokens per second of exact generation, beside plain generation of the same prompts.

The peer `plain + scoring` also computes the log-probabilities of what it wrote in one pass, as a training step does before several
updates; an exact step has them already. The note says how many of the drafted tokens were not the exact ones.

    python benchmarks/exact.py [--models 1m 25m] [--repeats 3] [--batches 1 8 64] [--prompt 32] [--new 128]
"""

from __future__ import annotations

from collections.abc import Sequence

from models import MODELS
from side_by_side import Row, arguments, in_turns, parse, table


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = arguments(__doc__, list(MODELS), repeats=3)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of each completion")
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        for batch in options.batches:
            rows += measure(name, batch, options.prompt, options.new, options.repeats)
    print(table(rows, "tokens/s", rate=True))
    return rows


def measure(name: str, batch: int, prompt: int, new: int, repeats: int) -> list[Row]:
    """Exact generation beside plain, and beside plain and scoring."""
    import jax
    import numpy as np

    from policy import create, families, modes
    from policy.config import Runtime
    from rollout import Generator, GeneratorOptions, SamplingParams

    model = create(families.read(MODELS[name]), runtime=Runtime(remat="none", scan=False))
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    params, length = SamplingParams(max_new_tokens=new), prompt + new
    exact, plain = (
        Generator(model, max_length=length, slots=batch, options=GeneratorOptions(tokens_per_dispatch=new, exact=on))
        for on in (True, False)
    )
    scored = jax.jit(lambda weights, tokens: model.graph.logprobs(weights, tokens, modes.sit(tokens), 1.0)[:2])

    def with_scoring():
        made = plain.generate(prompts, params)
        tokens = [prompt + group[0].tokens for prompt, group in zip(prompts, made, strict=True)]
        return np.asarray(scored(model.params, np.asarray(tokens, np.int32))[0])

    rows = []
    for peer, theirs in (("plain", lambda: plain.generate(prompts, params)), ("plain + scoring", with_scoring)):
        seconds = in_turns(lambda: exact.generate(prompts, params), theirs, repeats)
        note = "{replaced} of {checked} drafts replaced".format(**exact.counts)
        rows.append(Row(f"{name} batch {batch}", peer, batch * new, *seconds, note=note))
    return rows


if __name__ == "__main__":
    main()
