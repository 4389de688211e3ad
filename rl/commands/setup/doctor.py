"""`rl doctor`: looks at the machine; with the folder of a run, also says what is wrong with that
run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rl.errors import ConfigError

SUMMARY = "look at this machine, or at a run"
DESCRIPTION = (
    "Without RUN: versions, devices, disk, memory, limits, program cache, and which secrets are "
    "set (never their values). With the folder of a run: the verdict of `rl explain`. Exit code 5 "
    "if the machine cannot run Duet."
)
CACHE = "~/.cache/duet-rl/programs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "directory", nargs="?", type=os.path.expanduser, metavar="RUN", help="folder of a run"
    )
    parser.add_argument(
        "--remote",
        metavar="URL",
        help="also write to a remote folder (run.remote), such as gs://bucket/run, and read it",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints facts about the machine or the verdict on a run, and returns the exit code."""
    if arguments.directory is not None:
        from rl.commands.runs import explain

        if arguments.remote is not None:
            raise ConfigError("rl doctor: name a run, or --remote URL")
        return explain.explain_run(arguments.directory, arguments.json)
    from rl.run.health import doctor

    cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or CACHE)
    faults = doctor.machine(Path("runs"), cache)
    if arguments.remote is not None:
        faults.append(doctor.remote(arguments.remote))
    if arguments.json:
        print(json.dumps([doctor.to_json(each) for each in faults], indent=1))
    else:
        print(*(doctor.line(each) for each in faults), sep="\n")
    return 5 if any(each.level == "refuse" for each in faults) else 0
