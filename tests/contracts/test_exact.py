"""`exact: true`: no option of the generator changes a token, and log-probabilities are those of `model.logprobs` bit for bit."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import KINDS, VOCAB, random_model, short

import rollout.programs
import rollout.sampling
from policy import families, scoring
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.scheduler import Request

WIDTH, NEW = 80, 20
# Full attention, windows, latents with experts, a recurrent state; the others in the long suite.
QUICK = ("Llama", "Gemma3", "DeepseekV3", "Qwen3Next")
EVERY = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in KINDS]
# Completions on either side of token 64, where another program begins, and across it.
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in (55, 1, 30, 60)]
FILTERED = SamplingParams(max_new_tokens=NEW, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)


@pytest.fixture(autouse=True)
def two_lengths(monkeypatch):
    """The texts of these tests go through two programs, and the longest model has 128 positions."""
    monkeypatch.setattr(scoring, "SHORTEST", 64)


@functools.cache
def model_of(kind):
    return random_model(families.read(short(kind)), seed=3)


def generator_of(kind, slots=3, **options):
    return Generator(model_of(kind), max_length=WIDTH, slots=slots, seed=5, options=GeneratorOptions(exact=True, **options))


@functools.cache
def baseline(kind, params):
    return generator_of(kind).generate(PROMPTS, params)


def same(found, expected):
    """Tokens, log-probabilities to the last bit, and ends."""
    parts = ("tokens", "logprobs", "finish")
    for group, wanted in zip(found, expected, strict=True):
        assert [[getattr(c, part) for part in parts] for c in group] == [[getattr(c, part) for part in parts] for c in wanted]


def bits(model, tokens, segments, temperature=0.7):
    return np.stack(model.logprobs(tokens, segments=segments, temperature=temperature))


def laid_out(texts, width, rng, *, left=False):
    """(tokens, segments) of texts with anything as padding."""
    tokens, segments = rng.integers(0, VOCAB, (len(texts), width)), np.zeros((len(texts), width), int)
    for row, text in enumerate(texts):
        at = slice(width - len(text), width) if left else slice(0, len(text))
        tokens[row, at], segments[row, at] = text, 1
    return tokens, segments


@pytest.mark.parametrize("kind", EVERY)
def test_log_probabilities_do_not_depend_on_how_the_tokens_are_laid_out(kind):
    model, rng = model_of(kind), np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, n) for n in (100, 41, 64, 65, 1)]
    alone = [bits(model, text[None], None)[:, 0] for text in texts]
    for width, left in ((103, False), (128, True)):
        tokens, segments = laid_out(texts[::-1], width, rng, left=left)
        found = bits(model, tokens, segments)
        for row, expected in enumerate(alone[::-1]):
            np.testing.assert_array_equal(found[:, row][:, segments[row] != 0], expected)
        assert not found[:, segments == 0].any()
    packed, numbers = np.concatenate(texts), np.repeat(np.arange(1, 6), [len(text) for text in texts])
    np.testing.assert_array_equal(bits(model, packed[None], numbers[None])[:, 0], np.concatenate(alone, axis=1))
    # What follows is not seen, and rows that are documents to their end need no segments.
    longer = np.concatenate([np.stack([texts[0][:70]] * 2), rng.integers(0, VOCAB, (2, 7))], axis=1)
    np.testing.assert_array_equal(bits(model, longer, None)[:, 1, :70], alone[0][:, :70])
    one = model._logprobs(model.params, *model._arguments(texts[0][None], None, None), jnp.float32(0.7))
    np.testing.assert_allclose(alone[0], np.stack(one)[:, 0], atol=KINDS[kind].generator, rtol=0)


def test_documents_that_are_not_plain_are_computed_as_they_are():
    model, row = model_of("Llama"), np.arange(10)[None]
    torn = np.array([[1, 1, 1, 2, 2, 1, 1, 1, 0, 0]])
    for given in ({"segments": torn}, {"positions": row + 3}):
        found = model.logprobs(row, **given)
        step = model._arguments(row, given.get("positions"), given.get("segments"))
        np.testing.assert_array_equal(np.stack(found), np.stack(model._logprobs(model.params, *step, jnp.float32(1.0))))


def check_bits(kind, params):
    model, out = model_of(kind), baseline(kind, params)
    texts = [prompt + completion.tokens for prompt, (completion,) in zip(PROMPTS, out, strict=True)]
    for width in (WIDTH + 1, 2 * WIDTH):
        logp = bits(model, *laid_out(texts, width, np.random.default_rng(width)), temperature=params.temperature or 1.0)[0]
        for row, (prompt, (completion,)) in enumerate(zip(PROMPTS, out, strict=True)):
            expected = logp[row, len(prompt) : len(texts[row])]
            np.testing.assert_array_equal(np.asarray(completion.logprobs, np.float32), expected)


def check_ways(kind, params):
    expected = baseline(kind, params)
    same(generator_of(kind, slots=1, tokens_per_dispatch=5).generate(PROMPTS[:2], params), expected[:2])
    used = generator_of(kind, slots=16, prefill_chunk=7)
    order = [2, 0, 3, 1]
    same(used.generate([PROMPTS[i] for i in order] * 2, params, ids=order * 2), [expected[i] for i in order] * 2)


@pytest.mark.parametrize("kind", EVERY)
def test_completions_are_exact(kind):
    params = SamplingParams(max_new_tokens=NEW)
    check_bits(kind, params)
    check_ways(kind, params)


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=NEW, temperature=0), FILTERED], ids=["greedy", "filtered"])
@pytest.mark.parametrize("kind", ["Llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in QUICK[1:])])
def test_completions_are_exact_however_they_are_drawn(kind, params):
    check_bits(kind, params)
    check_ways(kind, params)


@pytest.fixture
def bad_drafts(monkeypatch):
    """The decoder's logits are off by enough to change about one token in five."""

    def poor(logits_SV, numbers, draws):
        noise = 0.3 * jnp.sin(jnp.arange(logits_SV.shape[-1]) * (1.0 + numbers[2][:, None]))
        return rollout.sampling.choose(logits_SV + noise, numbers, draws)

    monkeypatch.setattr(rollout.programs, "choose", poor)


@pytest.mark.parametrize("kind", ["Llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in QUICK[1:])])
def test_wrong_drafts_change_nothing(kind, bad_drafts):
    stops = SamplingParams(max_new_tokens=NEW, stop_token_ids=tuple(range(0, VOCAB, 16)))
    generator = generator_of(kind)
    for params in (SamplingParams(max_new_tokens=NEW), FILTERED, stops):
        before = dict(generator.counts)
        found = generator.generate(PROMPTS, params)
        assert generator.counts["replaced"] - before["replaced"] > 3
        same(found, expected_of(kind, params))
        for (completion,) in found:
            assert completion.steps == len(completion.tokens) == len(completion.logprobs)
    assert any(completion.finish == "stop" for (completion,) in found)


@functools.cache
def expected_of(kind, params):
    """Token by token what the scoring programs draw, one prompt after the other."""
    generator, out = generator_of(kind, slots=1), []
    real, rollout.programs.choose = rollout.programs.choose, rollout.sampling.choose
    try:
        for i, prompt in enumerate(PROMPTS):
            out += generator.generate([prompt], params, ids=[i])
    finally:
        rollout.programs.choose = real
    return out


def test_a_stop_string_ends_a_completion_at_the_same_token(bad_drafts):
    class Letters:
        def decode(self, tokens, skip_special_tokens=False):
            return "".join(chr(ord("a") + token % 26) for token in tokens)

    params = SamplingParams(max_new_tokens=NEW)
    whole = expected_of("Llama", params)
    text = Letters().decode(whole[0][0].tokens)
    stop = text[9:11]
    options = GeneratorOptions(exact=True)
    generator = Generator(model_of("Llama"), max_length=WIDTH, slots=2, seed=5, tokenizer=Letters(), options=options)
    ((found,),) = generator.generate([PROMPTS[0]], dataclasses.replace(params, stop=(stop,)))
    end = text.index(stop) + 2
    assert found.finish == "stop" and found.tokens == whole[0][0].tokens[:end]
    assert found.logprobs == whole[0][0].logprobs[:end]


def test_drafts_of_the_models_own_modules_are_checked_too():
    config = families.read(short("Llama", duet={"multi_token_prediction": {"depth": 1}}))
    model, params, out = random_model(config, seed=3), SamplingParams(max_new_tokens=NEW), []
    for drafts in (0, 2):
        options = GeneratorOptions(exact=True, speculative=drafts)
        out.append(Generator(model, max_length=WIDTH, slots=2, seed=5, options=options).generate(PROMPTS[:2], params))
    same(*out)


def test_a_request_that_was_put_off_ends_as_it_would_have():
    params = SamplingParams(max_new_tokens=NEW)
    generator = generator_of("Llama", tokens_per_dispatch=4)
    requests = [generator.submit(Request(tuple(PROMPTS[i]), params, i)) for i in (1, 2)]
    for _ in range(3):
        generator.step()
    assert 0 < len(requests[1].tokens) < NEW
    generator.engine.cancel(requests[1])
    generator.step()
    generator.submit(requests[1])
    while not all(request.finish for request in requests):
        generator.step()
    same([[generator.completion(request)] for request in requests], [baseline("Llama", params)[i] for i in (1, 2)])


def test_a_cancelled_request_does_not_come_back():
    generator = generator_of("Llama")
    kept, gone = (generator.submit(Request(tuple(PROMPTS[2]), SamplingParams(max_new_tokens=NEW), i)) for i in (2, 3))
    generator.step()
    generator.cancel(gone)
    ended = [request for _ in range(20) for request in generator.step()]
    assert ended == [kept] and gone.finish is None
    assert generator.completion(kept).tokens == baseline("Llama", SamplingParams(max_new_tokens=NEW))[2][0].tokens


@pytest.mark.parametrize("option", ["weights", "kv_cache"])
def test_quantised_numbers_are_refused(option):
    with pytest.raises(ValueError, match="exact gives the tokens of the trained weights"):
        GeneratorOptions(exact=True, **{option: "int8"})
