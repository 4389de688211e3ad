"""What runs of configs/quickstart.yml achieved, from their own events.jsonl: the accuracy on
held-out problems by step, the seconds of each stage, and what GRPO added to SFT.

    python benchmarks/quickstart_numbers.py runs/quickstart [runs/quickstart-1 ...] [--check]

With --check the exit code is 1, and every shortfall is said, unless

- each run's accuracy after SFT lies between 0.2 and 0.6: SFT alone has not solved the task, and has
  not failed;
- GRPO raised it by at least 0.15 in each run, and by at least 0.25 as the mean of the runs;
- GRPO's last quarter is not its decline: the mean of its evaluations is at most 0.03 below the mean
  of the quarter before (one evaluation of 512 problems has a standard error of 0.02).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AFTER_SFT = (0.2, 0.6)
GAIN_OF_EACH = 0.15
GAIN_OF_ALL = 0.25
DECLINE = 0.03
METRIC = "eval/greedy_accuracy"
WIDTH = 50  # characters of a bar for accuracy 1


@dataclass(frozen=True)
class Result:
    """`curve`: (stage, step, accuracy) of every evaluation, in order. `seconds` of steps and
    evaluations, by stage."""

    name: str
    curve: list[tuple[str, int, float]]
    seconds: dict[str, float]

    def of(self, stage: str) -> list[tuple[int, float]]:
        return [(step, accuracy) for where, step, accuracy in self.curve if where == stage]

    @property
    def after_sft(self) -> float:
        return self.of("sft")[-1][1]

    @property
    def gain(self) -> float:
        """Returns the accuracy gained by GRPO: after its last step less before its first."""
        evaluations = self.of("grpo")
        return evaluations[-1][1] - evaluations[0][1]

    def quarters(self) -> tuple[float | None, float | None]:
        """Returns the mean accuracy of GRPO's third and fourth quarter of steps; None for one
        without an evaluation."""
        evaluations = self.of("grpo")
        steps = evaluations[-1][0]
        third = [accuracy for step, accuracy in evaluations if 0.5 * steps < step <= 0.75 * steps]
        fourth = [accuracy for step, accuracy in evaluations if 0.75 * steps < step]
        return tuple(sum(part) / len(part) if part else None for part in (third, fourth))


def read(directory: str | Path) -> Result:
    """Raises ValueError for a run that did not evaluate both stages."""
    file = Path(directory) / "events.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    curve = [
        (r["stage"], r["step"], r["metrics"][METRIC])
        for r in rows
        if r["metrics"].get(METRIC) is not None
    ]
    seconds: dict[str, float] = {}
    for row in rows:
        spent = row["metrics"].get("time/step", 0.0) + row["metrics"].get("time/eval", 0.0)
        seconds[row["stage"]] = seconds.get(row["stage"], 0.0) + spent
    for stage in ("sft", "grpo"):
        if len([1 for where, _, _ in curve if where == stage]) < 2:
            raise ValueError(
                f"{file}: no {METRIC} before and after {stage}; it is no finished run of the "
                "quickstart"
            )
    return Result(str(directory), curve, seconds)


def report(result: Result) -> str:
    lines = [result.name, "stage  step  accuracy"]
    lines += [
        f"{stage:<5} {step:>5}  {value:>8.3f}  {'#' * round(value * WIDTH)}"
        for stage, step, value in result.curve
    ]
    lines += [f"{stage}: {seconds:.0f} s" for stage, seconds in result.seconds.items()]
    return "\n".join([*lines, f"after SFT {result.after_sft:.3f}, GRPO {result.gain:+.3f}"])


def shortfalls(results: Sequence[Result]) -> list[str]:
    """Lists the unmet claims at the top of this file, one line each."""
    problems = []
    for result in results:
        if not AFTER_SFT[0] <= result.after_sft <= AFTER_SFT[1]:
            problems.append(
                f"{result.name}: accuracy after SFT is {result.after_sft:.3f}, outside "
                f"{AFTER_SFT[0]}..{AFTER_SFT[1]}"
            )
        if result.gain < GAIN_OF_EACH:
            problems.append(
                f"{result.name}: GRPO added {result.gain:+.3f}, less than {GAIN_OF_EACH}"
            )
        third, fourth = result.quarters()
        if third is None or fourth is None:
            problems.append(
                f"{result.name}: too few evaluations of GRPO to rate its last quarter; lower "
                "evaluation.every"
            )
        elif fourth < third - DECLINE:
            problems.append(
                f"{result.name}: GRPO declined, {third:.3f} in its third quarter and {fourth:.3f} "
                "in its last"
            )
    mean = sum(result.gain for result in results) / len(results)
    if mean < GAIN_OF_ALL:
        problems.append(
            f"GRPO added {mean:+.3f} as the mean of {len(results)} runs, less than {GAIN_OF_ALL}"
        )
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the claims hold")
    options = parser.parse_args(argv)
    try:
        results = [read(directory) for directory in options.runs]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(map(report, results)))
    if len(results) > 1:
        print(
            f"\nmean of {len(results)} runs: GRPO "
            f"{sum(result.gain for result in results) / len(results):+.3f}"
        )
    if not options.check:
        return 0
    for line in (problems := shortfalls(results)):
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
