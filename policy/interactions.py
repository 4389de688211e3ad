"""Which features of a decoder and of how it is computed do not go together. Free of jax, so that a run's file is refused before
anything starts.

A feature is named by the key of a run's YAML file that switches it on, or by what the model has.
"""

from __future__ import annotations

from collections.abc import Iterator

from policy.config import DecoderConfig, DenseAndExperts, GatedDeltaNet, LatentAttention, Moe, Runtime

INDEXER, DELTA_NET, EXPERTS = "an indexer of keys", "a gated delta net", "a mixture of experts"
HYPER, ENGRAM, MODULES = "model.hyper_connections", "model.engram", "model.multi_token_prediction"
CONTEXT = "mesh.context"

# Unordered pairs, and why.
APART: dict[tuple[str, str], str] = {}


def features(config: DecoderConfig, runtime: Runtime) -> frozenset[str]:
    """Names of those that are on."""
    mixers, feed_forwards = ([getattr(spec, part) for spec in config.layers] for part in ("mixer", "feed_forward"))
    found = {
        INDEXER: any(isinstance(m, LatentAttention) and m.indexer is not None for m in mixers),
        DELTA_NET: any(isinstance(m, GatedDeltaNet) for m in mixers),
        EXPERTS: any(isinstance(f, Moe | DenseAndExperts) for f in feed_forwards),
        HYPER: config.hyper_connections is not None,
        ENGRAM: any(spec.memory is not None for spec in config.layers),
        MODULES: config.multi_token_prediction is not None,
    }
    return frozenset(name for name, on in found.items() if on)


def conflicts(on: frozenset[str]) -> Iterator[str]:
    """What is wrong with these features together, one text for each pair that is refused."""
    for (one, other), reason in APART.items():
        if {one, other} <= on:
            yield f"{one} and {other} do not go together: {reason}"
