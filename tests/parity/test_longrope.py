"""LongRoPE's two sets of factors: one set for all tokens of a call, a generator or a run, chosen by
the longest sequence. The oracle is a model that has the chosen factors as both of its sets."""

import jax
import numpy as np
import pytest
from oracles import KINDS, oracle, reference_logits, saved, tokens

import policy
from policy.model import Model
from policy.runtime import Runtime
from rl.config.run import RunConfig
from rl.run import build
from rollout import Generator, GeneratorOptions, SamplingParams

pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)
LIMIT = 16
ROPE = KINDS["Phi3"].standard["rope_parameters"]
KEYS = {"original_max_position_embeddings": LIMIT, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return saved(oracle("Phi3", rope_parameters=ROPE, **KEYS), tmp_path_factory.mktemp("phi3"))


def logprobs(factors: str, row: np.ndarray) -> np.ndarray:
    """float32[T - 1], of the tokens after the first, by the oracle with these factors."""
    both = ROPE | {"short_factor": ROPE[factors], "long_factor": ROPE[factors]}
    logits = reference_logits(oracle("Phi3", rope_parameters=both, **KEYS), row[None])[0].astype(
        np.float64
    )
    normed = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return normed[np.arange(len(row) - 1), row[1:]].astype(np.float32)


@pytest.mark.parametrize(
    ("max_length", "factors"), [(None, "short_factor"), (LIMIT + 1, "long_factor")]
)
def test_the_runtime_chooses_the_factors_of_short_rows(directory, max_length, factors):
    row = tokens(1, 12)[0]
    model = policy.load(directory, runtime=Runtime(max_length=max_length))
    ours, _ = model.logprobs(row[None])
    np.testing.assert_allclose(ours[0, 1:], logprobs(factors, row), atol=2e-5, rtol=0)
    logits = np.asarray(model.logits(row[None]))[0]
    both = ROPE | {"short_factor": ROPE[factors], "long_factor": ROPE[factors]}
    theirs = reference_logits(oracle("Phi3", rope_parameters=both, **KEYS), row[None])[0]
    np.testing.assert_allclose(logits, theirs, atol=2e-5, rtol=0)


def test_documents_of_one_call_have_the_factors_of_the_longest(directory):
    row = tokens(1, 40)[0]
    segments = np.repeat([1, 2], [10, 30])[None]
    ours, _ = policy.load(directory).logprobs(row[None], segments=segments)
    np.testing.assert_allclose(ours[0, 1:10], logprobs("long_factor", row[:10]), atol=2e-5, rtol=0)
    np.testing.assert_allclose(ours[0, 11:], logprobs("long_factor", row[10:]), atol=2e-5, rtol=0)


def test_padding_does_not_choose(directory):
    row = tokens(1, 40)[0]
    segments = np.repeat([1, 0], [12, 28])[None]
    logits = policy.load(directory).logits(row[None], segments=segments)
    alone = policy.load(directory).logits(row[None, :12])
    np.testing.assert_allclose(logits[0, :12], alone[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("max_length", "factors", "exact"),
    [
        (LIMIT, "short_factor", False),
        (40, "long_factor", True),
        pytest.param(LIMIT, "short_factor", True, marks=pytest.mark.slow),
        pytest.param(40, "long_factor", False, marks=pytest.mark.slow),
    ],
)
def test_a_generator_has_the_factors_of_its_max_length(directory, max_length, factors, exact):
    options = GeneratorOptions(exact=exact)
    generator = Generator(policy.load(directory), max_length=max_length, slots=2, options=options)
    prompt = tokens(1, 5)[0].tolist()
    ((completion,),) = generator.generate([prompt], SamplingParams(max_new_tokens=10))
    expected = logprobs(factors, np.array([*prompt, *completion.tokens]))[4:]
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5, rtol=0)


def test_a_run_has_the_factors_of_its_max_length(directory):
    stage = {"algorithm": {"name": "grpo"}, "steps": 1, "sampling": {"max_new_tokens": 8}}
    config = RunConfig(
        model={"source": str(directory)}, max_length=40, data={"task": "arithmetic"}, stages=[stage]
    )
    graph = build.graph(config, build.on_mesh(config, jax.devices()[:1]))
    assert graph.runtime.max_length == 40
    model = Model(graph, {})
    assert model.graph_for(LIMIT) is graph, "a generator of the run takes the run's factors"
