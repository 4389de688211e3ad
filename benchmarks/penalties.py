"""Measures what penalties, biases and forbidden tokens add to the sampling of a token.

A program of `--steps` draws from given logits [rows, vocabulary], without logits processors and
with them; a decoding step has one such draw after the passes of its layers. Columns: milliseconds
of a draw, the fastest of `--repeats` programs; what it takes more than without processors; bytes
that a draw has to read and write more (counts int32, a flag for tokens of the prompt, and the
processed logits written and read). The last line is the time that a program takes to count the
tokens of its rows at its start, once for all its steps.

    python benchmarks/penalties.py [--rows 64] [--vocabulary 151936] [--tokens 512] [--steps 16]
    [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rollout import SamplingParams
from rollout.engine.sampling import Draws, choose
from rollout.logits_processors import LogitsProcessors, ProcessorSizes
from rollout.request import Request

SETTINGS = {
    "none": {},
    "bias, words, ends": {"logit_bias": {5: 1.0}, "min_tokens": 4, "stop_token_ids": (1,)},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
}
SETTINGS["all"] = SETTINGS["bias, words, ends"] | SETTINGS["penalties"]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the benchmark from the command line. Returns the milliseconds of a draw by setting, and
    those of counting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of prompt and completion")
    parser.add_argument("--steps", type=int, default=16, help="draws of a program")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    S = options.rows
    V = options.vocabulary
    H = options.tokens + options.steps
    logits = jnp.asarray(rng.normal(0, 2, (S, V)).astype(np.float32))
    print(
        f"{jax.devices()[0].device_kind}, {S} rows, vocabulary {V:,}, {options.tokens} tokens of "
        "each row"
    )
    programs: dict[str, Callable[[], object]] = {}
    moved: dict[str, int] = {}
    half = options.tokens // 2
    processors = None
    for name, keys in SETTINGS.items():
        words = ((7,), (8, 9)) if "logit_bias" in keys else ()
        params = SamplingParams(max_new_tokens=options.tokens, **keys)
        requests = [
            Request(
                tuple(rng.integers(0, V, half).tolist()),
                params,
                tokens=rng.integers(0, V, half).tolist(),
                bad_words=words,
            )
            for _ in range(S)
        ]
        sizes = ProcessorSizes.of(requests)
        draws = Draws.of([params] * S, 0)
        processors = None if sizes is None else LogitsProcessors.of(requests, S, H, sizes)
        program = jax.jit(partial(_draws, steps=options.steps, at=2 * half))
        programs[name] = partial(program, logits, draws, processors)
        moved[name] = 0 if sizes is None else S * V * (8 + 5 * sizes.counts)
    counting = jax.jit(lambda each: each.seen(at, V))
    at = np.full(S, 2 * half, np.int32)
    programs["counting"] = partial(counting, processors)
    fastest = _in_turns(programs, options.repeats)
    result = {name: 1e3 * fastest[name] / options.steps for name in SETTINGS}
    for name, milliseconds in result.items():
        more = milliseconds - result["none"]
        print(f"{name:20} {milliseconds:9.3f} ms  {more:+9.3f} ms  {moved[name] / 1e6:8.1f} MB")
    result["counting"] = 1e3 * fastest["counting"]
    print(f"{'counting, once':20} {result['counting']:9.3f} ms")
    return result


def _draws(
    logits: jax.Array, draws: Draws, processors: LogitsProcessors | None, *, steps: int, at: int
) -> jax.Array:
    """Returns the sum of the tokens of `steps` draws, each from logits that depend on the last
    token."""
    (S, V), active = logits.shape, jnp.ones(len(logits), bool)
    start = jnp.full(S, at, jnp.int32)

    def draw(i, carry):
        token, total, seen = carry
        own = logits + token[:, None] * 1e-6
        processed = None if processors is None else processors.process(own, start + i, seen)
        token = choose(own, (start, start, start + i), draws, processed_SV=processed).tokens
        seen = None if seen is None else seen.with_token(start + i, token, active)
        return token, total + token, seen

    seen = None if processors is None else processors.seen(start, V)
    return jax.lax.fori_loop(0, steps, draw, (start, start, seen))[1]


def _in_turns(programs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the seconds of the fastest call of each program. They run in turns, after one call
    each that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(1 + repeats):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - began)
    return {name: min(each[1:]) for name, each in seconds.items()}


if __name__ == "__main__":
    main()
