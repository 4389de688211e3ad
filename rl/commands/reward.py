"""`rl reward test`: runs a reward function on its examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SUMMARY = "work on reward functions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the action `test` and its argument."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    test = actions.add_parser("test", help="run a reward function on its examples and show the scores")
    test.add_argument("reward", help="registered name, package.module:function, or file.py:function")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code of the test."""
    from rewards.check import main

    return main(arguments.reward, convert=_with_lists)


def _with_lists(example: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns an example with its pictures and sounds as rewards get them; one of text needs no import."""
    if not any(name in example for name in ("image", "images", "audio", "audios")):
        return example
    from rl.data.media import with_example_lists

    return with_example_lists(example, folder)
