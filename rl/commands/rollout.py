"""`rl rollout`: samples and scores completions for the stages of a configuration, without
training."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl.commands import train

SUMMARY = "sample and score completions of a configuration, without training"
DESCRIPTION = (
    "Samples and scores the completions of every step of the stages that sample, with the weights "
    "that the configuration names, and writes the records of a run (docs/sampling.md). A command "
    "that was stopped goes on after the last complete step."
)
HELP = """\
  rl rollout configs/quickstart.yml model=runs/sft/export stages.1.steps=50
  rl rollout runs/quickstart-rollouts-1           (goes on)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    train.add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Checks the configuration, samples, and returns the exit code."""
    from rl.cluster import launch
    from rl.commands.environment import choose_platform, use_program_cache
    from rl.config import files
    from rl.errors import ConfigError
    from rl.run.load import load

    given, overrides = train.split_arguments(arguments.config)
    config = load(given, overrides)
    if launch.launch(None, None, None) is not None:
        raise ConfigError("rl rollout runs in one process, and the cluster announces several")
    if config.run.dir is None:
        config = train.with_directory(config, _new_directory(given))
    choose_platform(config.platform)
    from rl.run import rollout  # imports jax

    rollout.check(config)
    if arguments.check:
        return train.check(config, given)
    print(files.changed_yaml(config), flush=True)
    use_program_cache(config.run.program_cache)
    rollout.rollout(config)
    return 0


def _new_directory(given: list[str]) -> str:
    """Returns runs/FILE-rollouts-NUMBER, next to runs/FILE-NUMBER of training."""
    name, _, _ = Path(train.new_directory(given)).name.rpartition("-")
    return train.new_directory([f"{name}-rollouts"])
