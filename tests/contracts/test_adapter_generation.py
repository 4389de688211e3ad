"""A generator samples from a policy with an adapter what the trainer scores, whatever its options;
updates over an adapter take replayed routes and shared prefixes."""

import functools

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
import qwix
import shared_prefixes
import trajectories
from adapted import with_adapter
from oracles import configuration, random_model

import rollout.engine.programs
from policy import families
from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import is_adapter
from policy.execution.decoding import DecodingWeights
from policy.model import Model
from rl.data.encoded import Problem
from rl.stages.sampling.batches import to_batch
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.engine.weights import RolloutWeights

WIDTH = 32
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [1, 2, 3, 9, 4]]
GREEDY = SamplingParams(max_new_tokens=9, temperature=0)
SPECS = {
    "lora": AdapterSpec(rank=4, alpha=6.0),
    "dora": AdapterSpec(rank=4, alpha=6.0, dora=True, experts="shared"),
}


@functools.cache
def model_of(form: str) -> Model:
    """A dense layer and one of 8 experts with a shared one, latent attention, a module that
    drafts."""
    sizes = learners.SIZES | {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "initializer_range": 0.05,
        "duet": {"multi_token_prediction": {"depth": 1}},
    }
    model = random_model(families.read(configuration("DeepseekV3", **sizes)), seed=2)
    return with_adapter(model, SPECS[form], size=0.1)


def generator_of(model: Model, **options) -> Generator:
    options = GeneratorOptions(**{"tokens_per_dispatch": 4, "prefill_chunk": 8} | options)
    return Generator(model, max_length=WIDTH, slots=3, seed=5, options=options)


def greedy(model: Model, **options):
    return [each for (each,) in generator_of(model, **options).generate(PROMPTS, GREEDY)]


def differences(model: Model, completions) -> np.ndarray:
    """Those of the log-probabilities of all tokens from what the model scores."""
    tokens, segments = np.zeros((2, len(PROMPTS), WIDTH), np.int32)
    for row, (prompt, each) in enumerate(zip(PROMPTS, completions, strict=True)):
        ids = prompt + each.tokens
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    logp = np.asarray(model.logprobs(tokens, segments=segments)[0])
    result = [
        logp[row, len(prompt) : len(prompt) + len(each.tokens)] - each.logprobs
        for row, (prompt, each) in enumerate(zip(PROMPTS, completions, strict=True))
    ]
    return np.abs(np.concatenate(result))


@functools.cache
def plain(form: str):
    """Greedy completions with one step a dispatch."""
    return greedy(model_of(form), tokens_per_dispatch=1)


OPTIONS = {
    "pages": {"cache": "paged", "page_size": 4},
    "drafts": {"speculative": 2},
    "drafts in pages": {"speculative": 2, "cache": "paged", "page_size": 4},
    "dispatches": {},
    "exact": {"exact": True},
}
EVERY = [
    pytest.param(name, form, marks=() if (name, form) == ("pages", "dora") else pytest.mark.slow)
    for name in OPTIONS
    for form in SPECS
]


@pytest.mark.parametrize(("name", "form"), EVERY)
def test_every_option_samples_the_same_tokens(name, form):
    completions = greedy(model_of(form), **OPTIONS[name])
    assert [each.tokens for each in completions] == [each.tokens for each in plain(form)]
    assert differences(model_of(form), completions).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("form", SPECS)
def test_scanned_layers_read_adapters_in_place(form, cache, monkeypatch):
    """As TPUs decode."""
    monkeypatch.setattr(rollout.engine.programs, "UNROLLED_LAYERS", 0)
    completions = greedy(model_of(form), cache=cache, page_size=4)
    assert [each.tokens for each in completions] == [each.tokens for each in plain(form)]
    assert differences(model_of(form), completions).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("form", SPECS)
def test_adapters_are_floats_over_quantised_copies(form):
    model = model_of(form)
    copies = RolloutWeights(model.graph, "int8").with_copies(model.params)
    assert not any(isinstance(copies[path], qwix.QArray) for path in copies if is_adapter(path))
    floats = {
        path: qwix.dequantize(each) if isinstance(each, qwix.QArray) else each
        for path, each in copies.items()
    }
    completions = greedy(model, weights="int8")
    assert differences(Model(model.graph, floats), completions).max() < 1e-5
    assert differences(model, completions).max() > 1e-5


@pytest.mark.slow
def test_a_quantised_cache_stays_near_the_trainer():
    result = differences(model_of("lora"), greedy(model_of("lora"), kv_cache="int8"))
    assert 1e-6 < result.mean() < 0.005 and result.max() < 0.05


def test_copies_of_the_base_stay_when_the_adapter_changes():
    model = model_of("lora")
    moved = {
        path: a + jnp.float32(1) if is_adapter(path) else a for path, a in model.params.items()
    }
    matrices = DecodingWeights(model.graph)
    integers = RolloutWeights(model.graph, "int8")
    for prepare in (matrices.prepare, integers.with_copies):
        before = prepare(model.params)
        after = prepare(moved)
        assert before.keys() == after.keys()
        for path, array in before.items():
            pairs = zip(jax.tree.leaves(array), jax.tree.leaves(after[path]), strict=True)
            assert all((one is other) is not is_adapter(path) for one, other in pairs), path


def adapted_experts() -> Model:
    return with_adapter(learners.experts(), SPECS["dora"], size=0.1)


@pytest.mark.slow
def test_recorded_routes_are_those_that_an_update_chooses():
    model = adapted_experts()
    params = SamplingParams(n=2, max_new_tokens=9)
    completions = generator_of(model, record_routes=True).generate(PROMPTS, params)
    problems = [Problem(None, ids) for ids in PROMPTS]
    rollouts = trajectories.rollouts(problems, range(len(PROMPTS)), completions)
    data = to_batch(rollouts, WIDTH, replay=True)
    advantages = np.random.default_rng(0).normal(size=len(data.tokens)).astype(np.float32)
    options = learners.stage("grpo", router_replay=True)
    trainer, state = learners.begin(model, options)
    old = trainer.logprobs(trainer.policy_params(state), data)[0]
    data = data.replace(advantages=advantages, old_logp=old)
    _, metrics = trainer.update(state, data)
    assert metrics["moe/replayed"] > 0.8 and metrics["moe/replay_disagreement"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_updates_share_prefixes(kind):
    model = with_adapter(learners.dense(), size=0.1) if kind == "dense" else adapted_experts()
    data = shared_prefixes.groups(learners.VOCAB)
    (_, expected), (_, weights) = shared_prefixes.moved(model, learners.stage("grpo"), data)
    assert any(".lora_b" in path for path in weights)
    assert max(float(np.abs(change).max()) for change in expected.values()) > 1e-4
    worst = shared_prefixes.differences(expected, weights)
    assert max(worst.values()) < 1e-4, max(worst.items(), key=lambda each: each[1])
