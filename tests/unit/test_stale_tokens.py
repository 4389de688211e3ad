"""Log-probabilities before an update, of batches with tokens that an older policy has sampled: both
kinds side by side.
"""

import contextlib
import dataclasses
from types import SimpleNamespace

import learners
import numpy as np
import pytest

from rl.errors import ModelError
from rl.stages import inputs, online
from rl.stages.sampling import staleness
from rl.training.updater import UpdateArguments

NOW = 3


@dataclasses.dataclass
class Case:
    """A stage, and a batch whose odd rows an older policy has sampled."""

    trainer: object
    state: object
    batch: object
    own: np.ndarray  # log-probabilities of the policy of this step

    def scored(self, *, exact: bool, version: int = NOW):
        """The batch of the step after `Stage._add_inputs`'s part on log-probabilities."""
        return self.data(exact=exact, version=version).batch

    def data(self, *, exact: bool, version: int = NOW) -> inputs.StepData:
        """The data of the step at the same point."""
        stage = online.Stage.__new__(online.Stage)
        stage.config = SimpleNamespace(generator=SimpleNamespace(exact=exact))
        stage.options, stage.algorithm, stage.trainer = (
            self.trainer.stage,
            self.trainer.algorithm,
            self.trainer,
        )
        timeline = SimpleNamespace(
            span=lambda name: contextlib.nullcontext(SimpleNamespace(seconds=0.0))
        )
        layout = self.trainer.graph.layout
        model = SimpleNamespace(graph=SimpleNamespace(layout=layout))
        progress = SimpleNamespace(version=version)
        stage.context = SimpleNamespace(progress=progress, timeline=timeline, model=model)
        stage.producer = stage.create_producer()
        data = inputs.StepData(self.state, self.batch)
        stage.log_probabilities(data)
        return data


def case(algorithm: dict, off: float = 1e-6, stale: float = 0.5, **keys) -> Case:
    """The sampler's log-probabilities are `off` from the policy's on fresh tokens, `stale` on the
    others."""
    trainer, state = learners.begin(
        learners.dense(), learners.stage({"name": "dapo"} | algorithm, **keys)
    )
    batch = learners.batch()
    batch = batch.replace(old_logp=None, entropy=None, old_values=None)
    own = trainer.logprobs(state.policy.params, batch)[0]
    rows = np.arange(len(own))[:, None] % 2 == 1
    mask = batch.mask != 0
    sampler = np.where(mask, own + np.where(rows, stale, off), 0).astype(np.float32)
    version = (np.where(rows, NOW - 1, NOW) * mask).astype(np.int32)
    return Case(trainer, state, batch.replace(sampler_logp=sampler, version=version), own)


@pytest.mark.parametrize("updates", [1, 2])
def test_exact_takes_the_old_log_probabilities_of_stale_tokens_from_the_policy(updates):
    it = case({}, updates_per_step=updates)
    batch, mask, rows = it.scored(exact=True), it.batch.mask != 0, np.arange(len(it.own)) % 2 == 1
    fresh, stale = mask & ~rows[:, None], mask & rows[:, None]
    assert fresh.any() and stale.any()
    assert (batch.old_logp == it.batch.sampler_logp)[fresh].all()
    assert (batch.old_logp == it.own)[stale].all()
    assert batch.entropy is None  # the same program as in a step without stale tokens


def test_exact_takes_them_all_from_the_sampler_where_none_is_stale_or_the_algorithm_says_so():
    it = case({})
    it.batch = it.batch.replace(version=np.where(it.batch.mask != 0, NOW, 0))
    assert it.scored(exact=True).old_logp is it.batch.sampler_logp
    it = case({"old_logp": "sampler"})
    assert (it.scored(exact=True).old_logp == it.batch.sampler_logp).all()


def test_without_exact_one_update_needs_no_old_log_probabilities():
    assert case({}).scored(exact=False).old_logp is None
    assert case({}, max_logp_diff=0.1).scored(exact=False).old_logp is None


@pytest.mark.parametrize(
    ("algorithm", "exact", "passes"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"old_logp": "sampler"}, False, False),
        ({"dynamic_batches": 0}, True, False),
    ],
)
def test_the_gap_of_a_token_leaves_out_changes_of_the_policy(algorithm, exact, passes):
    """Two updates: without a pass before them, only the first one knows the weights that
    sampled."""
    it = case(algorithm, off=0.25, updates_per_step=2)
    data, half = it.data(exact=exact), len(it.own) // 2
    assert (data.trainer_logp is not None) == passes
    # the first update's numbers, unless a pass ran
    first_logp = it.own[:half] + (7 if passes else 0)
    gap = staleness.logp_diff(it.batch, data.trainer_logp, first_logp, NOW)
    known = (it.batch.mask != 0) & (np.arange(len(it.own)) % 2 == 0)[:, None]
    if not passes:
        known[half:] = False
    np.testing.assert_allclose(gap[known], -0.25, atol=1e-5)
    assert np.isnan(gap[(it.batch.mask != 0) & ~known]).all() and known.any()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_difference_of_sampler_and_trainer_is_that_of_fresh_tokens(updates, exact):
    how = {"max_logp_diff": 1e-2, "updates_per_step": updates}
    case({}, **how).scored(exact=exact)  # stale tokens are 0.5 apart
    it = case({}, off=2e-2, stale=0.0, **how)
    with pytest.raises(ModelError, match=r"differ by 0\.02 per token"):
        it.scored(exact=exact)
    it.scored(exact=exact, version=NOW + 1)  # all are stale


def test_no_token_of_another_run_has_the_weights_of_this_one():
    """Equal versions count the updates of two runs."""
    it = case({}, max_logp_diff=1e-9)
    it.batch = it.batch.replace(version=np.where(it.batch.mask != 0, NOW, 0))
    options = it.trainer.stage
    it.trainer.stage = options.model_copy(update={"rollouts": "runs/earlier"})
    data = it.data(exact=True)
    mask = it.batch.mask != 0
    assert (data.batch.old_logp == it.own)[mask].all()
    assert staleness.staleness(it.batch, None) == (True, {})
    assert np.isnan(staleness.logp_diff(it.batch, it.own, it.own, None)).all()


def test_a_trainer_without_a_critic_says_so():
    it = case({})
    with pytest.raises(
        ValueError, match="this trainer has no critic, .* dapo names no input `values`"
    ):
        it.trainer.values(it.state, it.batch)


def test_an_array_of_a_mini_batch_has_a_value_per_row_or_is_a_scalar():
    it = case({})
    batch = it.batch.replace(version=None, advantages=it.own)
    total = it.trainer.loss_inputs(batch)
    arguments = UpdateArguments(batch, dataclasses.replace(total, mean_weight=np.ones(3)))
    (call,) = it.trainer.update_calls(it.state, arguments, 4)
    with pytest.raises(TypeError, match="cannot reshape"):
        call.lower()
