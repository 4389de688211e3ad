"""Measures what `sampling.filters: renormalise` costs against no filters: updates whose tokens have
K ids each, and completions whose ids are recorded.

Updates compute groups of completions with shared prompts. `plain` has log-probabilities over all
ids, the others over K ids of each token. Completions are drawn at temperature 1: `plain` without a
filter, `filtered` with top_k K and without a record (`filters: ignore`), `recorded` with the same
filter and its ids. Ratios are to `plain`, above 1 slower.

    python benchmarks/filters.py [--model 25m] [--vocab 32000] [--kept 20 64 128] [--repeats 5]
    [--platform cpu]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from models import MODELS
from shared_prefix import groups
from side_by_side import in_turns

PROMPT = 64
COMPLETION = 64
PROMPTS = 2
SAMPLES = 8


def main(argv: Sequence[str] | None = None) -> dict[int, dict[str, float]]:
    """Runs the benchmark from the command line. Returns the numbers of each K."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="25m")
    parser.add_argument(
        "--vocab", type=int, help="size of the vocabulary; default: that of the model"
    )
    parser.add_argument("--kept", nargs="+", type=int, default=[20, 64, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--platform", choices=("cpu", "cuda", "tpu"), default="cpu")
    options = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = options.platform

    import policy
    from policy import families
    from policy.config import Runtime

    keys = MODELS[options.model] | ({"vocab_size": options.vocab} if options.vocab else {})
    config = families.read(keys)
    how = {"remat": "none", "scan": False} if options.platform == "cpu" else {"dtype": "bfloat16"}
    model = policy.create(config, runtime=Runtime(**how))
    print(
        f"{options.model}, {config.vocab_size} ids, {PROMPTS} x {SAMPLES} completions of "
        f"{COMPLETION} tokens; seconds are medians of {options.repeats} turns"
    )
    results = {}
    for K in options.kept:
        results[K] = numbers = updates(model, K, options.repeats) | sampling(
            model, K, options.repeats
        )
        print(
            f"K {K:>3}: update {numbers['plain']:.3f} s, with ids {numbers['kept']:.3f} s, ratio "
            f"{numbers['update_ratio']:.3f}; sampling {numbers['unfiltered']:.3f} s, filtered "
            f"{numbers['filtered']:.3f} s, recorded {numbers['recorded']:.3f} s, ratios "
            f"{numbers['filtered_ratio']:.3f} and {numbers['recorded_ratio']:.3f}"
        )
    return results


def updates(model: Any, K: int, repeats: int) -> dict[str, float]:
    """Returns median seconds of an update over all ids and over K ids of each token."""
    batch = groups(model.config.vocab_size, PROMPT, COMPLETION, PROMPTS, alone=False, uneven=False)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, model.config.vocab_size, (*batch.tokens.shape, K)).astype(np.int32)
    ids[..., 0] = batch.tokens
    plain = update(model, batch)
    kept = update(model, batch.replace(kept=np.where(batch.mask[..., None] > 0, ids, -1)))
    seconds = [median(each) for each in in_turns(plain, kept, repeats)]
    return {"plain": seconds[0], "kept": seconds[1], "update_ratio": seconds[1] / seconds[0]}


def update(model: Any, batch: Any) -> Callable[[], Any]:
    """Returns an update by GRPO."""
    import jax

    import rl.algorithms
    from rl.config.stage import StageOptions
    from rl.training.packing.trees import Sharing
    from rl.training.trainer import Trainer

    options = StageOptions.model_validate(
        {
            "algorithm": "grpo",
            "steps": 100,
            "samples_per_prompt": SAMPLES,
            "prompts_per_step": PROMPTS,
        }
    )
    trainer = Trainer(model.graph, options, rl.algorithms.get("grpo"))
    trainer.sharing = Sharing(length_factor=2)
    state = trainer.start({path: jax.numpy.copy(array) for path, array in model.params.items()}, 0)

    def step() -> Any:
        nonlocal state
        state, metrics = trainer.update(state, batch)
        return float(metrics["loss"])

    return step


def sampling(model: Any, K: int, repeats: int) -> dict[str, float]:
    """Returns median seconds of completions without a filter, with one, and with its ids
    recorded."""
    from rollout import Generator, GeneratorOptions, SamplingParams

    prompts = (
        np.random.default_rng(2).integers(0, model.config.vocab_size, (PROMPTS, PROMPT)).tolist()
    )
    how = {"n": SAMPLES, "max_new_tokens": COMPLETION}
    plain = SamplingParams(**how)
    filtered = SamplingParams(**how, top_k=K)

    def sampled(kept: int, params: Any) -> Callable[[], Any]:
        options = GeneratorOptions(tokens_per_dispatch=COMPLETION, record_kept=kept)
        length = PROMPT + COMPLETION
        slots = PROMPTS * SAMPLES
        generator = Generator(model, max_length=length, slots=slots, options=options)
        return lambda: generator.generate(prompts, params)

    unfiltered, cut = in_turns(sampled(0, plain), sampled(0, filtered), repeats)
    again, recorded = in_turns(sampled(0, plain), sampled(K, filtered), repeats)
    return {
        "unfiltered": median((*unfiltered, *again)),
        "filtered": median(cut),
        "recorded": median(recorded),
        "filtered_ratio": median(cut) / median(unfiltered),
        "recorded_ratio": median(recorded) / median(again),
    }


if __name__ == "__main__":
    main()
