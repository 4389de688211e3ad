"""How far the weights that drew the tokens of a step are from the current ones, in updates and in
log-probabilities.

`version` is that of the current weights. None: the versions of the batch count the updates of
another run, so that no token is known to be of the current weights, and all are stale.

N rows, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rl.errors import ModelError

if TYPE_CHECKING:
    from rl.training.batch import Batch


def stale_tokens(batch: Batch, version: int | None) -> np.ndarray:
    """Returns bool[N, T]: the tokens of the mask that a policy older than `version` sampled."""
    trained_NT = batch.mask != 0
    return trained_NT if version is None else trained_NT & (batch.version != version)


def staleness(batch: Batch, version: int | None) -> tuple[bool, dict[str, float]]:
    """Counts the updates between the weights that sampled each token of the mask and the current
    weights.

    Returns (whether any token is stale, metrics); no metrics without a version.
    """
    assert batch.version is not None
    if version is None:
        return bool(np.any(batch.mask)), {}
    stale = version - batch.version[batch.mask != 0]
    if not stale.size:
        return False, {}
    metrics = {
        "async/staleness_mean": float(stale.mean()),
        "async/staleness_max": float(stale.max()),
    }
    return bool(stale.any()), metrics


def logp_diff(
    batch: Batch, trainer_logp: np.ndarray | None, first_logp: np.ndarray, version: int | None
) -> np.ndarray:
    """Returns float32[N,T]: log-probabilities of the trainer minus those of the generator, under
    the same weights.

    trainer_logp: of a pass before the updates; None: the step ran none. first_logp: what the first
    update computed before it changed the weights, which is used then. The tokens of later updates
    are NaN: their log-probabilities include the change of the policy. So are tokens that a policy
    older than `version` sampled.
    """
    if version is None:
        return np.full(batch.mask.shape, np.nan, np.float32)
    assert batch.sampler_logp is not None
    logp_NT = trainer_logp
    if logp_NT is None:
        logp_NT = np.full(batch.mask.shape, np.nan, np.float32)
        logp_NT[: len(first_logp)] = first_logp
    return np.where(batch.version == version, logp_NT - batch.sampler_logp, np.float32(np.nan))


def mean_logp_diff(batch: Batch, version: int | None) -> float | None:
    """Returns the mean |old_logp - sampler_logp| of the tokens of the mask that are not stale; None
    if all are."""
    assert batch.old_logp is not None and batch.sampler_logp is not None
    on_policy_NT = (batch.mask != 0) & ~stale_tokens(batch, version)
    if not on_policy_NT.any():
        return None
    return float(np.abs(batch.old_logp - batch.sampler_logp)[on_policy_NT].mean())


def check_logp_diff(limit: float | None, logp_diff: float | None) -> None:
    """Raises ModelError where generator and trainer differ by more than `limit`, which is
    `max_logp_diff`."""
    if limit is not None and logp_diff is not None and not logp_diff <= limit:
        raise ModelError(
            f"the log-probabilities of generator and trainer differ by {logp_diff:.3g} per token "
            f"in the mean, more than max_logp_diff ({limit:g}). Use `generator.exact: true`, "
            "`router_replay: true` or a wider dtype; the last checkpoint is from before this step"
        )
