"""The text of a completion while its tokens arrive (rl/serve/texts.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl.serve.sampling import MOST_STOP_CHARACTERS, SamplingFields
from rl.serve.texts import TextStream
from rollout import SamplingParams
from rollout.text.tokenizer import byte_level

TOKENIZER = byte_level()


def tokens_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def pieces(tokens, sizes, *, special=False, **params):
    stream = TextStream(TOKENIZER, SamplingParams(**params), special=special)
    parts = []
    start = 0
    for size in [*sizes, len(tokens)]:
        end = min(len(tokens), start + size)
        ended = end == len(tokens)
        parts.append(stream.add(tokens[start:end], ended=ended))
        start = end
        if ended:
            break
    return parts, stream


def test_a_character_waits_for_its_last_byte():
    assert pieces(tokens_of("a€b"), (1, 1, 1, 1))[0] == ["a", "", "", "€", "b"]


def test_bytes_that_stay_incomplete_are_shown_at_the_end():
    parts, _ = pieces(tokens_of("a€")[:-1], (1, 1))
    assert parts[:2] == ["a", ""] and parts[2].startswith("\ufffd")


def test_what_may_become_a_stop_is_held_and_then_shown_or_cut():
    assert pieces(tokens_of("UNO DUE TRE"), (8, 1, 1), stop="TRE\nA")[0] == [
        "UNO DUE ",
        "",
        "",
        "TRE",
    ]
    parts, stream = pieces(tokens_of("UNO DUE TRE\nA"), (8, 3), stop=("never", "TRE\nA"))
    assert "".join(parts) == "UNO DUE "
    assert stream.stopped_by == "TRE\nA"


def test_the_first_of_several_stops_counts():
    parts, stream = pieces(tokens_of("xabcd"), (), stop=("bcd", "ab"))
    assert parts == ["x"] and stream.stopped_by == "ab"


def test_stops_in_the_first_tokens_do_not_count():
    parts, stream = pieces(tokens_of("abab"), (), stop=("ab",), min_tokens=2)
    assert parts == ["ab"] and stream.stopped_by == "ab"


def test_the_token_that_ends_a_completion_is_not_shown():
    ended = [*tokens_of("a"), 2]
    assert pieces(ended, (), stop_token_ids=(2,), special=True)[0] == ["a"]
    assert pieces([*ended, *tokens_of("b")], (), stop_token_ids=(2,), special=True)[0] == [
        "a<eos>b"
    ]


@given(
    text=st.text("ab€é ", max_size=30),
    sizes=st.lists(st.integers(1, 5), max_size=20),
    stop=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3),
)
def test_pieces_add_up_to_the_text_however_they_are_cut(text, sizes, stop):
    tokens = tokens_of(text)
    places = [text.find(each) for each in stop if each in text]
    if places:  # the engine ends a completion with the token that completes the first stop
        ends = [text.find(each) + len(each) for each in stop if each in text]
        tokens = tokens_of(text[: min(ends)])
    parts, _ = pieces(tokens, sizes, stop=tuple(stop))
    [full], _ = pieces(tokens, (), stop=tuple(stop))
    assert "".join(parts) == full
    assert not any(each in full for each in stop)
    assert text.startswith(full)


def test_only_the_end_of_a_text_is_held_for_a_long_stop():
    stop = "a" * 200 + "b"
    parts, stream = pieces(tokens_of("a" * 300 + "c" + "a" * 5), [1] * 306, stop=(stop,))
    assert "".join(parts[:301]) == "a" * 300 + "c"
    assert parts[199:202] == ["", "a", "a"] and parts[300] == "a" * 200 + "c"
    assert "".join(parts[301:]) == "a" * 5 and stream.stopped_by is None


def test_stop_strings_have_a_most_length():
    longest = "a" * MOST_STOP_CHARACTERS
    assert SamplingFields(stop=longest).stops == (longest,)
    for stop in (longest + "a", [longest + "a"]):
        with pytest.raises(ValidationError):
            SamplingFields(stop=stop)
