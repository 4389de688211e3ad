"""`rl reward test`: runs a reward function on its examples."""

from __future__ import annotations

import argparse

SUMMARY = "work on reward functions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the action `test` and its argument."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    test = actions.add_parser("test", help="run a reward function on its examples and show the scores")
    test.add_argument("reward", help="registered name, package.module:function, or file.py:function")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code of the test."""
    from rewards.check import main

    return main(arguments.reward)
