"""`rl compare`: shows the curves of runs on each other, or their numbers as text."""

from __future__ import annotations

import argparse
import os

from rl.commands.runs.report import add_shared

SUMMARY = "compare runs: curves on each other, or tables with --text"
DESCRIPTION = """Write one HTML file in which the curves of two or more runs share their charts,
with the difference of their configurations. With --text, print tables: first, last and best value
of each headline metric, steps and seconds to each tenth of accuracy, and the keys of the
configuration that differ. Of folders of rl eval, print the difference of each score on the problems
that both have, with its 95% interval."""
HELP = """examples:
  rl compare runs/a runs/b --open
  rl compare runs/a runs/b --text
  rl compare evals/before evals/after --text"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "first", type=os.path.expanduser, metavar="RUN", help="folder or URL of a run"
    )
    parser.add_argument(
        "others",
        nargs="+",
        type=os.path.expanduser,
        metavar="RUN",
        help="folders of the runs to compare it with",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=os.path.expanduser,
        metavar="FILE",
        help="default: compare.html in the first folder",
    )
    parser.add_argument(
        "--text", action="store_true", help="print tables instead of writing a file"
    )
    add_shared(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares the runs and returns the exit code."""
    from rl.run.mirror.viewed import local_run
    from rl.views.report import command

    runs = [local_run(each) for each in (arguments.first, *arguments.others)]
    part = command.part_of(arguments.stage, arguments.steps)
    if arguments.text:
        return command.compare_text(runs, part)
    options = command.ReportFlags(
        output=arguments.output,
        samples=arguments.samples,
        part=part,
        json=arguments.json,
        open=arguments.open,
    )
    return command.report(runs, options)
