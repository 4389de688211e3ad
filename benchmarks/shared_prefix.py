"""Measures updates whose prompts are computed once for a group, in turns with updates of sequences
alone.

Completions have equal lengths, but those of 24/32x8 are drawn from 1 to their limit. `tokens` says
how many times fewer tokens are computed, `pairs` how many times fewer pairs of query and key
attention has.

    python benchmarks/shared_prefix.py [--model 25m] [--shapes 24/32x8 256/64x4 512/512x1
    1024/128x1] [--repeats 3]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from models import MODELS
from side_by_side import in_turns

SHAPES = ("24/32x8", "256/64x4", "512/512x1", "1024/128x1")
SAMPLES = 8


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Runs the benchmark from the command line. Returns the numbers of each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="25m")
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, help="tokens of prompt/completion x prompts"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--alone",
        action="store_true",
        help="prompts that nothing shares: the cost of looking for trees",
    )
    options = parser.parse_args(argv)

    import policy
    from policy import families
    from policy.config import Runtime

    config = families.read(MODELS[options.model] | {"max_position_embeddings": 4096})
    model = policy.create(config, runtime=Runtime(remat="none", scan=False))
    results = {}
    print(
        f"{options.model}, {SAMPLES} completions of each prompt; seconds are medians of "
        f"{options.repeats} turns"
    )
    for shape in options.shapes:
        results[shape] = numbers = measure(model, shape, options)
        print(
            f"{shape:>12}: tokens {numbers['tokens']:.2f}x, pairs {numbers['pairs']:.2f}x, "
            f"never {numbers['never']:.3f} s, auto {numbers['auto']:.3f} s, ratio "
            f"{numbers['ratio']:.2f}; "
            f"temporaries {numbers['never_mib']:.0f} and {numbers['auto_mib']:.0f} MiB"
        )
    return results


def measure(model: Any, shape: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns seconds of both, their ratio, the ratios of tokens and of pairs of tokens that see
    each other, and temporaries in MiB."""
    lengths, prompts = shape.split("x")
    P, C = map(int, lengths.split("/"))
    batch = groups(
        model.config.vocab_size, P, C, int(prompts), alone=options.alone, uneven=shape == SHAPES[0]
    )
    updates = {}
    packings = {}
    memory = {}
    for kind in ("never", "auto"):
        updates[kind], packings[kind], memory[kind] = update(model, kind, batch, P, C)
    ends, starts = (
        {kind: np.square(each.runs[i]).sum() for kind, each in packings.items()} for i in (0, 1)
    )
    pairs = {kind: ends[kind] - starts[kind] for kind in packings}
    seconds = dict(
        zip(updates, map(median, in_turns(*updates.values(), options.repeats)), strict=True)
    )
    return {
        **seconds,
        "ratio": seconds["never"] / seconds["auto"],
        "tokens": packings["never"].distinct / packings["auto"].distinct,
        "pairs": pairs["never"] / pairs["auto"],
        **{f"{kind}_mib": number / 2**20 for kind, number in memory.items()},
    }


def groups(vocab: int, P: int, C: int, prompts: int, *, alone: bool, uneven: bool) -> Any:
    """Returns a batch of groups. alone: the prompts of a group differ. uneven: the lengths of
    completions do."""
    from rl.training.batch import Batch

    rng = np.random.default_rng(0)
    N = prompts * SAMPLES
    T = P + C
    tokens = rng.integers(0, vocab, (N, T)).astype(np.int32)
    if not alone:
        tokens[:, :P] = np.repeat(tokens[::SAMPLES, :P], SAMPLES, axis=0)
    ends = rng.integers(P + 1, T + 1, N) if uneven else np.full(N, T)
    real = np.arange(T) < ends[:, None]
    noise = rng.normal(-3, 0.3, (2, N, T)).astype(np.float32)
    return Batch(
        tokens=np.where(real, tokens, 0),
        segments=real.astype(np.int32),
        mask=(real & (np.arange(T) >= P)).astype(np.float32),
        prompt=np.repeat(np.arange(prompts, dtype=np.int32), SAMPLES),
        sampler_logp=noise[0],
        old_logp=noise[1],
        advantages=rng.normal(size=N).astype(np.float32),
    )


def update(model: Any, kind: str, batch: Any, P: int, C: int) -> tuple[Callable[[], Any], Any, int]:
    """Returns (an update by GRPO, the Packing of its batch, bytes of temporaries of its
    program)."""
    import jax

    from rl.config.run import RunConfig
    from rl.stages import create

    stage = {
        "algorithm": "grpo",
        "steps": 100,
        "samples_per_prompt": SAMPLES,
        "prompts_per_step": len(batch.prompt) // SAMPLES,
        "shared_prefix": kind,
        "sampling": {"max_new_tokens": C},
    }
    config = RunConfig.model_validate(
        {
            "model": {"source": "tiny"},
            "max_length": P + C,
            "data": {"task": "arithmetic"},
            "rewards": {"functions": ["exact_answer"]},
            "stages": [stage],
        }
    )
    [made] = create(config)
    made.bind(model.graph)
    trainer = made.trainer
    state = trainer.start({path: jax.numpy.copy(array) for path, array in model.params.items()}, 0)

    def step() -> Any:
        nonlocal state
        state, metrics = trainer.update(state, batch)
        return float(metrics["loss"])

    step()
    [memory] = trainer.executables["update"].memory.values()
    return step, trainer.packing_of(batch)[0], memory.temporaries


if __name__ == "__main__":
    main()
