"""Speculative decoding writes what plain decoding writes, whatever the cache: tokens,
log-probabilities, ends. S slots.
"""

import functools

import jax
import numpy as np
import pytest
from oracles import KINDS, configuration, random_model

import rollout.engine.programs
from policy import families
from rollout import Generator, GeneratorOptions, SamplingParams

pytestmark = pytest.mark.xdist_group("speculative")

# So few tokens that drafts of untrained modules are right now and then.
VOCAB, WIDTH, NEW = 6, 40, 20
PROMPTS = [
    [int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in (15, 1, 2, 7, 12)
]
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)
DRAWN = SamplingParams(n=2, max_new_tokens=NEW, temperature=0.9)
FILTERED = SamplingParams(
    n=2, max_new_tokens=NEW, temperature=1.3, top_k=5, top_p=0.9, min_p=0.05, stop_token_ids=(3,)
)
PROCESSED = SamplingParams(
    n=2,
    max_new_tokens=NEW,
    temperature=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.15,
    presence_penalty=-0.3,
    logit_bias={1: 0.5},
    min_tokens=4,
    stop_token_ids=(3,),
)
# kind, keys, depth of the modules, drafts
MODELS = {
    "llama": ("Llama", {}, 1, 1),
    "latent-experts": ("DeepseekV3", KINDS["DeepseekV3"].short, 2, 3),
    "delta_net": ("Qwen3Next", KINDS["Qwen3Next"].standard | KINDS["Qwen3Next"].short, 1, 2),
    "sliding_window": (
        "Gemma3",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        1,
        3,
    ),
    "index_selector": ("DeepseekV32", KINDS["DeepseekV32"].short, 1, 3),
    "shared_index": ("GlmMoeDsa", KINDS["GlmMoeDsa"].short, 1, 3),
    "blocks_of_keys": ("Qwen4Exp", KINDS["Qwen4Exp"].standard | KINDS["Qwen4Exp"].short, 1, 2),
    "learned_positions": ("GPT2", {"n_layer": 2}, 3, 2),
    "chunks-temperature": ("Llama4", KINDS["Llama4"].short, 2, 3),
    "shared_keys": ("Gemma4Small", KINDS["Gemma4Small"].short, 1, 2),
    "mamba2": ("NemotronH", KINDS["NemotronH"].short, 1, 2),
    "kimi_delta": ("KimiLinear", KINDS["KimiLinear"].short, 1, 2),
    "short_conv": ("Lfm2", KINDS["Lfm2"].standard | KINDS["Lfm2"].short, 1, 2),
    "delta_net-scanned": ("Qwen3_5", {"num_hidden_layers": 4}, 3, 4),
}


@functools.cache
def model_of(name):
    kind, keys, depth, _ = MODELS[name]
    keys = {"vocab_size": VOCAB, "duet": {"multi_token_prediction": {"depth": depth}}} | keys
    return random_model(families.read(configuration(kind, **keys)), seed=2)


@functools.cache
def generator_of(name, drafts, slots=3, dispatch=4, chunk=16, **cache):
    options = GeneratorOptions(
        speculative=drafts, tokens_per_dispatch=dispatch, prefill_chunk=chunk, **cache
    )
    return Generator(model_of(name), max_length=WIDTH, slots=slots, seed=5, options=options)


def check(name, sampling, **how):
    """What both write, and that drafts were accepted, unevenly. Returns the completions."""
    kind, _, _, drafts = MODELS[name]
    expected = generator_of(name, 0).generate(PROMPTS, sampling)
    result = generator_of(name, drafts, **how).generate(PROMPTS, sampling)
    for group, requested in zip(result, expected, strict=True):
        for a, b in zip(group, requested, strict=True):
            assert (a.tokens, a.finish) == (b.tokens, b.finish) and len(b.tokens) == b.steps
            assert len(a.tokens) / (drafts + 1) <= a.steps <= len(a.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=KINDS[kind].generator, rtol=0)
    every = [completion for group in result for completion in group]
    assert len({round(c.steps / len(c.tokens), 3) for c in every}) > 1, (
        "no slot accepts more than another"
    )
    return every


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "learned_positions"])
def test_penalties_and_forbidden_tokens_count_the_accepted_drafts_only(name):
    every = check(name, PROCESSED)
    assert min(len(completion.tokens) for completion in every) > PROCESSED.min_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.slow, id="greedy"), pytest.param(FILTERED, id="drawn")],
)
def test_plain_attention_writes_the_same_tokens(sampling):
    check("llama", sampling)


@pytest.mark.slow
def test_slots_dispatches_and_prefill_chunks_change_nothing():
    check("llama", FILTERED, slots=1, dispatch=1, chunk=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_cache_writes_the_same_tokens(name, monkeypatch):
    if "scanned" in name:
        monkeypatch.setattr(rollout.engine.programs, "UNROLLED_LAYERS", 0)
    for sampling in (GREEDY, FILTERED):
        check(name, sampling, slots=2, chunk=7)


# Pages for little more than one of the longest rows.
FEW_PAGES = {"cache": "paged", "page_size": 8, "pages": 10, "sliding_window_cache": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_drafts_over_pages_write_the_same_tokens(name):
    check(name, DRAWN, chunk=7, dispatch=2, **FEW_PAGES)
    assert generator_of(name, MODELS[name][3], chunk=7, dispatch=2, **FEW_PAGES).engine.counts[
        "preempted"
    ]


def test_log_probabilities_are_those_of_the_full_forward():
    out = generator_of("llama", 1).generate(PROMPTS, FILTERED)
    rows, segments, written = (np.zeros((10, WIDTH), int) for _ in range(3))
    every = [(prompt, c) for prompt, group in zip(PROMPTS, out, strict=True) for c in group]
    for row, (prompt, completion) in enumerate(every):
        end = len(prompt) + len(completion.tokens)
        rows[row, :end], segments[row, :end], written[row, len(prompt) : end] = (
            prompt + completion.tokens,
            1,
            1,
        )
    expected = np.asarray(model_of("llama").logprobs(rows, segments=segments, temperature=1.3)[0])[
        written == 1
    ]
    np.testing.assert_allclose(
        np.concatenate([c.logprobs for _, c in every]), expected, atol=1e-5, rtol=0
    )


def test_what_cannot_draft_is_refused():
    options = GeneratorOptions(speculative=1)
    with pytest.raises(ValueError, match="no prediction modules"):
        Generator(random_model(families.read(configuration("Llama"))), options=options)
    recurrent = configuration(
        "Qwen3Next", layer_types=["full_attention", "linear_attention"], num_hidden_layers=2
    )
    with pytest.raises(ValueError, match="GatedDeltaNet"):
        Generator(
            random_model(
                families.read(recurrent | {"duet": {"multi_token_prediction": {"depth": 1}}})
            ),
            options=options,
        )
    with pytest.raises(ValueError, match="speculative"):
        GeneratorOptions(speculative=-1)


# A decoder and a module that look at the last token only: the decoder draws the next one by row x
# of P, the module by row WRONG[x], which is another row for most tokens.
P = np.array(
    [[0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1], [0.05, 0.45, 0.05, 0.45], [0.25, 0.25, 0.25, 0.25]]
)
WRONG = np.array([2, 3, 0, 3])


@functools.cache
def chain():
    E, V = 32, len(P)
    section = {"multi_token_prediction": {"depth": 1}}
    keys = {
        "vocab_size": V,
        "hidden_size": E,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "duet": section,
    }
    model = random_model(families.read(configuration("Llama", **keys)))
    params = {path: np.array(array) for path, array in model.params.items()}
    for path, array in params.items():
        array[...] = (
            0.0
            if path.endswith(("o_proj", "down_proj"))
            else 1.0
            if path.endswith("norm.weight")
            else array
        )
    params["embed_tokens"][...] = np.eye(V, E) * E**0.5
    params["lm_head"][...] = 0.0
    params["lm_head"][:, :V] = np.log(P).T / E**0.5
    params["mtp.eh_proj"][...] = 0.0
    params["mtp.eh_proj"][0, np.arange(V), WRONG] = 1.0
    params |= {
        path: np.ones_like(array)
        for path, array in params.items()
        if path.endswith(("enorm.weight", "hnorm.weight"))
    }
    model.params = {
        path: jax.device_put(array, model.params[path].sharding) for path, array in params.items()
    }
    return model


def coupling(p, q):
    """Probability that one number gives the same token under both
    (rollout/engine/speculative.py)."""
    P, Q = np.cumsum(p), np.cumsum(q)
    return np.maximum(0, np.minimum(P, Q) - np.maximum(P - p, Q - q)).sum()


@functools.cache
def chain_generator():
    return Generator(
        chain(),
        max_length=8,
        slots=500,
        seed=11,
        options=GeneratorOptions(speculative=2, tokens_per_dispatch=3),
    )


@pytest.mark.slow
def test_drawn_tokens_have_the_distribution_of_the_decoder():
    """Three tokens after a prompt, 64 outcomes whose probabilities are products of P, with a module
    that is mostly wrong. Rules that accept too much, or draw again after a rejection, are off by
    hundreds."""
    samples, start = 6000, 1
    (made,) = chain_generator().generate([[0, start]], SamplingParams(n=samples, max_new_tokens=3))
    expected = np.einsum("a,ab,bc->abc", P[start], P, P) * samples
    counts = np.zeros_like(expected)
    for completion in made:
        counts[tuple(completion.tokens)] += 1
    chi_square, freedom = float(((counts - expected) ** 2 / expected).sum()), expected.size - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    assert {completion.steps for completion in made} == {1, 2, 3}
    before = np.array([[start, *completion.tokens[:2]] for completion in made])
    logps = np.log(P[before, [completion.tokens for completion in made]])
    np.testing.assert_allclose([completion.logprobs for completion in made], logps, atol=1e-5)


@pytest.mark.slow
def test_drafts_are_accepted_as_often_as_the_documented_coupling_says():
    """Of two tokens only one is drafted: they take one step where it was right."""
    samples, start = 3000, 0
    (made,) = chain_generator().generate([[1, start]], SamplingParams(n=samples, max_new_tokens=2))
    rate, expected = (
        np.mean([completion.steps == 1 for completion in made]),
        coupling(P[start], P[WRONG[start]]),
    )
    assert abs(rate - expected) < 4 * (expected * (1 - expected) / samples) ** 0.5
    assert expected < np.minimum(P[start], P[WRONG[start]]).sum() < 1


def test_rows_that_draft_are_used_as_far_as_they_are_filled():
    """The state that the modules read is of fixed size, also in a model whose own cache has entries
    by position only.
    """
    assert not generator_of("llama", 1).engine.runner.geometry.supports_truncation
    assert generator_of("llama", 0).engine.runner.geometry.supports_truncation
