"""A step on demonstrations or on preferred pairs: nothing is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rl.data.prepare import Stage
from rl.training.batch import Batch, pack, together
from rl.training.flops import rates
from rl.training.trainer import RunState, Trainer

if TYPE_CHECKING:
    from rl.run.state import Run
from rl.stages.update import _next, _update


def supervised(run: Run, stage: Stage, trainer: Trainer, state: RunState, step: int) -> tuple[RunState, dict]:
    """`updates_per_step` updates on the next `prompts_per_step` demonstrations, or pairs."""
    with run.timeline.span("data"):
        batch = _demonstrations(run, stage) if stage.pairs is None else _pairs(run, stage)
    metrics, done = {}, trainer.done
    if state.reference is not None:
        with run.timeline.span("log-probabilities") as scoring:
            batch = batch.replace(ref_logp=trainer.logprobs(state.reference, batch)[0])
        metrics |= {"time/logprob": scoring.seconds, "time/ref": scoring.seconds}
        metrics |= rates("logprob", trainer.done - done, batch.real, scoring.seconds, run.model.graph.layout)
    state, updated = _update(run, trainer, state, batch, critic_only=stage.algorithm.needs_scores)
    return state, metrics | updated | {"perf/step_tflop": (trainer.done - done) / 1e12}


def _demonstrations(run: Run, stage: Stage) -> Batch:
    return pack(stage.demonstrations.take(_next(run, stage, stage.demonstrations.total)), run.config.max_length)


def _pairs(run: Run, stage: Stage) -> Batch:
    """The two answers of a pair in a row."""
    pairs = stage.pairs.take(_next(run, stage, stage.pairs.total))
    batch = together([(pair.chosen, pair.rejected) for pair in pairs], 2 * run.config.max_length)
    margin = np.asarray([pair.margin for pair in pairs], np.float32)
    return batch.replace(margin=np.broadcast_to(margin[:, None], batch.tokens.shape))
