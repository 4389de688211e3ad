"""Loads the configuration of a run from files and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rewards.registry import REWARD_MODEL
from rl.config.data import RewardSettings
from rl.config.files import merged, report, validate
from rl.config.run import RunConfig
from rl.data import models
from rl.errors import ConfigError


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, merges and checks a configuration. Imports no jax.

    Names on the Hugging Face hub get the commit that they stand for now, `hf://org/name@COMMIT`, so
    that a run that is continued from its saved configuration has the same files after a branch has
    moved.

    Args:
        paths: YAML files, or the directory of a run, for its saved configuration. A name that is no
        file can be a
            packaged configuration (`tiny`, `quickstart.yml`, `configs/quickstart.yml`).
        overrides: texts `key.path=value`. `resume=DIRECTORY` is equal to that directory as the
        first path.

    Raises:
        ConfigError: with one line per fault, `file:line: key.path: what (hint)`.
        ModelError: a model, reward model or tokenizer of the Hugging Face hub cannot be read, and
        there is no other
            problem.
    """
    from rl.run import checks

    tree = merged(list(paths), list(overrides))
    config, faults = validate(tree)
    if config is not None:
        # The schema refused some values, which have their defaults here: ignore faults near them.
        left_out = [each.key[:-1] for each in faults if not each.text.startswith("unknown")]
        faults += [
            each
            for each in checks.faults(config)
            if not any(near and each.key[: len(near)] == near for near in left_out)
        ]
    if faults or config is None:
        raise ConfigError(report(tree, faults))
    return _pinned(config)


def saved(directory: Path) -> RunConfig:
    """Reads the configuration of a run's folder. Checks only values, since files of the data and of
    rewards that it names may be gone. Raises ConfigError."""
    tree = merged([directory], [])
    config, faults = validate(tree)
    if faults or config is None:
        raise ConfigError(report(tree, faults))
    return config


def _pinned(config: RunConfig) -> RunConfig:
    """Returns the configuration with commits in its names on the hub. Raises as
    `models.directory`."""
    model = config.model.model_copy(update={"source": models.pinned(config.model.source)})
    tokenizer = config.tokenizer
    if tokenizer is not None and tokenizer.source is not None:
        tokenizer = tokenizer.model_copy(
            update={"source": models.pinned(tokenizer.source, "tokenizer")}
        )
    stages = [
        stage.model_copy(update={"rewards": _pinned_rewards(stage.rewards)})
        for stage in config.stages
    ]
    rewards = _pinned_rewards(config.rewards)
    return config.model_copy(
        update={"model": model, "tokenizer": tokenizer, "stages": stages, "rewards": rewards}
    )


def _pinned_rewards(rewards: RewardSettings | None) -> RewardSettings | None:
    if rewards is None:
        return None
    functions = []
    for each in rewards.functions:
        if each.name == REWARD_MODEL and isinstance(source := each.options.get("source"), str):
            each = each.model_copy(
                update={"options": each.options | {"source": models.pinned(source, "reward model")}}
            )
        functions.append(each)
    return rewards.model_copy(update={"functions": functions})
