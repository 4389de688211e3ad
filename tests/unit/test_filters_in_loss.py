"""A stage that samples with top_k, top_p or min_p takes every log-probability of its loss over the
ids that the filters left. The oracles are plain numpy, and finite differences of the expected
reward.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from trajectories import rollouts

from policy.config import LogitScaling
from policy.heads import kept, tiled
from policy.heads.head import Tiling
from policy.heads.vocab_tiles import Tiles
from policy.mesh.sharding import layout
from policy.modes import make_step
from rl.config.run import RunConfig
from rl.config.stage import SamplingOptions
from rl.data.datasets import Example
from rl.data.encoded import Problem
from rl.run.build import generator_options
from rl.stages import create
from rl.stages.producers.scored import ScoredGroup
from rl.stages.sampling import filters
from rl.training.batch import Batch
from rl.training.packing.trees import Sharing
from rl.training.weights import Weights
from rollout import Completion, SamplingParams
from rollout.engine.sampling import Draws, choose
from rollout.types import Trajectory

V, E, M = 23, 6, 7


def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def rows_of_ids(rng, M, V, K, none=()):
    """Targets int[M] and the ids of each, int[M, K] padded with -1; rows `none` have no id."""
    ids = np.full((M, K), -1, np.int32)
    for m in range(M):
        own = np.sort(rng.choice(V, rng.integers(1, K + 1), replace=False))
        ids[m, : len(own)] = own
    targets = np.array([rng.choice(row[row >= 0]) for row in ids], np.int32)
    ids[list(none)] = -1
    return targets, ids


def expected(z_MV, targets, ids):
    """Log-probability and entropy of each row, in float64."""
    logp, entropy = [], []
    for z, target, row in zip(z_MV.astype(np.float64), targets, ids, strict=True):
        left = (
            row[row >= 0]
            if (row >= 0).any()
            else np.setdiff1d(np.arange(len(z)), -2 - row[row < -1])
        )
        logs = log_softmax(z[left])
        logp.append(logs[list(left).index(target)])
        entropy.append(-(np.exp(logs) * logs).sum())
    return np.array(logp), np.array(entropy)


@pytest.mark.parametrize("tiles", [None, 3])
def test_log_probabilities_and_entropies_are_those_of_numpy(tiles):
    rng = np.random.default_rng(0)
    hidden, weight = (
        rng.normal(0, 1, (M, E)).astype(np.float32),
        rng.normal(0, 1, (V, E)).astype(np.float32),
    )
    targets, ids = rows_of_ids(rng, M, V, 5, none=(2,))
    ids[4] = [targets[4], -1, -1, -1, -1]
    ids[5] = [
        -2 - (targets[5] + 1) % V,
        -2 - (targets[5] + 4) % V,
        -1,
        -1,
        -1,
    ]  # ids that are left out
    logp, entropy = kept.logprobs(
        hidden, weight, targets, ids, 0.7, LogitScaling(softcap=3.0), Tiling(tiles)
    )
    logits = 3.0 * np.tanh(hidden.astype(np.float64) @ weight.T / 3.0) / 0.7
    numpy_logp, numpy_entropy = expected(logits, targets, ids)
    np.testing.assert_allclose(logp, numpy_logp, atol=2e-6)
    np.testing.assert_allclose(entropy, numpy_entropy, atol=2e-6)
    assert logp[4] == entropy[4] == 0


@pytest.mark.parametrize("tiles", [None, 3])
def test_the_gradient_is_that_of_the_plain_formula_and_padding_has_none(tiles):
    rng = np.random.default_rng(1)
    hidden, weight = (
        rng.normal(0, 1, (M, E)).astype(np.float32),
        rng.normal(0, 1, (V, E)).astype(np.float32),
    )
    targets, ids = rows_of_ids(rng, M, V, 5)
    ids[5] = [
        -2 - (targets[5] + 1) % V,
        -2 - (targets[5] + 4) % V,
        -1,
        -1,
        -1,
    ]  # ids that are left out
    factors = rng.normal(0, 1, (2, M)).astype(np.float32)
    allowed = np.zeros((M, V), bool)
    for m, row in enumerate(ids):
        allowed[m, row[row >= 0]] = True
    allowed[5] = True
    allowed[5, -2 - ids[5, :2]] = False

    def total(logp, entropy):
        return jnp.sum(factors[0] * logp + factors[1] * entropy)

    def plain(hidden, weight):
        z = jnp.where(allowed, hidden @ weight.T / 0.7, -1e30)
        logs = jax.nn.log_softmax(z)
        entropy = -jnp.sum(jnp.where(allowed, jnp.exp(logs) * logs, 0.0), axis=1)
        return total(logs[jnp.arange(M), targets], entropy)

    def own(hidden, weight):
        return total(*kept.logprobs(hidden, weight, targets, ids, 0.7, tiling=Tiling(tiles)))

    got, oracle = (
        jax.grad(f, argnums=(0, 1))(jnp.asarray(hidden), jnp.asarray(weight)) for f in (own, plain)
    )
    for a, b in zip(got, oracle, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    outside = ~allowed[np.arange(M) != 5].any(axis=0) & ~allowed[5]
    np.testing.assert_allclose(got[1][outside], 0, atol=1e-6)


def certain_of_what_is_left_out(p_left):
    """States and weights where two ids have all but about `p_left` of the probability, and a third
    is left out too. Rows of targets and of ids that are left out, coded as in a batch; the last row
    has none."""
    rng = np.random.default_rng(8)
    hidden, weight = rng.normal(0, 0.5, (M, E)), rng.normal(0, 0.5, (V, E))
    hidden[:, 0], weight[:, 0] = 1.0, 0.0
    weight[[0, 1], 0] = np.log(V / 2 / p_left)
    targets = rng.integers(3, V, M).astype(np.int32)
    ids = np.tile(np.array([-2, -3, -4, -1], np.int32), (M, 1))
    ids[-1] = -1
    return hidden.astype(np.float32), weight.astype(np.float32), targets, ids


def formula(hidden, weight, targets, ids, factors):
    """Log-probabilities, entropies, and the gradients of factors . (logp, entropy) in both arrays,
    in float64."""
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    logp, entropy = expected(hidden @ weight.T, targets, ids)
    g_z = np.zeros((len(hidden), len(weight)))
    for m, z in enumerate(hidden @ weight.T):
        left = np.setdiff1d(np.arange(len(z)), -2 - ids[m][ids[m] < -1])
        logs = log_softmax(z[left])
        g_z[m, left] = -np.exp(logs) * (factors[0, m] + factors[1, m] * (logs + entropy[m]))
        g_z[m, targets[m]] += factors[0, m]
    return (logp, entropy), (g_z @ weight, g_z.T @ hidden)


@pytest.mark.parametrize("p_left", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("form", ["chunks", "tiles"])
def test_ids_that_are_left_out_may_have_nearly_all_probability(form, p_left):
    hidden, weight, targets, ids = certain_of_what_is_left_out(p_left)
    factors = np.random.default_rng(9).normal(0, 1, (2, M)).astype(np.float32)

    def scored(hidden, weight):
        if form == "chunks":
            return kept.logprobs(hidden, weight, targets, ids, 1.0, tiling=Tiling(3))
        tiles = Tiles.of(layout({"fsdp": 1}, devices=jax.devices()[:1]), V, 12, LogitScaling())
        left_out = jnp.where(ids < -1, -2 - ids, -1)
        logp, entropy = tiled.logprobs(
            hidden, weight, targets[:, None], jnp.float32(1), left_out, tiles
        )
        return logp[:, 0], entropy

    def total(hidden, weight):
        logp, entropy = scored(hidden, weight)
        return jnp.sum(factors[0] * logp + factors[1] * entropy), (logp, entropy)

    got, numbers = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(
        jnp.asarray(hidden), jnp.asarray(weight)
    )
    numpy_numbers, numpy_gradients = formula(hidden, weight, targets, ids, factors)
    for a, b in zip((*numbers, *got), (*numpy_numbers, *numpy_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


def test_a_draw_records_the_ids_that_its_filters_left(all_optimizations):
    logits = np.random.default_rng(3).normal(0, 2, (4, V)).astype(np.float32)
    params = [
        SamplingParams(temperature=0.8, top_k=6, top_p=0.9),
        SamplingParams(temperature=1.5, min_p=0.02),
        SamplingParams(),
        SamplingParams(temperature=0),
    ]
    ids = tuple(np.arange(4, dtype=np.int32) for _ in range(3))
    drawn = jax.jit(functools.partial(choose, max_kept=8))(logits, ids, Draws.of(params, 0))
    plain = jax.jit(choose)(logits, ids, Draws.of(params, 0))
    np.testing.assert_array_equal(drawn.tokens, plain.tokens)
    np.testing.assert_array_equal(drawn.logprobs, plain.logprobs)
    assert plain.kept is None
    z = logits[0] / 0.8
    order = np.argsort(-z)[:6]
    mass = np.cumsum(np.exp(log_softmax(z[order])))
    left = np.sort(order[: 1 + int(np.sum(mass[:-1] < 0.9))])
    assert [i for i in drawn.kept[0].tolist() if i >= 0] == left.tolist() and drawn.kept_counts[
        0
    ] == len(left)
    exact = expected(
        z[None], drawn.tokens[:1], np.pad(left, (0, 8 - len(left)), constant_values=-1)[None]
    )[0]
    np.testing.assert_allclose(drawn.filtered_logprobs[:1], exact, atol=1e-6)
    z = logits[1] / 1.5
    left = np.flatnonzero(z >= z.max() + np.log(0.02))
    assert len(left) > 8 == np.count_nonzero(drawn.kept[1] >= 0) and drawn.kept_counts[1] == len(
        left
    )
    for row in (2, 3):
        assert drawn.kept_counts[row] == 0 and (drawn.kept[row] == -1).all()
        assert drawn.filtered_logprobs[row] == drawn.logprobs[row]


def segment(tokens, kept=None, counts=None):
    """A segment of one token of the prompt and these tokens."""
    (one,) = Trajectory.of_completion([0], completion(tokens, kept, counts)).segments
    return one


def completion(tokens, kept=None, counts=None):
    logprobs = [-1.0] * len(tokens)
    recorded = {}
    if kept is not None:
        array = np.full((len(tokens), max(map(len, kept))), -1, np.int32)
        for row, ids in zip(array, kept, strict=True):
            row[: len(ids)] = ids
        recorded = {
            "kept": array,
            "kept_counts": counts or list(map(len, kept)),
            "filtered_logprobs": [-0.5] * len(tokens),
        }
    return Completion(tokens, logprobs, "length", "x", **recorded)


def test_a_batch_has_the_ids_of_each_token_and_leaves_out_those_with_more():
    segments = [
        segment([4, 9, 2], [[4, 6], [9], [1, 2, 3]]),
        segment([5, 5, 6], [[5], [0, 1, 2, 3], [0, 1, 2, 3]], [1, 7, V]),
        segment([8, 8, 8]),
    ]
    mask = np.tile(np.array([0, 1, 1, 1, 0], np.float32), (3, 1))
    tokens = np.zeros((3, 5), np.int32)
    batch = Batch(
        tokens=tokens, segments=tokens, mask=mask, prompt=np.arange(3), sampler_logp=-mask
    )
    out, metrics = filters.with_kept(batch, segments, 4, V)
    assert out.kept.shape == (3, 5, 4)
    left = [[[i for i in ids if i >= 0] for ids in row] for row in out.kept.tolist()]
    assert left == [[[], [4, 6], [9], [1, 2, 3], []], [[], [5], [], [], []], [[]] * 5]
    np.testing.assert_array_equal(out.mask, [[0, 1, 1, 1, 0], [0, 1, 0, 1, 0], [0, 1, 1, 1, 0]])
    np.testing.assert_array_equal(out.sampler_logp[0], [0, -0.5, -0.5, -0.5, 0])
    np.testing.assert_array_equal(out.sampler_logp[1], [0, -0.5, -1, -1, 0])
    np.testing.assert_array_equal(out.sampler_logp[2], batch.sampler_logp[2])
    assert metrics == {
        "sampler/kept_overflow": pytest.approx(1 / 9),
        "sampler/kept_mean": pytest.approx((14 + V) / 6),
    }
    assert filters.with_kept(batch, segments[2:] * 3, 4, V) == (batch, {})
    forbidden = segment([8, 8, 8], [[-2 - 7, -2 - 1], [-1], [-2 - 3]], [V - 2, 0, V - 1])
    out, metrics = filters.with_kept(batch, [segments[0], forbidden, segments[2]], 4, V)
    assert [[i for i in ids if i != -1] for ids in out.kept[1].tolist()] == [
        [],
        [-9, -3],
        [],
        [-5],
        [],
    ]
    np.testing.assert_array_equal(out.mask, batch.mask)
    assert metrics == {"sampler/kept_overflow": 0, "sampler/kept_mean": pytest.approx(2)}
    assert filters.with_kept(batch, [forbidden] * 3, 4, V)[1] == {"sampler/kept_overflow": 0}
    assert [filters.width(n, 128) for n in (1, 32, 33, 128)] == [32, 32, 128, 128]


def test_a_group_that_a_checkpoint_holds_keeps_its_ids():
    problem = Problem(Example("a"), [0])
    one = completion([4, 9], [[4, 6], [9]])
    made = rollouts([problem], [1], [[one, completion([7])]], versions=[2])
    group = ScoredGroup(made.groups[0], np.ones((2, 1)), np.ones(2))
    plain = json.loads(json.dumps(group.to_json()))
    read, other = ScoredGroup.from_json(plain, lambda rows: [problem]).group.trajectories
    kept = read.segments[0].kept
    np.testing.assert_array_equal(kept.ids, one.kept)
    assert (kept.counts.tolist(), kept.logprobs.tolist()) == (
        one.kept_counts,
        one.filtered_logprobs,
    )
    assert other.segments[0].kept is None


# One token after each of two prompts: the expected reward is a sum over the ids that the filters
# leave.
PROMPTS = [[3, 7, 1, 9, 2], [5, 5, 8]]
TEMPERATURE, TOP_P, STEP = 0.5, 0.7, 4e-3


@functools.cache
def bandit(sharing: bool, tiles: int | None):
    how = (
        {}
        if tiles is None
        else {"runtime": dataclasses.replace(learners.QUICK, num_vocab_tiling=tiles)}
    )
    model = learners.dense(**how)
    options = learners.stage("grpo", sampling={"temperature": TEMPERATURE, "top_p": TOP_P})
    trainer, state = learners.begin(model, options, fresh=True)
    trainer.sharing = Sharing(length_factor=2) if sharing else None

    @jax.jit
    def logits(params, ids):
        with model.graph.precision():
            decoder = model.graph.decoder(params)
            hidden = decoder(ids, make_step(ids), None, model.graph.runtime)[0]
            return hidden[:, -1] @ decoder.head_weight.T

    return model, trainer, state, logits


def left_by_top_p(z):
    order = np.argsort(-z)
    mass = np.cumsum(np.exp(log_softmax(z[order])))
    return np.sort(order[: 1 + int(np.sum(mass < TOP_P))])


def expected_reward(logits, params, rewards, sets=None):
    """The mean over the prompts of the expected reward of a token after each, and the ids that the
    filters leave."""
    total, now = 0.0, []
    for prompt, own in zip(PROMPTS, rewards, strict=True):
        z = np.asarray(logits(params, np.asarray([prompt])), np.float64)[0] / TEMPERATURE
        now.append(left_by_top_p(z))
        total += float(np.exp(log_softmax(z[now[-1]])) @ own[now[-1]])
    assert sets is None or all(np.array_equal(a, b) for a, b in zip(now, sets, strict=True))
    return total / len(PROMPTS), now


def every_token(sets, logits, params, rewards, with_ids: bool, left_out=None) -> Batch:
    """A row for each id that is left, with the advantages that make the loss minus the expected
    reward, to first order: its probability times its reward, over its share of the tokens.
    left_out: the ids that the batch names in place of those that are left."""
    rows = [
        (p, prompt, token)
        for p, (prompt, ids) in enumerate(zip(PROMPTS, sets, strict=True))
        for token in ids
    ]
    N, T, K = len(rows), 6, max(map(len, sets)) + 2
    arrays = {
        name: np.zeros((N, T), kind)
        for name, kind in (("tokens", np.int32), ("segments", np.int32), ("mask", np.float32))
    }
    ids_NTK, advantages = np.full((N, T, K), -1, np.int32), np.zeros(N, np.float32)
    for i, (p, prompt, token) in enumerate(rows):
        n = len(prompt)
        arrays["tokens"][i, : n + 1] = [*prompt, token]
        arrays["segments"][i, : n + 1], arrays["mask"][i, n] = 1, 1
        named = sets[p] if left_out is None else -2 - left_out[p]
        ids_NTK[i, n, : len(named)] = named
        z = np.asarray(logits(params, np.asarray([prompt])), np.float64)[0] / TEMPERATURE
        probability = np.exp(log_softmax(z[sets[p]]))[list(sets[p]).index(token)]
        advantages[i] = N * probability * rewards[p][token] / len(PROMPTS)
    numbers = np.array([p for p, *_ in rows], np.int32)
    return Batch(
        **arrays, prompt=numbers, advantages=advantages, kept=ids_NTK if with_ids else None
    )


def gradient(trainer, params, batch):
    packing = trainer.packing_of(batch)[0]
    packed = packing.batch(batch)
    inputs = trainer.loss_inputs(packed)

    def loss(params):
        return trainer._policy_loss(Weights(policy=params), packed, inputs).loss

    return packing, jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize(
    ("sharing", "tiles"),
    [
        pytest.param(False, None, marks=pytest.mark.slow, id="alone"),
        pytest.param(True, 3, id="trees, chunked head"),
    ],
)
def test_the_gradient_is_that_of_the_expected_reward(sharing, tiles):
    _, trainer, state, logits = bandit(sharing, tiles)
    params, rng = state.policy.params, np.random.default_rng(0)
    rewards = rng.normal(1, 1, (2, learners.VOCAB))
    _, sets = expected_reward(logits, params, rewards)
    assert all(2 <= len(ids) <= learners.VOCAB // 2 for ids in sets)
    packing, right = gradient(trainer, params, every_token(sets, logits, params, rewards, True))
    assert (packing.tree is not None) == sharing
    biased = gradient(trainer, params, every_token(sets, logits, params, rewards, False))[1]
    directions = [
        {path: rng.normal(0, 1, a.shape).astype(np.float32) for path, a in params.items()}
        for _ in range(2)
    ]
    wrong = []
    for direction in (*directions, jax.tree.map(np.asarray, right)):
        size = np.sqrt(sum(float((a**2).sum()) for a in direction.values()))
        step = STEP / size
        high, low = (
            expected_reward(
                logits,
                {path: a + sign * step * direction[path] for path, a in params.items()},
                rewards,
                sets,
            )[0]
            for sign in (1, -1)
        )
        slope = (high - low) / (2 * STEP)
        along = [
            -sum(float(np.sum(np.asarray(g[path]) * a)) for path, a in direction.items()) / size
            for g in (right, biased)
        ]
        assert along[0] == pytest.approx(slope, rel=2e-3, abs=2e-4)
        wrong.append(abs(along[1] - slope) / abs(slope))
    assert max(wrong) > 0.1  # log-probabilities over all ids have another gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharing", "tiles"),
    [pytest.param(False, None, id="alone"), pytest.param(True, 3, id="trees, chunked head")],
)
def test_the_gradient_is_that_of_the_expected_reward_without_forbidden_tokens(sharing, tiles):
    """The two likeliest ids of each prompt are forbidden, as by bad_words; the batch names these
    alone."""
    _, trainer, state, logits = bandit(sharing, tiles)
    params, rng = state.policy.params, np.random.default_rng(0)
    rewards = rng.normal(1, 1, (2, learners.VOCAB))
    first = [np.asarray(logits(params, np.asarray([prompt])), np.float64)[0] for prompt in PROMPTS]
    left_out = [np.argsort(-z)[:2].astype(np.int32) for z in first]
    sets = [np.setdiff1d(np.arange(learners.VOCAB), ids) for ids in left_out]

    def reward(params):
        total = 0.0
        for prompt, ids, own in zip(PROMPTS, sets, rewards, strict=True):
            z = np.asarray(logits(params, np.asarray([prompt])), np.float64)[0] / TEMPERATURE
            total += float(np.exp(log_softmax(z[ids])) @ own[ids])
        return total / len(PROMPTS)

    right = gradient(trainer, params, every_token(sets, logits, params, rewards, True, left_out))[1]
    biased = gradient(trainer, params, every_token(sets, logits, params, rewards, False))[1]
    wrong = []
    for direction in (
        {path: rng.normal(0, 1, a.shape).astype(np.float32) for path, a in params.items()},
        jax.tree.map(np.asarray, right),
    ):
        size = np.sqrt(sum(float((a**2).sum()) for a in direction.values()))
        step = STEP / size
        high, low = (
            reward({path: a + sign * step * direction[path] for path, a in params.items()})
            for sign in (1, -1)
        )
        slope = (high - low) / (2 * STEP)
        along = [
            -sum(float(np.sum(np.asarray(g[path]) * a)) for path, a in direction.items()) / size
            for g in (right, biased)
        ]
        assert along[0] == pytest.approx(slope, rel=2e-3, abs=2e-4)
        wrong.append(abs(along[1] - slope) / abs(slope))
    assert max(wrong) > 0.1


def configured(**sampling):
    """A stage of GRPO with this `sampling`."""
    stage = {"algorithm": "grpo", "steps": 1, "sampling": {"max_new_tokens": 6} | sampling}
    sections = {
        "model": {"source": "tiny-deepseek"},
        "max_length": 32,
        "data": {"task": "arithmetic"},
    }
    config = RunConfig.model_validate(
        {**sections, "rewards": {"functions": ["exact_answer"]}, "stages": [stage]}
    )
    [made] = create(config)
    return config, made


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        ({}, 0),
        ({"top_p": 0.9}, 128),
        ({"top_p": 0.9, "top_k": 20}, 20),
        ({"min_p": 0.1, "max_kept": 5}, 5),
        ({"min_tokens": 2}, 128),
        ({"bad_words": ["a"]}, 128),
        ({"top_p": 0.9, "filters": "ignore"}, 0),
    ],
    ids=str,
)
def test_a_stage_records_ids_where_tokens_are_left_out(sampling, most):
    config, stage = configured(**sampling)
    assert stage.max_kept == generator_options(config).record_kept == most
    assert [bool(re.search("filters: ignore", each)) for each in stage.remarks()] == [True] * (
        "filters" in sampling
    )


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_k": 200}, "raise max_kept to at least top_k"),
        ({"min_tokens": 7}, "at most max_new_tokens"),
    ],
    ids=str,
)
def test_what_leaves_every_token_out_is_refused(sampling, message):
    assert [each for each in configured(**sampling)[1].check() if message in each.text]


def test_min_tokens_filters_only_where_a_token_can_end_the_completion():
    assert not SamplingParams(min_tokens=2).has_filter
    assert SamplingParams(min_tokens=2, stop_token_ids=(1,)).has_filter
    assert not SamplingParams(min_tokens=2, stop_token_ids=(1,), temperature=0).has_filter
    # The stop tokens of the tokenizer are unknown when a configuration is checked.
    assert filters.filters(SamplingOptions(min_tokens=2))
    assert not filters.filters(SamplingOptions())
