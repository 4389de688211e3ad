"""`rl plan`: what the programs of a run need on a slice, found by compiling them for it. No device of the slice has to be there."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl.plan.slices import HOW

HELP = """\
Compiles the programs of a run for a slice that need not be there and shows, for one of its devices, the memory that each needs,
what it computes, moves and exchanges, and a lower bound of its time:

  rl plan configs/grpo_deepseek.yml --topology v5p:8x8x4
  rl plan configs/quickstart.yml mesh.fsdp=4 mesh.tensor=2 --topology cpu:8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="files first, then overrides")
    parser.add_argument("--topology", required=True, help=HOW)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers into this file as well")
