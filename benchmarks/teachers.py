"""Compares five ways of a small model to get better, at equal tokens and at equal processor seconds:

- `sft` on texts that a teacher has sampled, and `distill` on the same texts (off policy),
- `gkd` and `opd`, in which the teacher grades the policy's own samples (on policy),
- `grpo`, with a reward that checks the answer, without a teacher.

The task is to add two to four numbers below 51 one after the other, `6+5+4=11+4=15`. The teacher, a
million weights (`1m` of models.py), learns it by SFT from demonstrations. For each seed a student of
a quarter of that first learns from `--start` steps of demonstrations. All ways go on from these
weights, with 128 completions and one update a step and the same optimizer; each has the learning
rate of `RATES`, chosen with another seed (`--seeds 9 --rates ...`).

- Tokens are those of completions that are drawn, by the policy or by the teacher, and those that
  are trained on. No text of the teacher is used twice.
- Seconds are those of processors, of the run and its workers, since other programs may be at work.
  Those in which the teacher drew the texts of a step count for it. Evaluations, the start of a run
  and its first step, which compiles, count for neither.
- Accuracy is greedy, on `--problems` held-out sums. Between two evaluations it is interpolated. The
  intervals of 95% come from the differences between seeds (Student's t, two-sided).

Runs that are in the folder are not repeated. Two never run at once.

    python benchmarks/teachers.py
    python benchmarks/teachers.py --seeds 9 --ways gkd opd --rates 1e-3 2e-3 --steps 60
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from distill import ACCURACY
from lora import interval
from models import MODELS

PROMPTS = 32
SAMPLES = 4
MAX_LENGTH = 64
NEW_TOKENS = 32
EVERY = 20  # steps between evaluations
POLL = 0.05  # seconds
RL = "import sys; from rl.commands.cli import main; sys.exit(main(sys.argv[1:]))"
ALPHABET = "0123456789+="
TEACHER = MODELS["1m"] | {"vocab_size": 32}
STUDENT = TEACHER | {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
TASK = {
    "task": "arithmetic",
    "options": {
        "min_terms": 2,
        "terms": 4,
        "decay": 0.8,
        "max_operand": 50,
        "problems": 20_000,
        "style": "steps",
    },
}
ANSWER = {"name": "exact_answer", "options": {"pattern": "=?([0-9]+)$"}}
WAYS: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft"},
    "distill": {"name": "distill", "alpha": 1.0},
    "gkd": {"name": "gkd"},
    "opd": {"name": "opd"},
    "grpo": {"name": "grpo"},
}
ON_TEXTS = ("sft", "distill")
WITH_TEACHER = ("distill", "gkd", "opd")
RATES = {"sft": 1e-3, "distill": 1e-3, "gkd": 1e-3, "opd": 1e-3, "grpo": 1e-3}


@dataclass(frozen=True)
class Mark:
    """An evaluation: tokens that were drawn and trained on before it, processor seconds, and
    accuracy."""

    tokens: float
    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Texts:
    """What the teacher wrote: a file of rows, and processor seconds for each of them."""

    file: Path
    seconds: float


@dataclass(frozen=True)
class Clock:
    """Processor seconds of a process and its children, by the time."""

    times: tuple[float, ...]
    seconds: tuple[float, ...]

    def between(self, begin: float, end: float) -> float:
        """Returns the processor seconds from `begin` to `end`, which `time.time` counts."""
        first, last = np.interp([begin, end], self.times, self.seconds)
        return float(last - first)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    parser.add_argument("--rates", type=float, nargs="+", help="default: the one of each way")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--start", type=int, default=400, help="steps of demonstrations before")
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--problems", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=Path("runs/teachers_benchmark"))
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    curves = {}
    for way in options.ways:
        for rate in options.rates or [RATES[way]]:
            one = partial(curve, options, way, rate)
            curves[f"{way}, rate {rate:g}"] = [one(seed) for seed in options.seeds]
            print(summary(way, rate, curves[f"{way}, rate {rate:g}"]), flush=True)
    print(table(curves, "tokens", lambda mark: mark.tokens))
    print(table(curves, "processor seconds", lambda mark: mark.seconds))


def curve(options: argparse.Namespace, way: str, rate: float, seed: int) -> list[Mark]:
    """Returns the evaluations of a run, which it trains unless it is there."""
    run = options.folder / f"{way}-{rate:g}-{seed}"
    marks = run / "marks.json"
    if not marks.is_file():
        start = student(options, seed)
        stage = {
            "algorithm": WAYS[way],
            "steps": options.steps,
            "optimizer": {"learning_rate": rate, "warmup_steps": 10},
        }
        seconds = 0.0
        if way in ON_TEXTS:
            texts = teacher_texts(options)
            stage |= {"prompts_per_step": PROMPTS * SAMPLES, "data": {"path": str(texts.file)}}
            seconds = texts.seconds * PROMPTS * SAMPLES
        else:
            stage |= {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
        config = configuration(options, run, start, stage) | {"seed": seed}
        if way in WITH_TEACHER:
            config["teacher"] = {"source": str(teacher(options))}
        clock = train(config)
        result = [asdict(mark) for mark in evaluations(events(run), clock, seconds)]
        marks.write_text(json.dumps(result))
    return [Mark(**mark) for mark in json.loads(marks.read_text())]


def teacher(options: argparse.Namespace) -> Path:
    """Returns the directory of the teacher, which it trains unless it is there."""
    return demonstrated(options, "teacher", TEACHER, 0, options.teacher_steps, 2e-3)


def student(options: argparse.Namespace, seed: int) -> Path:
    """Returns the directory of the student as all ways start from it."""
    return demonstrated(options, f"student-{seed}", STUDENT, seed, options.start, 3e-3)


def demonstrated(
    options: argparse.Namespace, name: str, model: dict, seed: int, steps: int, rate: float
) -> Path:
    """Returns the directory of a model that learned from demonstrations for some steps."""
    run = options.folder / name
    if not (run / "export").is_dir():
        import policy
        from policy import families

        random = options.folder / f"{name}-random"
        policy.save(policy.create(families.read(model), seed=seed), random)
        stage = {
            "algorithm": "sft",
            "steps": steps,
            "prompts_per_step": 128,
            "optimizer": {
                "learning_rate": rate,
                "warmup_steps": 20,
                "schedule": "linear",
                "final_fraction": 0.1,
            },
        }
        config = configuration(options, run, random, stage) | {"seed": seed}
        config["evaluation"]["every"] = steps
        train(config)
        print(f"{name}: accuracy {events(run)[-1]['metrics'][ACCURACY]:.3f}", flush=True)
    return run / "export"


def teacher_texts(options: argparse.Namespace) -> Texts:
    """Returns as many texts of the teacher as a run reads, and their processor seconds without the
    start of the program."""
    file = options.folder / "texts.jsonl"
    told = options.folder / "texts.json"
    if not told.is_file():
        import rl.tasks

        problems = rl.tasks.problems(TASK["task"], TASK["options"], "train")
        rows = options.steps * PROMPTS * SAMPLES
        prompts = options.folder / "prompts.jsonl"
        lines = [json.dumps({"prompt": problem.prompt}) for problem in problems]
        prompts.write_text("\n".join(lines) + "\n")
        drawn = options.folder / "drawn.jsonl"
        samples = -(-rows // len(problems))
        given = ["--prompts", prompts, "--output", drawn, "--samples", samples, "--slots", 256]
        sampling = ["--max-new-tokens", NEW_TOKENS, "--temperature", 1.0, "--platform", "cpu"]
        clock = watched(["generate", teacher(options), *given, *sampling], options.folder, drawn)
        texts = [json.loads(line) for line in drawn.read_text().splitlines()]
        kept = [text for text in texts if text["finish"] == "stop"]
        with file.open("w") as out:
            for text in kept:
                row = {"prompt": text["prompt"], "completion": text["completion"]}
                print(json.dumps(row), file=out)
        seconds = clock.between(clock.times[0], clock.times[-1]) / len(texts)
        told.write_text(json.dumps({"seconds": seconds, "drawn": len(texts), "kept": len(kept)}))
        print(f"texts of the teacher: {told.read_text()}", flush=True)
    return Texts(file, json.loads(told.read_text())["seconds"])


def configuration(
    options: argparse.Namespace, run: Path, model: Path, stage: dict[str, Any]
) -> dict[str, Any]:
    """Returns the configuration of a run of one stage from the weights in `model`."""
    return {
        "run": {"dir": str(run), "checkpoint_every": 0, "log_every": 1000},
        "platform": "cpu",
        "model": {"source": str(model), "remat": "none", "scan": False},
        "tokenizer": {"source": "characters", "alphabet": ALPHABET},
        "max_length": MAX_LENGTH,
        "data": TASK,
        "rewards": {"functions": [ANSWER], "workers": 1},
        "evaluation": {"data": TASK, "every": EVERY, "problems": options.problems},
        "generator": {"slots": PROMPTS * SAMPLES},
        "stages": [stage | {"sampling": {"max_new_tokens": NEW_TOKENS}}],
    }


def train(config: dict[str, Any]) -> Clock:
    """Trains a run and returns its processor seconds."""
    run = Path(config["run"]["dir"])
    file = run.with_name(f"{run.name}.yml")
    file.write_text(yaml.safe_dump(config))
    return watched(["train", file], run.parent, run)


def watched(command: Sequence[object], folder: Path, sign: Path) -> Clock:
    """Runs a command of `rl` and returns its processor seconds from when the file `sign` is there.

    Its output is shown if it fails.
    """
    log = folder / "output.txt"
    times = []
    seconds = []
    with log.open("w") as out:
        program = [sys.executable, "-c", RL, *map(str, command)]
        child = subprocess.Popen(program, stdout=out, stderr=subprocess.STDOUT)
        process = psutil.Process(child.pid)
        while child.poll() is None:
            if sign.exists():
                times.append(time.time())
                seconds.append(processor_seconds(process))
            time.sleep(POLL)
    if child.returncode:
        raise SystemExit(f"{' '.join(program)}\n{log.read_text()}")
    return Clock(tuple(times), tuple(seconds))


def processor_seconds(process: psutil.Process) -> float:
    """Returns the processor seconds of a process and of its children, ended ones too."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            used = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system + used.children_user + used.children_system
    return total


def events(run: Path) -> list[dict[str, Any]]:
    """Returns the rows of the steps of a run."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def evaluations(rows: Sequence[dict], clock: Clock, texts: float) -> Iterable[Mark]:
    """Yields the evaluations of a run. texts: processor seconds in which a teacher drew what a step
    reads."""
    tokens = 0.0
    seconds = 0.0
    before = 0.0
    for row in rows:
        metrics = row["metrics"]
        if row["step"]:
            tokens += step_tokens(metrics)
        if row["step"] > 1:
            seconds += texts + clock.between(before, row["time"] - metrics.get("time/eval", 0.0))
        before = row["time"]
        if ACCURACY in metrics:
            yield Mark(tokens, seconds, metrics[ACCURACY])


def step_tokens(metrics: dict[str, float]) -> float:
    """Returns the tokens that were drawn for a step and those that it trained on.

    A teacher drew all tokens of the texts of a step.
    """
    trained = metrics["perf/step_tokens"] * metrics["batch/trained_share"]
    length = metrics.get("completion/mean_length")
    return trained + (trained if length is None else length * PROMPTS * SAMPLES)


def summary(way: str, rate: float, curves: Sequence[Sequence[Mark]]) -> str:
    """Returns a line about the runs of a way: their last evaluations."""
    last = [marks[-1] for marks in curves]
    tokens, seconds = (
        np.mean([getattr(mark, key) for mark in last]) for key in ("tokens", "seconds")
    )
    accuracies = ", ".join(f"{mark.accuracy:.3f}" for mark in last)
    return f"{way}, rate {rate:g}: {accuracies} after {tokens:,.0f} tokens, {seconds:.0f} s"


def table(curves: dict[str, list[list[Mark]]], unit: str, measure: Callable[[Mark], float]) -> str:
    """Returns rows of accuracies after equal shares of what the shortest run used."""
    longest = min(measure(marks[-1]) for runs in curves.values() for marks in runs)
    places = [longest * share for share in (0.25, 0.5, 0.75, 1.0)]
    lines = [f"| {unit} | 0 | " + " | ".join(f"{place:,.0f}" for place in places) + " |"]
    lines.append("|---" * (len(places) + 2) + "|")
    for name, runs in curves.items():
        cells = []
        for place in (0.0, *places):
            reached = [
                float(np.interp(place, list(map(measure, marks)), [m.accuracy for m in marks]))
                for marks in runs
            ]
            cells.append(interval(reached))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
