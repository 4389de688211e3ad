"""`rl report`: writes a run as one HTML file that needs no network."""

from __future__ import annotations

import argparse
import os

SUMMARY = "write a run as one HTML file: curves, evaluations, samples, configuration"
DESCRIPTION = """Write one HTML file about a run, or about several runs whose curves share their
charts. The file loads nothing from the network. A run that is still going on can be reported at any
time."""
HELP = """examples:
  rl report runs/quickstart-1 --open
  rl report runs/a --against runs/b --stage grpo --steps 100:200 -o a.html

exit codes: 0 done; 2 no run there; 3 damaged lines (the report is written, and says which)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "runs", nargs="+", type=os.path.expanduser, metavar="RUN", help="folder or URL of a run"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=os.path.expanduser,
        metavar="FILE",
        help="default: report.html in the folder; -: standard output",
    )
    parser.add_argument(
        "--against",
        type=os.path.expanduser,
        metavar="RUN",
        help="a run to compare with: dashed curves, other keys",
    )
    add_shared(parser)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `rl report` and `rl compare` share."""
    parser.add_argument(
        "--samples", type=int, default=200, metavar="N", help="completions to show (default: 200)"
    )
    parser.add_argument("--stage", help="only this stage, e.g. grpo")
    parser.add_argument("--steps", metavar="A:B", help="only steps A to B of each stage")
    parser.add_argument(
        "--json",
        type=os.path.expanduser,
        metavar="FILE",
        help="write the numbers as JSON too; -: standard output",
    )
    parser.add_argument("--open", action="store_true", help="open the file in a browser")


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and returns the exit code."""
    from rl.run.mirror.viewed import local_run
    from rl.views.report import command

    runs = [local_run(each) for each in arguments.runs]
    against = None if arguments.against is None else local_run(arguments.against)
    options = command.ReportFlags(
        output=arguments.output,
        samples=arguments.samples,
        part=command.part_of(arguments.stage, arguments.steps),
        against=against,
        json=arguments.json,
        open=arguments.open,
    )
    return command.report(runs, options)
