"""The adapter of a run: what it is, where it begins, over which weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from policy.adapters.learning import Adapters
from policy.huggingface.peft.reader import Adapter, read_adapter
from policy.huggingface.peft.targets import TargetError, resolved
from policy.huggingface.reload import WeightsOnHost
from policy.huggingface.tensorfiles import ModelFileError
from policy.mesh import processes
from policy.model import Graph, Model
from rl.config.model import ModelOptions
from rl.config.run import RunConfig
from rl.data import models
from rl.errors import ConfigError, ModelError


def trains_adapter(config: RunConfig, stage: int) -> bool:
    """Whether the stage with this number trains the adapter of the run."""
    return config.model.adapter is not None and config.stages[stage].trains != "weights"


def with_adapter(graph: Graph, options: ModelOptions) -> Graph:
    """Returns the graph of a policy, whose adapter knows the weights that it adapts; itself for a
    model without one.

    Raises ConfigError for names that no weight has, ModelError for an adapter that cannot be read.
    """
    if options.adapter is None:
        return graph
    if options.adapter.source is not None:
        stored = _stored(options.adapter.source, graph, _ones(graph))
        spec = replace(stored.spec, dtype=options.adapter.dtype)
    else:
        spec = options.adapter.spec
    try:
        return graph.with_runtime(adapter=resolved(graph, spec))
    except TargetError as error:
        raise ConfigError(f"model.adapter.{error}") from None


def begin(model: Model, config: RunConfig) -> None:
    """Gives the model its adapter, over its present weights: a new one, or that of
    `model.adapter.source`. Raises ModelError if that cannot be read."""
    adapters = Adapters(model.graph)
    options = config.model.adapter
    assert options is not None  # the stage trains it
    if options.source is None:
        arrays = adapters.init(model.params, config.seed)
    else:
        weights = WeightsOnHost(model.graph, model.params)
        stored = _stored(options.source, model.graph, weights).params
        arrays = {
            path: processes.device_put_global(
                stored[path].astype(adapters.spec.dtype), adapters.shardings[path]
            )
            for path in adapters.sizes
        }
    model.params = {**model.params, **arrays}


def _ones(graph: Graph) -> dict[str, np.ndarray]:
    """Returns what stands for the weights where the description of an adapter is read alone."""
    one = np.float32(1)
    return {path: np.broadcast_to(one, graph.shapes[path].shape) for path in graph.paths}


def _stored(source: str, graph: Graph, weights: Mapping[str, np.ndarray]) -> Adapter:
    """Reads the adapter of a run from its directory, or from a repository of the hub."""
    directory = models.directory(source, weights=True) or Path(source)
    try:
        return read_adapter(directory, graph, weights)
    except ModelFileError as error:
        raise ModelError(f"model.adapter.source: {error}") from None
