"""Compares optimizers by what they learn per step: the SFT stage of configs/quickstart.yml, with
fewer demonstrations a step, from the same random weights and in the same order of rows.

Prints for each optimizer the loss on held-out sums (nats per token) by the step, the mean of the
seeds and in brackets their least and largest, and the seconds of a step. Each has the learning
rates of the command line (`--rates NAME=RATE ...`), or those below; none is tuned. Two runs never
run at once.

    python benchmarks/optimizers.py                    # three seeds
    python benchmarks/optimizers.py --optimizers adamw muon --seeds 0 --steps 40
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

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yml"
LOSS = "held_out/loss"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "learning_rate": 3e-3},
    "muon": {"name": "muon", "learning_rate": 3e-3},
    "muon, original": {"name": "muon", "learning_rate": 2e-2, "update_scale": "original"},
    "lion": {"name": "lion", "learning_rate": 3e-4},
    "sgd": {"name": "sgd", "learning_rate": 0.3},
    "adafactor": {"name": "adafactor", "learning_rate": 3e-3},
}
"""AdamW has the rate of the quickstart, Muon and Adafactor the same, Lion a tenth of it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--optimizers", choices=OPTIMIZERS, nargs="+", default=[*OPTIMIZERS], metavar="NAME"
    )
    parser.add_argument("--rates", nargs="+", default=[], metavar="NAME=RATE")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=32, help="demonstrations of a step")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/optimizers_benchmark"), help="of the runs"
    )
    options = parser.parse_args(argv)
    rates = {name: float(rate) for name, rate in (text.split("=") for text in options.rates)}
    options.folder.mkdir(parents=True, exist_ok=True)
    print(header(options.steps), flush=True)
    for name in options.optimizers:
        optimizer = OPTIMIZERS[name]
        if name in rates:
            optimizer = optimizer | {"learning_rate": rates[name]}
        runs = []
        for seed in options.seeds:
            run = options.folder / f"{name.replace(', ', '-')}-{optimizer['learning_rate']}-{seed}"
            train(configuration(optimizer, options.steps, options.rows), run, seed)
            runs.append(run)
        print(line(name, optimizer["learning_rate"], runs), flush=True)


def configuration(optimizer: dict[str, Any], steps: int, rows: int) -> dict[str, Any]:
    """Returns the SFT stage of the quickstart with another optimizer, without evaluations."""
    config = yaml.safe_load(QUICKSTART.read_text())
    stage = config["stages"][0]
    del stage["until"], config["evaluation"], config["rewards"]
    stage |= {"steps": steps, "prompts_per_step": rows}
    stage["optimizer"] = {"warmup_steps": 20} | optimizer
    stage["held_out"] = {"data": config["data"], "every": max(1, steps // 4)}
    config["stages"] = [stage]
    config["run"] = {"checkpoint_every": steps}
    return config


def train(config: dict[str, Any], run: Path, seed: int) -> None:
    """Runs rl-train in a process of its own. Its output is shown if it fails."""
    file = run.parent / f"{run.name}.yml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "rl.commands.cli", str(file), f"run.dir={run}", f"seed={seed}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def header(steps: int) -> str:
    """Returns the first lines of the table."""
    cells = [
        "optimizer",
        "rate",
        *(f"step {n * max(1, steps // 4)}" for n in range(1, 5)),
        "s/step",
    ]
    return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|"


def line(name: str, rate: float, runs: Sequence[Path]) -> str:
    """Returns the line of an optimizer, from the events of its runs."""
    curves = [events(run) for run in runs]
    steps = sorted(step for step, metrics in curves[0].items() if LOSS in metrics and step)
    cells = []
    for step in steps[:4]:
        losses = [curve[step][LOSS] for curve in curves]
        cells.append(f"{statistics.mean(losses):.3f} ({min(losses):.3f}-{max(losses):.3f})")
    seconds = [
        metrics["time/step"]
        for curve in curves
        for metrics in curve.values()
        if "time/step" in metrics
    ]
    return f"| {name} | {rate:g} | {' | '.join(cells)} | {statistics.median(seconds):.3f} |"


def events(run: Path) -> dict[int, dict[str, float]]:
    """Returns step -> metrics of a run."""
    rows = [json.loads(text) for text in (run / "events.jsonl").read_text().splitlines()]
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        if "metrics" in row:
            steps.setdefault(row["step"], {}).update(row["metrics"])
    return steps


if __name__ == "__main__":
    main()
