"""Rows of data with pictures and sounds: every form that other frameworks write, and refusals."""

import base64
import io

import datasets
import numpy as np
import pytest
from PIL import Image

from rollout.media.processor import MediaError
from rollout.media.rows import normalise


def png(grey) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 2), (grey,) * 3).save(file, "PNG")
    return file.getvalue()


ONE, TWO = png(10), png(200)
URI = "data:image/png;base64," + base64.b64encode(TWO).decode()
SOUND = {"array": np.zeros(40, np.float32), "sampling_rate": 8000}
IMAGE, AUDIO = {"type": "image"}, {"type": "audio"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.png").write_bytes(ONE)
    return tmp_path


def text(content):
    return {"type": "text", "text": content}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def greys(references):
    """Returns the grey level of each picture, and the samples of each sound."""
    return [int(r.decode()[0, 0, 0]) if r.kind == "image" else len(r.decode()) for r in references]


BOTH = user(text("a "), IMAGE, text(" and "), IMAGE)
FORMS = {
    "parts and images": (BOTH, {"images": ["one.png", TWO]}, BOTH),
    "arrow fills parts with null": (
        user(
            {"type": "text", "text": "a ", "image": None},
            {"type": "image", "text": None, "image": None},
            IMAGE,
        ),
        {
            "images": [{"bytes": None, "path": "one.png"}, {"bytes": TWO, "path": None}],
            "image": None,
        },
        user(text("a "), IMAGE, IMAGE),
    ),
    "parts of Qwen": (
        user(
            {"type": "image", "image": "one.png"},
            text("a "),
            {"type": "image", "image": {"bytes": TWO}},
        ),
        {},
        user(IMAGE, text("a "), IMAGE),
    ),
    "parts of OpenAI": (
        user(
            {"type": "image_url", "image_url": "one.png"},
            {"type": "image_url", "image_url": {"url": URI}},
            text("?"),
        ),
        {"images": []},
        user(IMAGE, IMAGE, text("?")),
    ),
    "part of Hugging Face": (
        user({"type": "image", "path": "one.png"}, {"type": "image", "url": URI}, text("?")),
        {},
        user(IMAGE, IMAGE, text("?")),
    ),
    "one part and one column": (
        user(IMAGE, {"type": "image", "image": TWO}, text("?")),
        {"image": "one.png"},
        user(IMAGE, IMAGE, text("?")),
    ),
    "a plain prompt": ("What?", {"images": ["one.png", TWO]}, user(IMAGE, IMAGE, text("What?"))),
    "texts": (
        [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "What?"},
            {"role": "user", "content": "x"},
        ],
        {"images": ["one.png", TWO]},
        [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": [IMAGE, IMAGE, text("What?")]},
            {"role": "user", "content": "x"},
        ],
    ),
    "tags of a plain prompt": (
        "<image>a <image>",
        {"images": [{"image": "one.png"}, {"bytes": TWO}]},
        user(IMAGE, text("a "), IMAGE),
    ),
    "tags of messages": (
        [{"role": "user", "content": "<image>\n<image>b"}, {"role": "assistant", "content": "c"}],
        {"images": ["one.png", TWO]},
        [*user(IMAGE, text("\n"), IMAGE, text("b")), {"role": "assistant", "content": "c"}],
    ),
    "tags in parts": (
        user(text("<image>a<image>")),
        {"images": [ONE, TWO]},
        user(IMAGE, text("a"), IMAGE),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_pictures(folder, name):
    prompt, columns, expected = FORMS[name]
    messages, references = normalise(prompt, columns, "rows.jsonl:5", folder)
    assert messages == expected
    assert greys(references) == [10, 200]
    assert [r.where for r in references] == ["rows.jsonl:5: picture 1", "rows.jsonl:5: picture 2"]


@pytest.mark.parametrize(
    "prompt, columns",
    [
        (user(AUDIO, text("?")), {"audio": SOUND}),
        (user(AUDIO, text("?")), {"audios": [SOUND]}),
        (user({"type": "audio", "audio": SOUND}, text("?")), {}),
        (user({"type": "audio", **SOUND}, text("?")), {}),
        ("<audio>?", {"audios": [SOUND]}),
        ("?", {"audio": SOUND}),
    ],
)
def test_forms_of_sounds(tmp_path, prompt, columns):
    messages, references = normalise(prompt, columns, "", tmp_path)
    assert messages == user(AUDIO, text("?")) and greys(references) == [40]


def test_a_sound_of_openai(tmp_path):
    import wave

    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes(bytes(60))
    data = base64.b64encode(file.getvalue()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    messages, references = normalise(user(part), {}, "", tmp_path)
    assert messages == user(AUDIO) and greys(references) == [30]


def test_pictures_and_sounds_of_one_row(folder):
    prompt = user(text("<audio>a<image>"))
    messages, references = normalise(prompt, {"images": ["one.png"], "audio": SOUND}, "", folder)
    assert messages == user(AUDIO, text("a"), IMAGE) and greys(references) == [40, 10]
    messages, references = normalise("a", {"images": ["one.png"], "audio": SOUND}, "", folder)
    assert messages == user(IMAGE, AUDIO, text("a"))
    assert greys(references) == [10, 40]


def test_rows_of_text_stay_as_they_are(tmp_path):
    messages = [
        {"role": "user", "content": "Draw <image>", "name": "x"},
        {"role": "assistant", "content": "No"},
    ]
    assert normalise("Write <image>.", {"answer": 3}, "", tmp_path) == ("Write <image>.", ())
    assert normalise(messages, {"images": None, "audio": []}, "", tmp_path) == (messages, ())
    parts = [{"role": "user", "content": [text("a"), text("b")]}]
    assert normalise(parts, {}, "", tmp_path) == ([{"role": "user", "content": "ab"}], ())


def test_columns_of_datasets_stay_bytes(tmp_path):
    """With decode=False, as the reader of data casts them."""
    columns = datasets.Features(
        {"prompt": datasets.Value("string"), "images": [datasets.Image(decode=False)]}
    )
    rows = datasets.Dataset.from_list(
        [{"prompt": "?", "images": [{"bytes": ONE, "path": None}]}], features=columns
    )
    messages, references = normalise(rows[0]["prompt"], rows[0], "", tmp_path)
    assert messages == user(IMAGE, text("?")) and greys(references) == [10]
    assert isinstance(references[0].source, bytes)


@pytest.mark.parametrize(
    "prompt, columns, message",
    [
        (
            BOTH,
            {"images": [ONE]},
            "1 pictures in the columns, but 2 parts or tags that take one; they must agree",
        ),
        (BOTH, {}, "0 pictures in the columns, but 2 parts or tags that take one"),
        ("<image>a", {"images": [ONE, TWO]}, "2 pictures in the columns, but 1 parts or tags"),
        (
            user({"type": "image", "image": ONE}),
            {"images": [ONE]},
            "1 pictures in the columns, but 0 parts or tags that take one and 1 with a picture of "
            "their own",
        ),
        (
            "a",
            {"image": ONE, "images": [TWO]},
            "a column 'image' and a column 'images'; leave one of them out",
        ),
        ("a", {"images": [ONE, None]}, "picture 2 of column 'images' is null"),
        (
            "a",
            {"images": ["https://example.org/a.png"]},
            "picture 1: https://example.org/a.png is an address",
        ),
        ("a", {"images": [ONE, b"x"]}, "picture 2: not a picture that Pillow reads"),
        ("a", {"videos": ["a.mp4"]}, "a column of videos; only pictures and sounds"),
        (
            user({"type": "video", "video": "a.mp4"}),
            {},
            "message 0 has a video; only pictures and sounds",
        ),
        (
            user({"type": "imag"}),
            {},
            r"message 0: unknown type of part 'imag' \(nearest: image; valid: ",
        ),
        (user({"text": "a"}), {}, "message 0: a part must be a mapping with `type`"),
        (user({"type": "text", "text": 3}), {}, "message 0: a part of type 'text' needs a `text`"),
        (
            [{"role": "user", "content": None}],
            {},
            "the content of message 0 must be a text or a list of parts",
        ),
        (
            [{"role": "system", "content": "a"}],
            {"image": ONE},
            "1 pictures, but no message of the user",
        ),
        (
            [*BOTH, {"role": "assistant", "content": [IMAGE]}],
            {"images": [ONE] * 3},
            "message 1 of the assistant has a picture; answers are texts",
        ),
    ],
)
def test_refusals(folder, prompt, columns, message):
    with pytest.raises(MediaError, match=message):
        normalise(prompt, columns, "rows.jsonl:5", folder)
