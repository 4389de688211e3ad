"""Compares a student of a teacher (configs/distill_quickstart.yml) with SFT on the same
demonstrations: the same model, seeds, rows, steps and optimizer; only the targets differ.

Trains the teacher of configs/distill_teacher.yml first, unless its run is there. Prints the
held-out accuracy of each seed by the step, and the mean of the seeds. Two runs never run at once.

    python benchmarks/distill.py                       # three seeds
    python benchmarks/distill.py --seeds 0 --steps 200
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TEACHER = CONFIGS / "distill_teacher.yml"
STUDENT = CONFIGS / "distill_quickstart.yml"
ACCURACY = "eval/greedy_accuracy"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--targets", choices=("distill", "sft"), nargs="+", default=["distill", "sft"]
    )
    parser.add_argument("--steps", type=int, help="of the student (as in the configuration)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/distill_benchmark"), help="of the runs"
    )
    options = parser.parse_args(argv)
    teacher = yaml.safe_load(STUDENT.read_text())["teacher"]["source"]
    if not (Path(teacher) / "export").is_dir():
        train(TEACHER, f"run.dir={teacher}")
    curves: dict[str, list[dict[int, float]]] = {}
    for name in options.targets:
        file = options.folder / f"{name}.yml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(configuration(name)))
        for seed in options.seeds:
            run = options.folder / f"{name}-{seed}"
            steps = [] if options.steps is None else [f"stages.0.steps={options.steps}"]
            train(file, f"run.dir={run}", f"seed={seed}", *steps)
            curves.setdefault(name, []).append(curve(run))
    show(curves, options.seeds)


def configuration(name: str) -> dict[str, Any]:
    """Returns the configuration of the student, or of SFT on its demonstrations."""
    config = yaml.safe_load(STUDENT.read_text())
    if name == "sft":
        del config["teacher"]
        config["stages"][0]["algorithm"] = "sft"
    return config


def train(config: Path, *overrides: str) -> None:
    """Runs rl-train in a process of its own. Its output is shown if it fails."""
    command = [sys.executable, "-m", "rl.commands.cli", str(config), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def curve(run: Path) -> dict[int, float]:
    """Returns step -> held-out accuracy of a run."""
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {row["step"]: row["metrics"][ACCURACY] for row in rows if ACCURACY in row["metrics"]}


def show(curves: dict[str, list[dict[int, float]]], seeds: Sequence[int]) -> None:
    """Prints a table of the accuracies."""
    steps = [step for step in next(iter(curves.values()))[0] if step]
    print("| | " + " | ".join(f"step {step}" for step in steps) + " |")
    print("|---" * (len(steps) + 1) + "|")
    for name, each in curves.items():
        for seed, one in zip(seeds, each, strict=True):
            print(
                f"| {name}, seed {seed} | "
                + " | ".join(f"{one[step]:.3f}" for step in steps)
                + " |"
            )
        means = [statistics.mean(one[step] for one in each) for step in steps]
        print(f"| {name}, mean | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")


if __name__ == "__main__":
    main()
