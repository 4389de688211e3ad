"""Compares learning with TRL: held-out accuracy on sums by the number of samples, and the seconds.

For each seed a decoder of a million random weights (`1m` of models.py) first learns by SFT to add
two to eight numbers one after the other, `6+5+4=11+4=15`, until three in ten sums come out right:
completions of 2 to 90 tokens, 16 on average, as long sums are rare. From these weights Duet
(`rl-train`) and TRL's GRPOTrainer go on, on the same task, with the same reward, learning rate,
optimizer and numbers of prompts and samples: 16 prompts of 4 samples a step, one strictly on-policy
update, AdamW, a constant learning rate after ten steps, no KL term, gradients clipped at norm 1.

- Samples are counted as they are drawn: dynamic sampling (DAPO) draws more in a step, so it ends
  sooner. PPO's critic first learns alone; those samples come on top and are printed.
- Accuracy is greedy, on 768 sums that occur in no prompt, by one program for all: TRL's weights are
  read by Duet.
- Seconds are those of the steps: sampling, reward, update, and what is compiled in them. Each also
  has its time for starting, which is printed next to them; evaluations and snapshots count for
  neither. Two programs never run at once.

    pip install -e '.[test]'
    python benchmarks/learning.py --out benchmarks/learning.json           # measures, and stores
    the curves python benchmarks/learning.py --show benchmarks/learning.json          # prints what
    is stored
    python benchmarks/learning.py --show benchmarks/learning.json --svg docs/learning.svg      # and
    draws it
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from models import MODELS
from side_by_side import trl_settings  # before jax: the CPU

PROMPTS = 16
SAMPLES = 4
NEW_TOKENS = 92
MAX_LENGTH = 118
PROBLEMS = 768
ALPHABET = "0123456789+="
WARM_UP = 10  # steps in which PPO's critic learns alone
TASK = {
    "task": "arithmetic",
    "options": {
        "min_terms": 2,
        "terms": 8,
        "decay": 0.55,
        "max_operand": 50,
        "problems": 12000,
        "style": "steps",
    },
}
ANSWER = {"pattern": "=?([0-9]+)$"}  # options of the reward exact_answer: what stands last
OPTIMIZER = {"learning_rate": 3e-5, "warmup_steps": 10}
ALGORITHMS = {
    "grpo": {},
    "dapo": {"dynamic_batches": 4},
    "rloo": {"kl_reward_coef": 0.0},
    "ppo": {"kl_reward_coef": 0.0, "critic_warmup": WARM_UP, "critic_trunk": "policy"},
}
TRL = "TRL GRPO"
MARKS = 6  # accuracies of a curve


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--methods", nargs="+", choices=[TRL, *ALGORITHMS], default=[TRL, *ALGORITHMS]
    )
    parser.add_argument(
        "--shared-prefix", choices=("auto", "never"), default="auto", help="of Duet's stages"
    )
    parser.add_argument(
        "--out", type=Path, help="file for the curves; what it holds already is kept"
    )
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print the curves of a file, and measure nothing"
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="with --show: draw the curves by seconds into this file",
    )
    parser.add_argument(
        "--trl-process", nargs=3, metavar=("DIRECTORY", "SEED", "STEPS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args(argv)
    if options.trl_process:
        directory, seed, steps = options.trl_process
        return trl_run(Path(directory), int(seed), int(steps))
    if options.show:
        measured = json.loads(options.show.read_text())
        if options.svg:
            options.svg.write_text(drawing(measured))
        return print(report(measured))
    measured = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            start = first_weights(Path(scratch), seed)
            for method in options.methods:
                measured = [
                    each for each in measured if (each["method"], each["seed"]) != (method, seed)
                ]
                run = Path(scratch), start, seed, options.steps
                measured.append(
                    trl(method, *run)
                    if method == TRL
                    else duet(method, *run, options.shared_prefix)
                )
                print(line(measured[-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(measured, indent=1) + "\n")
    return print(report(measured))


def configuration(directory: Path, model: Path, seed: int, stage: dict) -> dict:
    """Makes a run of one stage from the weights in `model`."""
    return {
        "run": {"dir": str(directory), "checkpoint_every": 0, "log_every": 1000},
        "seed": seed,
        "platform": "cpu",
        "model": {"source": str(model), "remat": "none", "scan": False},
        "tokenizer": {"source": "characters", "alphabet": ALPHABET},
        "max_length": MAX_LENGTH,
        "data": TASK,
        "rewards": {"functions": [{"name": "exact_answer", "options": ANSWER}]},
        "evaluation": {"data": TASK, "problems": PROBLEMS},
        "generator": {"slots": PROMPTS * SAMPLES},
        "stages": [stage | {"sampling": {"max_new_tokens": NEW_TOKENS}}],
    }


def train(config: dict) -> tuple[list[dict], float]:
    """(events, seconds) of a run in a process of its own."""
    directory = Path(config["run"]["dir"])
    file = directory.with_suffix(".yml")
    file.write_text(yaml.safe_dump(config))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "rl.commands.cli", str(file)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{file.name} ended with "
            f"{done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    seconds = time.perf_counter() - began
    return [
        json.loads(text) for text in (directory / "events.jsonl").read_text().splitlines()
    ], seconds


def first_weights(scratch: Path, seed: int) -> Path:
    """Makes a directory with weights that SFT has taught to add, some of the time."""
    import policy
    from policy import families

    random = scratch / "random"
    policy.save(policy.create(families.read(MODELS["1m"] | {"vocab_size": 32}), seed=seed), random)
    stage = {
        "algorithm": "sft",
        "steps": 3000,
        "until": {"metric": "eval/greedy_accuracy", "at_least": 0.3},
        "prompts_per_step": 64,
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 20},
    }
    config = configuration(scratch / "sft", random, seed, stage)
    config["evaluation"]["every"] = 50
    events, _ = train(config)
    print(
        f"seed {seed}: SFT took {events[-1]['step']} steps, accuracy "
        f"{events[-1]['metrics']['eval/greedy_accuracy']:.3f}",
        flush=True,
    )
    return scratch / "sft" / "export"


def duet(
    method: str, scratch: Path, start: Path, seed: int, steps: int, shared_prefix: str
) -> dict:
    """Runs Duet and returns its curve by the number of samples."""
    every = max(1, steps // MARKS)
    warm = ALGORITHMS[method].get("critic_warmup", 0)
    stage = {
        "algorithm": {"name": method} | ALGORITHMS[method],
        "steps": steps + warm,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "shared_prefix": shared_prefix,
        "optimizer": OPTIMIZER,
        "critic": {"learning_rate": 1e-3},
    }
    if method != "ppo":
        del stage["critic"]
    config = configuration(scratch / method, start, seed, stage)
    config["evaluation"]["every"] = every
    events, wall = train(config)
    samples = 0
    spent = 0.0
    curve = []
    evaluating = 0.0
    warming = 0.0
    for event in events:
        metrics = event["metrics"]
        samples += (
            round(metrics.get("dynamic/batches", 1.0) if event["step"] else 0) * PROMPTS * SAMPLES
        )
        spent += metrics.get("time/step", 0.0)
        warming = spent if event["step"] <= warm else warming
        evaluating += metrics.get("time/eval", 0.0)
        drawn = max(0, samples - warm * PROMPTS * SAMPLES)
        if "eval/greedy_accuracy" in metrics and (drawn or not curve):
            curve.append((drawn, round(spent - warming, 2), metrics["eval/greedy_accuracy"]))
    budget = steps * PROMPTS * SAMPLES
    curve = [mark for mark in curve if mark[0] <= budget]
    return {
        "method": method,
        "seed": seed,
        "curve": curve,
        "warm_up": [warm * PROMPTS * SAMPLES, round(warming, 1)],
        "besides": round(wall - spent - evaluating, 1),
    }


def trl(method: str, scratch: Path, start: Path, seed: int, steps: int) -> dict:
    """Runs TRL's GRPOTrainer in a process of its own and returns its curve."""
    directory = scratch / "trl"
    directory.mkdir()
    (directory / "start").symlink_to(start)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--trl-process", str(directory), str(seed), str(steps)],
        capture_output=True,
        text=True,
    )
    wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-4000:]}")
    told = json.loads((directory / "told.json").read_text())
    marks = [0, *told["marks"]]
    accuracies = accuracy([start, *(directory / f"step-{step}" for step in told["marks"])])
    spent = [0.0]
    for seconds in told["seconds"]:
        spent.append(spent[-1] + seconds)
    return {
        "method": method,
        "seed": seed,
        "curve": [
            (step * PROMPTS * SAMPLES, round(spent[step], 2), accuracy)
            for step, accuracy in zip(marks, accuracies, strict=True)
        ],
        "warm_up": [0, 0.0],
        "besides": round(wall - spent[-1] - told["saving"], 1),
    }


def trl_run(directory: Path, seed: int, steps: int) -> None:
    """Trains in the TRL process; writes weights at the marks and the seconds of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from rewards.exact_answer import exact_answer

    tokenizer = AutoTokenizer.from_pretrained(directory / "start")
    model = AutoModelForCausalLM.from_pretrained(directory / "start", dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    marks = [step for step in range(1, steps + 1) if step % max(1, steps // MARKS) == 0]
    seconds = []
    saving = 0.0

    def correct(prompts, completions, answer, **_):
        return exact_answer(prompts, completions, answer, **ANSWER)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, **__):
            nonlocal saving
            ended = time.perf_counter()
            seconds.append(ended - self.began)
            if state.global_step in marks:
                model.save_pretrained(directory / f"step-{state.global_step}")
                saving += time.perf_counter() - ended

    settings = trl_settings(
        str(directory / "trainer"),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        top_k=0,
        learning_rate=OPTIMIZER["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=OPTIMIZER["warmup_steps"],
    )
    rows = [
        {"prompt": problem.prompt, "answer": problem.columns["answer"]}
        for problem in problems("train")
    ]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correct,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    trainer.train()
    (directory / "told.json").write_text(
        json.dumps({"marks": marks, "seconds": seconds, "saving": saving})
    )


def problems(split: str):
    import rl.tasks

    return rl.tasks.problems(TASK["task"], TASK["options"], split)


def accuracy(directories: Sequence[Path]) -> list[float]:
    """Returns the greedy accuracy of the weights in each directory on the held-out problems."""
    import policy
    from rewards.exact_answer import exact_answer
    from rollout import Generator, SamplingParams
    from rollout.text.tokenizer import characters, stop_ids

    held_out = problems("eval")[:PROBLEMS]
    tokenizer = characters(ALPHABET)
    accuracies = []
    params = SamplingParams(
        max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=stop_ids(tokenizer)
    )
    model = policy.load(str(directories[0]))
    generator = Generator(
        model, max_length=MAX_LENGTH, slots=PROMPTS * SAMPLES, tokenizer=tokenizer
    )
    for directory in directories:
        model.params = policy.load(str(directory)).params
        prompts = [problem.prompt for problem in held_out]
        texts = [group[0].text for group in generator.generate(prompts, params)]
        scores = exact_answer(
            prompts, texts, answer=[problem.columns["answer"] for problem in held_out], **ANSWER
        )
        accuracies.append(statistics.mean(scores))
    return accuracies


def line(one: dict) -> str:
    samples, seconds, accuracy = one["curve"][-1]
    return (
        f"{one['method']}, seed {one['seed']}: {one['curve'][0][2]:.3f} -> {accuracy:.3f}, "
        f"{samples} samples, {seconds:.0f} s; besides {one['besides']:.0f} s, warm-up "
        f"{one['warm_up'][1]:.0f} s"
    )


def report(measured: Sequence[dict]) -> str:
    """Formats a table of means over seeds: accuracy by samples, seconds, and their ratio to
    TRL's."""
    methods = list(dict.fromkeys(each["method"] for each in measured))
    rows = []
    base = None
    for method in sorted(methods, key=lambda name: name != TRL):
        runs = [each for each in measured if each["method"] == method]
        ends = [run["curve"][-1] for run in runs]
        tenths = [
            statistics.mean(at(run["curve"], share * ends[0][0]) for run in runs)
            for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        ]
        seconds = statistics.mean(end[1] for end in ends)
        total = seconds + statistics.mean(run["besides"] + run["warm_up"][1] for run in runs)
        base = base or (seconds, total)
        rows.append(
            f"| {method} | {len(runs)} | {ends[0][0]:,} | "
            + " | ".join(f"{value:.3f}" for value in tenths)
            + f" | {seconds:.0f} | {seconds / base[0]:.2f} | {total:.0f} | {total / base[1]:.2f} |"
        )
    head = (
        "| method | seeds | samples | at 0 | 25% | 50% | 75% | 100% | s of steps | share | s "
        "of all | share |"
    )
    return "\n".join([head, "|---" * head.count(" | ") + "|---|", *rows])


def drawing(measured: Sequence[dict]) -> str:
    """Returns an SVG picture: accuracy, mean over seeds, by the seconds of all steps so far, mean
    over seeds."""
    W = 640
    H = 360
    LEFT = 46
    FOOT = 34
    colours = dict(
        zip(
            (TRL, *ALGORITHMS), ("#777777", "#1f77b4", "#2ca02c", "#d62728", "#9467bd"), strict=True
        )
    )
    runs = {
        name: [each["curve"] for each in measured if each["method"] == name] for name in colours
    }
    marks = {
        name: [
            tuple(statistics.mean(mark[i] for mark in same) for i in (1, 2))
            for same in zip(*curves, strict=False)
        ]
        for name, curves in runs.items()
        if curves
    }
    longest = max(seconds for each in marks.values() for seconds, _ in each)

    def place(seconds: float, accuracy: float) -> tuple[float, float]:
        return LEFT + (W - LEFT - 10) * seconds / longest, (H - FOOT) - (H - FOOT - 10) * accuracy

    def text(x: float, y: float, what: str, **more) -> str:
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" '
            + " ".join(f'{k.replace("_", "-")}="{v}"' for k, v in more.items())
            + f">{what}</text>"
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" font-family="sans-serif" '
        'font-size="12">'
    ]
    parts.append(f'<rect width="{W}" height="{H}" fill="white"/>')
    for tenth in range(0, 11, 2):
        x, y = place(0, tenth / 10)
        parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{W - 10}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(x - 6, y + 4, f"{tenth / 10:.1f}", text_anchor="end"))
        x, y = place(longest * tenth / 10, 0)
        parts.append(text(x, y + 16, f"{longest * tenth / 10:.0f} s", text_anchor="middle"))
    for i, (name, each) in enumerate(marks.items()):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*mark) for mark in each))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        )
        parts.append(
            text(
                W - 150,
                H - FOOT - 90 + 17 * i,
                name if name == TRL else f"Duet {name}",
                fill=colours[name],
            )
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def at(curve: Sequence[Sequence[float]], samples: float) -> float:
    """Returns the accuracy of the last evaluation up to this number of samples."""
    return [mark[2] for mark in curve if mark[0] <= samples + 1e-6][-1]


if __name__ == "__main__":
    main()
