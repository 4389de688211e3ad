"""Whether the updates of a stage made weights that can be used."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, NoReturn

from rl.errors import ModelError

if TYPE_CHECKING:
    from rl.stages.stage import StageKind, StageState


def check_weights(
    stage: StageKind, state: StageState, metrics: dict[str, float], *, last: bool
) -> None:
    """Checks the weights after a step of the stage with these metrics.

    Raises ModelError if its updates made weights that are not finite. After the last step raises it
    too if a weight or a moment is not finite, and if no update of the stage changed the weights and
    none of this step was finite. Updates with a gradient of 0, as from equal rewards, change
    nothing and alone are no error.
    """
    for key in metrics:
        if key.endswith("optim/update_norm") and not isfinite(metrics[key]):
            what = f"the last update made weights that are not finite ({key}: {metrics[key]})"
            _refuse(stage, what)
    if last:
        stage.trainer.check_updates(stage.learner(state), metrics)
        check_finite(stage, state)


def check_finite(stage: StageKind, tree: object) -> None:
    """Raises ModelError for a state, or weights, with a number that is not finite."""
    from rl.training.diagnostics import not_finite

    if path := not_finite(tree):
        _refuse(stage, f"{path} has a number that is not finite")


def _refuse(stage: StageKind, what: str) -> NoReturn:
    key = f"stages.{stage.index}.optimizer.learning_rate"
    raise ModelError(
        f"{stage.name}: {what}. Nothing is exported. If the weights were finite at the start, "
        f"set a smaller {key}, or model.dtype=float32, and start a new run"
    )
