"""Which weights a stage moves. The others stay as they are to the last bit: no gradient, no weight decay, no moments, no bias
update."""

from __future__ import annotations

from collections.abc import Iterable

from policy.config import Runtime

INDEXER = ".indexer."
"""Stands in the path of every weight of an indexer of keys (policy/attention/indexer.py)."""
MODULES = "mtp."
"""Starts the path of every weight of a prediction module (policy/heads/multi_token_prediction.py)."""


def learned(paths: Iterable[str], runtime: Runtime) -> frozenset[str]:
    """Those of `paths` that move. Indexers and prediction modules learn from nothing but losses of their own, so without those
    they stay; during their dense warm-up indexers are all that learns."""

    def moves(path: str) -> bool:
        if path.startswith(MODULES) and runtime.mtp is None:
            return False
        return runtime.indexer != ("off" if INDEXER in path else "dense_warmup")

    return frozenset(filter(moves, paths))
