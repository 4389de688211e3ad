"""Penalties, biases and forbidden tokens: what they do to logits, and to completions. The oracles
are the processors of transformers, and for presence and frequency the formula of OpenAI in numpy.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from oracles import VOCAB, configuration, random_model

from policy import families
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.engine.runner import Widths
from rollout.engine.sampling import Draws, choose, uniforms
from rollout.logits_processors import LogitsProcessors, ProcessorSizes
from rollout.request import Request
from rollout.text.tokenizer import bad_word_tokens, byte_level, characters, first_stop

V, LENGTH = 23, 20
ALPHABET = "".join(chr(0x4E00 + i) for i in range(VOCAB - 8 - 26)) + "abcdefghijklmnopqrstuvwxyz"
OPTIONS = GeneratorOptions(tokens_per_dispatch=4, batch_sizes=[])
# Each alone, and all in one.
SETTINGS = {
    "repetition": {"repetition_penalty": 1.7},
    "rewarded repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {3: 2.5, 9: -100.0, 17: 0.25}},
    "ends": {"min_tokens": 7, "stop_token_ids": (2, 5, 11)},
    "words": {},
}
SETTINGS["all"] = functools.reduce(dict.__or__, SETTINGS.values()) | {"presence_penalty": -0.4}
WORDS = ((4,), (5, 6), (7, 8, 9), (1, 1, 1, 2))


def requests_of(setting):
    """Completions of 0 to 9 tokens, from few tokens, so that they repeat and end with the
    beginnings of words."""
    rng = np.random.default_rng(4)
    params = SamplingParams(max_new_tokens=10, **SETTINGS[setting])
    words = WORDS if setting in ("words", "all") else ()
    ends = [(), (5,), (1, 1), (1, 1, 1), (7, 8), (8, 7)]
    rows = []
    for n in range(12):
        prompt = tuple(rng.integers(0, V, 1 + n % 4).tolist())
        tokens = [*rng.integers(0, V // 2, n // 2).tolist(), *ends[n % len(ends)]]
        rows.append(Request(prompt, params, tokens=tokens, bad_words=words))
    return rows


@jax.jit
def processed(logits, processors, at):
    return processors.process(logits, at, processors.seen(at, logits.shape[1]))


def of_transformers(row, logits):
    """The processors of transformers, and presence and frequency as OpenAI defines them, in the
    order of vLLM."""
    import torch
    from transformers.generation import logits_process as hf

    params, scores = row.params, torch.tensor(logits)[None]
    ids, completion = (
        torch.tensor([[*row.prompt, *row.tokens]]),
        torch.tensor([row.tokens], dtype=torch.long),
    )
    if params.logit_bias:
        biases = {(token,): bias for token, bias in params.logit_bias.items()}
        scores = hf.SequenceBiasLogitsProcessor(biases)(ids, scores)
    if row.bad_words:
        scores = hf.NoBadWordsLogitsProcessor([list(word) for word in row.bad_words])(
            completion, scores
        )
    if params.min_tokens:
        ends = list(params.stop_token_ids)
        scores = hf.MinNewTokensLengthLogitsProcessor(len(row.prompt), params.min_tokens, ends)(
            ids, scores
        )
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counts = np.bincount(row.tokens, minlength=len(logits)) if row.tokens else np.zeros(len(logits))
    return (
        scores[0].numpy()
        - params.frequency_penalty * counts
        - params.presence_penalty * (counts > 0)
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_equal_those_of_transformers(setting):
    pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    rows = requests_of(setting)
    logits = np.random.default_rng(1).normal(0, 2, (len(rows), V)).astype(np.float32)
    processors = LogitsProcessors.of(rows, len(rows), LENGTH, ProcessorSizes(1, 8, 8, 4, 4))
    at = np.asarray([len(row.prompt) + len(row.tokens) for row in rows], np.int32)
    result = np.asarray(processed(logits, processors, at))
    expected = np.stack([of_transformers(row, own) for row, own in zip(rows, logits, strict=True)])
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(result[finite], expected[finite], atol=2e-6, rtol=1e-6)
    assert not np.allclose(expected[finite], logits[finite]) or not finite.all(), (
        "the setting changes something"
    )


def test_a_row_without_settings_keeps_its_logits_among_rows_with_some():
    rows = [
        *requests_of("all")[:3],
        Request((1, 2), SamplingParams(stop_token_ids=(2,)), tokens=[1, 2]),
        None,
    ]
    logits = np.random.default_rng(1).normal(0, 2, (5, V)).astype(np.float32)
    processors = LogitsProcessors.of(rows, 5, LENGTH, ProcessorSizes.of(rows))
    result = np.asarray(processed(logits, processors, np.int32([3, 3, 5, 4, 1])))
    np.testing.assert_array_equal(result[3:], logits[3:])


def test_a_word_may_go_on_from_the_prompt():
    """Only tokens of the completion count as the tokens before the last one of a bad word."""
    params = SamplingParams(max_new_tokens=9)
    rows = [
        Request((1, 7, 8), params, tokens=[], bad_words=WORDS),
        Request((1, 7), params, tokens=[8], bad_words=WORDS),
        Request((1,), params, tokens=[7, 8], bad_words=WORDS),
    ]
    processors = LogitsProcessors.of(rows, 3, LENGTH, ProcessorSizes(1, 8, 8, 4, 4))
    result = np.asarray(processed(np.zeros((3, V), np.float32), processors, np.int32([3, 3, 3])))
    assert [set(np.flatnonzero(np.isinf(row)).tolist()) for row in result] == [{4}, {4}, {4, 9}]


def test_programs_have_processors_only_where_a_request_needs_them():
    plain = [
        SamplingParams(),
        SamplingParams(min_tokens=3),
        SamplingParams(repetition_penalty=1.0, logit_bias={}),
    ]
    assert {Widths.of([Request((1,), params)]) for params in plain} == {Widths()}
    few, more = ({"logit_bias": dict.fromkeys(range(n), 1.0)} for n in (2, 9))
    assert ProcessorSizes.of([Request((1,), SamplingParams(**few))]) == (0, 8, 0, 0, 0, 0)
    assert ProcessorSizes.of([Request((1,), SamplingParams(**more)), None]) == (0, 32, 0, 0, 0, 0)
    ends = SamplingParams(min_tokens=3, stop_token_ids=(1,), presence_penalty=0.1)
    assert ProcessorSizes.of(
        [Request((1,), ends), Request((1,), bad_words=((1, 2, 3, 4, 5),))]
    ) == (
        1,
        0,
        0,
        0,
        4,
        0,
    )


# Completions.


@pytest.fixture(scope="module")
def model():
    config = families.read(
        configuration("Llama", num_hidden_layers=1, vocab_size=VOCAB, tie_word_embeddings=True)
    )
    return random_model(config, seed=3)


def generator_of(model, slots=4, **options):
    options = dataclasses.replace(OPTIONS, **options)
    return Generator(
        model, max_length=64, slots=slots, seed=1, tokenizer=characters(ALPHABET), options=options
    )


@pytest.fixture(scope="module")
def generator(model):
    return generator_of(model)


PROMPTS = [[11, 12, 13, 14, 15], [7, 8], [9] * 12]
MANY = SamplingParams(
    n=3,
    max_new_tokens=24,
    temperature=0.8,
    repetition_penalty=1.4,
    presence_penalty=0.3,
    frequency_penalty=0.7,
    logit_bias={3: 2.0, 9: -5.0},
    min_tokens=10,
    stop_token_ids=(3, 4),
    bad_words=("ab", "c", "dd"),
)


def test_a_completion_is_drawn_from_the_processed_logits_and_its_log_probabilities_are_of_the_raw_ones(
    model, generator
):
    pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    words = bad_word_tokens(generator.tokenizer, MANY.bad_words)
    for group, prompt in zip(
        generator.generate(PROMPTS, MANY, ids=[41, 42, 43]), PROMPTS, strict=True
    ):
        for sample, completion in enumerate(group[:1]):
            row = np.array([prompt + completion.tokens])
            logits = np.asarray(model.logits(row), np.float32)[0, len(prompt) - 1 : -1]
            positions = np.arange(len(prompt), row.shape[1], dtype=np.int32)
            ids = (
                np.full_like(positions, 41 + PROMPTS.index(prompt)),
                np.full_like(positions, sample),
                positions,
            )
            u = np.asarray(uniforms(np.uint32(1), *ids))
            for n, token in enumerate(completion.tokens):
                request = Request(
                    tuple(prompt), MANY, tokens=completion.tokens[:n], bad_words=words
                )
                scores = of_transformers(request, logits[n]).astype(np.float64) / MANY.temperature
                cumulative = np.cumsum(np.exp(scores - scores.max()))
                assert token == int(
                    np.searchsorted(cumulative / cumulative[-1], u[n], side="right")
                )
            logp = np.asarray(model.logprobs(row, temperature=MANY.temperature)[0])[
                0, len(prompt) :
            ]
            np.testing.assert_allclose(completion.logprobs, logp, atol=1e-5, rtol=0)
            assert len(completion.tokens) > MANY.min_tokens


@pytest.mark.parametrize(
    "how",
    [
        {"cache": "paged", "page_size": 4, "pages": 18},
        pytest.param({"exact": True}, marks=pytest.mark.slow),
        pytest.param(
            {"tokens_per_dispatch": 7, "prefill_chunk": 16, "slots": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["preempted and prefilled again", "exact", "other slots and dispatches"],
)
def test_no_option_of_the_generator_changes_a_completion(model, generator, how):
    other = generator_of(model, **how)
    expected = [each.tokens for group in generator.generate(PROMPTS, MANY) for each in group]
    assert [each.tokens for group in other.generate(PROMPTS, MANY) for each in group] == expected
    assert other.counts["preempted"] > 0 or "pages" not in how


def test_requests_of_one_batch_have_parameters_of_their_own(model, generator):
    """Also the one that has none: it is drawn as in a batch of its own."""
    each = [
        MANY,
        SamplingParams(max_new_tokens=24),
        SamplingParams(max_new_tokens=24, temperature=0, presence_penalty=2.0),
    ]
    each = [dataclasses.replace(params, n=1) for params in each]
    together = [
        generator.submit(Request(tuple(PROMPTS[0]), params, prompt_id=5)) for params in each
    ]
    while not all(request.finish for request in together):
        generator.step()
    for request, params in zip(together, each, strict=True):
        assert request.tokens == generator.generate([PROMPTS[0]], params, ids=[5])[0][0].tokens
    greedy = together[2].tokens
    assert len(set(greedy[:8])) == 8, "a token that occurred is 2.0 less likely"


def test_other_values_need_no_other_program(model):
    own = generator_of(model)
    own.generate([[1, 2]], dataclasses.replace(MANY, n=1, max_new_tokens=12))
    shapes = set(own.engine.runner.memory)
    other = {
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "logit_bias": {5: 1.0},
        "bad_words": ("z",),
    }
    own.generate([[1, 2]], dataclasses.replace(MANY, n=1, max_new_tokens=12, **other))
    assert set(own.engine.runner.memory) == shapes
    assert [shape for name, *shape in shapes if name == "decode"] == [[4, 4, 1, 8, 8, 4, 4, 0]]


def test_programs_with_processors_are_compiled_ahead(model):
    own = generator_of(model)
    count = own.compile_ahead(12, [MANY, SamplingParams()], strict=True)
    own.generate([[1, 2]], dataclasses.replace(MANY, n=1, max_new_tokens=12))
    own.generate([[1, 2]], SamplingParams(max_new_tokens=12))
    assert len(own.engine.runner.memory) == count


def test_a_row_whose_tokens_are_all_forbidden_is_drawn_without_processors():
    logits = np.random.default_rng(2).normal(0, 2, (4, V)).astype(np.float32)
    ids = tuple(np.arange(4, dtype=np.int32) for _ in range(3))
    params = [
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(temperature=0),
        SamplingParams(),
    ]
    forbidden = np.full_like(logits, -np.inf)
    forbidden[3] = np.where(np.arange(V) == 7, logits[3], -np.inf)
    draw = jax.jit(functools.partial(choose, max_kept=4))
    plain, drawn = (
        draw(logits, ids, Draws.of(params, 0)),
        draw(logits, ids, Draws.of(params, 0), processed_SV=forbidden),
    )
    for a, b in zip(*map(jax.tree.leaves, (plain, drawn)), strict=True):
        np.testing.assert_allclose(b[:3], a[:3], atol=1e-6)
    assert (
        drawn.tokens[3] == 7
        and drawn.kept[3].tolist() == [7, -1, -1, -1]
        and drawn.filtered_logprobs[3] == 0
    )


# Words and stop strings.


def test_words_are_forbidden_with_and_without_a_blank():
    tokenizer = byte_level()
    b, a, d = tokenizer.encode("bad", add_special_tokens=False)
    (blank,) = tokenizer.encode(" ", add_special_tokens=False)
    assert bad_word_tokens(tokenizer, (" bad", "a")) == (
        (b, a, d),
        (blank, b, a, d),
        (a,),
        (blank, a),
    )


def test_no_completion_holds_a_bad_word(generator):
    likely = dict.fromkeys(range(VOCAB - 26, VOCAB - 22), 8.0)
    params = dataclasses.replace(
        MANY, logit_bias=likely, repetition_penalty=1.0, frequency_penalty=0.01
    )
    free = generator.generate(PROMPTS, dataclasses.replace(params, bad_words=("zzz",)))
    assert sum("ab" in each.text for group in free for each in group) > 2
    forbidden = generator.generate(PROMPTS, dataclasses.replace(params, bad_words=("ab", "cca")))
    texts = [each.text for group in forbidden for each in group]
    assert not any("ab" in text or "cca" in text for text in texts)
    assert any("b" in text for text in texts) and any("cc" in text for text in texts)


def test_a_stop_string_counts_after_min_tokens_only():
    tokenizer = characters("abc")
    ids = tokenizer.encode("abcabcab", add_special_tokens=False)
    for least, expected in ((0, 2), (1, 2), (2, 5), (4, 5), (5, 8), (8, None)):
        assert first_stop(tokenizer, ids, 0, ("ab",), least) == expected
    letters = byte_level().encode("xéy", add_special_tokens=False)  # é has two tokens
    assert [first_stop(byte_level(), letters, 0, ("é",), least) for least in (1, 2, 3)] == [
        3,
        3,
        None,
    ]


def test_a_completion_ends_after_min_tokens(generator):
    likely = {3: 3.0, 4: 3.0} | dict.fromkeys(range(VOCAB - 26, VOCAB - 22), 3.0)
    params = dataclasses.replace(
        MANY, logit_bias=likely, stop=("a", "b", "c", "d"), bad_words=("zzz",), min_tokens=1
    )
    early = [len(each.tokens) for group in generator.generate(PROMPTS, params) for each in group]
    late = generator.generate(PROMPTS, dataclasses.replace(params, min_tokens=8))
    assert min(early) == 2 and min(len(each.tokens) for group in late for each in group) == 9
    assert {each.finish for group in late for each in group} == {"stop"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_tokens": -1}, "min_tokens must be 0 or more"),
        ({"min_tokens": 65}, "at most max_new_tokens"),
        ({"bad_words": ("x", " ")}, "bad_words must not hold an empty string or blanks alone"),
        ({"logit_bias": {1: 101.0}}, "logit_bias must hold numbers from -100 to 100"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must hold numbers from -100 to 100"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0"),
        (
            {"repetition_penalty": float("inf")},
            "repetition_penalty must be a finite number above 0",
        ),
        ({"presence_penalty": 2.5}, r"presence_penalty must lie in \[-2, 2\]"),
        ({"frequency_penalty": -2.5}, r"frequency_penalty must lie in \[-2, 2\]"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_what_a_model_or_its_tokenizer_does_not_have_is_refused(model, generator):
    with pytest.raises(
        ValueError, match=f"generate: logit_bias names token {VOCAB}, outside 0..{VOCAB - 1}"
    ):
        generator.generate([[1]], SamplingParams(logit_bias={VOCAB: 1.0}))
    bare = Generator(model, max_length=64, slots=4, seed=1, options=OPTIONS)
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        bare.submit(Request((1,), SamplingParams(max_new_tokens=9, bad_words=("x",))))
    every = dataclasses.replace(
        MANY, stop_token_ids=tuple(range(VOCAB)), min_tokens=1, max_new_tokens=9
    )
    with pytest.raises(ValueError, match=f"forbid all {VOCAB} tokens of the vocabulary"):
        bare.generate([[1]], dataclasses.replace(every, stop=(), bad_words=()))
    assert (
        SamplingParams(bad_words="ab").bad_words == ("ab",)
        and SamplingParams(logit_bias={}).logit_bias is None
    )
