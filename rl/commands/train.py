"""`rl-train`, also `rl train`: trains a model with a configuration."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rewards.text import quoted
from rl.commands.environment import choose_platform, use_program_cache
from rl.commands.exits import run_guarded
from rl.commands.overrides import add_files
from rl.errors import ConfigError, DuetError, ResourceError, disk_room, no_room

if TYPE_CHECKING:
    from rl.cluster.watchdog import Watch
    from rl.config.run import RunConfig

SUMMARY = "train with a configuration (the same as rl-train)"
HELP = """\
CONFIG is a YAML file, the name of a packaged one (quickstart, tiny), or the directory of a run,
which is continued. Several are merged from left to right; key=value overrides come last:

  rl-train configs/quickstart.yml
  rl-train configs/grpo_deepseek.yml tiny.yml stages.0.steps=3 run.dir=runs/try
  rl-train runs/try                (the same: rl-train resume=runs/try)
"""


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a configuration, and --check."""
    add_files(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="check configuration, tokenizer and first rows, and stop",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    add_configuration(parser)
    group = parser.add_argument_group(
        "several processes (docs/processes.md)",
        "by default, the cluster announces them, if there is one",
    )
    group.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of processes of the run (1: skip cluster detection)",
    )
    group.add_argument("--process", type=int, metavar="I", help="number of this process, from 0")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="machine of process 0, and a port that is free there",
    )


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into configuration files and overrides: `key.path=value` that names no file
    is an override."""
    overrides = [
        text for text in arguments if re.match(r"[\w.\s-]*=", text) and not os.path.exists(text)
    ]
    return [text for text in arguments if text not in overrides], overrides


def run(arguments: argparse.Namespace) -> int:
    """Checks the configuration, trains, and returns the exit code."""
    from rl.cluster import launch
    from rl.run.load import load

    given, overrides = split_arguments(arguments.config)
    config = load(given, overrides)
    _refuse_rollouts(config)
    if arguments.check:
        return check(config, given)
    together = launch.launch(arguments.processes, arguments.process, arguments.coordinator)
    if config.run.dir is None and together is not None:
        raise ConfigError(
            "run.dir: several processes need one folder that all of them see; set run.dir=FOLDER"
        )
    if config.run.dir is None:
        config = with_directory(config, new_directory(given))
    if together is None or together.index == 0:
        _show_configuration(config)
    choose_platform(config.platform)
    use_program_cache(config.run.program_cache)
    return _train(config) if together is None else _train_together(config, launch.start(together))


def check(config: RunConfig, given: Sequence[str]) -> int:
    """Checks the configuration that these files make, as `--check` says, and returns 0."""
    from rl.config import files

    if config.run.dir is None:
        config = with_directory(config, new_directory(given))
    _refuse_unwritable(config.directory)
    config, remarks = _checked(config)  # an error comes before the configuration
    _show_configuration(config)
    for note in (*files.cut_texts(given), *remarks):
        print(note)
    print("the configuration is good, and so are the tokenizer and the first rows of the data")
    return 0


def _refuse_unwritable(directory: Path) -> None:
    """Raises ConfigError if the folder of the run cannot be written or made. Makes nothing."""
    place = next(
        each for each in (directory.absolute(), *directory.absolute().parents) if each.exists()
    )
    if not place.is_dir():
        raise ConfigError(f"run.dir: {directory} cannot be made: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run.dir: {directory} cannot be written: no permission to write in {place}"
        )


def _refuse_rollouts(config: RunConfig) -> None:
    """Raises ConfigError if the folder of the run holds samples of `rl rollout`, which training
    would remove."""
    from rl.records.run_files import ROLLOUTS

    if config.run.dir is not None and (config.directory / ROLLOUTS).exists():
        raise ConfigError(
            f"run.dir: {config.directory} holds samples of `rl rollout`; choose another one to "
            f"train: run.dir={quoted(f'{config.directory}-trained')}"
        )


def _show_configuration(config: RunConfig) -> None:
    """Prints the keys that differ from their defaults, and notes on them."""
    from rl.config import files

    _show(files.changed_yaml(config))
    for note in _notes_on_filters(config):
        print(note, flush=True)


def _notes_on_filters(config: RunConfig) -> list[str]:
    """Returns a line for each stage that goes on without filters in its loss, as an older version
    began it."""
    from rl.config import files

    older = [] if config.run.dir is None else files.older_filters(config.directory)
    return [
        f"{config.directory / files.RESOLVED}: stages.{index}.sampling has no `filters`, as "
        "before 0.2.0: the run goes on with `ignore`, the loss that it had (docs/sampling.md)"
        for index in older
        if index < len(config.stages) and config.stages[index].sampling.filters == "ignore"
    ]


def _checked(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Checks the first rows, all rows of stages with `epochs`, and the run that the configuration
    continues.

    Returns (the configuration with the changes of that run, remarks on changes, settings and rows).
    """
    from rl.config import changes
    from rl.data.inspect import check_first_rows
    from rl.run.resume.continued import continued, has_known_steps, places, stages_of_run

    notes = check_first_rows(config)
    if any(stage.freeze for stage in config.stages):
        choose_platform("cpu")
        from rl.run import build  # imports jax

        build.check_frozen(config)
    counted = config
    steps = []
    if not has_known_steps(config) or any(s.held_out or s.curriculum for s in config.stages):
        from rl.run.prepare import read_held_out, with_steps  # imports jax

        notes += read_held_out(config, first=100, hub=False)
        counted, steps = with_steps(config, hub=False)
    complete = continued(counted)
    changed = [line for each in complete.changes for line in changes.notes(complete, *each.place)]
    stages = stages_of_run(complete, places(complete))
    for stage in stages:
        if not stage.is_over:
            stage.check_groups()
    remarks = [remark for stage in stages for remark in stage.remarks()]
    return config.model_copy(update={"changes": complete.changes}), [
        *changed,
        *remarks,
        *notes,
        *steps,
    ]


def new_directory(given: Sequence[str]) -> str:
    """Returns runs/FILE-NUMBER: the last configuration file but `tiny`, and the first number after
    those that exist."""
    names = [Path(path).stem for path in given]
    name = next((name for name in reversed(names) if name != "tiny"), names[-1])
    used = [path.name.removeprefix(f"{name}-") for path in Path("runs").glob(f"{name}-*")]
    return (
        f"runs/{name}-{1 + max((int(number) for number in used if number.isdecimal()), default=0)}"
    )


def with_directory(config: RunConfig, directory: str) -> RunConfig:
    """Returns the configuration with this folder of the run."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})


def _train(config: RunConfig) -> int:
    from rl.run import loop

    try:
        return loop.run(config)
    except Exception as error:
        if isinstance(error, DuetError) or not no_room(error):
            raise
        room = disk_room(config.directory)
        raise ResourceError(
            f"{error}. Make room, then continue with `rl-train {quoted(config.run.dir)}` ({room})"
        ) from None


def _train_together(config: RunConfig, watch: Watch) -> int:
    """Runs one of several processes. After an error it tells the others and ends the process."""

    def attempt(_: argparse.Namespace) -> int:
        with watch:
            return _train(config)

    try:
        code = run_guarded(attempt, argparse.Namespace())
    except Exception:
        traceback.print_exc()
        code = 1
    watch.leave(code)
    return code


def _show(text: str) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        # A long line continues on the next row of the terminal; by default it is cut.
        Console().print(Syntax(text, "yaml", background_color="default"), soft_wrap=True)
    else:
        print(text, flush=True)
