"""`rl samples`: lists the samples of a run that meet a filter, with their tokens, or scores them
again."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from policy.json_types import JsonObject, as_object

if TYPE_CHECKING:
    from rewards import RunnerOptions

SUMMARY = "list the samples of a run by a filter, token by token, or score them again"
DESCRIPTION = "List the samples of a run, the newest first. A single match is shown in full."
HELP = """\
a filter is one line of terms, all of which a sample must meet; a leading `-` negates a term:
  step:100-200  reward<0.5  reward.format=0  len>800  adv>1  gap>0.01  prompt:123
  stage:grpo  finish:length  fault:timeout  fault  eval  unscored  signal
  "some words"  /regular expression/  /ignoring case/i

examples:
  rl samples runs/a 'reward<0.5 finish:length' --sort gap
  rl samples runs/a 'step:200 "therefore"' --tokens --limit 1
  rl samples runs/a --json -eval
  rl samples runs/a 'step:100-' --rescore my_reward.py:correct

exit codes: 0 done; 2 no run there, or a filter or a reward that cannot be used; 3 the samples
changed meanwhile"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "run_directory", type=os.path.expanduser, metavar="RUN", help="folder or URL of a run"
    )
    parser.add_argument("filter", nargs="*", metavar="FILTER", help="terms that a sample must meet")
    parser.add_argument(
        "--sort", choices=("reward", "gap", "len"), help="largest first (default: newest first)"
    )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="samples to show (default: 20)"
    )
    parser.add_argument("--tokens", action="store_true", help="show every token with its numbers")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample")
    parser.add_argument(
        "--rescore",
        metavar="CONFIG_OR_REWARD",
        help="score the samples with the rewards of a configuration, or with one reward, and show "
        "what changed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the samples and returns the exit code."""
    from rl.errors import ConfigError
    from rl.run.mirror.viewed import local_run
    from rl.views.viewer import terminal

    if arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: write a number from 1 on")
    options = terminal.SamplesFlags(
        " ".join(arguments.filter),
        arguments.sort,
        arguments.limit,
        arguments.tokens,
        arguments.json,
    )
    directory = local_run(arguments.run_directory)
    if arguments.rescore is None:
        return terminal.show(directory, options)
    options_of, limits = _rewards(arguments.rescore, directory)
    return terminal.show_rescored(directory, options, options_of, limits)


def _rewards(source: str, directory: str) -> tuple[Callable[[str], RunnerOptions], dict[str, int]]:
    """Returns the rewards of each stage, and the max_new_tokens of each."""
    from pathlib import Path

    from rewards import RunnerOptions
    from rl.errors import ConfigError

    if not source.endswith((".yml", ".yaml")) and not Path(source).is_dir():
        from rl.records.run_files import read_config

        options = RunnerOptions(((source, 1.0, {}),))
        return lambda stage: options, _limits(read_config(Path(directory), []))
    from rl.run.load import load

    config = load([source])
    settings = dict(
        zip(
            config.stage_names,
            map(config.rewards_of, config.stages),
            strict=True,
        )
    )

    def options_of(stage: str) -> RunnerOptions:
        own = settings.get(stage, config.rewards)
        if own is None:
            raise ConfigError(f"--rescore {source}: it has no rewards for the stage {stage}")
        functions = tuple((each.name, each.weight, each.options) for each in own.functions)
        return RunnerOptions(functions, own.workers, own.timeout_s)

    return options_of, _limits(config.model_dump())


def _limits(config: JsonObject) -> dict[str, int]:
    """Returns stage -> max_new_tokens of a configuration."""
    from rl.config.stage_names import stage_names

    result: dict[str, int] = {}
    stages = config.get("stages")
    entries = stages if isinstance(stages, list) else []
    for name, stage in zip(stage_names(config), entries, strict=False):
        limit = as_object(as_object(stage).get("sampling")).get("max_new_tokens")
        if isinstance(limit, int):
            result[name] = limit
    return result
