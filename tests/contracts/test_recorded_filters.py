"""Completions say which ids their filters left, whatever the generator: those that numpy finds in
the logits of the model, and the log-probability of each token among them.
"""

import functools

import numpy as np
import pytest
from oracles import configuration, random_model

from policy import families
from rollout import Generator, GeneratorOptions, SamplingParams

pytestmark = pytest.mark.xdist_group("recorded_filters")

VOCAB, NEW = 12, 10
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
DRAWN = SamplingParams(
    n=2, max_new_tokens=NEW, temperature=1.3, top_k=7, top_p=0.8, min_p=0.05, stop_token_ids=(3,)
)
FORBIDDEN = SamplingParams(
    n=2, max_new_tokens=NEW, temperature=1.3, min_tokens=4, stop_token_ids=(3, 7)
)
MOST = 4  # of up to seven ids
GENERATORS = {
    "plain": {},
    "drafts": {"speculative": 1},
    "exact": {"exact": True},
    "pages": {"cache": "paged", "page_size": 4},
}


@functools.cache
def model():
    keys = {
        "vocab_size": VOCAB,
        "num_hidden_layers": 1,
        "duet": {"multi_token_prediction": {"depth": 1}},
    }
    return random_model(families.read(configuration("Llama", **keys)), seed=2)


@functools.cache
def logits_of(tokens):
    """The logits after each token of a row, from one program."""
    row = np.zeros((1, 16), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(model().logits(row), np.float64)[0] / DRAWN.temperature


def left_by_filters(z):
    """The ids in ascending order, and the log-probability of each id among them."""
    order = np.argsort(-z)[: DRAWN.top_k]
    p = np.exp(z[order] - z.max())
    mass = np.cumsum(p) / p.sum()
    ids = order[: 1 + int(np.sum(mass < DRAWN.top_p))]
    ids = np.sort(ids[z[ids] >= z.max() + np.log(DRAWN.min_p)])
    return ids, z - z.max() - np.log(np.exp(z[ids] - z.max()).sum())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "plain" else pytest.mark.slow) for name in GENERATORS],
)
def test_the_ids_are_those_of_numpy(name):
    options = GeneratorOptions(
        record_kept=MOST, tokens_per_dispatch=4, prefill_chunk=16, **GENERATORS[name]
    )
    generator = Generator(model(), max_length=40, slots=3, seed=5, options=options)
    more = 0
    for prompt, group in zip(PROMPTS, generator.generate(PROMPTS, DRAWN), strict=True):
        for completion in group:
            z_TV = logits_of((*prompt, *completion.tokens))[len(prompt) - 1 :]
            n = len(completion.tokens)
            assert (
                completion.kept.shape[0]
                == len(completion.kept_counts)
                == len(completion.filtered_logprobs)
                == n
            )
            for t, token in enumerate(completion.tokens):
                ids, logp = left_by_filters(z_TV[t])
                assert completion.kept_counts[t] == len(ids)
                assert completion.kept[t][completion.kept[t] >= 0].tolist() == ids[:MOST].tolist()
                assert token in ids and completion.filtered_logprobs[t] == pytest.approx(
                    logp[token], abs=1e-5
                )
                assert completion.filtered_logprobs[t] >= completion.logprobs[t] - 1e-6
                more += len(ids) > MOST
    assert more
    forbidden = generator.generate(PROMPTS, FORBIDDEN)
    for prompt, group in zip(PROMPTS, forbidden, strict=True):
        for completion in group:
            z_TV = logits_of((*prompt, *completion.tokens))[len(prompt) - 1 :]
            for t, (token, ids) in enumerate(
                zip(completion.tokens, completion.kept.tolist(), strict=True)
            ):
                out = list(FORBIDDEN.stop_token_ids) if t < FORBIDDEN.min_tokens else []
                assert (
                    ids == [-2 - each for each in out] + [-1] * (MOST - len(out))
                    and token not in out
                )
                assert completion.kept_counts[t] == (VOCAB - len(out) if out else 0)
                left = np.setdiff1d(np.arange(VOCAB), out)
                logp = z_TV[t, token] - np.log(np.exp(z_TV[t, left]).sum())
                assert completion.filtered_logprobs[t] == pytest.approx(logp, abs=1e-5)
    if name == "plain":
        plain = Generator(
            model(), max_length=40, slots=3, seed=5, options=GeneratorOptions(tokens_per_dispatch=4)
        )
        for one, other in zip(
            generator.generate(PROMPTS, DRAWN), plain.generate(PROMPTS, DRAWN), strict=True
        ):
            for recorded, unrecorded in zip(one, other, strict=True):
                assert (
                    recorded.tokens == unrecorded.tokens
                    and unrecorded.kept is unrecorded.filtered_logprobs is None
                )
                assert recorded.logprobs == pytest.approx(unrecorded.logprobs, abs=1e-6)
        greedy = SamplingParams(max_new_tokens=2, temperature=0, top_k=5)
        assert generator.generate(PROMPTS[:1], greedy)[0][0].kept is None
