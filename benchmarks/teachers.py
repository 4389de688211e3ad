"""Compares five ways of a small model to get better, at equal tokens and equal processor seconds:

- `sft` on texts that a teacher has sampled, and `distill` on the same texts (off policy),
- `gkd` and `opd`, in which the teacher grades the policy's own samples (on policy),
- `grpo`, with a reward that checks the answer, without a teacher.

The task is to add two or three numbers below 21 one after the other, `6+15+4=21+4=25`. The teacher,
a million weights (`1m` of models.py), learned by SFT to add two to four numbers below 51, other
than the held-out sums. For each seed a student of a quarter of that first learns from `--start`
steps of demonstrations. All ways go on from these weights, with 256 completions and one update a
step and the same optimizer. `--rates` replaces the learning rates of `RATES`.

- Tokens are those of completions that are drawn, by the policy or by the teacher, and those that
  are trained on. No text of the teacher is used twice.
- Seconds are those of processors, of the run and its workers, since other programs may be at work.
  A step counts the median of all steps of its run, so that compilation counts for none, and with
  texts those in which the teacher drew them. Evaluations and the start of a run do not count.
- Accuracy is greedy, on `--problems` held-out sums. Between two evaluations it is interpolated. The
  intervals of 95% come from the differences between seeds (Student's t, two-sided).

Runs that are in the folder are not repeated: name another one for other options. Two never run at
once.

    python benchmarks/teachers.py
    python benchmarks/teachers.py --ways sft distill --rates 3e-3
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
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from distill import ACCURACY
from lora import interval
from models import MODELS

PROMPTS = 64
SAMPLES = 4
MICRO_BATCH = 16  # few shapes of packed rows, which all ways have: compilation is most of a run
EVERY = 25  # steps between evaluations
ROOM = 1.05  # texts that are drawn for each that is read, as some are cut off or empty
POLL = 0.1  # seconds
RL = "import sys; from rl.commands.cli import main; sys.exit(main(sys.argv[1:]))"
ALPHABET = "0123456789+="
TEACHER = MODELS["1m"] | {"vocab_size": 32}
STUDENT = TEACHER | {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
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
RATES = {"sft": 1e-3, "distill": 1e-3, "gkd": 5e-4, "opd": 1e-4, "grpo": 1e-4}


@dataclass(frozen=True)
class Task:
    """Sums that are added one after the other, tokens of the longest with its prompt, and alone."""

    options: dict[str, Any]
    max_length: int
    new_tokens: int

    @property
    def data(self) -> dict[str, Any]:
        """Returns the section `data` of a configuration."""
        return {"task": "arithmetic", "options": self.options | {"min_terms": 2, "style": "steps"}}


SUMS = Task({"terms": 3, "max_operand": 20}, 24, 12)
TEACHERS_SUMS = Task({"terms": 4, "decay": 0.8, "max_operand": 50, "problems": 20_000}, 64, 32)


@dataclass(frozen=True)
class DemonstrationRun:
    """A run in which a model learns from demonstrations: its name, shape, task, seed and learning rate."""

    name: str
    model: dict[str, Any]
    task: Task
    seed: int
    rate: float


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
    parser.add_argument("--start", type=int, default=200, help="steps of demonstrations before")
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
    for one, other in combinations(curves, 2):
        differences = [
            first[-1].accuracy - second[-1].accuracy
            for first, second in zip(curves[one], curves[other], strict=True)
        ]
        print(f"at the end {one} - {other}: {interval(differences)}")


def curve(options: argparse.Namespace, way: str, rate: float, seed: int) -> list[Mark]:
    """Returns the evaluations of a run, which it trains unless it is there."""
    run = options.folder / f"{way}-{rate:g}-{seed}"
    marks = run / "marks.json"
    if not marks.is_file():
        start = student(options, seed)
        stage = {
            "algorithm": WAYS[way],
            "steps": options.steps,
            "micro_batch": MICRO_BATCH,
            "optimizer": optimizer(rate, 10),
        }
        seconds = 0.0
        if way in ON_TEXTS:
            texts = teacher_texts(options)
            stage |= {"prompts_per_step": PROMPTS * SAMPLES, "data": {"path": str(texts.file)}}
            seconds = texts.seconds * PROMPTS * SAMPLES
        else:
            sampled = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
            stage |= sampled | {"shared_prefix": "never"}
        config = configuration(run, start, SUMS, stage) | {"seed": seed}
        config["evaluation"] = evaluation(SUMS, EVERY, options.problems)
        if way in WITH_TEACHER:
            config["teacher"] = {"source": str(teacher(options))}
        clock = train(config)
        result = [asdict(mark) for mark in evaluations(events(run), clock, seconds)]
        marks.write_text(json.dumps(result))
    return [Mark(**mark) for mark in json.loads(marks.read_text())]


def teacher(options: argparse.Namespace) -> Path:
    """Returns the directory of the teacher, which it trains unless it is there."""
    demonstration = DemonstrationRun("teacher", TEACHER, TEACHERS_SUMS, 0, 2e-3)
    return demonstrated(options.folder, demonstration, options.teacher_steps, options.problems)


def student(options: argparse.Namespace, seed: int) -> Path:
    """Returns the directory of the student as all ways start from it."""
    demonstration = DemonstrationRun(f"student-{seed}", STUDENT, SUMS, seed, 3e-3)
    return demonstrated(options.folder, demonstration, options.start, options.problems)


def demonstrated(folder: Path, demonstration: DemonstrationRun, steps: int, problems: int) -> Path:
    """Returns the directory of a model after some steps of demonstrations, and makes it unless it
    is there."""
    run = folder / demonstration.name
    if not (run / "export").is_dir():
        import policy
        from policy import families

        random = folder / f"{demonstration.name}-random"
        policy.save(
            policy.create(families.read(demonstration.model), seed=demonstration.seed), random
        )
        stage = {
            "algorithm": "sft",
            "steps": steps,
            "prompts_per_step": 128,
            "optimizer": optimizer(demonstration.rate, 20),
        }
        config = configuration(run, random, demonstration.task, stage) | {
            "seed": demonstration.seed
        }
        config["evaluation"] = evaluation(demonstration.task, steps, problems)
        train(config)
        print(
            f"{demonstration.name}: accuracy {events(run)[-1]['metrics'][ACCURACY]:.3f}", flush=True
        )
    return run / "export"


def optimizer(rate: float, warmup: int) -> dict[str, Any]:
    """Returns settings of AdamW whose rate falls to a tenth."""
    return {
        "learning_rate": rate,
        "warmup_steps": warmup,
        "schedule": "linear",
        "final_fraction": 0.1,
        "beta2": 0.98,
    }


def teacher_texts(options: argparse.Namespace) -> Texts:
    """Returns as many texts of the teacher as a run reads, and their processor seconds without the
    start of the program."""
    file = options.folder / "texts.jsonl"
    told = options.folder / "texts.json"
    if not told.is_file():
        prompts = options.folder / "prompts.jsonl"
        write_rows(prompts, training_prompts(round(options.steps * PROMPTS * SAMPLES * ROOM)))
        drawn = options.folder / "drawn.jsonl"
        given = ["--prompts", prompts, "--output", drawn, "--slots", 256]
        sampling = ["--max-new-tokens", SUMS.new_tokens, "--temperature", 1.0, "--platform", "cpu"]
        clock = watched(["generate", teacher(options), *given, *sampling], options.folder, drawn)
        texts = [json.loads(line) for line in drawn.read_text().splitlines()]
        kept = [text for text in texts if text["finish"] == "stop" and text["completion"]]
        write_rows(file, [{key: text[key] for key in ("prompt", "completion")} for text in kept])
        seconds = clock.between(clock.times[0], clock.times[-1]) / len(texts)
        told.write_text(json.dumps({"seconds": seconds, "drawn": len(texts), "kept": len(kept)}))
        print(f"texts of the teacher: {told.read_text()}", flush=True)
    return Texts(file, json.loads(told.read_text())["seconds"])


def training_prompts(count: int) -> list[dict[str, str]]:
    """Returns rows with prompts of the task in a random order, each as often as the others."""
    import rl.tasks

    problems = rl.tasks.problems(SUMS.data["task"], SUMS.data["options"], "train")
    rng = np.random.default_rng(0)
    rounds = range(-(-count // len(problems)))
    order = np.concatenate([rng.permutation(len(problems)) for _ in rounds])[:count]
    return [{"prompt": problems[number].prompt} for number in order]


def write_rows(file: Path, rows: Iterable[dict[str, str]]) -> None:
    """Writes rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def configuration(run: Path, model: Path, task: Task, stage: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a run of one stage from the weights in `model`."""
    return {
        "run": {"dir": str(run), "checkpoint_every": 0, "log_every": 1000},
        "platform": "cpu",
        "model": {"source": str(model), "remat": "none", "scan": True},
        "tokenizer": {"source": "characters", "alphabet": ALPHABET},
        "max_length": task.max_length,
        "data": task.data,
        "rewards": {"functions": [ANSWER], "workers": 1},
        "generator": {"slots": PROMPTS * SAMPLES, "batch_sizes": []},
        "stages": [stage | {"sampling": {"max_new_tokens": task.new_tokens}}],
    }


def evaluation(task: Task, every: int, problems: int) -> dict[str, Any]:
    """Returns the section `evaluation` of a configuration. every: steps."""
    return {"data": task.data, "every": every, "problems": problems}


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
    """Yields the evaluations of a run. A step counts the median of the processor seconds of all
    steps, since some compile programs.

    texts: processor seconds in which a teacher drew what a step reads.
    """
    used = [
        clock.between(before["time"], row["time"] - row["metrics"].get("time/eval", 0.0))
        for before, row in pairwise(rows)
    ]
    step_seconds = texts + float(np.median(used))
    tokens = 0.0
    for row in rows:
        metrics = row["metrics"]
        tokens += step_tokens(metrics) if row["step"] else 0.0
        if ACCURACY in metrics:
            yield Mark(tokens, row["step"] * step_seconds, metrics[ACCURACY])


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
