"""Selects the weights that a stage trains.

All other weights stay bit-identical: no gradient, no weight decay, no moments, no bias update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from policy.config import Runtime
from policy.layers.layer_embeddings import TABLE
from policy.media import TOWERS, is_tower
from policy.model import Graph
from rewards.suggest import nearest
from rl.config.stage import StageOptions
from rl.errors import ConfigError

INDEXER = ".indexer."
"""Is part of the path of every weight of a key indexer (policy/attention/indexer.py)."""
MODULES = "mtp."
"""Starts the path of every weight of a prediction module
(policy/heads/multi_token_prediction.py)."""


def is_named(path: str, name: str) -> bool:
    """Whether `name` names the weight at `path`: it is the path, or parts at its beginning."""
    return path == name or path.startswith(f"{name}.")


def trained_paths(
    paths: Iterable[str], runtime: Runtime, frozen: Collection[str] = ()
) -> frozenset[str]:
    """Returns the paths of the weights that are trained.

    Indexers and prediction modules are trained only by their own losses, so without these losses
    they stay as they are. During dense warm-up only indexers are trained. The table of the
    embeddings for each layer is trained if the runtime says so. frozen: names of weights and of
    parts that are not trained.
    """

    def is_trained(path: str) -> bool:
        if path.startswith(MODULES) and runtime.mtp is None:
            return False
        if path == TABLE and not runtime.train_layer_embeddings:
            return False
        if any(is_named(path, name) for name in frozen):
            return False
        return runtime.indexer != ("off" if INDEXER in path else "dense_warmup")

    return frozenset(filter(is_trained, paths))


def frozen_weights(model: Any, stage: StageOptions) -> Sequence[str]:
    """Returns the names of weights that a stage does not train; only a policy has names that can be
    frozen."""
    if not isinstance(model, Graph):
        return ()
    return TOWERS if stage.freeze is None else stage.freeze


def check_freeze(graph: Graph, stages: Sequence[StageOptions]) -> Graph:
    """Returns the graph. Raises ConfigError for a name in `freeze` that no weight has, and if
    nothing is left to train. Names of weights of towers go with a model that was built without
    towers, for rows of text."""
    has_towers = any(map(is_tower, graph.paths))
    for number, stage in enumerate(stages):
        where = f"stages.{number}.freeze"
        for name in stage.freeze or ():
            absent = is_tower(name) and not has_towers
            if not absent and not any(is_named(path, name) for path in graph.paths):
                parts = sorted({path.partition(".")[0] for path in graph.paths})
                raise ConfigError(
                    f"{where}: the path of no weight begins with {name!r}{nearest(name, parts)}"
                )
        if not trained_paths(graph.paths, graph.runtime, frozen_weights(graph, stage)):
            raise ConfigError(f"{where}: no weight is left to train; name fewer parts")
    return graph
