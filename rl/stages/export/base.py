"""Where the weights under the adapter of a run are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl.data import models
from rl.errors import ModelError
from rl.stages import kind_of

if TYPE_CHECKING:
    from rl.config.run import RunConfig

FOLDER = "base"
"""Of a run: the weights that its stages trained before the adapter, or that a run without a
directory of a model gave its adapter to."""


def is_trained(config: RunConfig) -> bool:
    """Whether stages train the weights of the policy before the first one that trains the adapter
    of the run."""
    for options in config.stages:
        if options.trains != "weights":
            return False
        if kind_of(options).trains_policy:
            return True
    return False


def directory_of(config: RunConfig) -> Path | None:
    """Returns the directory of the base; None if its weights are random. Raises ModelError if it is
    gone."""
    if not is_trained(config):
        return models.directory(config.model.source, weights=True)
    directory = config.directory / FOLDER
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory}: no config.json there; the run keeps in this folder the weights that its "
            "adapter was trained over. Restore the folder, or start a new run in another run.dir"
        )
    return directory
