"""Updates without a token in the loss have no metrics of it, and teach nothing to what follows
metrics."""

import contextlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from algorithms_fixture import LOGP, MASK, inputs

import rl.algorithms
from rl.stages.stage import StageKind
from rl.training.batch_updates import LOSS_TOKENS, without_empty

OF_THE_UPDATE = {
    "optim/lr": 0.1,
    "optim/skipped": 0.0,
    "moe/max_load": 2.0,
    "perf/packed_share": 0.5,
}


@pytest.mark.parametrize(
    ("name", "options"),
    [("grpo", {}), ("cispo", {}), ("vespo", {}), ("sft", {}), ("raft", {"threshold": 5.0})],
)
def test_means_of_nothing_are_left_out(name, options):
    algorithm = rl.algorithms.get(name, **options)
    mask = MASK if name == "raft" else 0 * MASK  # raft keeps no completion of these rewards
    advantages = algorithm.advantages([[1.0, 0.0, 0.5, 0.0]])[0] if name == "raft" else np.zeros(4)
    arrays = inputs(mask=mask, advantages=advantages, entropy=np.ones_like(LOGP))
    given = algorithm.with_totals(arrays)
    _, metrics = algorithm.loss(given)
    assert metrics["entropy"] == 0.0
    metrics |= {LOSS_TOKENS: given.num_tokens, "loss": 0.0} | OF_THE_UPDATE
    assert {
        key for key in without_empty(metrics) if not key.startswith("sequences/")
    } == OF_THE_UPDATE.keys()


def test_the_metrics_of_a_step_are_those_of_the_updates_with_tokens():
    """An entropy of 0 would raise the coefficient of an entropy target, and a loss of 0 end a stage
    by `until`."""
    adapted = []
    updates = iter([(0.0, 0.0), (8.0, 2.5)])  # tokens, entropy

    class Trainer:
        total_flops = 0.0

        def policy_params(self, state):
            return {}

        def update(self, state, batch, **options):
            tokens, entropy = next(updates)
            return state, {
                LOSS_TOKENS: np.float32(tokens),
                "entropy": entropy,
                "loss": entropy,
                "optim/lr": 0.1,
            }

    algorithm = SimpleNamespace(
        first_update_metrics=frozenset({"loss"}),
        adapt_after_update=lambda coefs, metrics: adapted.append(metrics["entropy"]) or coefs,
    )
    progress = SimpleNamespace(adaptive_coefs={"entropy_coef": 0.1}, version=0)
    span = contextlib.nullcontext(SimpleNamespace(seconds=0.0))
    context = SimpleNamespace(
        progress=progress,
        model=SimpleNamespace(
            params=None, graph=SimpleNamespace(layout=SimpleNamespace(peak_flops=None))
        ),
        timeline=SimpleNamespace(span=lambda name: span),
        tables=None,
    )
    stage = SimpleNamespace(
        context=context,
        options=SimpleNamespace(updates_per_step=2),
        trainer=Trainer(),
        trains_policy=True,
        algorithm=algorithm,
        data_metrics=dict,
    )
    stage._one_update = partial(StageKind._one_update, stage)

    class Rows(SimpleNamespace):
        def rows(self, part):
            return SimpleNamespace(mask=self.mask[part])

    batch = Rows(prompt=np.zeros(2), mask=np.array([[0.0], [1.0]]), filled_tokens=2)
    state = SimpleNamespace(policy=SimpleNamespace(params={}))
    _, metrics = StageKind.update(stage, state, batch, 1)
    assert metrics["entropy"] == metrics["loss"] == 2.5 and metrics["optim/lr"] == pytest.approx(
        0.1
    )
    assert adapted == [2.5] and LOSS_TOKENS not in metrics
