"""`rl plan`: computes the memory and time that a run needs on a slice, without the slice."""

from __future__ import annotations

import argparse
import sys

from rl import plan
from rl.commands.overrides import add_files
from rl.commands.train import split_arguments
from rl.errors import ConfigError

SUMMARY = "what a run needs on a slice, without the slice"
DESCRIPTION = plan.HELP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    add_files(parser)
    plan.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plans the run, or searches for its mesh, and returns the exit code."""
    from rl.data.inspect import weights
    from rl.data.inspect.source import length_faults
    from rl.plan import command
    from rl.run.load import load

    config = load(*split_arguments(arguments.config))
    for fault in length_faults(config):
        if fault.level == "refuse":
            raise ConfigError(fault.message())
        print(f"warning: {fault.message()}", file=sys.stderr)
    weights.check(config, media=config.model.media_rows is not None)
    options = command.PlanFlags(
        arguments.topology, arguments.memory, arguments.candidates, arguments.json
    )
    return (command.plan_search if arguments.search else command.plan)(config, options)
