"""`rl teach`: writes the likeliest tokens of a teacher for the rows of a stage."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl.commands.overrides import add_files
from rl.commands.train import split_arguments

SUMMARY = "write a teacher's likeliest tokens for the rows of a distill stage"
DESCRIPTION = (
    "Runs the teacher of a stage once over the rows of its data and writes the K likeliest tokens "
    "in each place that is trained on, with their log-probabilities. Runs with `teacher: {files: "
    "DIR}` then load no teacher (docs/distillation.md). A command that was stopped goes on after "
    "the last file that is full."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    add_files(parser)
    parser.add_argument(
        "--output",
        required=True,
        type=lambda text: Path(text).expanduser(),
        metavar="DIR",
        help="folder for the files",
    )
    parser.add_argument("--top", required=True, type=int, metavar="K", help="tokens in each place")
    parser.add_argument(
        "--stage", metavar="NAME", help="stage with the teacher; needed if there are several"
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        default="float16",
        help="type of the log-probabilities; float16 rounds those above -1 by at most 0.0005 "
        "(float16)",
    )
    parser.add_argument(
        "--rows-per-file", type=int, default=256, metavar="N", help="rows of one file (256)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Writes the files of the teacher's probabilities. Raises ConfigError for numbers out of range,
    and what reading a configuration or a model raises."""
    from rl.commands.environment import choose_platform, use_program_cache
    from rl.errors import ConfigError
    from rl.run.health import devices
    from rl.run.load import load
    from rl.run.teach import TeachOptions, teach

    for option, value in (("--top", arguments.top), ("--rows-per-file", arguments.rows_per_file)):
        if value < 1:
            raise ConfigError(f"{option} {value}: write a number from 1 on")
    config = load(*split_arguments(arguments.config))
    choose_platform(config.platform)
    use_program_cache(config.run.program_cache)
    devices.check(config.platform)
    teach(
        config,
        TeachOptions(
            arguments.output,
            arguments.top,
            arguments.stage,
            arguments.dtype,
            arguments.rows_per_file,
        ),
    )
