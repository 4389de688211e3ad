"""`rl explain`: a verdict on a run, in at most eight lines."""

from __future__ import annotations

import argparse
import json

SUMMARY = "say what is wrong with a run, in at most eight lines"
DESCRIPTION = (
    "Reads the folder of a run, finished or not, and names what is wrong with it: learning rate, rewards, lengths, entropy, "
    "KL, masks, templates, data, memory (docs/diagnose.md)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("directory", metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print every finding with all its numbers as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict. Returns 0, also for an ill run."""
    from rl.reporting.explain import findings, verdict

    if arguments.json:
        print(json.dumps([each.to_json() for each in findings(arguments.directory)], indent=1))
    else:
        print(*verdict(arguments.directory), sep="\n")
    return 0
