"""Prompt and completion together are what their tokens spell, for each form of tokenizer, in both
directions."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rl.data.inspect.template_checks import end_of_turn
from rollout.media import processors
from rollout.media.processor import MediaError
from rollout.text.chat import encode_answer, encode_completion, render_prompt
from rollout.text.spelling import GrowingText, decode_after, encode_after
from rollout.text.tokenizer import first_stop, load_tokenizer

LETTERS = '\n !"+,-.0123456789=?Aabcdehilnorstuwxyz'
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def _vocabulary(space: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Letters and bytes, and merges of a space with the letter behind it."""
    letters = [letter for letter in dict.fromkeys(LETTERS.replace(" ", space)) if letter != "\n"]
    merges = [(space, letter) for letter in "4aist"] + [(space + "t", "h")]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *letters, *("".join(pair) for pair in merges)]
    return {token: number for number, token in enumerate(tokens)}, merges


def _sentencepiece(form: str) -> Tokenizer:
    vocabulary, merges = _vocabulary("▁")
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if form == "legacy":  # Llama 2, Mistral v0.1, Mixtral
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence([*steps, strip])
    elif form == "no prefix":  # Gemma
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
        tokenizer.decoder = decoders.Sequence([*steps, strip])
    return tokenizer


def _byte_level(add_prefix_space: bool) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", letter) for letter in "4aist"]
    vocabulary = {
        token: n
        for n, token in enumerate(["<unk>", "<s>", "</s>", *letters, *map("".join, merges)])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


FORMS = {
    "legacy normaliser": lambda: _sentencepiece("legacy"),
    "Metaspace, always": lambda: _sentencepiece("always"),
    "Metaspace, first": lambda: _sentencepiece("first"),
    "SentencePiece without a prefix": lambda: _sentencepiece("no prefix"),
    "byte level": lambda: _byte_level(False),
    "byte level with a prefix": lambda: _byte_level(True),
}
ANSWERS = (
    "4",
    " 4",
    "  4",
    "a is that",
    " a",
    "\n4",
    "\n\n a",
    "",
    " ",
    "é4",
    " é",
    "4é",
    "=4",
    "a",
    "0.5",
    "世 a",
    "世",
)


@pytest.fixture(scope="module", params=FORMS)
def tokenizer(request):
    backend = FORMS[request.param]()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **specials
    )


@pytest.mark.parametrize("answer", ANSWERS)
def test_prompt_and_answer_are_what_their_tokens_spell(tokenizer, answer):
    ids, mask = encode_answer(tokenizer, "2+2=", answer)
    prompt = render_prompt(tokenizer, "2+2=")
    assert ids[: len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (
        len(ids) - len(prompt)
    )
    spelled = tokenizer.decode(ids, skip_special_tokens=True)
    assert (
        spelled.removeprefix(" ") == "2+2=" + answer
    )  # " 2+2=" with a prefix that the decoder leaves
    assert ids[-1] == tokenizer.eos_token_id
    assert encode_completion(tokenizer, "2+2=", answer) == (ids, mask)


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_completion_keeps_its_first_space(tokenizer, answer):
    ids = encode_after(tokenizer, answer)
    assert decode_after(tokenizer, ids) == answer
    assert (
        decode_after(tokenizer, [*ids, tokenizer.eos_token_id], skip_special_tokens=True) == answer
    )
    prompt = tokenizer.encode("2+2=")
    both = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert both == tokenizer.decode(prompt, skip_special_tokens=True) + decode_after(tokenizer, ids)


@pytest.fixture
def decoded(tokenizer, monkeypatch):
    """The numbers of tokens that the tokenizer has decoded, call by call."""
    lengths = []
    decode = type(tokenizer).decode
    monkeypatch.setattr(
        type(tokenizer),
        "decode",
        lambda self, ids, **more: lengths.append(len(ids)) or decode(self, ids, **more),
    )
    return lengths


def test_a_text_that_grows_is_that_of_all_tokens(tokenizer):
    rng = random.Random(0)
    words = encode_after(tokenizer, " 4 is the answer, \u20ac and \U0001f40b ")
    for _ in range(30):
        noise = [rng.choice([rng.randrange(3, 262), *words]) for _ in range(rng.randrange(12))]
        tokens = rng.choice([noise, words]) + words + noise + words
        text = GrowingText(tokenizer)
        pieces = []
        left = list(tokens)
        while left:
            size = rng.randrange(1, 6)
            pieces.append(text.add(left[:size]))
            left = left[size:]
        assert "".join([*pieces, text.finish()]) == decode_after(tokenizer, tokens)


def test_a_text_that_grows_decodes_its_last_tokens_only(tokenizer, decoded):
    words = encode_after(tokenizer, " 4 is the answer, \u20ac and \U0001f40b ")
    text = GrowingText(tokenizer)
    for _ in range(200):
        text.add(words)
    assert max(decoded) < 4 * len(words)
    decoded.clear()
    for _ in range(3000):
        text.add([5])  # a byte that no character has
    assert max(decoded) < 1000


def test_a_stop_is_searched_in_the_last_tokens_only(tokenizer, decoded):
    tokens = encode_after(tokenizer, " 4 is the answer, and ") * 50
    end = encode_after(tokenizer, "dear")
    expected = len(tokens) + len(end)
    assert first_stop(tokenizer, [*tokens, *end], len(tokens), ("d dear", "x")) == expected
    assert first_stop(tokenizer, [*tokens, *end], len(tokens) + 1, ("dear",), 7) == expected
    assert first_stop(tokenizer, [*tokens, *end], len(tokens), ("dearest",)) is None
    assert max(decoded) < 40


def test_a_string_that_stops_may_begin_with_a_space(tokenizer):
    ids = encode_after(tokenizer, " 4 a")
    assert first_stop(tokenizer, ids, 0, (" 4",)) is not None
    assert first_stop(tokenizer, ids, 0, ("  4",)) is None


@pytest.mark.parametrize("source", [("bytes",), ("characters", "0123456789+=")])
def test_the_tokens_of_other_tokenizers_stay(source):
    tokenizer = load_tokenizer(*source)
    for text in ("12", "=", "x1", " 1", ""):
        assert encode_after(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
        ids = tokenizer.encode(text)
        assert decode_after(tokenizer, ids) == tokenizer.decode(ids)


class Slow:
    """A tokenizer that does not say where its tokens begin."""

    is_fast = False

    def __init__(self, tokenizer):
        self.encode, self.decode, self.unk_token_id = (
            tokenizer.encode,
            tokenizer.decode,
            tokenizer.unk_token_id,
        )


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_tokenizer_without_offsets_spells_the_same(tokenizer, answer):
    assert encode_after(Slow(tokenizer), answer) == encode_after(tokenizer, answer)


def test_the_end_of_a_turn_without_offsets(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.is_fast
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + END }}{% endfor %}"
    for end, token in (("'</s>'", 1), ("'\n</s>'", 1), ("'\n'", None), ("'.'", ord(".") + 3)):
        tokenizer.chat_template = template.replace("END", end)
        assert end_of_turn(tokenizer)[0] == token
    with pytest.raises(
        MediaError,
        match="ByT5Tokenizer does not say where its tokens begin.*use one with a tokenizer",
    ):
        processors.read(tmp_path, tokenizer)
