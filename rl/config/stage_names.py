"""Names the stages of a run. Imports nothing, so that readers of run folders start fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def numbered(algorithms: Sequence[str]) -> list[str]:
    """Returns the names of stages with these algorithms: the algorithm, and a number from its
    second use on (grpo-2).
    """
    counts = [algorithms[: place + 1].count(name) for place, name in enumerate(algorithms)]
    return [
        name if count == 1 else f"{name}-{count}"
        for name, count in zip(algorithms, counts, strict=True)
    ]


def stage_names(config: Mapping[str, object]) -> list[str]:
    """Returns the names of the stages of a saved configuration, given as plain values."""
    stages = config.get("stages")
    algorithms = []
    for stage in stages if isinstance(stages, list) else ():
        algorithm = stage.get("algorithm") if isinstance(stage, Mapping) else None
        algorithms.append(
            str(algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm)
        )
    return numbered(algorithms)
