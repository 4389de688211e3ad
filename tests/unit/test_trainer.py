"""Updates: what they compute does not depend on how the rows are cut, they happen in place, and
they do what is promised.
"""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import learners
import numpy as np
import optax
import pytest
from learners import batch, begin, host, same_bits, stage

import policy
from policy.experts.router import bias_update
from policy.model import Model
from policy.modes import make_step
from rl.accounting.program_names import ProgramName
from rl.config.stage import OptimizerOptions
from rl.training.batch import padded_batch
from rl.training.learning_rate import drawn, learning_rate
from rl.training.optimizer import schedule, stored_as
from rl.training.updater import UpdateArguments, UpdateCall
from rl.training.updates.optimizer_step import updates_made
from rl.training.weights import WeightGroup, Weights
from rollout import Generator, GeneratorOptions, SamplingParams


@pytest.fixture
def compilations():
    """The seconds of every compilation, as they happen; a program read from the compilation cache
    counts too."""
    result = []

    def calls(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            result.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(calls)
    yield result
    jax.monitoring.unregister_event_duration_listener(calls)


AGGREGATIONS = ("token", "sequence", "sequence_sum", "constant", "prompt")


def updated(model, options, data, updates=2) -> tuple[dict, list[dict]]:
    """(all arrays after some updates on the same rows, metrics of each)."""
    trainer, state = begin(model, options)
    result = []
    for _ in range(updates):
        state, metrics = trainer.update(state, data)
        result.append({key: float(value) for key, value in metrics.items()})
    return host(state), result


def assert_cut_changes_nothing(model, data, algorithm, cuts, **keys):
    full, result = updated(model, stage(algorithm, **keys), data)
    for rows in cuts:
        arrays, metrics = updated(model, stage(algorithm, micro_batch=rows, **keys), data)
        assert metrics[0].keys() == result[0].keys()
        for one, other in zip(metrics, result, strict=True):
            for key in one.keys() - {"perf/packed_share"}:
                np.testing.assert_allclose(
                    one[key], other[key], rtol=2e-6, atol=1e-6, err_msg=f"{key}, micro_batch {rows}"
                )
        for key in full:
            np.testing.assert_allclose(
                arrays[key], full[key], atol=1e-6, err_msg=f"{key}, micro_batch {rows}"
            )
    return full, result


@pytest.mark.slow
def test_supervised_updates_are_the_same_for_any_micro_batch():
    assert_cut_changes_nothing(learners.dense(), batch(), "sft", cuts=[1, 3, 4])


def test_policy_gradient_updates_are_the_same_for_any_micro_batch():
    options = {
        "name": "grpo",
        "aggregation": "prompt",
        "kl_coef": 0.1,
        "top_entropy": 0.5,
        "correction": "token_truncate",
    }
    assert_cut_changes_nothing(
        learners.dense(), batch(), options, cuts=[3], updates_per_step=2, prompts_per_step=2
    )


@pytest.mark.slow
def test_updates_of_policy_and_critic_are_the_same_for_any_micro_batch():
    assert_cut_changes_nothing(learners.dense(), batch(), "ppo", cuts=[4])


@pytest.mark.slow
def test_updates_of_experts_are_the_same_for_any_micro_batch_and_move_biases_by_the_counts_of_the_full_batch():
    model, data = learners.experts(), batch()
    router = {"bias_rate": 0.05, "balance_coef": 0.3}
    full, result = assert_cut_changes_nothing(model, data, "sft", cuts=[3], router=router)
    paths = [path for path in full if path.endswith("router.correction_bias']")]
    cut, _ = updated(model, stage(router=router, micro_batch=3), data)
    before = {path: np.asarray(model.params[path.split("'")[1]]) for path in paths}
    assert len(paths) == 1
    for path in paths:
        np.testing.assert_array_equal(cut[path], full[path])
        moved = full[path] - before[path]  # two updates of 0.05 up, down or not at all
        np.testing.assert_allclose(moved / 0.05, np.rint(moved / 0.05), atol=1e-4)
        assert (moved > 0).any() and (moved < 0).any()
    plain, unbalanced = updated(
        model, stage(router=router | {"balance_coef": 0.0}), data, updates=1
    )
    difference = result[0]["loss"] - unbalanced[0]["loss"]
    np.testing.assert_allclose(difference, 0.3 * result[0]["moe/balance"], rtol=1e-5)


@pytest.mark.slow
def test_the_balance_of_a_full_batch_is_the_same_for_any_micro_batch():
    router = {"balance": "batch", "balance_coef": 0.3, "bias_rate": 0.0}
    assert_cut_changes_nothing(learners.experts(), batch(), "sft", cuts=[3], router=router)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_is_the_same_for_any_micro_batch(aggregation):
    options = {"name": "grpo", "aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}
    assert_cut_changes_nothing(learners.dense(), batch(), options, cuts=[3])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_rollout_updates_of_experts_are_the_same_for_any_micro_batch(algorithm):
    router = {"bias_rate": 0.05, "balance_coef": 0.3}
    assert_cut_changes_nothing(
        learners.experts(), batch(), algorithm, cuts=[1, 3, 4], router=router
    )


def test_groups_of_an_update_have_metrics_of_their_own():
    """The policy and a reward model, which are never in one update, have names without a prefix."""
    fields = {field.name for field in dataclasses.fields(Weights)}
    groups = [group for group in WeightGroup if group.value in fields]
    without = {group for group in groups if not group.prefix}
    assert without == {WeightGroup.POLICY, WeightGroup.REWARD_MODEL}
    prefixes = {group.prefix for group in groups if group.prefix}
    assert len(prefixes) == len(groups) - len(without)


def test_an_update_of_two_groups_happens_in_place():
    options = stage({"name": "ppo", "critic_trunk": "policy"})
    trainer, state = begin(learners.dense(), options)
    call = learners.update_call(trainer, state, batch(), 8)
    assert call.learners == {WeightGroup.POLICY: state.policy, WeightGroup.CRITIC: state.critic}
    aliased = call.lower().compile().memory_analysis().alias_size_in_bytes
    leaves = sum(leaf.nbytes for leaf in jax.tree.leaves(call.learners))
    assert aliased == leaves - 2 * 4  # the counts of the two schedules are not read


def test_an_update_happens_in_place_in_one_program(compilations):
    model = Model(learners.dense().graph, {})
    trainer, state = begin(learners.dense(), stage("grpo"), fresh=True)
    data = batch()
    model.params = state.policy.params
    old = model.params
    lowered = learners.update_call(trainer, state, data, 8).lower()
    aliased = lowered.compile().memory_analysis().alias_size_in_bytes
    leaves = sum(leaf.nbytes for leaf in jax.tree.leaves(state.policy))
    assert (
        aliased == leaves - 4
    )  # the count of the schedule, which is the number of the update and not read
    state, _ = trainer.update(
        state, data
    )  # the first weights may lie in memory of numpy, which nobody can give away
    where = {path: array.unsafe_buffer_pointer() for path, array in state.policy.params.items()}
    assert compilations
    compilations.clear()
    for _ in range(3):
        state, _ = trainer.update(state, data)
        model.params = state.policy.params
        assert {
            path: array.unsafe_buffer_pointer() for path, array in model.params.items()
        } == where
    assert not compilations
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old["norm.weight"])
    model.logits(data.tokens[:1])


def test_the_generator_reads_the_arrays_that_the_update_wrote():
    data = batch()
    trainer, state = begin(learners.dense(), stage("grpo"))
    model = Model(learners.dense().graph, state.policy.params)
    generator = Generator(
        model, max_length=16, slots=2, options=GeneratorOptions(tokens_per_dispatch=4)
    )
    prompt, params = [3, 5, 7], SamplingParams(max_new_tokens=8, temperature=1.0)
    first = generator.generate([prompt], params)[0][0]
    for _ in range(2):
        state, _ = trainer.update(state, data)
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        generator.generate(
            [prompt], params
        )  # not told of the new ones, it cannot go on with the old
    model.params = state.policy.params
    written = generator.generate([prompt], params)[0][0]
    row = padded_batch([(prompt + written.tokens, [0] * 3 + [1] * 8)], 16)
    np.testing.assert_allclose(
        trainer.logprobs(state.policy.params, row)[0][0, 3:11], written.logprobs, atol=1e-5
    )
    assert not np.allclose(first.logprobs, written.logprobs, atol=1e-3)


def test_an_update_that_is_not_finite_changes_no_bit_and_is_counted():
    model, data = learners.experts(), batch()
    trainer, state = begin(model, stage("grpo", router={"bias_rate": 0.1}))
    state, metrics = trainer.update(state, data)
    assert metrics["optim/skipped"] == 0
    before = host(state)
    poisoned = data.replace(advantages=np.full_like(data.advantages, np.inf))
    state, metrics = trainer.update(state, poisoned)
    assert metrics["optim/skipped"] == 1 and not np.isfinite(metrics["optim/grad_norm"])
    assert metrics["optim/update_norm"] == 0
    assert same_bits(host(state), before)
    state, metrics = trainer.update(state, data)
    assert metrics["optim/skipped"] == 0 and not same_bits(host(state), before)
    # Outside of a stage the learning rate is that of the updates made: count 1 of this constant
    # schedule with warm-up.
    assert metrics["optim/lr"] == np.float32(1e-2)


def test_equal_rewards_leave_everything_as_it_was():
    """Also what the moments of an update before, and weight decay, would have moved."""
    model, data = learners.dense(), batch()
    trainer, state = begin(model, stage("grpo", optimizer={"weight_decay": 0.1}))
    state, _ = trainer.update(state, data)
    before = host(state)
    silent = data.replace(
        advantages=trainer.algorithm.advantages(np.full((4, 2), 0.7)).reshape(-1).astype(np.float32)
    )
    state, metrics = trainer.update(state, silent)
    assert (
        metrics["optim/grad_norm"] == 0
        and metrics["loss"] == 0
        and metrics["optim/skipped"] == metrics["optim/update_norm"] == 0
    )
    assert same_bits(host(state), before)
    state, _ = trainer.update(state, data)
    assert not same_bits(host(state), before)


def test_a_row_without_a_score_is_as_good_as_absent():
    model, data = learners.experts(), batch()
    unscored = np.array([False, True, False, False, False, False, False, True])
    router = {"bias_rate": 0.05, "balance_coef": 0.3}
    options = stage({"name": "grpo", "aggregation": "sequence"}, router=router)
    with_it, result = updated(model, options, data.without_rows(unscored))
    alone, expected = updated(model, options, jax.tree.map(lambda a: a[~unscored], data))
    for key in expected[0].keys() - {"perf/packed_share"}:
        np.testing.assert_allclose(
            result[0][key], expected[0][key], rtol=1e-5, atol=1e-6, err_msg=key
        )
    for key in alone:
        np.testing.assert_allclose(with_it[key], alone[key], atol=1e-6, err_msg=key)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(
    ("steps", "k", "warm"), [(20, 1, 4), (7, 3, 4), (5, 4, 0), (6, 2, 11), (3, 1, 9), (1, 1, 0)]
)
def test_learning_rates_follow_from_the_number_of_the_update_by_the_formula(kind, steps, k, warm):
    options = OptimizerOptions(
        learning_rate=0.5, schedule=kind, warmup_steps=warm, final_fraction=0.1
    )
    rates = [learning_rate(options, steps, k, update) for update in range(steps * k)]
    compiled = jax.jit(schedule(options, steps, k))
    np.testing.assert_allclose(
        [compiled(np.int32(update)) for update in range(steps * k)], rates, rtol=2e-6
    )
    np.testing.assert_allclose(
        rates[:warm], [0.5 * (u + 1) / (warm + 1) for u in range(warm)][: steps * k], rtol=1e-6
    )
    if warm < steps * k:
        assert rates[warm] == 0.5
    if kind == "constant" or warm // k >= steps - 1:
        return
    np.testing.assert_allclose(rates[-k:], 0.05, rtol=1e-6)  # all updates of the last step
    s = np.arange(warm, steps * k) // k
    t = (s - warm // k) / (steps - 1 - warm // k)
    share = 1 - t if kind == "linear" else (1 + np.cos(np.pi * t)) / 2
    np.testing.assert_allclose(rates[warm:], 0.5 * (0.1 + 0.9 * share), rtol=1e-6)


def test_a_schedule_without_warm_up_starts_at_its_peak_and_ends_at_its_end():
    options = OptimizerOptions(learning_rate=0.5, schedule="linear")
    assert [float(schedule(options, 6)(update)) for update in range(6)] == pytest.approx(
        [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    )
    rates = [learning_rate(options, 6, 1, update) for update in range(6)]
    assert drawn(rates) == "█▇▅▄▂▁  at most 0.5 (step 1), 0 in the last of 6 steps"
    assert len(drawn([0.1] * 1500, 3).partition(" ")[0]) == 40 and drawn([])


def test_updates_that_change_nothing_do_not_hold_the_learning_rate():
    model, data = learners.dense(), batch()
    options = stage(
        "grpo",
        steps=4,
        optimizer={"learning_rate": 0.4, "schedule": "linear", "final_fraction": 0.25},
    )
    trainer, state = begin(model, options)
    silent = data.replace(advantages=np.zeros_like(data.advantages))
    rates = []
    for number, each in enumerate([data, silent, silent, data]):
        state, metrics = trainer.update(state, each, number=number)
        rates.append(float(metrics["optim/lr"]))
    np.testing.assert_allclose(rates, [0.4, 0.3, 0.2, 0.1], rtol=1e-6)
    assert (
        int(updates_made(state.policy)) == 2
    )  # AdamW corrects its moments by the updates that it made
    again, start = begin(model, options)
    start, _ = again.update(start, data, number=0)
    start, _ = again.update(start, data, number=3)
    assert same_bits(host(start), host(state))


def test_a_policy_counts_from_the_step_after_the_warm_up_of_its_critic():
    options = {"learning_rate": 0.4, "schedule": "linear", "final_fraction": 0.25}
    trainer, _ = begin(
        learners.dense(), stage({"name": "ppo", "critic_warmup": 2}, steps=6, optimizer=options)
    )
    assert trainer.policy_update.main_step._first_update == 2
    assert [float(trainer.policy_update.main_step.rate(u)) for u in range(4)] == pytest.approx(
        [0.4, 0.3, 0.2, 0.1]
    )


@pytest.mark.slow
def test_weight_decay_acts_on_matrices_only():
    """Against the same update without it."""
    model, data = learners.experts(), batch()
    before, result = host(model.params), []
    for decay in (0.5, 0.0):
        trainer, state = begin(
            model, stage("grpo", optimizer={"weight_decay": decay}, router={"bias_rate": 0.0})
        )
        result.append(host(trainer.update(state, data)[0].policy.params))
    decayed, plain = result
    for path, axes in model.graph.axes.items():
        key, matrix = f"['{path}']", len([axis for axis in axes if axis != "layers"]) > 1
        expected = plain[key] - np.float32(1e-2 * 0.5 * matrix) * before[key]
        np.testing.assert_allclose(decayed[key], expected, rtol=1e-6, atol=1e-7, err_msg=path)
    assert (
        decayed["['norm.weight']"].tobytes()
        == plain["['norm.weight']"].tobytes()
        != before["['norm.weight']"].tobytes()
    )


@pytest.mark.slow
def test_small_steps_of_weights_in_bfloat16_add_up():
    """Against AdamW of optax on the same weights in float32; without a copy in float32 most of them
    never move."""
    rng, adamw = np.random.default_rng(0), optax.adamw(1e-5, weight_decay=0.1)
    kept, rounded = (
        stored_as(adamw, "float32", master=True),
        stored_as(adamw, "bfloat16", master=False),
    )
    first = {"a": jnp.asarray(rng.normal(size=200), jnp.bfloat16)}
    wide = {"a": first["a"].astype(jnp.float32)}
    result = [first, kept.init(first)], [wide, adamw.init(wide)], [first, rounded.init(first)]
    for _ in range(300):
        grads = {"a": jnp.asarray(rng.normal(size=200) + 1, jnp.float32)}
        for each, transform in zip(result, (kept, adamw, rounded), strict=True):
            changes, each[1] = transform.update(grads, each[1], each[0])
            each[0] = optax.apply_updates(each[0], changes)
        np.testing.assert_array_equal(result[0][0]["a"], result[1][0]["a"].astype(jnp.bfloat16))
    still = [np.mean(each[0]["a"] == first["a"]) for each in result]
    assert still[0] < 0.5 and still[1] == 0.0 and still[2] > 0.8, still


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_an_update_leaves_every_array_in_its_dtype(param_dtype, state_dtype):
    model = learners.dense(runtime=dataclasses.replace(learners.QUICK, param_dtype=param_dtype))
    trainer, state = begin(model, stage("grpo", optimizer={"state_dtype": state_dtype}))
    data = batch()
    call = learners.update_call(trainer, state, data, 8)
    update = partial(trainer.policy_update._update, micro_rows=8)
    new = jax.eval_shape(update, call.learners, call.arguments).learners[WeightGroup.POLICY]
    assert jax.tree.map(lambda a: a.dtype, new) == jax.tree.map(lambda a: a.dtype, state.policy)
    sizes = [np.dtype(a.dtype).itemsize for a in jax.tree.leaves(new.optimizer) if a.ndim]
    copies = 3 if (param_dtype, state_dtype) == ("bfloat16", "float32") else 2
    assert sizes == [np.dtype(state_dtype).itemsize] * (copies * len(new.params))


@pytest.mark.parametrize(
    "model", [learners.dense, pytest.param(learners.experts, marks=pytest.mark.slow)]
)
def test_weights_cast_before_a_pass_give_the_bits_of_those_cast_in_it(model):
    model, data = model(runtime=dataclasses.replace(learners.QUICK, dtype="bfloat16")), batch()
    graph, step = (
        model.graph,
        make_step(jnp.asarray(data.tokens), segments=jnp.asarray(data.segments)),
    )
    still = {path: model.params[path] for path in graph.untrained}
    trained = {path: array for path, array in model.params.items() if path not in still}

    @jax.jit
    def gradient(weights):
        return jax.value_and_grad(
            lambda w: graph.logprobs(w | still, data.tokens, step, 1.0)[0].sum()
        )(weights)

    (expected, slopes), (result, cast) = (
        gradient(trained),
        gradient(graph.cast_for_products(trained)),
    )
    assert result == expected
    assert {
        path for path, slope in cast.items() if slope.dtype == jnp.bfloat16
    } == graph.inputs.keys()
    for path, slope in slopes.items():
        np.testing.assert_array_equal(slope, cast[path].astype(jnp.float32), err_msg=path)


@pytest.mark.slow
def test_gradients_are_clipped_as_optax_clips_them():
    model, data = learners.dense(), batch()

    def first_gradient(clip):
        trainer, state = begin(model, stage(optimizer={"clip_norm": clip}))
        state, metrics = trainer.update(state, data)
        return jax.tree.map(lambda m: m / np.float32(0.1), state.policy.optimizer[0].mu), float(
            metrics["optim/grad_norm"]
        )

    raw, norm = first_gradient(1e3)
    assert norm == pytest.approx(
        float(optax.tree.norm(raw)), rel=1e-5
    )  # below the limit nothing is changed
    clip = optax.clip_by_global_norm(norm / 3)
    expected, _ = clip.update(raw, clip.init(raw))
    result, reported = first_gradient(norm / 3)
    assert reported == pytest.approx(norm, rel=1e-5)  # before clipping
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), result, expected
    )


def test_loss_and_adamw_are_those_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from oracles import oracle, saved
    from safetensors.numpy import load_file

    theirs = oracle("Llama", **learners.SIZES)
    model = policy.load(saved(theirs, tmp_path / "hf"))
    data = batch()
    optimizer = {
        "learning_rate": 1e-2,
        "eps": 1e-4,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "beta2": 0.95,
    }
    trainer, state = begin(model, stage(optimizer=optimizer))
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    labels = torch.tensor(np.where(data.mask > 0, data.tokens, -100)).long()
    for _ in range(3):
        state, metrics = trainer.update(state, data)
        adamw.zero_grad()
        loss = theirs(
            torch.tensor(data.tokens), attention_mask=torch.tensor(data.segments), labels=labels
        ).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adamw.step()
        assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=1e-5)
        assert float(metrics["optim/grad_norm"]) == pytest.approx(norm.item(), rel=1e-4)
    model.params = state.policy.params
    policy.save(model, tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_allclose(ours[name], tensor.numpy(), atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_critic_learns_a_constant_return_and_leaves_the_policy_alone():
    model, data = learners.dense(), batch()
    data = data.replace(returns=np.ones_like(data.returns), old_values=None)
    algorithm = {"name": "ppo", "critic_warmup": 40, "value_clip": None}
    trainer, state = begin(model, stage(algorithm, steps=40, critic={"learning_rate": 2e-2}))
    values = trainer.values(state, data)[0]
    assert values.shape == data.mask.shape and (values == 0).all()  # a fresh value head
    policy_before, reference = host(state.policy), host(state.reference)
    losses = []
    for _ in range(40):
        data = data.replace(old_values=trainer.values(state, data)[0])
        state, metrics = trainer.update(state, data, critic_only=True)
        losses.append(float(metrics["value/loss"]))
    assert losses[0] == pytest.approx(0.5) and losses[-1] < 0.01, losses
    masked = trainer.values(state, data)[0][data.mask > 0]
    np.testing.assert_allclose(masked, 1.0, atol=0.3)
    assert same_bits(host(state.policy), policy_before) and "loss" not in metrics
    state, metrics = trainer.update(state, data)
    assert "loss" in metrics and not same_bits(host(state.policy), policy_before)
    assert same_bits(host(state.reference), reference)


def test_a_value_head_on_the_policys_states_learns_from_them_and_leaves_them_alone():
    """Its first update against numpy on the policy's final states; no second model is in memory."""
    model, data = learners.dense(), batch()
    algorithm = {"name": "ppo", "critic_trunk": "policy", "value_clip": None, "value_init_std": 1.0}
    trainer, state = begin(model, stage(algorithm, critic={"learning_rate": 0.01}, micro_batch=3))
    assert state.critic.params.keys() == {"value_head"}
    jax.tree.map(
        lambda s, a: (s.shape, s.sharding) == (a.shape, a.sharding) or pytest.fail(f"{s}"),
        trainer.abstract(),
        state,
    )
    head, policy_before = np.array(state.critic.params["value_head"]), host(state.policy)

    last = np.asarray(model.hidden_states(data.tokens, segments=data.segments)[-1])
    scale = np.asarray(model.params["norm.weight"])
    states = last / np.sqrt((last**2).mean(-1, keepdims=True) + model.config.norm.eps) * scale
    before = np.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0)))
    for result, expected in zip(
        trainer.values(state, data), (before @ head, states @ head), strict=True
    ):
        np.testing.assert_allclose(result, expected * data.segments, atol=1e-5)
    error = (before @ head - data.returns) * data.mask / data.mask.sum()
    gradient = np.einsum("nt,nte->e", error, before)
    norm = np.linalg.norm(gradient)
    gradient *= min(1.0, 1.0 / norm)
    state, metrics = trainer.update(state, data, critic_only=True)
    np.testing.assert_allclose(metrics["value/optim/grad_norm"], norm, rtol=1e-5)
    moved = head - 0.01 * gradient / (np.abs(gradient) + 1e-3)
    np.testing.assert_allclose(state.critic.params["value_head"], moved, atol=1e-6)
    assert same_bits(host(state.policy), policy_before)


@pytest.mark.slow
def test_a_value_head_learns_with_the_policy_what_it_learns_alone():
    """In an update of both from packed rows in micro-batches: the head as if the policy stayed, the
    policy as if the head did.
    """
    model, data = learners.dense(), batch()
    options = stage({"name": "ppo", "critic_trunk": "policy", "value_init_std": 1.0}, micro_batch=3)
    trainer, state = begin(model, options)
    alone, result = trainer.update(state, data, critic_only=True)
    head = np.array(alone.critic.params["value_head"])
    values = {name: value for name, value in result.items() if name.startswith("value/")}

    trainer, state = begin(model, options)
    before = np.array(state.critic.params["value_head"])
    both, metrics = trainer.update(state, data)
    np.testing.assert_allclose(both.critic.params["value_head"], head, atol=1e-6)
    assert np.abs(head - before).max() > 1e-3 and int(both.critic.optimizer[-1].count) == 1
    assert {
        name for name in metrics if name.startswith("value/")
    } == values.keys() and "value/gradient" not in metrics
    for name, value in values.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)

    trainer, state = begin(model, options)
    packing, R = trainer.packing_of(data)
    packed, start = packing.batch(data), host(state.policy)
    critic_stays = trainer.policy_update.with_steps(trainer.optimizer_steps, options)
    critic_stays.optimizer_steps = {WeightGroup.POLICY: trainer.optimizer_steps[WeightGroup.POLICY]}
    arguments = UpdateArguments(packed, trainer.loss_inputs(packed))
    call = UpdateCall(
        ProgramName.UPDATE, critic_stays, {WeightGroup.POLICY: state.policy}, arguments, R
    )
    still = call.run().learners[WeightGroup.POLICY]
    moved = host(both.policy)
    assert not same_bits(moved, start)
    for path, array in host(still).items():
        np.testing.assert_allclose(moved[path], array, atol=1e-6, err_msg=path)


def test_a_value_is_of_the_state_before_its_token():
    """The value at t sees the tokens before t and not token t."""
    model, data = learners.dense(), batch()
    trainer, state = begin(model, stage({"name": "ppo", "value_init_std": 1.0}))
    values, after = trainer.values(state, data)
    changed = data.tokens.copy()
    changed[:, 2] = (changed[:, 2] + 1) % learners.VOCAB
    other = trainer.values(state, data.replace(tokens=changed))[0]
    np.testing.assert_array_equal(other[:, :3], values[:, :3])
    assert (other[:, 3] != values[:, 3]).all() and values[:, 0].tolist() == [0.0] * 8
    np.testing.assert_array_equal(values[:, 1:], np.where(data.segments[:, 1:], after[:, :-1], 0.0))


def test_the_kl_to_the_reference_starts_at_zero():
    model, data = learners.dense(), batch()
    trainer, state = begin(model, stage({"name": "grpo", "kl_coef": 0.1}, micro_batch=2))
    reference = trainer.logprobs(state.reference, data)[0]
    np.testing.assert_array_equal(reference, trainer.logprobs(state.policy.params, data)[0])
    np.testing.assert_allclose(
        reference, model.logprobs(data.tokens, segments=data.segments)[0], atol=1e-5
    )
    kept = host(state.reference)
    kl = []
    for _ in range(2):
        state, metrics = trainer.update(
            state, data.replace(ref_logp=reference, old_logp=None, sampler_logp=None, entropy=None)
        )
        kl.append(float(metrics["kl/ref"]))
    assert abs(kl[0]) < 1e-9 and kl[1] > 1e-6, kl
    assert same_bits(host(state.reference), kept)
    state, policy = trainer.renew_reference(state, 0.25), host(state.policy.params)
    for path, weight in host(state.reference).items():
        np.testing.assert_allclose(weight, 0.25 * policy[path] + 0.75 * kept[path], atol=1e-7)


def test_a_state_described_for_a_checkpoint_has_the_shapes_and_places_of_the_real_one():
    trainer, state = begin(learners.experts(), stage({"name": "ppo", "kl_coef": 0.1}))
    jax.tree.map(
        lambda s, a: (
            (s.shape, s.dtype, s.sharding) == (a.shape, a.dtype, a.sharding)
            or pytest.fail(f"{s} {a}")
        ),
        trainer.abstract(),
        state,
    )


def test_a_bias_moves_against_the_load():
    bias = jnp.array([0.0, 1.0, -1.0, 0.5])
    np.testing.assert_allclose(
        bias_update(bias, jnp.array([4.0, 0.0, 2.0, 2.0]), 0.1), [-0.1, 1.1, -1.0, 0.5]
    )


ON_EIGHT_DEVICES = """
import json, sys
import jax, numpy as np
import learners
from policy.mesh.sharding import layout
devices = jax.devices()
assert len(devices) == 8
data = learners.batch()
options = learners.stage({"name": "ppo", "kl_coef": 0.1}, micro_batch=3, router={"balance_coef": 0.1})
results = []
for degrees in ({"fsdp": 1}, {"fsdp": 8}, {"fsdp": 2, "tensor": 2, "expert": 2}):
    mesh = layout(degrees, devices=devices[: int(np.prod(list(degrees.values())))])
    trainer, state = learners.begin(learners.experts(mesh=mesh), options)
    for _ in range(2):
        state, metrics = trainer.update(state, data)
    assert trainer.policy_update.executable.number == 1
    spread = max(len(a.sharding.device_set) for a in state.policy.params.values())
    results.append((learners.host(state), {k: float(v) for k, v in metrics.items()}, spread))
(one, ours, _), *others = results
for arrays, metrics, spread in others:
    assert spread == 8
    for key in one:
        np.testing.assert_allclose(arrays[key], one[key], atol=1e-5, err_msg=key)
    for key in ours.keys() - {"perf/packed_share"}:  # devices that hold data have rows of their own
        np.testing.assert_allclose(metrics[key], ours[key], rtol=1e-4, atol=1e-5, err_msg=key)
print("equal", len(one))
"""


@pytest.mark.slow
def test_updates_on_eight_devices_are_those_on_one():
    import os

    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
        "PJRT_NPROC": "64",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]]),
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.stdout.startswith("equal"), done.stderr[-3000:]
