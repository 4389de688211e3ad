"""`rl fetch`: copies a run from its remote folder."""

from __future__ import annotations

import argparse
import os

from rewards.text import quoted

SUMMARY = "copy a run from a remote folder: its records, or all that it goes on with"
DESCRIPTION = """Copy a run from its remote folder (run.remote), which it leaves as it is: events, samples
and configuration, which `rl report`, `rl view` and `rl explain` read. The run may be going on; the
same command then fetches what is new."""
HELP = """example:
  rl fetch gs://my-bucket/runs/first runs/first && rl report runs/first

exit codes: 0 done; 2 no run there, or another run in RUN; 5 it cannot be read"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("url", metavar="URL", help="remote folder of the run")
    parser.add_argument(
        "directory", type=os.path.expanduser, metavar="RUN", help="local folder for the copy"
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="also the newest checkpoint and the folders with weights, such as export/",
    )


def run(arguments: argparse.Namespace) -> int:
    """Copies the run and returns the exit code."""
    from pathlib import Path

    from rl.run.folder import FolderLock
    from rl.run.mirror.fetch import fetch_copy

    directory = Path(arguments.directory)
    with FolderLock(directory):
        fetch_copy(arguments.url, directory, weights=arguments.weights)
    print(f"{arguments.url} is copied to {directory}; see it: rl report {quoted(directory)}")
    return 0
