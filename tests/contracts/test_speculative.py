"""Speculative decoding writes what plain decoding writes, whatever the cache: tokens, log-probabilities, ends. S slots."""

import functools

import numpy as np
import pytest
import rollout.programs
from oracles import KINDS, configuration, random_model

from policy import families
from rollout import Generator, GeneratorOptions, SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compilation")

# So few tokens that drafts of untrained modules are right now and then.
VOCAB, WIDTH, NEW = 6, 48, 20
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in (19, 1, 2, 7, 12)]
# kind, keys, depth of the modules, drafts
MODELS = {
    "llama": ("Llama", {}, 1, 1),
    "latent-experts": ("DeepseekV3", KINDS["DeepseekV3"].short, 2, 4),
    "sliding_window": ("Gemma3", {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}, 1, 3),
    "delta_net": ("Qwen3Next", KINDS["Qwen3Next"].standard | KINDS["Qwen3Next"].short, 1, 2),
}
OTHERS = {
    "index_selector": ("DeepseekV32", KINDS["DeepseekV32"].short, 1, 3),
    "learned_positions": ("GPT2", {"n_layer": 2}, 3, 2),
    "chunks-temperature": ("Llama4", KINDS["Llama4"].short, 2, 3),
    "delta_net-scanned": ("Qwen3_5", {"num_hidden_layers": 4}, 3, 4),
}


@functools.cache
def model_of(name):
    kind, keys, depth, _ = (MODELS | OTHERS)[name]
    keys = {"vocab_size": VOCAB, "duet": {"multi_token_prediction": {"depth": depth}}} | keys
    return random_model(families.read(configuration(kind, **keys)), seed=2)


@functools.cache
def generator_of(name, drafts, slots=3, dispatch=4, chunk=8):
    options = GeneratorOptions(speculative=drafts, tokens_per_dispatch=dispatch, prefill_chunk=chunk)
    return Generator(model_of(name), max_length=WIDTH, slots=slots, seed=5, options=options)


def assert_same(found, expected, tolerance):
    for group, wanted in zip(found, expected, strict=True):
        for a, b in zip(group, wanted, strict=True):
            assert (a.tokens, a.finish) == (b.tokens, b.finish)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)


def check(name, **how):
    """Greedy and drawn, ends by token and by length, more requests than slots."""
    kind, _, _, drafts = (MODELS | OTHERS)[name]
    plain, speculative = generator_of(name, 0), generator_of(name, drafts, **how)
    for sampling in (
        SamplingParams(max_new_tokens=NEW, temperature=0),
        SamplingParams(n=3, max_new_tokens=NEW, temperature=0.9),
        SamplingParams(n=2, max_new_tokens=NEW, temperature=1.3, top_k=4, top_p=0.9, min_p=0.05, stop_token_ids=(3,)),
    ):
        expected, found = plain.generate(PROMPTS, sampling), speculative.generate(PROMPTS, sampling)
        assert_same(found, expected, KINDS[kind].generator)
        every = [completion for group in found for completion in group]
        assert all(len(c.tokens) == c.steps for group in expected for c in group)
        assert all(len(c.tokens) / (drafts + 1) <= c.steps <= len(c.tokens) for c in every)
        gained = [1 - c.steps / len(c.tokens) for c in every]
        assert len({round(gain, 3) for gain in gained}) > 1, "no slot accepts more than another"
        assert sum(c.steps for c in every) < sum(len(c.tokens) for c in every), "no draft was accepted"


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_and_log_probabilities_as_plain_decoding(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_for_other_caches(name, monkeypatch):
    if "scanned" in name:
        monkeypatch.setattr(rollout.programs, "UNROLLED_LAYERS", 0)
    check(name)
