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
    "set (never their values). With a run, by its folder or the URL of its remote folder: the "
    "verdict of `rl explain`, and whether its remote folder (run.remote) is as far as it. Exit "
    "code 5 if the machine cannot run Duet."
)
CACHE = "~/.cache/duet-rl/programs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=os.path.expanduser,
        metavar="RUN",
        help="folder or URL of a run",
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
        if arguments.remote is not None:
            raise ConfigError("rl doctor: name a run, or --remote URL")
        return _look_at_run(arguments.directory, arguments.json)
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


def _look_at_run(place: str, as_json: bool) -> int:
    """Prints the verdict on a run and what there is to say of its remote folder. Returns 0."""
    from rl.remote.urls import is_remote
    from rl.run.health import doctor
    from rl.run.mirror import health
    from rl.run.mirror.viewed import local_run
    from rl.views.explain import findings, to_json, verdict

    directory = local_run(place)
    url = place if is_remote(place) else health.url_of(Path(directory))
    remote = [] if url is None else health.faults(url, Path(directory))
    if as_json:
        print(json.dumps([to_json(each) for each in (*findings(directory), *remote)], indent=1))
    else:
        print(*verdict(directory), *(doctor.line(each) for each in remote), sep="\n")
    return 0
