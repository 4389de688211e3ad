"""`rl explain`: a verdict on a run, in at most eight lines, or the numbers behind a
configuration."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rl.commands.train import split_arguments

SUMMARY = "say what is wrong with a run, or what a configuration computes"
DESCRIPTION = (
    "With the folder of a run, finished or not: names what is wrong with it in at most eight "
    "lines (docs/diagnose.md). With a configuration: the loss of each stage with its numbers, "
    "batches, tokens, and what differs from the defaults."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "config",
        nargs="+",
        type=os.path.expanduser,
        metavar="RUN | CONFIG | key=value",
        help="folder or URL of a run, or files and overrides",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print every finding of a run with all its fields as JSON",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict or the explanation. Returns 0, also for an ill run."""
    from rl.remote.urls import is_remote

    first = arguments.config[0]
    if len(arguments.config) == 1 and (is_remote(first) or Path(first).is_dir()):
        from rl.run.mirror.viewed import local_run

        return explain_run(local_run(first), arguments.json)
    from rl.run.health import outline
    from rl.run.load import load

    print(*outline.lines(load(*split_arguments(arguments.config))), sep="\n")
    return 0


def explain_run(directory: str, as_json: bool) -> int:
    """Prints the verdict on a run. Returns 0."""
    from rl.views.explain import findings, to_json, verdict

    if as_json:
        print(json.dumps([to_json(each) for each in findings(directory)], indent=1))
    else:
        print(*verdict(directory), sep="\n")
    return 0
