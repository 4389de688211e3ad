"""Measures what an adapter of rank 32 costs next to full training, in Duet and in TRL with peft: the
peak memory of the process, and the seconds of a step.

The programs of a table take the same steps from the same weights, one after the other in each turn:
Duet and TRL, each with the weights and with an adapter of all linear layers (alpha 32). The steps
are those of benchmarks/sft.py (rows of random tokens of different lengths) and of
benchmarks/grpo.py (sampling, reward and update), which say more. Each program runs in a process of
its own. Compilation counts in its peak memory, and does not count in its seconds.

Seconds are medians of the turns: by the clock, and of processors. Where other programs are at work,
those of processors say more; threads of torch that wait for each other count in them.

    python benchmarks/adapter_costs.py models/smollm2 [--stages sft grpo] [--repeats 3]
    python benchmarks/adapter_costs.py 25m            # random weights of models.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpo
import sft
from models import MODELS, pair
from side_by_side import process

REMAT = "minimal_flash"
WARM = 2
SAMPLES = 4  # of a prompt in a GRPO step
NEW_TOKENS = 16


@dataclass(frozen=True)
class Program:
    """One that takes steps. rank: of the adapter that it trains; None: it trains the weights."""

    name: str
    steps: Callable
    rank: int | None


@dataclass(frozen=True)
class Cost:
    """What the steps of a program cost: bytes, and medians of seconds."""

    name: str
    memory: float
    wall: float
    processor: float


def main(argv: Sequence[str] | None = None) -> list[Cost]:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"a Hugging Face directory, or one of {', '.join(MODELS)}")
    parser.add_argument("--stages", choices=("sft", "grpo"), nargs="+", default=["sft", "grpo"])
    parser.add_argument("--peers", choices=("TRL",), nargs="*", default=["TRL"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4, help="of an SFT step")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a row of an SFT step")
    parser.add_argument("--torch-threads", type=int)
    options = parser.parse_args(argv)
    results = []
    with directory(options.model) as files:
        for stage in options.stages:
            costs = measure(options, stage, files)
            print(table(f"{stage}, {Path(options.model).name}", costs), flush=True)
            results += costs
    return results


@contextmanager
def directory(model: str) -> Iterator[str]:
    """Yields the directory of a model, with random weights if it is a name of models.py."""
    if model not in MODELS:
        yield model
        return
    from rollout.text.tokenizer import byte_level

    with tempfile.TemporaryDirectory() as files:
        with pair(model) as (_, theirs):
            theirs.save_pretrained(files)
        byte_level().save_pretrained(files)
        yield files


def measure(options: argparse.Namespace, stage: str, files: str) -> list[Cost]:
    """Returns the costs of all programs of a stage, which take their steps in turns."""
    turns = options.repeats + WARM
    module = {"sft": sft, "grpo": grpo}[stage]
    if stage == "sft":
        work = sft.Work(files, turns, options.rows, options.longest, REMAT)
    else:
        is_real = options.model not in MODELS
        work = grpo.Work(files, turns, SAMPLES, NEW_TOKENS, is_real=is_real, remat=REMAT)
    with ExitStack() as stack:
        programs = [
            Program(f"{name}, {'weights' if rank is None else 'adapter'}", steps, rank)
            for name, steps in (("Duet", module.duet_steps), ("TRL", module.trl_steps))
            if name == "Duet" or name in options.peers
            for rank in (None, options.rank)
        ]
        step_of = [
            stack.enter_context(
                process(each.steps, options.torch_threads, replace(work, rank=each.rank))
            )
            for each in programs
        ]
        reports = [[step() for step in step_of] for _ in range(turns)][WARM:]
    return [
        cost(program.name, steps)
        for program, steps in zip(programs, zip(*reports, strict=True), strict=True)
    ]


def cost(name: str, steps: Sequence[dict]) -> Cost:
    """Returns what the reports of the steps of a program say."""
    wall, processor = (
        statistics.median(step[key] for step in steps) for key in ("step", "processor")
    )
    return Cost(name, max(step["memory"] for step in steps), wall, processor)


def table(name: str, costs: Sequence[Cost]) -> str:
    """Returns a row for each program, with its ratios to the first one."""
    first = costs[0]
    lines = [
        f"| {name} | peak MiB | ratio | s/step | ratio | processor s/step | ratio |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {each.name} | {each.memory / 2**20:,.0f} | {each.memory / first.memory:.2f} "
        f"| {each.wall:.2f} | {each.wall / first.wall:.2f} "
        f"| {each.processor:.2f} | {each.processor / first.processor:.2f} |"
        for each in costs
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
