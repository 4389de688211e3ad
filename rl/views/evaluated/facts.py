"""The headline numbers of an evaluation."""

from __future__ import annotations

from rl.evaluation import files
from rl.views.report.read import RecordedRun

Tile = tuple[str, str, str]
"""The name of a number, its value, and a line below it."""
_TILES = 4


def model_name(run: RecordedRun) -> str:
    """Returns the model that was evaluated, with its checkpoint."""
    model = run.evaluation.get("model")
    values = model if isinstance(model, dict) else {}
    place = values.get("checkpoint")
    return f"{values.get('name', 'a model')}{f', {place}' if place else ''}"


def tiles(run: RecordedRun) -> list[Tile]:
    """Returns the accuracy of the first score of each task, of the first tasks; [] for a run."""
    made = []
    for name, task in files.results(run.evaluation).items():
        score, values = next(iter(task["scores"].items()))
        if (each := values["accuracy"]) is not None:
            interval = f"95%: {each['low']:.3f} to {each['high']:.3f}, n {each['n']:,}"
            made.append((f"{name} {score}", f"{each['value']:.3f}", interval))
    return made[:_TILES]
