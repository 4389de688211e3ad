"""Pictures in prompts of the generator: its tokens are those of transformers' `generate`, however prompts are cut and cached."""

import dataclasses
import functools

import media_oracles
import numpy as np
import pytest

import policy
from rollout import Generator, GeneratorOptions, MediaPrompt, SamplingParams
from rollout.request import prefix_keys

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch: pip install 'duet-rl[test]'")
pytestmark = pytest.mark.usefixtures("quick_compilation")

NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)
WIDTH = 64


def prompt_of(document, digest="a"):
    """The prompt of a document; the rows of its table are parts of one picture of this digest."""
    parts = [None if row < 0 else (digest, row) for row in document.media.index.tolist()]
    return MediaPrompt(tuple(document.tokens.tolist()), document.media, prefix_keys(document.tokens.tolist(), parts))


def greedy(theirs, document) -> list[int]:
    """What `generate` of transformers appends."""
    getattr(theirs, "model", theirs).rope_deltas = None
    tokens = torch.tensor(document.tokens[None])
    with torch.no_grad():
        out = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, **document.inputs
        )
    return out[0, len(document) :].tolist()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """case(kind) -> (ours, two documents with the same text and other pictures, greedy tokens of transformers for both)."""

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
            dataclasses.replace(each, media=dataclasses.replace(each.media, table=table, index=shifted(each, offset)))
            for each, offset in ((first, 0), (second, len(first.media.table.rows)))
        ]
        return policy.load(directory), documents, [greedy(theirs, each) for each in (first, second)]

    return made


def joined(*documents):
    """One table of the rows of all documents."""
    tables = [each.media.table for each in documents]
    deep = None if tables[0].deep is None else np.concatenate([each.deep for each in tables], axis=1)
    return media_oracles.MediaTable(np.concatenate([each.rows for each in tables]), deep)


def shifted(document, offset):
    return np.where(document.media.index >= 0, document.media.index + offset, -1).astype(np.int32)


def generator(model, **options):
    options = GeneratorOptions(**{"prefill_chunk": 64, "tokens_per_dispatch": 4, "page_size": 4} | options)
    return Generator(model, max_length=WIDTH, slots=2, seed=5, options=options)


def tokens(out):
    return [completion.tokens for (completion,) in out]


# A picture of Gemma 3 has nine tokens that see each other; a chunk ends before it or after it.
CUTS = [
    ("Qwen3VLMoe", {"prefill_chunk": 64}),
    ("Qwen3VLMoe", {"prefill_chunk": 5, "cache": "paged"}),
    ("Gemma3", {"prefill_chunk": 10}),
    ("Gemma3", {"prefill_chunk": 12, "cache": "paged", "sliding_window_cache": True}),
]
MORE_CUTS = [
    ("Qwen3VL", {"prefill_chunk": 8}),
    ("Qwen3VLMoe", {"prefill_chunk": 8, "cache": "paged"}),
    ("Qwen3VLMoe", {"prefill_chunk": 5}),
    ("Gemma3", {"prefill_chunk": 64, "cache": "paged"}),
    ("Gemma3", {"prefill_chunk": 9, "sliding_window_cache": True}),
    ("Gemma4", {"prefill_chunk": 7}),
    ("Qwen3_5", {"prefill_chunk": 5}),
    ("Qwen3_5", {"prefill_chunk": 8, "cache": "paged"}),
    ("Llama4", {"prefill_chunk": 5, "cache": "paged"}),
    ("Llama4", {"prefill_chunk": 64, "sliding_window_cache": True}),
]


@pytest.mark.parametrize(
    ("kind", "options"), [*CUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_CUTS)], ids=str
)
def test_greedy_tokens_are_those_of_transformers_for_every_cut(kind, options, case):
    """Two prompts of the same ids with other pictures, and the first one again: no cached entry of another picture is used."""
    model, (first, second), (want, other) = case(kind)
    assert want != other, "the pictures change nothing"
    gen = generator(model, **options)
    prompts = [prompt_of(first, "a"), prompt_of(second, "b"), prompt_of(first, "a")]
    assert tokens(gen.generate(prompts, GREEDY)) == [want, other, want]
    prefilled = gen.engine.counts["prefill"]
    assert tokens(gen.generate([prompts[1]], GREEDY)) == [other]
    assert tokens(gen.generate([prompts[0]], GREEDY)) == [want]
    assert gen.engine.counts["prefill"] - prefilled <= 2 * (len(first) - 1)
