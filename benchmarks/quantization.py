"""Compares quantized rollouts with floats: log-probabilities, bytes and tokens per second of the
same generator.

For each model and each kind of numbers, in one process: the difference |log p of the generator -
log p of the float32 trainer| of sampled tokens (mean and largest), bytes of the weights that
decoding reads and of one token in the cache, and tokens/s of both generators in turns. Random
weights: trained ones have larger outliers, and so larger differences. `latent` is a tiny
DeepSeek-V3 (latent attention, experts), `25m` the model of the other benchmarks. On CPU a product
with int8 or int4 weights turns them into floats first and is slower, not faster; what is saved
there is memory only.

    python benchmarks/quantization.py [--models 1m latent] [--kinds int8 int4 fp8] [--batch 8]
    [--new-tokens 32] [--repeats 3]
"""

from __future__ import annotations

from collections.abc import Sequence

from models import MODELS
from side_by_side import Row, arguments, in_turns, parse, table

PROMPT_TOKENS = 16
KINDS = ("int8", "int4", "fp8")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark from the command line."""
    parser = arguments(__doc__, [*MODELS, "latent"], repeats=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parse(parser, argv)
    rows = []
    for name in options.models:
        model = created(name)
        for kind in options.kinds:
            for parts in ({"weights": kind}, {"kv_cache": kind}):
                rows.append(measure(name, model, parts, options))
    print(table(rows, "tokens/s", rate=True))
    return rows


def created(name: str):
    import policy
    from policy import families
    from policy.huggingface import sources

    return policy.create(
        sources.preset("tiny-deepseek") if name == "latent" else families.read(MODELS[name])
    )


def measure(name: str, model, parts: dict[str, str], options) -> Row:
    """Measures both programs in turns."""
    import numpy as np

    from rollout import Generator, GeneratorOptions, SamplingParams

    length = PROMPT_TOKENS + options.new_tokens
    batch = options.batch
    prompts = (
        np.random.default_rng(0)
        .integers(0, model.config.vocab_size, (batch, PROMPT_TOKENS))
        .tolist()
    )
    params = SamplingParams(max_new_tokens=options.new_tokens)
    made = GeneratorOptions(**parts)
    plain, quantized = (
        Generator(model, max_length=length, slots=batch, options=o)
        for o in (GeneratorOptions(), made)
    )
    plain.generate(prompts, params)
    completions = [group[0] for group in quantized.generate(prompts, params)]
    rows = np.asarray(
        [
            prompt + completion.tokens
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    )
    sampled = np.asarray([completion.logprobs for completion in completions])
    difference = np.abs(np.asarray(model.logprobs(rows)[0])[:, PROMPT_TOKENS:] - sampled)
    seconds = in_turns(
        lambda: quantized.generate(prompts, params),
        lambda: plain.generate(prompts, params),
        options.repeats,
    )
    [(part, kind)] = parts.items()
    note = (
        f"|d logp| mean {difference.mean():.1e} max {difference.max():.1e}, {bytes_of(model, made)}"
    )
    return Row(f"{name} {part} {kind}", "float32", batch * options.new_tokens, *seconds, note=note)


def bytes_of(model, options) -> str:
    from policy.cache import cache as caches
    from rollout.engine.weights import RolloutWeights

    if options.weights:
        view = RolloutWeights(model.graph, options.weights).with_copies(model.params)
        weights = [(view[path], model.params[path]) for path in model.graph.inputs]
        bits = 4 if options.weights == "int4" else 8
        kept = sum(
            quantized.qvalue.size * bits // 8 + quantized.scale.nbytes for quantized, _ in weights
        )
        floats = sum(array.nbytes for _, array in weights)
        return f"layers {kept / 1e6:.2f} of {floats / 1e6:.2f} MB"
    per_token = [
        caches.bytes_per_token(model.config, model.graph.runtime.dtype, kind)
        for kind in (options.kv_cache, None)
    ]
    return f"token {per_token[0]} of {per_token[1]} bytes"


if __name__ == "__main__":
    main()
