"""Updates whose sequences share beginnings move metrics and weights as those of sequences alone do:
every algorithm, owners of tokens that several sequences have, biases of experts, replayed routes,
indexers and prediction modules.
"""

import functools

import learners
import numpy as np
import pytest
import shared_prefixes
from oracles import configuration, random_model

import rl.algorithms
from policy import families
from policy.cache.step import UNKNOWN
from policy.modes import VALUE_HEAD
from rl.training.packing.trees import Sharing
from rl.training.reward_model import RewardModelScorer

VOCAB = learners.VOCAB
FIRST = ("ppo", "dpo")
SAMPLED = [name for name in rl.algorithms.known() if rl.algorithms.get(name).stage == "online"]


def check(model, options, data, sharing=Sharing(length_factor=2), alone=None) -> dict:
    """Returns the metrics with trees. alone: the batch of the sequences alone, if it is another."""
    (alone, expected), (metrics, weights) = shared_prefixes.moved(
        model, options, data, sharing, alone=alone
    )
    for name, value in alone.items():
        if not name.startswith("perf/"):
            assert metrics[name] == pytest.approx(value, rel=2e-5, abs=2e-5), name
    assert max(float(np.abs(change).max()) for change in expected.values()) > 1e-4
    worst = shared_prefixes.differences(expected, weights)
    assert max(worst.values()) < 1e-4, max(worst.items(), key=lambda each: each[1])
    return metrics


def marked(names):
    return [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(SAMPLED))
def test_algorithms_that_sample(name):
    check(learners.dense(), learners.stage(name), shared_prefixes.groups(VOCAB))


@pytest.mark.parametrize("name", marked(["dpo", "reward_model"]))
def test_pairs(name):
    data = shared_prefixes.pairs(VOCAB)
    check(learners.dense(), learners.stage(name), data, Sharing(length_factor=1, together=True))


@pytest.mark.slow
def test_pairs_in_micro_batches():
    data, sharing = shared_prefixes.pairs(VOCAB), Sharing(length_factor=1, together=True)
    check(
        learners.dense(),
        learners.stage({"name": "dpo", "loss_type": "ipo"}, micro_batch=1),
        data,
        sharing,
    )


EPISODES = [
    (0, [(1, 0), (2, 0), (3, 0), (7, 1), (8, 1), (4, 0), (9, 1), (5, 1)]),  # trains on a turn
    (0, [(1, 0), (2, 0), (3, 0), (7, 0), (8, 0), (4, 0), (6, 1), (6, 1)]),  # that two others read
    (0, [(1, 0), (2, 0), (3, 0), (7, 0), (8, 0), (4, 0), (6, 0), (5, 1), (1, 1)]),
    (0, [(1, 0), (2, 0), (3, 0), (7, 0), (9, 1)]),
    (0, [(1, 0), (2, 0), (3, 0), (7, 1), (8, 1)]),  # a beginning of the first, trained on as well
    (1, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (11, 1), (12, 1)]),
    (1, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (11, 1), (12, 1)]),  # identical completions
    (1, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (13, 1)]),  # a completion of one token
    (1, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (13, 0)]),  # nothing is trained on
    (1, [(1, 0), (2, 0), (3, 0)]),  # all of it is prompt
    (2, [(1, 0), (2, 1)]),
]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "kl_coef": 0.1, "aggregation": "prompt"},
        pytest.param(
            {"name": "grpo", "kl_coef": 0.1, "aggregation": "sequence"}, marks=pytest.mark.slow
        ),
        pytest.param({"name": "gspo"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_turn_that_one_row_trains_on_and_others_read(algorithm):
    data = shared_prefixes.rows(EPISODES, VOCAB)
    data = data.replace(
        old_logp=np.where(data.mask > 0, data.old_logp, np.nan)
    )  # read where the owner trains alone
    check(learners.dense(), learners.stage(algorithm), data)
    trainer, state = shared_prefixes.pair(learners.dense(), learners.stage(algorithm))[1]
    packing = trainer.packing_of(data)[0]
    for row, packed in zip(packing.tree.count, packing.segments, strict=True):
        assert ((packed > 0) | (row != 1)).all()
    logp = trainer.logprobs(state.policy.params, data)[0]
    np.testing.assert_array_equal(logp[0, 3:6], logp[1, 3:6])


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("balance", ["sequence", "batch"])
def test_experts_count_a_token_for_each_of_its_sequences(balance, micro_batch):
    """Ten updates, after each of which the biases move by the counts."""
    router = {"bias_rate": 0.05, "balance_coef": 0.3, "balance": balance}
    options = learners.stage(
        "grpo", router=router, micro_batch=micro_batch, optimizer={"learning_rate": 1e-3}
    )
    data = shared_prefixes.groups(VOCAB)
    (_, alone), (_, trees) = shared_prefixes.moved(learners.experts(), options, data, updates=10)
    biases = [path for path in alone if "correction_bias" in path]
    assert biases and all(np.abs(alone[path]).max() > 0.1 for path in biases)
    for path in biases:
        np.testing.assert_array_equal(trees[path], alone[path])
    check(learners.experts(), options, data)


@pytest.mark.slow
def test_replayed_routes_that_are_equal_unknown_or_differ():
    data, model = shared_prefixes.groups(VOCAB), learners.experts()
    rng = np.random.default_rng(1)
    by_token = np.argsort(rng.random((VOCAB, 8)), axis=-1)[:, :2]
    routes = by_token[data.tokens][:, :, None].astype(np.int8)
    routes[4, 1] = (routes[4, 1] + 1) % 8  # a row of the second group that took other experts
    routes[7:11, :3] = UNKNOWN  # nobody knows
    known = data.replace(routes={"stacks.0.layers.0": routes.copy()})
    routes[1, 2:5] = UNKNOWN  # not recorded for this row, but for others of its group
    data = data.replace(routes={"stacks.0.layers.0": routes})
    options = learners.stage("grpo", router_replay=True, router={"bias_rate": 0.05})
    metrics = check(model, options, data, alone=known)
    assert 0 < metrics["moe/replayed"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("training", ["sparse", "off"])
def test_indexers_count_a_token_for_each_of_its_sequences(training):
    check(
        learners.indexed(),
        learners.stage("grpo", indexer={"training": training}),
        shared_prefixes.groups(VOCAB),
    )


@functools.cache
def predicting(depth: int):
    keys = learners.SIZES | {"duet": {"multi_token_prediction": {"depth": depth}}}
    return random_model(families.read(configuration("Llama", **keys)), runtime=learners.QUICK)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_prediction_modules_at_a_branch(depth):
    metrics = check(
        predicting(depth),
        learners.stage("grpo", mtp={}),
        shared_prefixes.groups(VOCAB),
        Sharing(2, ahead=depth),
    )
    assert metrics["mtp/loss"] > 0


@pytest.mark.slow
def test_modules_need_the_tokens_that_follow_a_branch():
    """Without tokens ahead a beginning would predict the tokens of one of its sequences."""
    data = shared_prefixes.groups(VOCAB)
    (alone, _), (metrics, _) = shared_prefixes.moved(
        predicting(2), learners.stage("grpo", mtp={}), data, Sharing(2)
    )
    assert metrics["mtp/loss"] != pytest.approx(alone["mtp/loss"], rel=1e-4)


def test_reward_models_score_completions_of_a_prompt_together():
    graph, params = learners.dense().graph, learners.dense().params
    head = np.random.default_rng(0).normal(size=graph.config.hidden_size).astype(np.float32)
    data = shared_prefixes.groups(VOCAB, ((5, (6, 9, 4, 7)), (9, (2, 10, 5, 5)), (1, (4, 1, 3, 8))))
    sequences = [
        row[: int(n)].tolist() for row, n in zip(data.tokens, data.segments.sum(1), strict=True)
    ]
    one, other = (
        RewardModelScorer(graph, params | {VALUE_HEAD: head}, 20, how)
        for how in (None, Sharing(length_factor=2))
    )
    expected = one(sequences)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(other(sequences, samples=4), expected, atol=1e-5)
    np.testing.assert_allclose(other(sequences), expected, atol=1e-5)
    assert other.executable.number == 1
