"""`rl plan`: what the programs of a run need on a slice, found by compiling them for it. No device of the slice has to be there."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl.plan.slices import HOW

HELP = """\
Compiles the programs of a run for a slice that need not be there and shows, for one of its devices, the memory that each needs,
what it computes, moves and exchanges, and a lower bound of its time. Where a program does not fit, shows settings with which it
does. With --search chooses mesh, micro-batch and remat policy for the slice:

  rl plan configs/grpo_deepseek.yml --topology v5p:8x8x4
  rl plan configs/quickstart.yml mesh.fsdp=4 mesh.tensor=2 --topology cpu:8
  rl plan configs/grpo_deepseek.yml --topology v5p:8x8x4 --search --memory 80
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="files first, then overrides")
    parser.add_argument("--topology", required=True, help=HOW)
    parser.add_argument("--search", action="store_true", help="choose mesh, micro-batch and remat policy")
    parser.add_argument(
        "--memory", type=_above_0, metavar="GIB", help="memory of a device that programs may take (its whole)"
    )
    parser.add_argument(
        "--candidates", type=_whole, default=6, metavar="N", help="changes that are compiled at most (6)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers into this file as well")


def _above_0(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _whole(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError
    return number
