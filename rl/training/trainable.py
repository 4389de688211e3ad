"""Selects the weights that a stage trains.

All other weights stay bit-identical: no gradient, no weight decay, no moments, no bias update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from policy.config import Runtime
from policy.layers.layer_embeddings import TABLE

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
