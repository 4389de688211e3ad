#!/usr/bin/env python3
"""Measures how long the commands take to start: `python benchmarks/startup.py [--runs 9] [VERB
...]`.

Prints a Markdown table of the verbs that need no jax, and of `--help` of all verbs: median seconds
and CPU seconds of several runs, the large packages that the command imported, and the packages that
took longest to import.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGE = ("jax", "transformers", "datasets", "wandb", "numpy", "pydantic", "yaml", "rich")
COMMANDS = {
    "rl --version": ["--version"],
    "rl schema": ["schema"],
    "rl completion bash": ["completion", "bash"],
    "Tab (rl _complete)": [
        "_complete",
        "bash",
        "rl-train",
        "configs/quickstart.yml",
        "stages.1.opt",
    ],
    "rl reward test exact_answer": ["reward", "test", "exact_answer"],
    "rl train --check quickstart": ["train", "--check", "configs/quickstart.yml"],
}
CODE = """
import sys
from rl.commands import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("\\n\\0", *sorted(set({large!r}) & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def run(arguments: list[str], *options: str) -> tuple[float, float, str]:
    """Runs `rl` in a new process. Returns (seconds, CPU seconds, what it wrote to standard
    error)."""
    code = CODE.format(large=LARGE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *options, "-c", code, *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"rl {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr


def slowest(arguments: list[str], count: int = 3) -> list[str]:
    """Returns the packages whose modules took longest to import, with milliseconds under the import
    timer."""
    lines = re.findall(
        r"^import time: +(\d+) \| +\d+ \| *(\S+)$",
        run(arguments, "-X", "importtime")[2],
        re.MULTILINE,
    )
    micros: Counter[str] = Counter()
    for own, module in lines:
        micros[module.partition(".")[0]] += int(own)
    return [f"{name} {total / 1e3:.0f} ms" for name, total in micros.most_common(count)]


def row(name: str, arguments: list[str], runs: int) -> str:
    """Returns the line of the table for a command."""
    run(arguments)  # compiles Python files and warms the cache of the disk
    results = [run(arguments) for _ in range(runs)]
    seconds, cpu = (statistics.median(result[part] for result in results) for part in (0, 1))
    loaded = results[0][2].rpartition("\0")[2].split()
    return (
        f"| `{name}` | {seconds:.2f} | {cpu:.2f} | {', '.join(loaded) or '-'} | "
        f"{', '.join(slowest(arguments))} |"
    )


def main() -> None:
    """Prints the table."""
    sys.path.insert(0, str(ROOT))
    from rl.commands import cli

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("verbs", nargs="*", metavar="VERB", help="verbs to measure (all)")
    parser.add_argument(
        "--runs",
        type=int,
        default=9,
        help="runs of each command, after one that is not counted (9)",
    )
    options = parser.parse_args()
    commands = COMMANDS | {f"rl {verb} --help": [verb, "--help"] for verb in cli.VERBS}
    print(
        "| command | seconds | CPU seconds | large packages | slowest imports "
        "|\n|---|---|---|---|---|"
    )
    for name, arguments in commands.items():
        if not options.verbs or set(options.verbs) & set(arguments):
            print(row(name, arguments, options.runs), flush=True)


if __name__ == "__main__":
    main()
