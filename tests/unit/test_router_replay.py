"""Routes that the generator records and updates replay: they are those of the full forward pass,
they travel with their tokens, given routes decide, and a router's own change nothing."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import launch
import learners
import numpy as np
import pytest
import trajectories
from learners import batch, begin, host, stage
from oracles import configuration, random_model, short

from policy import families, modes
from policy.cache import cache as caches
from policy.cache.entries import ROUTES
from policy.cache.step import UNKNOWN
from policy.config import Runtime
from policy.experts.router import bias_update
from rl.config.run import RunConfig
from rl.data.encoded import Problem
from rl.records import events
from rl.run import checks
from rl.stages.sampling.batches import routes_of, to_batch
from rl.training.batch import padded_batch
from rl.training.packing.packing import plan_packing
from rollout import Generator, GeneratorOptions, SamplingParams

SLOW = pytest.mark.slow

SHARED = [7, 8, 9] * 12
PROMPTS = [
    [1, 2, 3],
    [4],
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [*SHARED, 4],
    [*SHARED, 5, 6],
    [*SHARED, 4],
]
GRPO, TWICE = {"name": "grpo", "kl_coef": 0.1}, {"updates_per_step": 2, "prompts_per_step": 2}
SAMPLED = SamplingParams(n=2, max_new_tokens=9, stop_token_ids=tuple(range(0, 64, 3)))


@functools.cache
def groups(**how):
    """A dense layer and two layers with 8 experts in 4 groups, scanned and rematerialised."""
    sizes = learners.SIZES | {"num_hidden_layers": 3, "first_k_dense_replace": 1}
    return random_model(families.read(configuration("DeepseekV3", **sizes)), runtime=Runtime(**how))


@functools.cache
def forward(model):
    return jax.jit(model.graph.with_runtime(record=("routes",)).aux)


def own_routes(model, tokens, segments=None) -> dict[str, np.ndarray]:
    """Batch.routes of these rows: what the full forward pass chooses."""
    aux = forward(model)(
        model.params, jnp.asarray(tokens), modes.make_step(jnp.asarray(tokens), segments=segments)
    )
    return {
        path: np.moveaxis(np.asarray(a), 0, 2).astype(np.int8)
        for path, a in aux.by_layer("routes").items()
    }


def random_routes(model, data, seed=0, known=1.0) -> dict[str, np.ndarray]:
    """Two different experts of eight for each token, but for some of which they are not known."""
    rng, result = np.random.default_rng(seed), {}
    for path, own in own_routes(model, data.tokens, data.segments).items():
        chosen = rng.permuted(np.broadcast_to(np.arange(8), (*own.shape[:-1], 8)), axis=-1)[
            ..., : own.shape[-1]
        ]
        result[path] = np.where(rng.random((*own.shape[:2], 1, 1)) < known, chosen, UNKNOWN).astype(
            np.int8
        )
    return result


def updated(model, data, **keys):
    """(all arrays after an update, its metrics)."""
    trainer, state = begin(model, stage(GRPO, **TWICE, **keys))
    state, metrics = trainer.update(state, data)
    return host(state), {name: float(value) for name, value in metrics.items()}


def assert_close(one, other, but=()):
    for arrays, others in zip(one, other, strict=True):
        for name in others.keys() - set(but):
            np.testing.assert_allclose(
                arrays[name], others[name], atol=2e-6, rtol=2e-6, err_msg=name
            )


# What is recorded.


def generator(model, slots=2, **options):
    options = {"prefill_chunk": 8, "tokens_per_dispatch": 4, "record_routes": True} | options
    return Generator(model, max_length=64, slots=slots, options=GeneratorOptions(**options))


@functools.cache
def recorded(model, params=SAMPLED, **options):
    """(the generator, its completions of PROMPTS)."""
    made = generator(model, **options)
    return made, made.generate(PROMPTS, params)


def assert_those_of_the_forward_pass(model, completions):
    rows = [
        (prompt + c.tokens, c)
        for prompt, group in zip(PROMPTS, completions, strict=True)
        for c in group
    ]
    data = padded_batch([(ids, [0] * len(ids)) for ids, _ in rows], 64)
    expected = own_routes(model, data.tokens, data.segments)
    made = trajectories.rollouts(
        [Problem(None, ids) for ids in PROMPTS], range(len(PROMPTS)), completions
    )
    result = routes_of([row.segment for row in made.rows], data.tokens.shape[1])
    fed = np.arange(data.tokens.shape[1]) < np.asarray([len(ids) - 1 for ids, _ in rows])[:, None]
    assert result.keys() == expected.keys() and result
    for path, routes in result.items():
        assert routes.dtype == np.int8 and (routes[~fed] == UNKNOWN).all()
        same = np.sort(routes[fed], axis=-1) == np.sort(expected[path][fed], axis=-1)
        assert same.mean() > 0.99, (
            f"{path}: {1 - same.mean():.3f} of the choices differ; rounding decides near ties only"
        )


@functools.cache
def family(kind):
    return random_model(families.read(short(kind)), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["one layer", *(pytest.param(kind, marks=SLOW) for kind in ("Qwen3Next", "Gemma4Moe"))]
)
def test_recorded_routes_are_those_of_the_full_forward_pass(kind):
    """Prompts in chunks, shared, copied from one another, more requests than slots; completions of
    different lengths. Also next to states of fixed size, and next to dense feed-forwards with a
    sliding-window cache."""
    model, how = (
        (learners.experts(), {})
        if kind == "one layer"
        else (family(kind), {"sliding_window_cache": kind == "Gemma4Moe"})
    )
    _, result = recorded(model, **how)
    assert_those_of_the_forward_pass(model, result)
    assert len({len(c.tokens) for group in result for c in group}) > 1


@SLOW
@pytest.mark.parametrize("kind", ["one layer", "DeepseekV3"])
def test_pages_keep_routes_as_rows_do(kind):
    """Pages of a prompt that others share, copies of them, and those that preempted requests are
    read into again."""
    model = learners.experts() if kind == "one layer" else family(kind)
    long = SamplingParams(n=2, max_new_tokens=26)
    made, result = recorded(model, long, cache="paged", page_size=4, pages=20)
    assert made.engine.counts["preempted"] > 0
    assert_those_of_the_forward_pass(model, result)


@SLOW
def test_only_drafts_that_are_accepted_leave_routes():
    sizes = learners.SIZES | {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "duet": {"multi_token_prediction": {"depth": 1}},
    }
    model = random_model(families.read(configuration("DeepseekV3", **sizes)), seed=2)
    _, result = recorded(model, speculative=2, cache="paged", page_size=4)
    assert_those_of_the_forward_pass(model, result)
    assert any(c.steps < len(c.tokens) for group in result for c in group), "no draft was accepted"
    assert any(c.steps > 1 for group in result for c in group), "no draft was taken back"


@SLOW
def test_recording_changes_no_completion_and_without_it_nothing_is_kept():
    (made, kept), (other, plain) = (
        recorded(learners.experts()),
        recorded(learners.experts(), record_routes=False),
    )
    assert [[(c.tokens, c.logprobs) for c in group] for group in kept] == [
        [(c.tokens, c.logprobs) for c in group] for group in plain
    ]
    assert plain[0][0].routes is None
    caches_of = [each.engine.runner.abstract_cache for each in (made, other)]
    names = [
        {name for stack in cache for part in stack for layer in part for name in layer}
        for cache in caches_of
    ]
    assert names[0] - names[1] == {ROUTES}
    sizes = [sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache)) for cache in caches_of]
    assert sizes[0] - sizes[1] == 2 * 64 * 2, "a byte for each of the 2 experts of a token"
    assert "routes" not in {key[0] for key in other.engine.runner.memory}


def test_a_model_without_experts_has_nothing_to_record():
    with pytest.raises(ValueError, match="no mixture of experts"):
        generator(learners.dense())


@pytest.mark.parametrize(("experts", "bits"), [(128, 8), (129, 16)])
def test_the_smallest_numbers_that_hold_all_experts_are_kept(experts, bits):
    model = learners.experts()
    spec = model.config.layers[0]
    router = replace(spec.feed_forward.router, experts=experts)
    stacks = (
        replace(
            model.config.stacks[0],
            pattern=(replace(spec, feed_forward=replace(spec.feed_forward, router=router)),),
        ),
    )
    config = replace(model.config, stacks=stacks)
    cache = caches.create(config, 2, 4, "float32", scan=True, routes=True)
    assert cache[0][0][0][ROUTES].dtype == f"int{bits}"


# What is replayed.


@SLOW
def test_a_routers_own_routes_change_nothing():
    model, data = learners.experts(), batch()
    routes = own_routes(model, data.tokens, data.segments)
    plain = updated(model, data)
    replayed = updated(model, data.replace(routes=routes), router_replay=True)
    assert plain[1]["optim/grad_norm"] > 0
    assert (replayed[1].pop("moe/replayed"), replayed[1].pop("moe/replay_disagreement")) == (1, 0)
    assert_close(replayed, plain)


@SLOW
def test_given_routes_are_packed_and_cut_as_their_tokens_are():
    model, data = groups(), batch()
    data = data.replace(routes=random_routes(model, data, known=0.8))
    full = updated(model, data, router_replay=True)
    cut = updated(model, data, router_replay=True, micro_batch=3)
    assert 0.5 < full[1]["moe/replayed"] < 0.95 and full[1]["moe/replay_disagreement"] > 0.5
    assert_close(cut, full, but=["perf/packed_share"])
    own = updated(model, data.replace(routes=None))
    assert abs(own[1]["optim/grad_norm"] - full[1]["optim/grad_norm"]) > 1e-4, (
        "other experts, and the same gradient"
    )


@pytest.mark.slow
def test_the_trainer_agrees_with_the_generator_until_its_weights_move():
    model = learners.experts()
    _, result = recorded(model)
    problems = [Problem(None, ids) for ids in PROMPTS]
    data = to_batch(trajectories.rollouts(problems, range(len(PROMPTS)), result), 64, replay=True)
    advantages = np.random.default_rng(0).normal(size=len(data.tokens)).astype(np.float32)
    trainer, state = begin(
        model, stage("grpo", router_replay=True, optimizer={"learning_rate": 0.1})
    )
    disagreements = []
    for _ in range(2):
        state, metrics = trainer.update(
            state, data.replace(advantages=advantages, old_logp=data.sampler_logp)
        )
        disagreements.append(float(metrics["moe/replay_disagreement"]))
        assert metrics["moe/replayed"] == pytest.approx(
            1 - len(data.tokens) / np.count_nonzero(data.segments)
        )
    assert disagreements[0] == 0 < disagreements[1]
    others = {
        path: np.where(ids != UNKNOWN, (ids + 1) % 8, ids) for path, ids in data.routes.items()
    }
    state = begin(model, trainer.stage)[1]
    metrics = trainer.update(
        state, data.replace(advantages=advantages, old_logp=data.sampler_logp, routes=others)
    )[1]
    assert metrics["moe/replay_disagreement"] > 0.5, "other routes, and no disagreement"


@SLOW
def test_log_probabilities_of_a_batch_are_those_of_its_rows_with_their_routes():
    """Of two layers with experts: each gets its own."""
    model, data = groups(), batch()
    routes = random_routes(model, data, known=0.8)
    assert {path: a.shape[2:] for path, a in routes.items()} == {"stacks.1.layers.0": (2, 2)}
    trainer, _ = begin(model, stage(GRPO, router_replay=True, micro_batch=2))
    logp, entropy = trainer.logprobs(model.params, data.replace(routes=routes))
    step = replace(modes.make_step(data.tokens, segments=data.segments), routes=routes)
    expected = jax.jit(model.graph.logprobs)(model.params, data.tokens, step, 1.0)
    np.testing.assert_allclose(logp, expected[0], atol=2e-6)
    np.testing.assert_allclose(entropy, expected[1], atol=2e-6)
    assert abs(logp - trainer.logprobs(model.params, data)[0]).max() > 1e-3

    trainer, state = begin(model, stage("ppo", router_replay=True, micro_batch=2))
    values = [trainer.values(state, each)[0] for each in (data, data.replace(routes=routes))]
    np.testing.assert_array_equal(*values, err_msg="a critic is another model: it chooses itself")


@SLOW
def test_the_batch_split_schedule_changes_nothing_of_given_routes():
    data = batch()
    routes = random_routes(groups(), data, known=0.8)
    step = replace(modes.make_step(data.tokens, segments=data.segments), routes=routes)
    result = []
    for changes in ({}, {"batch_split": True}):
        logp, _, aux = jax.jit(groups().graph.with_runtime(**changes).logprobs)(
            groups().params, data.tokens, step, 1.0
        )
        (routing,) = aux.by_layer("routing").values()
        result.append((logp, routing.counts, routing.replayed.given, routing.replayed.disagreed))
    for a, b in zip(*result, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@SLOW
def test_metrics_and_biases_count_the_choices_that_are_computed():
    """One layer with experts: what its router would have chosen does not depend on what is
    given."""
    model, data = learners.experts(), batch()
    own, given = (
        own_routes(model, data.tokens, data.segments),
        random_routes(model, data, known=0.7),
    )
    (path,) = own
    real = data.segments != 0
    known = (given[path] != UNKNOWN) & real[..., None, None]
    agrees = (given[path][..., :, None] == own[path][..., None, :]).any(-1)
    executed = np.where(given[path] != UNKNOWN, given[path], own[path])[real]
    arrays, metrics = updated(model, data.replace(routes=given), router_replay=True)
    assert metrics["moe/replayed"] == pytest.approx(known.sum() / executed.size)
    assert metrics["moe/replay_disagreement"] == pytest.approx(
        (known & ~agrees).sum() / known.sum()
    )
    counts = np.bincount(executed.ravel(), minlength=8).astype(np.float32)
    assert metrics["moe/max_load"] == pytest.approx(counts.max() / counts.mean())
    bias = f"{path}.feed_forward.router.correction_bias"
    (moved,) = (
        array for name, array in arrays.items() if bias in name and name.startswith(".policy")
    )
    np.testing.assert_allclose(
        moved, bias_update(np.array(model.params[bias]), counts[None], 1e-3), atol=1e-7
    )


@SLOW
def test_prediction_modules_choose_themselves():
    sizes = learners.SIZES | {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "duet": {"multi_token_prediction": {"depth": 1}},
    }
    model, data = (
        random_model(families.read(configuration("DeepseekV3", **sizes)), runtime=learners.QUICK),
        batch(),
    )
    data = data.replace(routes=own_routes(model, data.tokens, data.segments))
    assert set(data.routes) == {"stacks.1.layers.0"}
    trainer, state = begin(model, stage("grpo", router_replay=True, mtp={}), fresh=True)
    _, metrics = trainer.update(state, data)
    assert (
        metrics["moe/replay_disagreement"] == 0
        and 0 < metrics["moe/replayed"] < 1
        and metrics["mtp/loss"] > 0
    )


def test_packing_fills_up_with_routes_that_are_not_known():
    data = batch()
    routes = np.random.default_rng(0).integers(0, 8, (*data.tokens.shape, 3, 2)).astype(np.int16)
    packing = plan_packing(data.segments, len(data.tokens))
    packed = packing.batch(data.replace(routes={"a": routes}))
    assert (packed.routes["a"][packed.segments == 0] == UNKNOWN).all()
    for layer in range(3):
        back = packing.unpack(packed.routes["a"][:, :, layer, 1])
        np.testing.assert_array_equal(back, routes[:, :, layer, 1] * (data.segments != 0))


# A run.


def test_a_batch_without_routes_is_refused():
    trainer, state = begin(learners.experts(), stage("grpo", router_replay=True))
    with pytest.raises(ValueError, match="no routes"):
        trainer.update(state, batch())


NOTHING = [
    ("mistral-7b", "grpo", False, "no experts"),
    ("tiny-deepseek", "sft", False, "no generator"),
    ("tiny-deepseek", "grpo", True, "exact: true"),
]


@pytest.mark.parametrize(("source", "algorithm", "exact", "said"), NOTHING)
def test_a_run_that_has_nothing_to_replay_is_refused(source, algorithm, exact, said):
    run = RunConfig.model_validate(
        {
            "model": source,
            "tokenizer": {"source": "characters", "alphabet": "0123456789+="},
            "data": {"task": "arithmetic"},
            "max_length": 16,
            "generator": {"exact": exact},
            "rewards": {"functions": ["exact_answer"]},
            "stages": [
                {
                    "algorithm": algorithm,
                    "steps": 1,
                    "router_replay": True,
                    "sampling": {"max_new_tokens": 2},
                }
            ],
        }
    )
    (fault,) = checks.faults(run)
    assert fault.key == ("stages", 0, "router_replay") and said in fault.text


@SLOW
def test_a_run_replays_what_it_sampled(tmp_path, monkeypatch):
    """Updates after the first of a step may disagree: the weights have moved."""
    monkeypatch.chdir(launch.ROOT)
    grpo = (
        "{algorithm: {name: grpo, kl_coef: 0.05}, steps: 2, prompts_per_step: 4, "
        "samples_per_prompt: 4, "
    )
    grpo += (
        "updates_per_step: 2, optimizer: {learning_rate: 1e-3}, sampling: {max_new_tokens: "
        "6}, router_replay: true}"
    )
    assert (
        launch.train(
            tmp_path, "evaluation=null", "generator.strict_shapes=true", f"stages=[{grpo}]"
        )
        == 0
    )
    steps = [row["metrics"] for row in events.read(tmp_path / "events.jsonl") if row["step"]]
    assert len(steps) == 2
    for metrics in steps:
        assert 0.5 < metrics["moe/replayed"] < 1 and 0 <= metrics["moe/replay_disagreement"] < 0.1
        assert metrics["sampler/logp_diff_max"] < 1e-5
