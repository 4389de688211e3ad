"""Which weights a stage moves. The others stay as they are to the last bit: no gradient, no weight decay, no moments, no bias
update."""

from __future__ import annotations

from collections.abc import Iterable

INDEXER = ".indexer."
"""Stands in the path of every weight of an indexer of keys (policy/layers/indexer.py)."""


def learned(paths: Iterable[str], indexer: str) -> frozenset[str]:
    """Those of `paths` that move under `Runtime.indexer`. Indexers learn from nothing but their own loss, so without it they stay;
    during their dense warm-up they are all that learns."""
    every = frozenset(paths)
    indexers = frozenset(path for path in every if INDEXER in path)
    return {"off": every - indexers, "dense_warmup": indexers, "sparse": every}[indexer]
