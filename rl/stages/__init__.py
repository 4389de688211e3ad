"""The kinds of stages: every file of this folder that defines a class `Stage` is one, and its name
is the kind.

An algorithm names its kind in `stage`. Nothing here imports jax before a stage is bound to a model:
`create` also serves the check of a configuration.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import rl.algorithms

if TYPE_CHECKING:
    from rl.config.run import RunConfig
    from rl.config.stage import StageOptions
    from rl.stages.stage import StageKind


def kind_of(options: StageOptions) -> type[StageKind]:
    """Returns the class of the stage that runs the algorithm of these options."""
    return importlib.import_module(f"{__name__}.{algorithm_of(options).stage}").Stage


def algorithm_of(options: StageOptions) -> Any:
    """Returns the algorithm of these options."""
    return rl.algorithms.get(options.algorithm.name, **(options.algorithm.model_extra or {}))


def create(config: RunConfig) -> list[StageKind]:
    """Returns the stages of a run, in order. They have read nothing yet."""
    return [kind_of(options)(config, index) for index, options in enumerate(config.stages)]
