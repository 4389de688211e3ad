"""Completions under constraints are texts of their grammars, whatever else their requests ask for
and whatever decodes with them."""

import dataclasses
import functools
import json
import re
import sys

import jsonschema
import numpy as np
import pytest
from test_generate import fresh_model

from rollout import Constraint, Generator, GeneratorOptions, SamplingParams
from rollout.constraints import MOST_CHARACTERS, Grammars
from rollout.request import Request
from rollout.text.tokenizer import byte_level, characters

pytestmark = pytest.mark.xdist_group("constraints")

VOCAB = 320  # more than any tokenizer here has
TEXTS = '{"name": "yes", "ok": true, "of": [1, 23]} {"name":"no","ok":false} maybe not 12 345 6789'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["yes", "no", "maybe"]},
        "ok": {"type": "boolean"},
        "of": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = Constraint("regex", "[0-9]{3}-[a-z]{1,4}")
JSON = Constraint("json_schema", json.dumps(SCHEMA))
LARK = Constraint("lark", 'start: "yes" | ("no" (" " NUMBER){2})\nNUMBER: /[1-9][0-9]{0,3}/')


def subwords():
    """A tokenizer of BPE whose tokens are parts of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<pad>", "<bos>", "<eos>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXTS] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


TOKENIZERS = {
    "characters": lambda: characters("".join(sorted(set(TEXTS + "-abcdefghijklmnopqrstuvwxyz0")))),
    "bytes": byte_level,
    "subwords": subwords,
}


@functools.cache
def model():
    return fresh_model(vocab_size=VOCAB)


@functools.cache
def generator_of(tokenizer: str = "bytes", **options) -> Generator:
    options = GeneratorOptions(**{"tokens_per_dispatch": 4, "batch_sizes": ()} | options)
    return Generator(
        model(), max_length=96, slots=4, seed=1, tokenizer=TOKENIZERS[tokenizer](), options=options
    )


def params_of(constraint: Constraint | None, **changes) -> SamplingParams:
    return SamplingParams(
        **{"max_new_tokens": 60, "stop_token_ids": (2,), "constraint": constraint} | changes
    )


def check(constraint: Constraint, text: str) -> None:
    match constraint.kind:
        case "regex":
            assert re.fullmatch(constraint.text, text), text
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(constraint.text))
        case "lark":
            assert re.fullmatch("yes|no( [1-9][0-9]{0,3}){2}", text), text


@pytest.mark.parametrize("constraint", [REGEX, JSON, LARK], ids=lambda c: c.kind)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_completions_are_texts_of_the_grammar(tokenizer, constraint):
    generator = generator_of(tokenizer)
    groups = generator.generate([[5, 6], [7]], params_of(constraint, n=4))
    ended = [each for group in groups for each in group if each.finish == "stop"]
    assert len(ended) > 4
    for each in ended:
        check(constraint, each.text)
    assert len({each.text for each in ended}) > 1


def test_the_likeliest_allowed_token_is_taken_and_its_log_probability_stays():
    """Against the model's own logits, over the digits."""
    generator = generator_of()
    digits = generator.tokenizer.encode("0123456789", add_special_tokens=False)
    params = params_of(Constraint("regex", "[0-9]{6}"), temperature=0, top_logprobs=1)
    [[completion]] = generator.generate([[5, 6, 9]], params)
    assert len(completion.tokens) == 6 and completion.finish == "stop"
    tokens = [5, 6, 9, *completion.tokens]
    z = np.asarray(model().logits(np.asarray([tokens])), np.float64)[0, 2:-1]
    assert completion.tokens == [digits[i] for i in z[:, digits].argmax(1)]
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    chosen = logp[np.arange(6), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-5)
    np.testing.assert_allclose(completion.scores.logprobs, chosen, atol=1e-5)
    assert (completion.scores.top_ids[:, 0] == z.argmax(1)).all()


@pytest.mark.parametrize("options", [{}, {"cache": "paged", "page_size": 4, "pages": 30}])
def test_requests_do_not_change_each_other(options):
    """Constrained and free ones, which arrive at any time and wait for pages."""
    generator = generator_of(**options)
    asked = [
        params_of(REGEX),
        params_of(None, max_new_tokens=20),
        params_of(JSON, temperature=0.7, top_k=9),
        params_of(None, temperature=0, max_new_tokens=9, frequency_penalty=0.4),
        params_of(REGEX, presence_penalty=1.0),
        params_of(LARK, temperature=2.0),
    ]

    def request(n):
        return Request((5 + n, 9), asked[n], prompt_id=n)

    def run(requests):
        while not all(each.finish for each in requests):
            generator.step()

    alone = []
    for n in range(len(asked)):
        alone.append(generator.submit(request(n)))
        run(alone)
    together = []
    for n in range(len(asked)):
        together.append(generator.submit(request(n)))
        generator.step()
    gone = generator.submit(Request((4, 4), params_of(JSON), prompt_id=99))
    generator.step()
    generator.cancel(gone)
    run(together)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_free_requests_decode_many_steps_again_after_a_constrained_one():
    generator = generator_of()
    before = dict(generator.counts)
    generator.generate([[5, 6]], params_of(None, max_new_tokens=16, stop_token_ids=()))
    free = generator.counts["dispatches"] - before["dispatches"]
    assert free <= 5
    before = dict(generator.counts)
    [[one]] = generator.generate([[5, 6]], params_of(Constraint("regex", "[ab]{7}")))
    assert generator.counts["dispatches"] - before["dispatches"] == 7 == len(one.tokens)


def test_penalties_biases_bad_words_and_stop_strings_hold_too():
    generator = generator_of()
    [five, seven] = generator.tokenizer.encode("57", add_special_tokens=False)
    digits = Constraint("regex", "[0-9]{10}")
    asked = params_of(digits, logit_bias={five: 100.0})
    assert generator.generate([[5]], asked)[0][0].text == "5" * 10
    stopped = dataclasses.replace(asked, stop=("555",))
    [[completion]] = generator.generate([[5]], stopped)
    assert completion.text == "555" and completion.finish == "stop"
    forbidden = dataclasses.replace(asked, bad_words=("5",))
    text = generator.generate([[5]], forbidden)[0][0].text
    assert len(text) == 10 and "5" not in text
    greedy = params_of(digits, temperature=0)
    varied = dataclasses.replace(greedy, repetition_penalty=9.0, frequency_penalty=2.0)
    texts = [generator.generate([[5]], each)[0][0].text for each in (greedy, varied)]
    assert len(set(texts[0])) < len(set(texts[1]))
    # Where these forbid all that the grammar allows, the grammar holds.
    only = params_of(Constraint("regex", "7{3}"), bad_words=("7",), logit_bias={seven: -100.0})
    assert generator.generate([[5]], only)[0][0].text == "777"


def test_every_token_that_ends_a_completion_may_end_it_where_the_text_is_complete():
    """Chat models have several; min_tokens puts them off."""
    generator = generator_of()
    params = params_of(
        Constraint("regex", "(ab)*"), stop_token_ids=(4, 7), min_tokens=4, n=8, max_new_tokens=40
    )
    biased = dataclasses.replace(params, logit_bias={7: 3.0, 4: 3.0, 2: -100.0})
    [group] = generator.generate([[5]], biased)
    ended = [each for each in group if each.finish == "stop"]
    assert {each.tokens[-1] for each in ended} == {4, 7}
    for each in ended:
        assert re.fullmatch("(ab){2,}", each.text)


def test_a_text_that_is_complete_before_min_tokens_ends():
    """vLLM's issue 53665: together they left no token."""
    params = params_of(Constraint("regex", "true|false"), min_tokens=20, n=4)
    [group] = generator_of("subwords").generate([[5]], params)
    for each in group:
        assert each.text in ("true", "false") and each.finish == "stop"


def test_the_end_of_sequence_ends_a_text_that_could_go_on():
    generator = generator_of()
    params = params_of(Constraint("regex", "(ab)*"), stop_token_ids=(), logit_bias={2: 100.0})
    [[completion]] = generator.generate([[5]], params)
    assert completion.tokens == [2] and completion.text == "" and completion.finish == "stop"


@pytest.mark.parametrize("text", ["aÉb", "a[ÉÀ]"])
def test_a_text_that_no_token_continues_is_cut_off(text):
    """The tokenizer has no token for the second character."""
    generator = generator_of("characters")
    [[completion]] = generator.generate([[9]], params_of(Constraint("regex", text)))
    assert completion.text == "a" and completion.finish == "length"


REFUSED = [
    ({}, Constraint("regex", "[0-9"), "unclosed character class"),
    ({}, Constraint("regex", "(?=a)b"), "look-around"),
    ({}, Constraint("json_schema", '{"type":'), "no JSON"),
    ({}, Constraint("json_schema", '{"if": {}, "then": {}}'), "if"),
    ({}, Constraint("lark", "start: nothing"), "nothing"),
    ({"exact": True}, REGEX, "does not go with exact"),
]


@pytest.mark.parametrize(("options", "constraint", "message"), REFUSED)
def test_what_cannot_work_is_refused_by_name(options, constraint, message):
    generator = generator_of(**options)
    with pytest.raises(ValueError, match=message):
        generator.generate([[5]], params_of(constraint))
    with pytest.raises(ValueError, match=message):
        generator.submit(Request((5,), params_of(constraint)))


def test_more_is_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match="'xml' is none of regex, json_schema, lark"):
        Constraint("xml", "a")
    for text in ("É+", "[ÉÀ]b"):
        with pytest.raises(ValueError, match="no token of this vocabulary begins"):
            generator_of("characters").generate([[5]], params_of(Constraint("regex", text)))
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Generator(model(), max_length=16).generate([[5]], params_of(REGEX))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"duet-rl\[constraints\]"):
        generator_of().generate([[5]], params_of(Constraint("regex", "new")))


def chain(kind: str, rules: int) -> Constraint:
    """Rules that each refer to the next one."""
    if kind == "lark":
        lines = [f"r{n}: r{n + 1}" for n in range(rules)]
        return Constraint("lark", "\n".join(["start: r0", *lines, f'r{rules}: "a"']))
    defined: dict = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(rules)}
    defined[f"d{rules}"] = {"const": "a"}
    return Constraint("json_schema", json.dumps({"$defs": defined, "$ref": "#/$defs/d0"}))


@pytest.mark.parametrize(("kind", "rules"), [("lark", 15_000), ("json_schema", 6_000)])
def test_a_long_chain_of_rules_does_not_end_the_process(kind, rules):
    """llguidance 1.9.1 follows it by recursion."""
    grammars = Grammars(byte_level(), VOCAB)
    matcher = grammars.matcher(chain(kind, rules))
    text = "a" if kind == "lark" else '"a"'
    matcher.advance(byte_level().encode(text, add_special_tokens=False))
    assert matcher.complete
    with pytest.raises(ValueError, match=f"more than {MOST_CHARACTERS}"):
        grammars.matcher(chain(kind, 3 * rules))


def test_a_schema_that_is_nested_too_deep_is_refused():
    with pytest.raises(ValueError, match="nested too deep"):
        Grammars(byte_level(), VOCAB).matcher(Constraint("json_schema", "[" * 100_000))


def test_drafts_are_refused_by_name():
    from oracles import configuration, random_model

    from policy import families

    keys = {"num_hidden_layers": 1, "vocab_size": VOCAB}
    keys["duet"] = {"multi_token_prediction": {"depth": 1}}
    drafting = random_model(families.read(configuration("Llama", **keys)), seed=2)
    options = GeneratorOptions(speculative=1)
    generator = Generator(drafting, max_length=32, tokenizer=byte_level(), options=options)
    with pytest.raises(ValueError, match="does not go with speculative"):
        generator.generate([[5]], params_of(REGEX))
