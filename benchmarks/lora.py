"""Compares training an adapter with training the weights, on the sums of configs/quickstart.yml.

For each seed the same SFT of the weights comes first, with the same bits. From there GRPO goes on
for `--steps` steps: of the weights, and of an adapter over them, for each rank and learning rate.
The accuracy of a run is the mean of its last four evaluations, on at most `--problems` held-out
sums each; the task holds 965 out. The last column is its difference from the first row, seed by
seed. Intervals of 95% come from the differences between seeds (Student's t, two-sided).

Two runs never run at once.

    python benchmarks/lora.py                                  # three seeds, rank 32
    python benchmarks/lora.py --seeds 0 --rates 1e-3 --steps 20
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distill import ACCURACY, CONFIGS, train

CONFIG = CONFIGS / "quickstart.yml"
LAST = 4  # evaluations that count
EVERY = 10  # steps between evaluations
# Two-sided quantiles of Student's t at 95%, by the number of seeds.
QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


@dataclass(frozen=True)
class Kind:
    """What GRPO trains: the weights, or an adapter of a rank; and its learning rate."""

    rank: int | None
    rate: float

    @property
    def name(self) -> str:
        """Returns what the table calls it."""
        what = "weights" if self.rank is None else f"adapter of rank {self.rank}"
        return f"{what}, rate {self.rate:g}"

    @property
    def overrides(self) -> list[str]:
        """Returns what it changes in the configuration."""
        rate = f"stages.1.optimizer.learning_rate={self.rate}"
        if self.rank is None:
            return [rate]
        adapter = f"model.adapter={{rank: {self.rank}, alpha: 32}}"
        return [rate, adapter, "stages.0.trains=weights"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--problems", type=int, default=2048)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0e-3, 2.0e-3])
    parser.add_argument("--full-rates", type=float, nargs="+", default=[1.0e-3])
    parser.add_argument("--folder", type=Path, default=Path("runs/lora_benchmark"))
    options = parser.parse_args(argv)
    kinds = [Kind(None, rate) for rate in options.full_rates]
    kinds += [Kind(rank, rate) for rank in options.ranks for rate in options.rates]
    seeds = " | ".join(f"seed {seed}" for seed in options.seeds)
    print(f"| GRPO of | {seeds} | mean | s | difference |")
    print("|---" * (len(options.seeds) + 4) + "|")
    first: list[float] = []
    for kind in kinds:
        results = [result(options, kind, seed) for seed in options.seeds]
        accuracies = [each.accuracy for each in results]
        first = first or accuracies
        differences = [own - other for own, other in zip(accuracies, first, strict=True)]
        cells = [f"{each:.3f}" for each in accuracies] + [interval(accuracies)]
        seconds = statistics.mean(each.seconds for each in results)
        row = " | ".join((kind.name, *cells, f"{seconds:.0f}", interval(differences)))
        print(f"| {row} |", flush=True)


@dataclass(frozen=True)
class Result:
    """The accuracy of a run, and the seconds of the steps of its GRPO."""

    accuracy: float
    seconds: float


def result(options: argparse.Namespace, kind: Kind, seed: int) -> Result:
    """Trains one run, unless it is there, and reads its events."""
    run = options.folder / f"{kind.rank or 'weights'}-{kind.rate:g}-{seed}"
    if not (run / "export").is_dir():
        train(
            CONFIG,
            f"run.dir={run}",
            f"seed={seed}",
            f"stages.1.steps={options.steps}",
            "stages.1.until=null",
            f"evaluation.every={EVERY}",
            f"evaluation.problems={options.problems}",
            *kind.overrides,
        )
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    metrics = [row["metrics"] for row in rows if row["stage"] == "grpo" and row["step"]]
    accuracies = [each[ACCURACY] for each in metrics if ACCURACY in each]
    seconds = sum(each.get("time/step", 0.0) for each in metrics)
    return Result(statistics.mean(accuracies[-LAST:]), seconds)


def interval(accuracies: Sequence[float]) -> str:
    """Returns the mean, with the half width of its interval where there are several seeds."""
    mean = statistics.mean(accuracies)
    if len(accuracies) < 2:
        return f"{mean:.3f}"
    quantile = QUANTILES.get(len(accuracies), 2.5)
    half = quantile * statistics.stdev(accuracies) / len(accuracies) ** 0.5
    return f"{mean:.3f} +- {half:.3f}"


if __name__ == "__main__":
    main()
