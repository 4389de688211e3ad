"""Seconds and bytes of `rl report` for a run of 10,000 steps of 80 metrics with 100,000
completions.

    python benchmarks/report.py [--steps 10000] [--samples 100000] [--directory DIR]

The run is made by this script: noise, trends and spikes under the names of docs/metrics.md. It
prints seconds by the clock, CPU seconds, which other load changes little, and the size of the file.
The start of the command is included.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARES = (
    "reward/frac_zero_std",
    "completion/truncated_ratio",
    "clip_ratio/region_mean",
    "generator/useful_rows",
)
NAMED = (
    *(
        "reward/mean",
        "reward/std",
        "rewards/correct/mean",
        "rewards/format/mean",
        "entropy",
        "kl/ref",
        "loss",
    ),
    *(
        "completion/mean_length",
        "completion/max_length",
        "sampler/logp_diff_mean",
        "sampler/logp_diff_max",
    ),
    *(
        "optim/grad_norm",
        "async/staleness_mean",
        "reward/faults",
        "reward/timeouts",
        "perf/step_tokens_per_s",
    ),
    *(
        "perf/mfu_step",
        "time/step",
        "time/sample",
        "time/update",
        "time/logprob",
        "time/reward",
        "time/idle",
    ),
    *SHARES,
)


def write_run(directory: Path, steps: int, metrics: int, samples: int, seed: int = 0) -> None:
    """Writes the folder of a run: events.jsonl, config.yml and samples.jsonl, each line as a run
    writes it."""
    draw = random.Random(seed)
    names = [*NAMED, *(f"activation/std/{layer}" for layer in range(metrics - len(NAMED)))]
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "events.jsonl").open("w") as file:
        for step in range(steps + 1):
            values = {name: _value(name, step, steps, draw) for name in names} if step else {}
            if step % max(1, steps // 100) == 0:
                values |= {
                    "eval/greedy_accuracy": round(512 * (1 - math.exp(-3 * step / steps))) / 512,
                    "time/eval": 9.0,
                }
            row = {"stage": "grpo", "step": step, "time": 1.7e9 + 30 * step, "metrics": values}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    (directory / "config.yml").write_text(
        "model: {source: qwen3-0.6b}\nevaluation: {problems: 512}\n"
        f"stages: [{{algorithm: {{name: grpo}}, steps: {steps}}}]\n"
    )
    words = [
        "we",
        "add",
        "the",
        "two",
        "numbers",
        "<",
        "carry",
        "one,",
        "so",
        "that",
        "sum",
        "is",
        "&",
        "46;",
        "check",
    ]
    with (directory / "samples.jsonl").open("w") as file:
        for number in range(samples):
            tokens = [draw.randrange(150_000) for _ in range(draw.randrange(100, 500))]
            row = {
                "stage": "grpo",
                "step": 1 + number * steps // samples,
                "prompt_id": number // 8,
                "sample": number % 8,
            }
            row |= {
                "prompt": "What is 12 + 34?",
                "completion": " ".join(draw.choices(words, k=len(tokens) // 2)),
            }
            score = float(draw.random() < 0.5)
            row |= {
                "tokens": tokens,
                "finish": "length" if len(tokens) > 490 else "stop",
                "rewards": {"correct": score},
            }
            file.write(
                json.dumps(row | {"reward": score, "advantage": score - 0.5}, separators=(",", ":"))
                + "\n"
            )


def _value(name: str, step: int, steps: int, draw: random.Random) -> float:
    if name in SHARES:
        return draw.random() ** 4
    spike = 50.0 if draw.random() < 2e-4 else 1.0
    return (1 + step / steps) * (0.5 + draw.random()) * spike


def _seconds(*arguments: str) -> str:
    """Runs `rl report` three times and returns the least seconds."""
    code = "import sys; from rl.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    clock = []
    cpu = []
    for _ in range(3):
        start = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", code, "report", *arguments], check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        clock.append(time.perf_counter() - start)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"{min(clock):.2f} s, {min(cpu):.2f} CPU s"


def main() -> int:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=80)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument(
        "--directory", type=Path, help="keep the run here (default: a temporary folder)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        if not (directory / "events.jsonl").exists():
            write_run(directory, options.steps, options.metrics, options.samples)
        size = lambda name: (directory / name).stat().st_size / 1e6  # noqa: E731
        print(f"events {size('events.jsonl'):.0f} MB, samples {size('samples.jsonl'):.0f} MB")
        print(f"rl report --help: {_seconds('--help')}")
        for count in ("0", "200"):
            print(
                f"rl report --samples {count}: {_seconds(str(directory), '--samples', count)}, "
                f"{size('report.html'):.2f} MB"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
