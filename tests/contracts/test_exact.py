"""`exact: true`: no option of the generator changes a token, and log-probabilities are those of
`model.logprobs` bit for bit.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import KINDS, VOCAB, random_model, short

import rollout.engine.programs
import rollout.engine.sampling
from policy import families
from policy.programs import scoring
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.request import Request

pytestmark = [pytest.mark.usefixtures("all_optimizations"), pytest.mark.xdist_group("exact")]

WIDTH, NEW = 80, 20
# Full attention; windows, latents with experts, entries of blocks, a recurrent state, shared keys.
EACH = [
    "Llama",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "Gemma3",
            "DeepseekV3",
            "DeepseekV4",
            "Qwen3Next",
            "KimiLinear",
            "Lfm2",
            "NemotronH",
            "FalconH1",
            "Gemma4Small",
            "Qwen4Exp",
        )
    ),
]
# Completions on either side of token 64, where another program begins, and across it.
PROMPTS = [
    [int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in (55, 1, 30, 60)
]
PLAIN = SamplingParams(max_new_tokens=NEW)
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)
FILTERED = SamplingParams(max_new_tokens=NEW, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
TOGETHER = {"slots": 4, "tokens_per_dispatch": 5}
ALONE = {"slots": 1, "prefill_chunk": 16, "tokens_per_dispatch": 8}
# The first 16 tokens of each completion need 54 pages, all of them 58; one more is nobody's.
PAGES = {"slots": 4, "cache": "paged", "page_size": 4, "pages": 56}


@pytest.fixture(autouse=True)
def two_lengths(monkeypatch):
    """The texts of these tests go through two programs, and the longest model has 128 positions."""
    monkeypatch.setattr(scoring, "SHORTEST", 64)


@functools.cache
def model_of(kind):
    return random_model(families.read(short(kind)), seed=3)


class Letters:
    """A tokenizer that encodes nothing."""

    def encode(self, text, add_special_tokens=True):
        return []

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(ord("a") + token % 26) for token in tokens)


def generator_of(kind, slots, **options):
    options = GeneratorOptions(exact=True, **options)
    return Generator(
        model_of(kind), max_length=WIDTH, slots=slots, seed=5, tokenizer=Letters(), options=options
    )


@functools.cache
def together(kind):
    return generator_of(kind, **TOGETHER)


@functools.cache
def alone(kind):
    return generator_of(kind, **ALONE)


@functools.cache
def baseline(kind, params=PLAIN):
    return together(kind).generate(PROMPTS, params)


def same(actual, expected):
    """Tokens, log-probabilities to the last bit, and ends."""
    parts = ("tokens", "logprobs", "finish")
    for group, requested in zip(actual, expected, strict=True):
        assert [[getattr(c, part) for part in parts] for c in group] == [
            [getattr(c, part) for part in parts] for c in requested
        ]


def bits(model, tokens, segments, temperature=0.7):
    return np.stack(model.logprobs(tokens, segments=segments, temperature=temperature))


def padded(texts, width, rng, *, left=False):
    """(tokens, segments) of texts with anything as padding."""
    tokens, segments = (
        rng.integers(0, VOCAB, (len(texts), width)),
        np.zeros((len(texts), width), int),
    )
    for row, text in enumerate(texts):
        at = slice(width - len(text), width) if left else slice(0, len(text))
        tokens[row, at], segments[row, at] = text, 1
    return tokens, segments


@pytest.mark.parametrize("kind", ["Llama"])
def test_log_probabilities_do_not_depend_on_padding_and_packing(kind):
    model, rng = model_of(kind), np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, n) for n in (100, 41, 64, 65, 1)]
    single = [bits(model, text[None], None)[:, 0] for text in texts]
    for width, left in ((103, False), (128, True)):
        tokens, segments = padded(texts[::-1], width, rng, left=left)
        result = bits(model, tokens, segments)
        for row, expected in enumerate(single[::-1]):
            np.testing.assert_array_equal(result[:, row][:, segments[row] != 0], expected)
        assert not result[:, segments == 0].any()
    packed, numbers = (
        np.concatenate(texts),
        np.repeat(np.arange(1, 6), [len(text) for text in texts]),
    )
    np.testing.assert_array_equal(
        bits(model, packed[None], numbers[None])[:, 0], np.concatenate(single, axis=1)
    )
    # What follows is not seen, and rows that are documents to their end need no segments.
    longer = np.concatenate([np.stack([texts[0][:70]] * 2), rng.integers(0, VOCAB, (2, 7))], axis=1)
    np.testing.assert_array_equal(bits(model, longer, None)[:, 1, :70], single[0][:, :70])
    one = model._logprobs(
        model.params, *model._arguments(texts[0][None], None, None), jnp.float32(0.7)
    )
    np.testing.assert_allclose(single[0], np.stack(one)[:, 0], atol=KINDS[kind].generator, rtol=0)


def test_documents_that_are_not_plain_are_computed_as_they_are():
    model, row = model_of("Llama"), np.arange(10)[None]
    torn = np.array([[1, 1, 1, 2, 2, 1, 1, 1, 0, 0]])
    for given in ({"segments": torn}, {"positions": row + 3}):
        result = model.logprobs(row, **given)
        step = model._arguments(row, given.get("positions"), given.get("segments"))
        np.testing.assert_array_equal(
            np.stack(result), np.stack(model._logprobs(model.params, *step, jnp.float32(1.0)))
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", EACH)
def test_slots_chunks_and_what_else_is_decoded_change_no_bit(kind):
    model = model_of(kind)
    for params in (PLAIN, GREEDY, FILTERED):
        expected = baseline(kind, params)
        order = [2, 0, 3, 1]
        same(
            together(kind).generate([PROMPTS[i] for i in order], params, ids=order),
            [expected[i] for i in order],
        )
        for i, prompt in enumerate(PROMPTS):
            same(alone(kind).generate([prompt], params, ids=[i]), [expected[i]])
        texts = [
            prompt + completion.tokens
            for prompt, (completion,) in zip(PROMPTS, expected, strict=True)
        ]
        logp = bits(
            model,
            *padded(texts, 97, np.random.default_rng(0)),
            temperature=params.temperature or 1.0,
        )[0]
        for row, (prompt, (completion,)) in enumerate(zip(PROMPTS, expected, strict=True)):
            assert completion.logprobs == logp[row, len(prompt) : len(texts[row])].tolist()


@pytest.mark.slow
def test_pages_and_pauses_for_want_of_them_change_no_bit():
    generator = generator_of("Llama", **PAGES)
    same(generator.generate(PROMPTS, PLAIN), baseline("Llama"))
    assert generator.counts["preempted"] > 0


@pytest.fixture
def bad_drafts(monkeypatch):
    """The decoder's logits are off by enough to change about one token in five; those of `together`
    are not."""
    baseline("Llama"), baseline("Llama", FILTERED)

    def poor(logits_SV, numbers, *others):
        noise = 0.3 * jnp.sin(jnp.arange(logits_SV.shape[-1]) * (1.0 + numbers[2][:, None]))
        return rollout.engine.sampling.choose(logits_SV + noise, numbers, *others)

    monkeypatch.setattr(rollout.engine.programs, "choose", poor)


@pytest.mark.slow
def test_wrong_drafts_change_nothing(bad_drafts):
    """Whatever the decoder makes, greedy or sampled, and also where a wrong token ends a completion
    or runs past its end.
    """
    generator = generator_of("Llama", **ALONE)
    for params in (PLAIN, FILTERED):
        before, expected = generator.counts, baseline("Llama", params)
        result = generator.generate(PROMPTS, params)
        same(result, expected)
        assert generator.counts["replaced"] - before["replaced"] > 3
        assert all(completion.steps == len(completion.tokens) for (completion,) in result)
    stops = tuple(
        completion.tokens[n]
        for (completion,), n in zip(baseline("Llama"), (7, 12, 3, 19), strict=True)
    )
    for (completion,), (full,) in zip(
        generator.generate(PROMPTS, dataclasses.replace(PLAIN, stop_token_ids=stops)),
        baseline("Llama"),
        strict=True,
    ):
        end = next(n for n, token in enumerate(full.tokens, 1) if token in stops)
        assert (completion.tokens, completion.logprobs, completion.finish) == (
            full.tokens[:end],
            full.logprobs[:end],
            "stop",
        )
    tokens = baseline("Llama")[0][0].tokens
    text = Letters().decode(tokens)
    ((result,),) = generator.generate([PROMPTS[0]], dataclasses.replace(PLAIN, stop=(text[9:11],)))
    assert result.finish == "stop" and result.tokens == tokens[: text.index(text[9:11]) + 2]


@pytest.mark.slow
def test_programs_for_wrong_drafts_are_there_before_the_first_step(bad_drafts):
    """Also those that read a completion in again, longer than any prompt, whose slot another has
    taken meanwhile."""
    generator = generator_of("Llama", **ALONE)
    generator.compile_ahead(2, [PLAIN], strict=True)
    prompts, ids = [PROMPTS[1]] * 3, [1, 4, 5]
    same(
        generator.generate(prompts, PLAIN, ids=ids),
        together("Llama").generate(prompts, PLAIN, ids=ids),
    )
    assert generator.counts["replaced"] > 0


@pytest.mark.slow
def test_a_request_that_was_put_off_ends_as_it_would_have():
    generator = alone("Llama")
    request = generator.submit(Request(tuple(PROMPTS[2]), PLAIN, 2))
    while not request.tokens:
        generator.step()
    assert request.finish is None
    generator.engine.cancel(request)
    generator.submit(request)
    while request.finish is None:
        generator.step()
    same([[generator.completion(request)]], [baseline("Llama")[2]])


def test_a_cancelled_request_does_not_come_back():
    generator = alone("Llama")
    gone, *kept = (generator.submit(Request(tuple(PROMPTS[i]), PLAIN, i)) for i in (3, 2, 0))
    while len(gone.tokens) < NEW:
        assert not generator.step()
    generator.cancel(gone)
    ended = [request for _ in range(20) for request in generator.step()]
    assert ended == kept and gone.finish is None
    same(
        [[generator.completion(request)] for request in kept],
        [baseline("Llama")[i] for i in (2, 0)],
    )


@pytest.mark.slow
def test_drafts_of_the_models_own_modules_are_checked_too():
    model = random_model(
        families.read(short("Llama", duet={"multi_token_prediction": {"depth": 1}}))
    )
    model.params |= model_of("Llama").params
    generator = Generator(
        model,
        max_length=WIDTH,
        slots=1,
        seed=5,
        options=GeneratorOptions(exact=True, speculative=2),
    )
    same(generator.generate(PROMPTS[:2], PLAIN), baseline("Llama")[:2])


@pytest.mark.parametrize("option", ["weights", "kv_cache"])
def test_quantised_numbers_are_refused(option):
    with pytest.raises(ValueError, match="exact gives the tokens of the trained weights"):
        GeneratorOptions(exact=True, **{option: "int8"})
