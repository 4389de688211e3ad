"""Raw log-probabilities and likeliest tokens of completions and of prompts: those of
`torch.log_softmax` of the logits of transformers, and of `Model.logprobs`, whatever the request
samples with."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from oracles import VOCAB, configuration, oracle, random_model, saved

import policy
from policy import families
from rollout import Generator, GeneratorOptions, SamplingParams
from rollout.request import Request
from rollout.token_scores import ScoredText, TokenScorer

pytestmark = pytest.mark.xdist_group("token_scores")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2, 3] * 5, [1, 2, 3, 9]]
CHANGED = SamplingParams(
    max_new_tokens=9,
    temperature=0.6,
    top_k=5,
    top_p=0.9,
    logit_bias={3: 5.0},
    frequency_penalty=0.5,
    min_tokens=3,
    stop_token_ids=(7,),
    top_logprobs=5,
    prompt_logprobs=3,
)
GENERATORS = {
    "plain": {},
    "drafts": {"speculative": 2},
    "exact": {"exact": True},
    "pages": {"cache": "paged", "page_size": 4, "pages": 20},
}


@functools.cache
def model():
    keys = {"num_hidden_layers": 1, "duet": {"multi_token_prediction": {"depth": 1}}}
    return random_model(families.read(configuration("Llama", **keys)), seed=2)


def generator_of(model, **options):
    options = GeneratorOptions(**{"tokens_per_dispatch": 4, "prefill_chunk": 8} | options)
    return Generator(model, max_length=64, slots=3, seed=5, options=options)


def check(scores, logp_nV, tokens, k):
    """logp[t]: the log-probabilities of all tokens in the place of token t; nan: nothing predicts
    it."""
    assert scores.logprobs.shape == (len(tokens),)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (len(tokens), k)
    for t, token in enumerate(tokens):
        if np.isnan(logp_nV[t, 0]):
            assert np.isnan(scores.logprobs[t]) and (scores.top_ids[t] == -1).all()
            assert np.isnan(scores.top_logprobs[t]).all()
            continue
        assert scores.logprobs[t] == pytest.approx(logp_nV[t, token], abs=1e-5)
        ids = scores.top_ids[t]
        assert len(set(ids.tolist())) == k and (np.diff(scores.top_logprobs[t]) <= 0).all()
        np.testing.assert_allclose(scores.top_logprobs[t], logp_nV[t, ids], atol=1e-5)
        np.testing.assert_allclose(scores.top_logprobs[t], np.sort(logp_nV[t])[::-1][:k], atol=1e-5)
        if token in ids:  # one float in both lists
            assert scores.logprobs[t] == scores.top_logprobs[t][ids.tolist().index(token)]


def logprobs_of(model, tokens):
    """float64[n, V] of the model, nan in the first place."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(tokens)] = tokens
    z = np.asarray(model.logits(row), np.float64)[0, : len(tokens) - 1]
    logp = z - z.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    return np.concatenate([np.full((1, logp.shape[1]), np.nan), logp])


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "plain" else pytest.mark.slow) for n in GENERATORS],
)
def test_they_are_those_of_the_model(name):
    """Whatever the cache and the way to decode; the same tokens are drawn as without them."""
    generator = generator_of(model(), **GENERATORS[name])
    groups = generator.generate(PROMPTS, CHANGED)
    for prompt, [completion] in zip(PROMPTS, groups, strict=True):
        tokens = [*prompt, *completion.tokens]
        logp = logprobs_of(model(), tokens)
        check(completion.scores, logp[len(prompt) :], completion.tokens, 5)
        check(completion.prompt_scores, logp[: len(prompt)], prompt, 3)
        trained, _ = model().logprobs(np.asarray([tokens], np.int32))
        np.testing.assert_allclose(completion.scores.logprobs, trained[0, len(prompt) :], atol=1e-5)
        np.testing.assert_allclose(
            completion.prompt_scores.logprobs[1:], trained[0, 1 : len(prompt)], atol=1e-5
        )
        assert not np.allclose(completion.scores.logprobs, completion.logprobs, atol=1e-2)
    unrecorded = generator_of(model(), **GENERATORS[name]).generate(
        PROMPTS, replace(CHANGED, top_logprobs=None, prompt_logprobs=None)
    )
    for [one], [other] in zip(groups, unrecorded, strict=True):
        assert one.tokens == other.tokens and other.scores is other.prompt_scores is None


def test_they_are_those_of_transformers(tmp_path):
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
    )
    theirs = oracle("Qwen3", num_hidden_layers=2)
    generator = generator_of(policy.load(saved(theirs, tmp_path)))
    params = SamplingParams(max_new_tokens=6, temperature=1.7, top_logprobs=20, prompt_logprobs=20)
    for prompt, [completion] in zip(PROMPTS, generator.generate(PROMPTS, params), strict=True):
        tokens = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logp = torch.log_softmax(theirs(tokens, use_cache=False).logits, -1)[0, :-1].numpy()
        logp = np.concatenate([np.full((1, VOCAB), np.nan, np.float32), logp])
        check(completion.scores, logp[len(prompt) :], completion.tokens, 20)
        check(completion.prompt_scores, logp[: len(prompt)], prompt, 20)


def test_only_requests_that_ask_have_them():
    """One decode serves them all; programs of others do not change."""
    generator = generator_of(model())
    asked = [None, 0, 2, None]
    requests = [
        Request(tuple(prompt), SamplingParams(max_new_tokens=5, top_logprobs=k), n)
        for n, (prompt, k) in enumerate(zip(PROMPTS, asked, strict=True))
    ]
    for request in requests:
        generator.submit(request)
    while not all(request.finish for request in requests):
        generator.step()
    for request, k in zip(requests, asked, strict=True):
        if k is None:
            assert request.scores is None and not request.raw_logprobs + request.top_ids
            continue
        tokens = [*request.prompt, *request.tokens]
        logp = logprobs_of(model(), tokens)[len(request.prompt) :]
        check(request.scores, logp, request.tokens, k)
    decodes = {tuple(shape) for name, *shape in generator.engine.runner.memory if name == "decode"}
    plain = generator_of(model())
    plain.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    runner = plain.engine.runner
    assert {len(shape) for name, *shape in runner.memory if name == "decode"} == {2}
    assert {len(shape) for shape in decodes} >= {4}
    lowered = runner.executables["decode"].lower
    state = runner.decode_state(requests[:1], 3, 5)
    inputs = plain._params, plain.engine.batch.full_cache(), state, np.zeros(2, np.int32)
    assert "chlo.top_k" not in lowered(*inputs).as_text()
    state = replace(state, tops=5)
    assert "chlo.top_k" in lowered(*inputs[:2], state, inputs[-1]).as_text()


def test_equal_logits_are_named_by_the_lowest_ids():
    """Two ids may spell one text, and all of them may be equally likely."""
    weights = {path: 0 * array for path, array in model().params.items()}
    flat = type(model())(model().graph, weights)
    params = SamplingParams(max_new_tokens=3, temperature=0, top_logprobs=4, prompt_logprobs=4)
    [[completion]] = generator_of(flat).generate([[5, 6]], params)
    assert completion.tokens == [0, 0, 0]
    for scores in (completion.scores, completion.prompt_scores.part(1, None, 4)):
        assert (scores.top_ids == [0, 1, 2, 3]).all()
        np.testing.assert_allclose(scores.top_logprobs, -np.log(VOCAB), atol=1e-5)


def test_a_stop_string_cuts_them_with_the_tokens():
    from rollout.text.tokenizer import characters

    tokenizer = characters("".join(chr(0x4E00 + i) for i in range(VOCAB - 8)))
    options = GeneratorOptions(tokens_per_dispatch=8)
    generator = Generator(
        model(), max_length=64, slots=2, seed=5, tokenizer=tokenizer, options=options
    )
    free = SamplingParams(max_new_tokens=8, top_logprobs=2)
    [[uncut]] = generator.generate([[1, 2, 3]], free)
    stop = tokenizer.decode(uncut.tokens[3:4])
    assert stop.strip()
    [[cut]] = generator.generate([[1, 2, 3]], replace(free, stop=(stop,)))
    n = len(cut.tokens)
    assert n < 8 and cut.finish == "stop"
    np.testing.assert_array_equal(cut.scores.top_ids, uncut.scores.top_ids[:n])
    np.testing.assert_allclose(cut.scores.logprobs, uncut.scores.logprobs[:n], atol=1e-6)


def test_the_samples_of_a_prompt_are_scored_once(monkeypatch):
    generator = generator_of(model())
    counts = []
    score = TokenScorer.score

    def counting(self, params, texts, k):
        counts.append(len(texts))
        return score(self, params, texts, k)

    monkeypatch.setattr(TokenScorer, "score", counting)
    params = SamplingParams(n=3, max_new_tokens=2, prompt_logprobs=2)
    [group] = generator.generate([PROMPTS[3]], params)
    assert counts == [1]
    for each in group:
        check(each.prompt_scores, logprobs_of(model(), PROMPTS[3]), PROMPTS[3], 2)


def test_prompts_of_many_lengths_are_scored_in_few_calls():
    rng = np.random.default_rng(0)
    texts = [ScoredText(rng.integers(0, VOCAB, n).tolist()) for n in (1, 31, 32, 33, 64, 2, 3)]
    scorer = TokenScorer(model().graph, 64)
    results = scorer.score(model().params, texts, 2)
    assert scorer._program.number == 2
    for text, scores in zip(texts, results, strict=True):
        check(scores, logprobs_of(model(), text.tokens), text.tokens, 2)


@pytest.mark.parametrize("field", ["top_logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("number", [-1, 21])
def test_more_than_twenty_are_refused(field, number):
    with pytest.raises(ValueError, match=f"{field} must be None or 0 to 20"):
        SamplingParams(**{field: number})
