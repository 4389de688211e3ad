"""The adapter of a run: where it begins, over which weights."""

from __future__ import annotations

from policy.adapters.learning import Adapters, is_adapter
from policy.model import Model
from rl.config.run import RunConfig


def trains_adapter(config: RunConfig, stage: int) -> bool:
    """Whether the stage with this number trains the adapter of the run."""
    return config.model.adapter is not None and config.stages[stage].trains != "weights"


def begin(model: Model, config: RunConfig) -> bool:
    """Gives the model its adapter, over its present weights, unless it has one. Returns whether it
    got one."""
    if any(map(is_adapter, model.params)):
        return False
    adapters = Adapters(model.graph)
    model.params = {**model.params, **adapters.init(model.params, config.seed)}
    return True
