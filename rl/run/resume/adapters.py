"""The adapter of a run: where it begins, over which weights."""

from __future__ import annotations

from policy.adapters.learning import Adapters, is_adapter
from policy.model import Model
from rl.config.run import RunConfig


def trains_adapter(config: RunConfig, stage: int) -> bool:
    """Whether the stage with this number trains the adapter of the run."""
    return config.model.adapter is not None and config.stages[stage].trains != "weights"


def has_adapter(model: Model) -> bool:
    """Whether the weights of the model have an adapter."""
    return any(map(is_adapter, model.params))


def begin(model: Model, config: RunConfig) -> None:
    """Gives the model its adapter, over its present weights."""
    adapters = Adapters(model.graph)
    model.params = {**model.params, **adapters.init(model.params, config.seed)}
