"""Pictures in prompts of the generator: its tokens are those of transformers' `generate`, however
prompts are cut and cached."""

import dataclasses
import functools

import media_oracles
import numpy as np
import oracles
import pytest

import policy
from policy import families
from rollout import Generator, GeneratorOptions, MediaPrompt, SamplingParams
from rollout.request import prefix_keys

torch = pytest.importorskip(
    "torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'"
)

NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)
WIDTH = 64


def prompt_of(document, digest="a"):
    """The prompt of a document; the rows of its table are parts of one picture of this digest."""
    parts = [None if row < 0 else (digest, row) for row in document.media.index.tolist()]
    return MediaPrompt(
        tuple(document.tokens.tolist()),
        document.media,
        prefix_keys(document.tokens.tolist(), parts),
    )


@dataclasses.dataclass(frozen=True)
class Greedy:
    """What `generate` of transformers appends to a document, and the log-probability of each
    token."""

    tokens: list[int]
    logprobs: list[float]


def greedy(theirs, document) -> Greedy:
    getattr(theirs, "model", theirs).rope_deltas = None
    tokens = torch.tensor(document.tokens[None])
    with torch.no_grad():
        out = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **document.inputs,
        )
    logp = torch.log_softmax(torch.cat(out.logits), -1)
    return Greedy(out.sequences[0, len(document) :].tolist(), logp.max(-1).values.tolist())


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """case(kind) -> (ours, two documents with the same text and other pictures, greedy tokens of
    transformers for both)."""

    @functools.cache
    def made(kind):
        theirs = media_oracles.build(kind)
        directory = tmp_path_factory.mktemp(kind)
        theirs.save_pretrained(directory)
        first = media_oracles.document(kind, theirs, (4, 3, 6), seed=1)
        second = media_oracles.document(kind, theirs, (4, 3, 6), seed=1, pictures=5)
        assert first.tokens.tolist() == second.tokens.tolist()
        table = joined(first, second)
        documents = [
            dataclasses.replace(
                each,
                media=dataclasses.replace(each.media.in_table(table), index=shifted(each, offset)),
            )
            for each, offset in ((first, 0), (second, len(first.media.table)))
        ]
        return policy.load(directory), documents, [greedy(theirs, each) for each in (first, second)]

    return made


def joined(*documents):
    """One table of the rows of all documents."""
    tables = [each.media for each in documents]
    deep = (
        None if tables[0].deep is None else np.concatenate([each.deep for each in tables], axis=1)
    )
    return media_oracles.MediaTable(np.concatenate([each.table for each in tables]), deep)


def shifted(document, offset):
    return np.where(document.media.index >= 0, document.media.index + offset, -1).astype(np.int32)


def generator(model, **options):
    options = GeneratorOptions(
        **{"prefill_chunk": 64, "tokens_per_dispatch": 4, "page_size": 4} | options
    )
    return Generator(model, max_length=WIDTH, slots=2, seed=5, options=options)


def assert_greedy(out, expected):
    """The tokens of transformers, with log-probabilities within the tolerance of logits."""
    for (completion,), want in zip(out, expected, strict=True):
        assert completion.tokens == want.tokens
        np.testing.assert_allclose(completion.logprobs, want.logprobs, atol=1e-4, rtol=0)


# A picture of Gemma 3 has nine tokens that see each other; a chunk ends before it or after it.
CUTS = [("Qwen3VLMoe", {"prefill_chunk": 5, "cache": "paged"})]
MORE_CUTS = [
    ("Gemma3", {"prefill_chunk": 10}),
    ("Qwen3OmniMoeThinker", {"prefill_chunk": 8, "cache": "paged"}),
    ("Qwen3VLMoe", {"prefill_chunk": 64}),
    ("Gemma3", {"prefill_chunk": 12, "cache": "paged", "sliding_window_cache": True}),
    ("Qwen3VL", {"prefill_chunk": 8}),
    ("Qwen3VLMoe", {"prefill_chunk": 8, "cache": "paged"}),
    ("Qwen3VLMoe", {"prefill_chunk": 5}),
    ("Gemma3", {"prefill_chunk": 64, "cache": "paged"}),
    ("Gemma3", {"prefill_chunk": 9, "sliding_window_cache": True}),
    ("Gemma4", {"prefill_chunk": 7}),
    ("Qwen2_5_VL", {"prefill_chunk": 5, "cache": "paged", "sliding_window_cache": True}),
    ("Qwen2_5_VL", {"prefill_chunk": 64}),
    ("Qwen3_5", {"prefill_chunk": 5}),
    ("Qwen3_5", {"prefill_chunk": 8, "cache": "paged"}),
    ("Llama4", {"prefill_chunk": 5, "cache": "paged"}),
    ("Llama4", {"prefill_chunk": 64, "sliding_window_cache": True}),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*CUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_CUTS)],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers_for_every_cut(kind, options, case):
    """Two prompts of the same ids with other pictures, and the first one again: no cached entry of
    another picture is used."""
    model, (first, second), (want, other) = case(kind)
    assert want.tokens != other.tokens, "the pictures change nothing"
    gen = generator(model, **options)
    prompts = [prompt_of(first, "a"), prompt_of(second, "b"), prompt_of(first, "a")]
    assert_greedy(gen.generate(prompts, GREEDY), [want, other, want])
    prefilled = gen.engine.counts["prefill"]
    assert_greedy(gen.generate([prompts[1]], GREEDY), [other])
    assert_greedy(gen.generate([prompts[0]], GREEDY), [want])
    assert gen.engine.counts["prefill"] - prefilled <= 2 * (len(first) - 1)


@pytest.mark.slow
def test_exact_completions_have_the_bits_of_log_probabilities(case, all_optimizations):
    """Also the samples of one prompt, of a text next to it, and whatever the cache: exact
    completions are a function of the prompt."""
    model, (first, second), _ = case("Qwen3VLMoe")
    text = media_oracles.plain("Qwen3VLMoe", 7).tokens.tolist()
    params = SamplingParams(n=2, max_new_tokens=NEW, temperature=0.8)
    outputs = [
        generator(model, exact=True, **options).generate(
            [prompt_of(first), text, prompt_of(second, "b")], params
        )
        for options in ({"prefill_chunk": 5}, {"prefill_chunk": 64, "cache": "paged"})
    ]
    assert [[c.tokens for c in group] for group in outputs[0]] == [
        [c.tokens for c in group] for group in outputs[1]
    ]
    for document, group in ((first, outputs[0][0]), (second, outputs[0][2])):
        for completion in group:
            row, media = extended(document, completion.tokens)
            logp = np.asarray(model.logprobs(row[None], temperature=0.8, **media)[0])[0]
            np.testing.assert_array_equal(np.float32(completion.logprobs), logp[len(document) :])
    assert outputs[0][0] != outputs[0][2]


def extended(document, completion):
    """(tokens, media keywords) of a document and what follows it."""
    end = len(document) + len(completion)
    media = document.media.part(0, end)
    arrays = {name: getattr(media, name) for name in ("index", "turns", "until")}
    rows = {name: a[None] for name, a in arrays.items() if a is not None}
    row = np.concatenate([document.tokens, completion]).astype(int)
    return row, {"media": dataclasses.replace(media, **rows)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"kv_cache": "int8"}, {"record_routes": True}, {"weights": "int8"}], ids=str
)
def test_options_of_the_generator_go_with_pictures(options, case):
    """Two pictures in each prompt; quantised entries and weights move log-probabilities a little,
    recorded routes not at all."""
    model, documents, expected = case("Qwen3VLMoe")
    prompts = [prompt_of(each, str(n)) for n, each in enumerate(documents)]
    out = generator(model, prefill_chunk=8, **options).generate(prompts, GREEDY)
    for (completion,), document, want in zip(out, documents, expected, strict=True):
        row, media = extended(document, completion.tokens)
        logp = np.asarray(model.logprobs(row[None], **media)[0])[0, len(document) :]
        np.testing.assert_allclose(
            completion.logprobs, logp, atol=1e-5 if "record_routes" in options else 0.5, rtol=0
        )
        if "record_routes" in options:
            assert completion.tokens == want.tokens
            assert {len(routes) for routes in completion.routes.values()} == {
                len(document) + NEW - 1
            }


@pytest.mark.slow
def test_a_sampled_placeholder_is_a_token_like_any_other(case):
    """The policy is made to sample the placeholder id. Decoding feeds its embedding, as the full
    forward pass does."""
    model, (first, _), _ = case("Qwen3VLMoe")
    params = dict(model.params)
    head = np.array(params["lm_head"])
    row, media = extended(first, [])
    hidden = np.asarray(model.hidden_states(row[None], **media))[-1, 0, -1]
    head[media_oracles.IMAGE] += 20 * hidden / np.square(hidden).sum()
    pushed = type(model)(model.graph, params | {"lm_head": head})
    (completion,) = generator(pushed, prefill_chunk=8).generate([prompt_of(first)], GREEDY)[0]
    assert completion.tokens[0] == media_oracles.IMAGE
    row, media = extended(first, completion.tokens)
    logp = np.asarray(pushed.logprobs(row[None], **media)[0])[0, len(first) :]
    np.testing.assert_allclose(completion.logprobs, logp, atol=1e-5, rtol=0)
    ((again,),) = generator(pushed, prefill_chunk=5, cache="paged").generate(
        [prompt_of(first)], GREEDY
    )
    assert again.tokens == completion.tokens


@pytest.mark.slow
def test_samples_of_a_prompt_share_its_entries_and_a_preempted_one_is_prefilled_again(case):
    model, (first, second), (want, other) = case("Qwen3VLMoe")
    gen = generator(model, cache="paged", pages=2 + 16, prefill_chunk=8)
    out = gen.generate([prompt_of(first), prompt_of(second, "b")], dataclasses.replace(GREEDY, n=3))
    assert [[c.tokens for c in group] for group in out] == [[want.tokens] * 3, [other.tokens] * 3]
    assert gen.engine.counts["prefill"] < 6 * (len(first) - 1)


@pytest.mark.slow
def test_programs_of_prompts_with_pictures_are_compiled_ahead(case):
    model, (first, second), (want, other) = case("Qwen3VLMoe")
    gen = generator(model, prefill_chunk=8)
    gen.compile_ahead(len(first), [GREEDY], [len(first.media.table)], strict=True)
    assert_greedy(gen.generate([prompt_of(first), prompt_of(second, "b")], GREEDY), [want, other])


def test_what_a_prompt_cannot_have_is_refused_by_name(case):
    model, (first, _), _ = case("Qwen3VLMoe")
    gen, prompt, media = generator(model), prompt_of(first), first.media
    rows, n = media.table, len(first)
    cut = dataclasses.replace(media, index=media.index[:8], turns=media.turns[:8])
    for wrong, message in (
        (MediaPrompt(prompt.tokens[:8], cut, prompt.keys[:8]), "ends with a picture"),
        (MediaPrompt(prompt.tokens, media, prompt.keys[:-1]), "no key for each token"),
        (MediaPrompt(prompt.tokens[1:], media, prompt.keys[1:]), rf"index has shape \[{n}\]"),
        (
            MediaPrompt(
                prompt.tokens, dataclasses.replace(media, index=media.index + 99), prompt.keys
            ),
            "outside -1",
        ),
        (
            MediaPrompt(
                prompt.tokens,
                dataclasses.replace(media, table=rows.astype("f2")),
                prompt.keys,
            ),
            "computes in float32",
        ),
        (
            MediaPrompt(prompt.tokens, dataclasses.replace(media, turns=None), prompt.keys),
            "media without turns",
        ),
        (
            MediaPrompt(prompt.tokens, dataclasses.replace(media, until=np.arange(n)), prompt.keys),
            "media with until, which this model does not read",
        ),
        (MediaPrompt((999, *prompt.tokens[1:]), media, prompt.keys), "holds a token id outside"),
    ):
        with pytest.raises(ValueError, match=message):
            gen.generate([wrong], GREEDY)
    outside = tuple(
        10**6 if row >= 0 else token
        for token, row in zip(prompt.tokens, media.index.tolist(), strict=True)
    )
    assert gen.submit(rollout_request(MediaPrompt(outside, media, prompt.keys))).finish is None


def test_drafts_and_pictures_are_refused(case):
    _, (first, _), _ = case("Qwen3VLMoe")
    section = {"duet": {"multi_token_prediction": {"depth": 1}}}
    model = oracles.random_model(families.read(oracles.short("Qwen3VLMoe") | section))
    with pytest.raises(ValueError, match=r"do not go with generator\.speculative"):
        generator(model, speculative=1).submit(rollout_request(prompt_of(first)))


def rollout_request(prompt):
    from rollout.request import Request

    return Request(prompt.tokens, GREEDY, media=prompt.media, keys=prompt.keys)


def test_a_picture_longer_than_a_call_is_refused_where_it_sees_itself(case):
    model, (first, _), _ = case("Gemma3")
    with pytest.raises(ValueError, match="prefill_chunk to at least 9"):
        generator(model, prefill_chunk=8).generate([prompt_of(first)], GREEDY)
