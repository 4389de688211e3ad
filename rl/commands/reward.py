"""`rl reward test`: runs a reward function on its examples."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

SUMMARY = "work on reward functions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the action `test` and its argument."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    test = actions.add_parser(
        "test", help="run a reward function on its examples and show the scores"
    )
    test.add_argument(
        "reward", help="registered name, package.module:function, or file.py:function"
    )
    test.add_argument(
        "--timeout",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="deadline of one call (default: 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code of the test."""
    from rewards.check import main

    return main(arguments.reward, timeout_s=arguments.timeout, convert=_with_lists)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def _with_lists(example: dict[str, object], folder: Path) -> dict[str, object]:
    """Returns an example with its pictures and sounds as rewards get them; one of text needs no
    import."""
    if not any(name in example for name in ("image", "images", "audio", "audios")):
        return example
    from rl.data.media import with_example_lists

    return with_example_lists(example, folder)
