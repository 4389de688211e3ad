"""Prints what runs of configs/quickstart_v32.yml achieved, from their events.jsonl: rewards in the
first and last tenth of GRPO's steps, accepted drafts per step, and the gradient norm of each part.

    python benchmarks/parts_numbers.py runs/quickstart_v32 [...] [--check]

With --check, prints every shortfall and exits with 1 unless, in each run, the mean reward of the
last tenth is at least 0.1 above that of the first, drafts were accepted in every step of GRPO, and
no part's gradient was 0 in any step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.training.diagnostics import PARTS

GAIN = 0.1
ACCEPTED = "speculative/accepted_per_step"


def steps(directory: str, stage: str) -> list[dict[str, float]]:
    """Returns the metrics of the updates of a stage. Raises ValueError if there are none."""
    file = Path(directory) / "events.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows_of_stage = [row["metrics"] for row in rows if row["stage"] == stage and row["step"] > 0]
    if not rows_of_stage:
        raise ValueError(f"{file}: no step of {stage}; it is no finished run of quickstart_v32")
    return rows_of_stage


def tenths(grpo: list[dict[str, float]]) -> tuple[float, float]:
    """Returns the mean reward of the first and the last tenth of steps, at least one step each."""
    n = max(1, len(grpo) // 10)
    first = grpo[:n]
    last = grpo[-n:]
    return tuple(sum(step["reward/mean"] for step in part) / n for part in (first, last))


def look(directory: str) -> list[str]:
    """Prints what a run achieved; returns its shortfalls."""
    sft = steps(directory, "sft")
    grpo = steps(directory, "grpo")
    first, last = tenths(grpo)
    accepted = [step.get(ACCEPTED, 0.0) for step in grpo]
    smallest = {
        part: min(step.get(f"grad_norm/{part}", 0.0) for step in sft + grpo) for part in PARTS
    }
    print(
        f"{directory}: reward {first:.3f} -> {last:.3f}; accepted drafts a step "
        f"{sum(accepted) / len(accepted):.2f}"
    )
    print(
        "smallest gradient norm: "
        + ", ".join(f"{part} {norm:.1e}" for part, norm in smallest.items())
    )
    shortfalls = []
    if last - first < GAIN:
        shortfalls.append(f"{directory}: reward rose by {last - first:.3f}, less than {GAIN}")
    if min(accepted) <= 0:
        shortfalls.append(f"{directory}: a step of GRPO accepted no draft")
    return shortfalls + [
        f"{directory}: a step without a gradient for {part}"
        for part, norm in smallest.items()
        if norm <= 0
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the claims hold")
    options = parser.parse_args(argv)
    try:
        shortfalls = [line for directory in options.runs for line in look(directory)]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in shortfalls if options.check else []:
        print(line, file=sys.stderr)
    return 1 if options.check and shortfalls else 0


if __name__ == "__main__":
    sys.exit(main())
