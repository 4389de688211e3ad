"""Selects the weights that a stage trains.

All other weights stay bit-identical: no gradient, no weight decay, no moments, no bias update.
"""

from __future__ import annotations

from collections.abc import Iterable

from policy.config import Runtime
from policy.layers.layer_embeddings import TABLE

INDEXER = ".indexer."
"""Is part of the path of every weight of a key indexer (policy/attention/indexer.py)."""
MODULES = "mtp."
"""Starts the path of every weight of a prediction module (policy/heads/multi_token_prediction.py)."""


def trained_paths(paths: Iterable[str], runtime: Runtime) -> frozenset[str]:
    """Returns the paths of the weights that are trained.

    Indexers and prediction modules are trained only by their own losses, so without these losses they stay as they are.
    During dense warm-up only indexers are trained. The table of the embeddings for each layer is trained if the runtime
    says so.
    """

    def is_trained(path: str) -> bool:
        if path.startswith(MODULES) and runtime.mtp is None:
            return False
        if path == TABLE and not runtime.train_layer_embeddings:
            return False
        return runtime.indexer != ("off" if INDEXER in path else "dense_warmup")

    return frozenset(filter(is_trained, paths))
