"""Compares the memory of an sft update on TPU slices, by `rl plan`, with MaxText's train step; or
plans the shipped configurations on the slices that they are meant for.

MaxText's numbers come from its own `train_compile` (flash attention, pure FSDP) for the same model,
slice, tokens per chip, dtypes of weights and moments, and full recomputation, compiled by libtpu
0.0.51 under jax 0.10.2.

    pip install libtpu          # a compilation takes 1 to 6 minutes on two cores
    python benchmarks/plans.py [llama3.1-8b ...]
    python benchmarks/plans.py --shipped [grpo_deepseek ...]
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from rl.accounting import chips
from rl.plan.command import bound
from rl.plan.compiled import ProgramReport
from rl.plan.slices import TPUS

FLOAT32 = {"dtype": "bfloat16", "param_dtype": "float32"}
# (model and how it is computed, slice, mesh, tokens of a chip, dtype of moments) -> MaxText's GiB
# of arguments, temporaries, peak.
CASES = (
    (
        ({"source": "llama3.1-8b"} | FLOAT32),
        "v5e:4x4",
        {"fsdp": 16},
        2048,
        "float32",
        (5.61, 3.75, 9.32),
    ),
    (
        ({"source": "llama3.1-8b"} | FLOAT32),
        "v6e:4x4",
        {"fsdp": 16},
        16384,
        "float32",
        (5.61, 14.19, 19.61),
    ),
    (
        ({"source": "deepseek-v2-lite"} | FLOAT32),
        "v6e:4x4",
        {"fsdp": 16},
        2048,
        "float32",
        (10.97, 7.53, 18.43),
    ),
    (
        {
            "source": "deepseek-v3",
            "dtype": "bfloat16",
            "param_dtype": "bfloat16",
            "expert_parallel": "all_to_all",
        },
        *("v5p:4x4x8", {"fsdp": 2, "expert": 64}, 4096, "bfloat16", (29.30, 41.54, 70.66)),
    ),
)
# Files of configs/ and the slices that they are meant for.
SHIPPED = (
    ("grpo_deepseek", "v5p:8x8x4"),
    ("grpo_qwen3_30b_a3b", "v6e:4x4"),
    ("grpo_qwen3_30b_a3b", "v5p:2x2x4"),
    ("grpo_llama3_8b", "v5e:4x4"),
    ("grpo_llama3_8b", "v6e:2x4"),
    ("ppo_gemma3_27b", "v5p:2x2x4"),
    ("lora_llama3_8b", "v5e:2x4"),
    ("qlora_qwen3_30b_a3b", "v5e:4x4"),
    ("lora_deepseek", "v5p:4x4x4"),
)
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def main() -> None:
    """Runs the benchmark from the command line."""
    if sys.argv[1:2] == ["--shipped"]:
        shipped(set(sys.argv[2:]) or {name for name, _ in SHIPPED})
    else:
        compare_with_maxtext(set(sys.argv[1:]) or {case[0]["source"] for case in CASES})


def compare_with_maxtext(selected: set[str]) -> None:
    print(
        "| model | slice | mesh | tokens per chip | arguments | temporaries | peak | MaxText | "
        "exchanged, GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model, topology, mesh, tokens, state_dtype, theirs in CASES:
        if model["source"] not in selected:
            continue
        numbers = update(model, topology, mesh, tokens, state_dtype)
        ours = " | ".join(
            f"{numbers[part] / 2**30:.2f}" for part in ("arguments", "temporaries", "peak")
        )
        exchanged = sum(size for size, _ in numbers["exchanged"].values()) / 2**30
        cut = ", ".join(f"{axis} {size}" for axis, size in mesh.items())
        maxtext = " / ".join(f"{number:.2f}" for number in theirs)
        print(
            f"| {model['source']} | {topology} | {cut} | {tokens:,} | {ours} | {maxtext} | "
            f"{exchanged:.0f} |",
            flush=True,
        )


def shipped(selected: set[str]) -> None:
    """Prints one line per program of each shipped configuration."""
    print(
        "| configuration, slice | program | arguments | temporaries | other | peak of all | moved "
        "| ratio | exchanged | per step | at least |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, topology in SHIPPED:
        if name not in selected:
            continue
        plan = planned(CONFIGS / f"{name}.yml", topology)
        chip = chips.of(TPUS[topology.split(":")[0]])
        for place, each in enumerate(ProgramReport(**program) for program in plan["programs"]):
            first = f"{name}, {topology}" if place == 0 else ""
            sizes = (each.arguments, each.temporaries, each.non_argument, each.needs, each.moved)
            sizes = " | ".join(f"{size / 2**30:.2f}" for size in sizes)
            ratio = "-" if each.refused else f"{each.moved_ratio:.2f}"
            exchanged = f"{sum(size for size, _ in each.exchanged.values()) / 2**30:.2f}"
            run = f"{each.times:,.6g} | {each.times * bound(each, chip):.3g} s"
            print(
                f"| {first} | {each.name.split(': ')[1]} | {sizes} | {ratio} | {exchanged} | "
                f"{run} |",
                flush=True,
            )


def update(model: dict, topology: str, mesh: dict[str, int], tokens: int, state_dtype: str) -> dict:
    """Returns the numbers of `rl plan` for the update, with one row of `tokens` per chip."""
    with tempfile.TemporaryDirectory() as directory:
        stage = {"algorithm": "sft", "steps": 10, "prompts_per_step": math.prod(mesh.values())}
        config = {
            "run": {"dir": f"{directory}/run"},
            "platform": "tpu",
            "model": model | {"remat": "full"},
            "tokenizer": "bytes",
            "max_length": tokens,
            "mesh": mesh,
            "data": {"task": "arithmetic"},
            "stages": [stage | {"optimizer": {"state_dtype": state_dtype}}],
        }
        file = Path(directory, "plan.yml")
        file.write_text(yaml.safe_dump(config))
        return next(
            each for each in planned(file, topology)["programs"] if each["name"] == "sft: update"
        )


def planned(file: Path, topology: str) -> dict:
    """Returns the numbers of `rl plan`, whether everything fits or not."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "plan.json")
        command = [
            Path(sys.executable).with_name("rl"),
            "plan",
            str(file),
            "--topology",
            topology,
            "--json",
            str(output),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if not output.exists():
            raise SystemExit(
                f"{topology}, {file}: exit code "
                f"{done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
            )
        return json.loads(output.read_text())


if __name__ == "__main__":
    main()
