"""Packed rows: every sequence is there once, nothing of it changes, and what is computed from them
is what separate rows give.
"""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import batch, begin, host, same_bits, stage

import rl.algorithms
from policy import modes
from policy.attention import block_attention
from rl.training.batch import segmented_batch
from rl.training.packing.packing import best_fit, plan_packing, plan_rows
from rl.training.packing.row_shapes import (
    MAX_LENGTHS,
    RECENT,
    RowBounds,
    RowHistory,
    RowShape,
    Sizes,
    choose_shape,
)
from rl.training.weights import WeightGroup, Weights

AGGREGATIONS = ("token", "sequence", "sequence_sum", "constant", "prompt")
RATIOS = ("token", "sequence", "sequence_token")
ANSWERS = [
    ((2, 4), (2, 1)),
    ((1, 2), (1, 5)),
    ((3, 1), (3, 2)),
    ((1, 1), (1, 1)),
    ((2, 3), (2, 6)),
]  # of prompts and answers
UNSCORED = np.arange(12) == 5


def uneven(rows=12, length=10, group=3):
    """Sequences of 4 to 10 tokens, of which one fills its row and one has no score."""
    data = batch(rows=rows, length=length, group=group, seed=1).without_rows(UNSCORED[:rows])
    assert {10, 4} <= set((data.segments != 0).sum(1))
    return data


def segments_of(lengths, T):
    return (np.arange(T) < np.asarray(lengths)[:, None]).astype(np.int32)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.sampled_from([12, 17, 36]))
@settings(max_examples=200, deadline=None)
def test_every_sequence_is_contiguous_in_a_row_of_its_own_number(lengths, length):
    segments = segments_of(lengths, 12)
    packing = plan_packing(segments, len(lengths), length)
    tokens = np.arange(1, segments.size + 1).reshape(segments.shape) * segments
    packed, numbers = packing.pack(tokens), packing.segments
    np.testing.assert_array_equal(packing.unpack(packed), tokens)
    assert np.count_nonzero(packed) == sum(lengths) and ((packed != 0) == (numbers != 0)).all()
    result = []
    for row, numbered in zip(packed, numbers, strict=True):
        real = numbered[numbered != 0]
        assert (np.diff(real) >= 0).all() and set(real) == set(range(1, real.max(initial=0) + 1))
        assert (numbered[: len(real)] != 0).all()  # no padding between sequences
        result += [tuple(row[numbered == n]) for n in set(real)]
    assert sorted(result) == sorted(tuple(row[row != 0]) for row in tokens if row.any())
    assert packed.shape == (len(lengths), length)
    room = length - (packed != 0).sum(1)
    used = room < length
    fullest = sorted(room[used])  # no two rows could have been one
    assert len(fullest) < 2 or 2 * length - fullest[-1] - fullest[-2] > length


BOUNDS = st.builds(
    lambda micro_tokens, **rest: RowBounds(
        sequences=40,
        sequence=64,
        limit=64,
        most_rows=(micro_tokens or 40 * 64) // 64,
        micro_tokens=micro_tokens,
        **rest,
    ),
    micro_tokens=st.sampled_from([None, 64, 256, 768]),
    longest=st.sampled_from([64, 192, 3072]),
    stretched=st.sampled_from([0, 3072]),
    row_multiple=st.sampled_from([1, 3, 8]),
    length_multiple=st.sampled_from([1, 4]),
    few_rows_first=st.booleans(),
)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), BOUNDS)
@settings(max_examples=150, deadline=None)
def test_the_shape_of_rows_keeps_to_its_bounds_and_holds_every_batch(lengths, bounds):
    segments = segments_of(lengths, 64)
    packing, shape = plan_rows(segments, bounds)
    longest = max(lengths)
    rows, length = shape
    assert packing.shape == (bounds.program_rows(shape, packing.filled_rows), length)
    if packing.filled_rows <= rows:
        assert packing.shape[0] == rows, "what fits one micro-batch has a program of one"
    assert packing.shape[0] % rows == 0
    assert rows % bounds.row_multiple == 0 and length % bounds.length_multiple == 0
    if bounds.micro_tokens is not None:
        stretched = bounds.row_multiple * min(2 * longest, bounds.stretched)
        alone = bounds.row_multiple * bounds.shortest(longest).length
        assert rows * length <= max(bounds.micro_tokens, stretched, alone)
    assert length <= max(bounds.longest, bounds.shortest(longest).length)
    sizes = Sizes(len(lengths), sum(lengths), longest)
    assert len({each.length for each in bounds.shapes(sizes, 0.95)}) <= MAX_LENGTHS
    full = Sizes(40, 40 * 64, 64)
    for each in (*bounds.shapes(sizes, 0.95), *bounds.shapes(full, 0.95)):
        if bounds.micro_tokens is not None:
            worst = best_fit(np.full(40, 64), np.ones(40), max(64, each.length)).rows
            assert bounds.program_rows(each, worst) >= worst, (
                "a program has room for the fullest batch"
            )
    again, _ = plan_rows(segments[::-1], bounds)
    assert again.shape == packing.shape, "the order of the sequences changes nothing"
    fullest = bounds.largest(40) if bounds.micro_tokens is not None else bounds.shortest(64)
    assert bounds.allows(fullest, 64)
    if bounds.row_multiple == 1:
        assert rows * length <= math.prod(fullest), "a plan takes the largest"
    history = RowHistory([RowShape(1, 64), RowShape(3, 72), RowShape(40, 192), shape], 1.0, RECENT)
    met = choose_shape(bounds, sizes, lambda length: filled(segments, length), history)
    assert met in history.shapes and bounds.allows(met, longest)


@pytest.mark.parametrize(
    "sequences, limit, longest",
    [(16, 96, 64), (8, 1000, 3000), (2, 150, 3072)],
    ids=["longer than rows of several", "no rounded length", "few sequences"],
)
def test_a_plan_takes_the_largest_micro_batch(sequences, limit, longest):
    """Sequences that fill a micro-batch have no larger one in a run."""
    bounds = RowBounds(sequences, limit, limit, 4, 4 * limit, longest, few_rows_first=True)
    largest = bounds.largest(sequences)
    assert bounds.allows(largest, limit)
    segments = segments_of([limit] * sequences, limit)
    for tokens in (limit - 1, limit):
        sizes = Sizes(sequences, sequences * tokens, limit)
        shape = choose_shape(bounds, sizes, lambda length: filled(segments, length))
        assert math.prod(shape) <= math.prod(largest)
    assert math.prod(largest) >= min(4, sequences) * limit


def filled(segments, length):
    """How many packed rows of a length the sequences fill."""
    lengths = (segments != 0).sum(1)
    return best_fit(lengths, np.ones(len(lengths), int), length).rows


BATCHES = RowBounds(8, 512, 512, most_rows=2, micro_tokens=1024, longest=3072)


def choice(lengths, history=None):
    segments = segments_of(lengths, 512)
    sizes = Sizes(len(lengths), sum(lengths), max(lengths))
    shape = choose_shape(BATCHES, sizes, lambda length: filled(segments, length), history)
    passes = -(-filled(segments, shape.length) // shape.micro_rows)
    return shape, sum(lengths) / (passes * math.prod(shape))


def test_an_update_has_the_shape_of_an_earlier_one_while_rows_are_full():
    """Of 30 batches of 8 sequences, with the state that a checkpoint holds."""
    rng = np.random.default_rng(0)
    batches = np.exp(rng.normal(np.log(205), 0.6, (30, 8))).clip(8, 512).astype(int).tolist()
    history, alone, shares = RowHistory(), set(), []
    for lengths in batches:
        alone.add(choice(lengths)[0])
        shape, share = choice(lengths, history)
        history = RowHistory.from_json(json.loads(json.dumps(history.to_json())))
        assert choice(lengths, history) == (shape, share), "read back, it gives the same"
        history.add(shape, share)
        shares.append(share)
    assert len(history.shapes) <= len(alone) // 2 and history.updates == 30
    assert np.mean(shares) >= 0.9


def test_what_long_ago_was_full_excuses_no_empty_rows():
    """Answers that become shorter have rows of their own, as soon as the mean of recent updates has
    fallen."""
    history = RowHistory([RowShape(1, 512)], 1.0, RECENT)
    short = [70] * 8  # two rows of 512 are 0.55 full
    for _ in range(RECENT):
        history.add(*choice(short, history))
    assert choice(short, history)[1] > 0.9 and len(history.shapes) == 2
    assert choice([500] * 8, history)[0] == (1, 512)


@given(BOUNDS)
def test_a_batch_without_tokens_has_rows_of_padding(bounds):
    """As one has in which nothing got a score."""
    packing, shape = plan_rows(segments_of([0, 0], 64), bounds)
    assert packing.filled_rows == 0 and packing.shape == (
        bounds.program_rows(shape, 0),
        shape.length,
    )
    assert shape.length > 0 and not packing.segments.any()


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_pairs_stay_together_with_the_first_of_them_odd(lengths):
    segments = np.array([([1] * a + [2] * b + [0] * 12)[:12] for a, b in lengths], np.int32)
    packing = plan_packing(segments, len(lengths))
    pair, packed = (
        np.broadcast_to(np.arange(1, 1 + len(lengths))[:, None], segments.shape),
        packing.segments,
    )
    np.testing.assert_array_equal(packing.unpack(packed) % 2, segments % 2)
    named = packing.pack(pair)
    for row, numbers in zip(named, packed, strict=True):
        for k in range(1, numbers.max(initial=0), 2):
            (first,), (second,) = set(row[numbers == k]), set(row[numbers == k + 1])
            assert first == second
            assert ((numbers == k).sum(), (numbers == k + 1).sum()) == lengths[first - 1]
    assert packing.filled_rows <= len(lengths)


def test_prompts_keep_their_groups_whatever_their_numbers():
    data = uneven(rows=6).replace(prompt=np.array([7, 7, 7, 9, 9, -1], np.int32))
    data = data.without_rows(data.prompt < 0)
    packing = plan_packing(data.segments, 12)
    packed = packing.batch(data)
    np.testing.assert_array_equal(packing.unpack(packed.prompt)[:, 0], [0, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(packed.prompt < 0, packed.segments == 0)


def inputs_of(data, logp, packing=None):
    """PolicyInputs of a batch as it is, or packed."""
    if packing is not None:
        data, logp = packing.batch(data), packing.pack(logp)
    names = (
        "mask",
        "old_logp",
        "sampler_logp",
        "ref_logp",
        "entropy",
        "advantages",
        "segments",
        "prompt",
    )
    arrays = {name: jnp.asarray(getattr(data, name)) for name in names}
    if packing is None:
        del arrays["segments"]
    return rl.algorithms.PolicyInputs(**arrays, max_length=8), jnp.asarray(logp)


# Each of both in the default run, every pair in the slow one.
QUICK = set(zip(AGGREGATIONS, RATIOS * 2, strict=False))
PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
    for pair in itertools.product(AGGREGATIONS, RATIOS)
]


@pytest.mark.parametrize(("aggregation", "ratio"), PAIRS)
def test_losses_and_their_gradients_are_those_of_separate_rows(aggregation, ratio):
    correction = {"token": "geometric_mask", "sequence": "sequence_truncate"}.get(ratio)
    options = {
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "top_entropy": 0.6,
        "off_policy_delta": 0.1,
        "correction": correction,
    }
    algorithm = rl.algorithms.get("grpo", aggregation=aggregation, ratio=ratio, **options)
    data = uneven()
    data.mask[2] = 0  # a completion without a token
    logp = data.old_logp + 0.2 * np.random.default_rng(2).normal(size=data.old_logp.shape).astype(
        np.float32
    )
    packing = plan_packing(data.segments, 12)
    assert packing.filled_rows < 12

    @jax.jit
    def run(inputs, logp):
        inputs = algorithm.with_totals(inputs)
        return jax.value_and_grad(
            lambda lp: algorithm.loss(dataclasses.replace(inputs, logp=lp)), has_aux=True
        )(logp)

    (loss, metrics), slope = run(*inputs_of(data, logp))
    (packed_loss, packed_metrics), packed_slope = run(*inputs_of(data, logp, packing))
    np.testing.assert_allclose(packed_loss, loss, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(packing.unpack(packed_slope), slope, rtol=1e-5, atol=1e-8)
    assert np.abs(slope).max() > 1e-3
    for key in metrics:
        np.testing.assert_allclose(
            packed_metrics[key], metrics[key], rtol=2e-6, atol=1e-7, err_msg=key
        )


GRPO = {"name": "grpo", "aggregation": "prompt", "ratio": "sequence"}


@pytest.mark.parametrize(
    ("create", "algorithm"),
    [
        (learners.dense, GRPO),
        pytest.param(learners.dense, {"name": "ppo"}, marks=pytest.mark.slow),
        pytest.param(learners.experts, GRPO, marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_separate_rows(create, algorithm):
    """Also with experts, whose balance is one of sequences. The program takes rows that are not
    packed just as well."""
    data = uneven()
    options = stage(algorithm, router={"bias_rate": 0.05, "balance_coef": 0.3})
    trainer, state = begin(create(), options, fresh=True)
    apart = learners.update_call(trainer, state, data, 12).run()
    if trainer.critic_update:
        critic = learners.update_call(trainer, state, data, 12, of_policy=False).run()
    trainer, state = begin(create(), options)
    together, metrics = trainer.update(state, data)
    assert 0.5 < metrics["perf/packed_share"] <= 1
    for key, value in apart.metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-6, err_msg=key)
    pairs = [(apart.learners[WeightGroup.POLICY], together.policy)]
    if trainer.critic_update:
        np.testing.assert_allclose(metrics["value/loss"], critic.metrics["value/loss"], rtol=1e-5)
        pairs.append((critic.learners[WeightGroup.CRITIC], together.critic))
    for one, other in pairs:
        one, other = host(one), host(other)
        for key in one:
            np.testing.assert_allclose(other[key], one[key], atol=2e-6, err_msg=key)


def test_long_rows_change_an_update_by_rounding_alone(all_optimizations):
    """Rows as long as the longest sequence, each computed densely, against the rows that a run
    chooses, whose attention skips blocks."""
    data = batch(rows=12, length=120, group=3, seed=1)
    trainer, state = begin(learners.dense(), stage(GRPO), fresh=True)
    chosen, micro_rows = trainer.packing_of(data)
    assert chosen.shape[1] >= block_attention.SHORTEST_FLAT > data.tokens.shape[1]

    def loss_and_gradient(packing):
        packed = packing.batch(data)
        inputs = trainer.loss_inputs(packed)

        def loss(params):
            return trainer._policy_loss(Weights(policy=params), packed, inputs).loss

        return jax.jit(jax.value_and_grad(loss))(state.policy.params)

    loss, gradient = loss_and_gradient(plan_packing(data.segments, 12))
    other, packed_gradient = loss_and_gradient(chosen)
    np.testing.assert_allclose(other, loss, rtol=2e-6)
    for path, want in gradient.items():
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(packed_gradient[path], want, atol=1e-5 * scale, err_msg=path)


@pytest.mark.slow
def test_a_trainer_that_goes_on_packs_the_same_and_gives_the_same_bits(all_optimizations):
    """Batches whose rows have different lengths. The second trainer has not seen the first ones,
    and packs the last one as they were, which it would not do without their history."""
    batches = [batch(rows=8, length=length, seed=length) for length in (12, 50, 48)]
    trainer, state = begin(learners.dense(), stage(GRPO), fresh=True)
    shapes = {trainer.packing_of(data)[0].shape for data in batches}
    assert len(shapes) == 3
    for data in batches[:2]:
        state, _ = trainer.update(state, data)
    saved = jax.tree.map(np.array, state)
    history = json.loads(json.dumps(trainer.row_history.to_json()))
    last = host(trainer.update(state, batches[2])[0])
    assert len(trainer.row_history.shapes) == 2
    other, _ = begin(learners.dense(), stage(GRPO), fresh=True)
    other.row_history = RowHistory.from_json(history)
    assert same_bits(host(other.update(jax.tree.map(jnp.asarray, saved), batches[2])[0]), last)
    assert other.row_history == trainer.row_history


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_updates_on_pairs_do_not_depend_on_how_they_are_cut(name):
    """Two pairs in a packed row and one row at a time, or all at once. A reward model leaves the
    policy's bits as they are.
    """
    rng, states, result = np.random.default_rng(4), [], []
    rows = [
        [(rng.integers(0, learners.VOCAB, p + n).tolist(), [0] * p + [1] * n) for p, n in pair]
        for pair in ANSWERS
    ]
    data = segmented_batch(rows, 16).replace(prompt=np.arange(len(rows), dtype=np.int32))
    data = data.replace(margin=0.3 * np.ones(data.mask.shape, np.float32))
    for micro in (1, None):
        trainer, state = begin(learners.dense(), stage(name, micro_batch=micro))
        before = host(state.policy)
        if name == "dpo":
            data = data.replace(
                ref_logp=trainer.logprobs(state.reference, data)[0] - 0.1 * (data.segments == 1)
            )
        state, metrics = trainer.update(state, data)
        states.append(host(state))
        result.append(metrics)
    packing = trainer.packing_of(data)[0]
    assert packing.filled_rows < len(rows) and packing.segments.max() > 4
    for key in result[0]:
        if key != "perf/packed_share":
            np.testing.assert_allclose(
                result[0][key], result[1][key], rtol=2e-5, atol=2e-6, err_msg=key
            )
    for key in states[0]:
        np.testing.assert_allclose(states[0][key], states[1][key], atol=2e-6, err_msg=key)
    assert same_bits(before, host(state.policy)) == (name == "reward_model")


def test_log_probabilities_and_values_come_back_to_their_places():
    data = uneven()
    trainer, state = begin(learners.dense(), stage("ppo"))
    params = state.critic.params
    params |= {"value_head": jnp.ones_like(params["value_head"])}
    state = dataclasses.replace(state, critic=dataclasses.replace(state.critic, params=params))

    @jax.jit
    def apart(policy, critic, tokens, segments):
        step = modes.make_step(tokens, segments=segments)
        return *trainer.graph.logprobs(policy, tokens, step, 1.0)[:2], trainer.value_model.values(
            critic, tokens, step
        )[0]

    logp, entropy, values = apart(state.policy.params, params, data.tokens, data.segments)
    result = trainer.logprobs(state.policy.params, data)
    np.testing.assert_allclose(result[0], logp, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(result[1], entropy, rtol=2e-6, atol=2e-6)
    assert np.abs(values).max() > 0.1
    np.testing.assert_allclose(
        trainer.values(state, data)[0], values * (data.segments != 0), rtol=5e-6, atol=5e-6
    )
