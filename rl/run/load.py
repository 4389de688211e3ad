"""Loads the configuration of a run from files and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.config.files import _merged, _report, validate
from rl.config.run import RunConfig
from rl.data import models
from rl.errors import ConfigError


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, merges and checks a configuration. Imports no jax.

    Args:
        paths: YAML files, or the directory of a run, for its saved configuration. A name that is no file can be a
            packaged configuration (`tiny`, `quickstart.yml`, `configs/quickstart.yml`).
        overrides: texts `key.path=value`. `resume=DIRECTORY` is equal to that directory as the first path.

    Raises:
        ConfigError: with one line per problem, `file:line: key.path: what (hint)`.
        ModelError: the configuration of a model of the Hugging Face hub cannot be read, and there is no other problem.
    """
    from rl.run import checks

    tree = _merged(list(paths), list(overrides))
    config, problems = validate(tree)
    if config is not None:
        # The schema refused some values, which have their defaults here: ignore problems near them.
        left_out = [path[:-1] for path, text in problems if not text.startswith("unknown")]
        checked = checks.problems(config)
        problems += [one for one in checked if not any(near and one[0][: len(near)] == near for near in left_out)]
    if problems or config is None:
        raise ConfigError(_report(tree, problems))
    models.directory(config.model.source)
    return config
