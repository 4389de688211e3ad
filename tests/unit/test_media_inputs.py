"""Pictures of a document on the host: where calls end, what a span of tokens gets, keys, and rotary
sections."""

import dataclasses
import re

import numpy as np
import pytest

from policy.cache.media import Media, of_call
from policy.config import Rope
from policy.ops.rope import frequencies, rotation
from rollout.request import Request, prefix_keys

# Two tokens, a picture of three that see each other, one token, a picture of two, one token. What
# follows turns by 2 less than its place, as after larger pictures.
INDEX = np.array([-1, -1, 0, 1, 2, -1, 3, 4, -1], np.int32)
UNTIL = np.array([0, 1, 4, 4, 4, 5, 7, 7, 8], np.int32)
TURNS = np.array(
    [
        (0, 0, 0),
        (1, 1, 1),
        *((2, 2, 2), (2, 2, 3), (2, 3, 2)),
        (4,) * 3,
        (5, 5, 5),
        (5, 5, 5),
        (6,) * 3,
    ],
    np.int32,
)
TABLE = np.zeros((5, 2), np.float32)
MEDIA = Media(INDEX, TABLE, turns=TURNS, until=UNTIL)


def test_calls_end_at_the_borders_of_blocks():
    assert [MEDIA.call_end(end) for end in range(1, 12)] == [1, 2, 2, 2, 5, 6, 6, 8, 9, 10, 11]
    assert dataclasses.replace(MEDIA, until=None).call_end(3) == 3
    assert MEDIA.longest_block == 3 and dataclasses.replace(MEDIA, until=None).longest_block == 1


def test_every_chunk_of_a_request_holds_full_blocks_and_the_keys_of_its_prompt():
    keys = prefix_keys(range(9), [None if row < 0 else ("a", row) for row in INDEX.tolist()])
    request = Request(tuple(range(9)), media=MEDIA, keys=keys, tokens=[20, 21])
    ends = []
    while request.cached < request.needed:
        request.cached = request.call_end(4)
        ends.append(request.cached)
    assert ends == [2, 6, 10]
    assert request.span(7, 11) == (7, 8, 20, 21) and request.cacheable == (*keys, 20)


def test_a_part_past_the_prompt_is_text_at_shifted_positions():
    part = MEDIA.part(7, 11)
    assert MEDIA.delta == -2 and part.table is TABLE
    assert part.index.tolist() == [4, -1, -1, -1] and part.until.tolist() == [7, 8, 9, 10]
    assert part.turns.tolist() == [[5, 5, 5], [6, 6, 6], [7, 7, 7], [8, 8, 8]]
    call = of_call([MEDIA, MEDIA], [0, 7], (3, 4))
    assert call.index.tolist() == [[-1, -1, 0, 1], [4, -1, -1, -1], [-1] * 4]
    assert call.until[1].tolist() == part.until.tolist()
    assert call.turns[1].tolist() == part.turns.tolist() and call.table is TABLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": INDEX[:-1]}, r"index has shape \[8\]"),
        ({"turns": TURNS[:, :2]}, r"need \[9, 3\]"),
        ({"index": INDEX + 1}, "outside -1..4"),
        ({"index": np.where(INDEX == -1, 0, INDEX)}, "ends with a picture"),
        ({"until": UNTIL[::-1].copy()}, "until does not name"),
        ({"until": np.minimum(UNTIL, 3)}, "until does not name"),
        (
            {"until": np.append([1, 4], UNTIL[2:])},
            "until does not name",
        ),  # token 1 belongs to another block
        (
            {"until": np.append(UNTIL[:-2], [len(UNTIL) - 1] * 2)},
            "until does not name",
        ),  # a block with the last token
    ],
)
def test_media_that_do_not_fit_a_prompt_are_named(change, message):
    assert MEDIA.refusal(9) is None
    assert re.search(message, dataclasses.replace(MEDIA, **change).refusal(9))


def test_keys_tell_pictures_and_their_parts_apart():
    parts = [None, ("a", 0), ("a", 1), None]
    keys = prefix_keys([5, 9, 9, 7], parts)
    assert (keys[0], keys[3]) == (5, 7) and keys[1] < 0 and keys[2] < 0 and keys[1] != keys[2]
    assert keys == prefix_keys([5, 9, 9, 7], parts)
    assert keys[1] not in prefix_keys([9, 9], [("b", 0), ("a", 1)])


def test_sections_choose_the_position_of_each_frequency():
    """The angles of a formula in numpy: height at 1, 4, 7, ..., width at 2, 5, ..., as far as the
    sections go."""
    rope = Rope(dim=16, theta=100.0, sections=(3, 3, 2))
    turns = np.array([[[3, 5, 7]]], np.int32)
    chosen = np.array([3, 5, 7, 3, 5, 7, 3, 5])
    cos, sin = rotation(rope, np.array([[11]], np.int32), turns)
    np.testing.assert_allclose(cos[0, 0], np.cos(chosen * frequencies(rope)), atol=1e-6)
    np.testing.assert_allclose(sin[0, 0], np.sin(chosen * frequencies(rope)), atol=1e-6)
    short = dataclasses.replace(rope, sections=(6, 1, 1))
    np.testing.assert_allclose(
        rotation(short, np.array([[11]]), turns)[0][0, 0],
        np.cos(np.array([3, 5, 7, 3, 3, 3, 3, 3]) * frequencies(rope)),
        atol=1e-6,
    )
    blocks = dataclasses.replace(rope, sections=(4, 1, 3), blocks=True)
    np.testing.assert_allclose(
        rotation(blocks, np.array([[11]]), turns)[0][0, 0],
        np.cos(np.array([3, 3, 3, 3, 5, 7, 7, 7]) * frequencies(rope)),
        atol=1e-6,
    )
    plain = rotation(dataclasses.replace(rope, sections=None), np.array([[11]], np.int32), turns)
    np.testing.assert_array_equal(plain, rotation(rope, np.array([[11]], np.int32)))
