"""`rl plan`: compiles the programs of a run for hardware that you do not have, and reports their
needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl.plan.slices import HOW

HELP = """\
Compiles the programs of a run for hardware that you do not have. Shows for each program, per
device: memory, operations, HBM traffic, communication, and a lower bound of its time. If a program
does not fit, suggests settings with which it does. With --search, chooses mesh, micro-batch and
remat policy for the slice:

  rl plan configs/grpo_deepseek.yml --topology v5p:8x8x4
  rl plan configs/quickstart.yml mesh.fsdp=4 mesh.tensor=2 --topology cpu:8
  rl plan configs/grpo_deepseek.yml --topology v5p:8x8x4 --search --memory 80
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `rl plan` to a parser, which has the files of the configuration."""
    parser.add_argument("--topology", required=True, help=HOW)
    parser.add_argument(
        "--search", action="store_true", help="choose mesh, micro-batch and remat policy"
    )
    parser.add_argument(
        "--memory",
        type=_above_0,
        metavar="GIB",
        help="memory per device that programs may use (all)",
    )
    parser.add_argument(
        "--candidates", type=_count, default=6, metavar="N", help="most changes to compile (6)"
    )
    parser.add_argument(
        "--json",
        type=lambda text: Path(text).expanduser(),
        metavar="FILE",
        help="also write the numbers to this file",
    )


def _above_0(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError
    return number
