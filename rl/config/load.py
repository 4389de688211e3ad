"""Loads a run's configuration: files and overrides in, a checked `RunConfig` out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.config.files import _merged, _report, validate
from rl.config.run import RunConfig
from rl.errors import ConfigError


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, merges and checks a configuration. Imports no jax.

    Args:
        paths: YAML files, or the directory of a run, which stands for its saved configuration. A file that does not
            exist is looked for among the packaged ones (`tiny`, `quickstart.yml`, `configs/quickstart.yml`).
        overrides: texts `key.path=value`; `resume=DIRECTORY` is the same as naming that directory first.

    Raises:
        ConfigError: with one line for each thing wrong, `file:line: key.path: what (hint)`.
    """
    from rl.config import checks

    tree = _merged(list(paths), list(overrides))
    config, problems = validate(tree)
    if config is not None:
        # What disagrees with a value that was left out, and so stood at its default, is no finding.
        left_out = [path[:-1] for path, text in problems if not text.startswith("unknown")]
        found = checks.problems(config)
        problems += [one for one in found if not any(near and one[0][: len(near)] == near for near in left_out)]
    if problems:
        raise ConfigError(_report(tree, problems))
    return config
