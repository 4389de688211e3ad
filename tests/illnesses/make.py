"""Makes small runs that are ill in a known way, and healthy ones: `python tests/illnesses/make.py
DIRECTORY [NAME ...]`.

Every run is a real one: a configuration of the quickstart's model on sums, seconds long. Most start
from the weights of a short SFT, which is made first. `--fixtures FOLDER` keeps what `rl explain`
reads of each run, shortened, for the tests.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REWARDS = "tests/illnesses/own_rewards.py"
SUMS = "{task: arithmetic, options: {operations: ['+'], max_operand: 99, style: reversed}}"
BASE = [
    "configs/quickstart.yml",
    "stages=[{algorithm: sft, steps: 165, prompts_per_step: 128, optimizer: {learning_rate: "
    "3.0e-3, warmup_steps: 20}, router: {bias_rate: 0.01}, sampling: {max_new_tokens: 6}}]",
]


def grpo(**changes) -> str:
    """Returns `stages` with one short stage of GRPO."""
    stage = {
        "algorithm": {"name": "grpo"},
        "steps": 24,
        "prompts_per_step": 32,
        "samples_per_prompt": 8,
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        "router": {"bias_rate": 0.0},
        "sampling": {"max_new_tokens": 6},
    }
    return "stages=" + json.dumps([stage | changes])


def sft(**changes) -> str:
    """Returns `stages` with one short stage of SFT."""
    stage = {
        "algorithm": {"name": "sft"},
        "steps": 30,
        "prompts_per_step": 64,
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5},
        "sampling": {"max_new_tokens": 6},
    }
    return "stages=" + json.dumps([stage | changes])


def two(first: str, second: str) -> str:
    """Returns `stages` with the stages of both."""
    lists = [json.loads(text.removeprefix("stages=")) for text in (first, second)]
    return "stages=" + json.dumps([*lists[0], *lists[1]])


def reward(name: str) -> str:
    """Returns `rewards` with one function."""
    return "rewards=" + json.dumps(
        {"functions": [name if ":" in name else f"{REWARDS}:{name}"], "workers": 1}
    )


def rate(value: float) -> dict:
    """Returns an optimizer with a learning rate."""
    return {"learning_rate": value, "warmup_steps": 2}


ONE = "{path: tests/illnesses/one_row.jsonl}"
LONG = ["max_length=48", "generator.tokens_per_dispatch=8"]
CHAT = {
    "task": "arithmetic",
    "options": {"operations": ["+"], "max_operand": 99, "style": "reversed"},
    "chat": True,
}
DIALOGUE = f"data={SUMS[:-1]}, chat: true}}"
WORDS = [
    "tokenizer={source: bytes, alphabet: null}",
    "model={source: tiny-deepseek, overrides: {vocab_size: 320}, remat: none, scan: false}",
    DIALOGUE,
    *LONG,
]
RUNS: dict[str, list[str]] = {
    "healthy_texts": [*WORDS, f"evaluation.data={DIALOGUE.removeprefix('data=')}", sft(steps=20)],
    "healthy": ["MODEL", grpo()],
    "healthy_sft": [sft()],
    "healthy_kl": ["MODEL", grpo(algorithm={"name": "grpo", "kl_coef": 0.02}, updates_per_step=2)],
    "learning_rate": ["MODEL", grpo(optimizer=rate(1e-1))],
    "learning_rate_sft": [sft(optimizer=rate(3e-1))],
    "learning_rate_updates": ["MODEL", grpo(optimizer=rate(3e-2), updates_per_step=4)],
    "equal_rewards": ["MODEL", reward("constant"), grpo()],
    "filtered": [
        "MODEL",
        reward("constant"),
        grpo(algorithm={"name": "dapo", "dynamic_batches": 2}, steps=8),
    ],
    "frozen": ["MODEL", grpo(optimizer=rate(1e-10), steps=12)],
    "frozen_sft": [sft(optimizer=rate(1e-8))],
    "held": ["MODEL", grpo(algorithm={"name": "grpo", "kl_coef": 100.0}, updates_per_step=2)],
    "repeated": ["MODEL", f"data={ONE}", grpo(prompts_per_step=8, steps=12)],
    "length": [
        "MODEL",
        *LONG,
        reward("pays_for_length"),
        grpo(sampling={"max_new_tokens": 40}, steps=30),
    ],
    "entropy": ["MODEL", reward("pays_for_ones"), grpo(steps=30)],
    "kl": [
        "MODEL",
        reward("pays_for_ones"),
        grpo(algorithm={"name": "grpo", "kl_coef": 1e-4}, optimizer=rate(3e-3)),
    ],
    "truncated": ["MODEL", grpo(sampling={"max_new_tokens": 3})],
    "mask": [sft(algorithm={"name": "sft", "train_on": "all"})],
    "template_between": [
        *WORDS,
        f"data={SUMS[:-1]}, chat: false}}",
        two(sft(steps=80, data=CHAT), grpo(sampling={"max_new_tokens": 16}, steps=8)),
    ],
    "template_plain": ["MODEL", *LONG, f"data={SUMS[:-1]}, chat: true}}", grpo(steps=12)],
    "stale": [
        "MODEL",
        grpo(
            algorithm={"name": "dapo", "dynamic_batches": 8}, prompts_per_step=8, updates_per_step=8
        ),
    ],
    "faults": ["MODEL", reward("misses_a_column"), grpo()],
    "faults_some": ["MODEL", reward("sometimes_raises"), grpo()],
    "exhausted": ["MODEL", f"data={SUMS[:-1]}, limit: 16}}", grpo(prompts_per_step=16)],
    "memory": ["MODEL", "LIMIT", grpo(steps=8)],
    "exhausted_sft": [f"data={SUMS[:-1]}, limit: 64}}", sft(steps=60)],
}


def train(arguments: list[str], directory: Path, limit: int | None = None) -> int:
    """Runs `rl-train` with these arguments. Returns its exit code. limit: most bytes of its address
    space."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "rl.commands.cli",
        *arguments,
        f"run.dir={directory}",
        "run.checkpoint_every=0",
    ]
    if limit is not None:
        command = ["bash", "-c", f'ulimit -v {limit // 1024}; exec "$@"', "limited", *command]
    with open(f"{directory}.log", "w") as log:
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
        ).returncode


def make(name: str, folder: Path) -> Path:
    """Makes a run in folder/name unless it is there, and the weights that it starts from. Returns
    its directory."""
    directory, limited = folder / name, False
    arguments = (
        BASE
        if name == "base"
        else ["configs/quickstart.yml", "evaluation.problems=64", *RUNS[name]]
    )
    if "MODEL" in arguments:
        weights = make("base", folder) / "export"
        model = [f"model={{source: {weights}, remat: none, scan: false}}", "tokenizer=null"]
        arguments = [each for one in arguments for each in (model if one == "MODEL" else [one])]
    if "LIMIT" in arguments:
        arguments, limited = [each for each in arguments if each != "LIMIT"], True
    if not (directory / "export").is_dir():
        limit = (
            int(address_space(arguments, folder / f"{name}-measured") / 0.94) if limited else None
        )
        print(name, "exit code", train(arguments, directory, limit), flush=True)
    return directory


def address_space(arguments: list[str], directory: Path) -> float:
    """Returns the bytes of address space that a run takes at its end, measured under a limit that
    it does not reach."""
    limit = (
        2**35
    )  # so low that the process uses more of it than all processes of the machine's memory
    train(arguments, directory, limit)
    return metrics(directory)[-1]["metrics"]["perf/host_memory_share"] * limit


def metrics(directory: Path) -> list[dict]:
    """Returns the events of a run."""
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


NOT_KEPT = (
    "time/",
    "perf/",
    "generator/",
    "advantage/",
    "sampler/is",
    "sampler/k",
    "rewards/",
    "moe/",
    "optim/update",
)
SAMPLE = ("stage", "step", "prompt_id", "prompt", "completion", "reward", "n")
KEPT = ("perf/host_memory_share", "perf/step_tokens")


def keep(directory: Path, fixtures: Path) -> None:
    """Writes what `rl explain` reads of a run to a folder, with four digits, and 32 of its
    samples."""
    target = fixtures / directory.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("inspection.json", "probe.json"):
        if (directory / name).exists():
            shutil.copy(directory / name, target)
    config = (directory / "config.yml").read_text().replace(str(directory.parent), "runs")
    (target / "config.yml").write_text(config)
    rows = []
    for row in metrics(directory):
        values = {
            k: short(v)
            for k, v in row["metrics"].items()
            if k in KEPT or not k.startswith(NOT_KEPT)
        }
        rows.append(
            json.dumps(
                {"stage": row["stage"], "step": row["step"], "metrics": values},
                separators=(",", ":"),
            )
        )
    (target / "events.jsonl").write_text("\n".join(rows) + "\n")
    samples = directory / "samples.jsonl"
    if samples.exists():
        last = [json.loads(line) for line in samples.read_text().splitlines()]
        kept = [
            {key: row[key] for key in SAMPLE if key in row} for row in last if not row.get("eval")
        ][-32:]
        (target / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def short(value: float | None) -> float | None:
    """Returns a number with four digits."""
    return value if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", default=["base", *RUNS])
    parser.add_argument(
        "--fixtures", type=Path, help="folder for what `rl explain` reads of each run"
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    for each in options.names:
        made = make(each, options.directory.resolve())
        if options.fixtures:
            keep(made, options.fixtures)
