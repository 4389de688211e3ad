"""Rows with pictures through the reader of data: forms of files, tokens and masks against the
processor of transformers, references between processes, and refusals that name file and row."""

import base64
import io
import json
import struct
import sys
import zlib
from pathlib import Path

import datasets as library
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from media_rows import PROCESSOR, TEMPLATE, model_directory, pixels, png, run_config
from media_tokenizers import tokenizer
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from policy.mesh import processes, serialization
from rewards import Runner, RunnerOptions
from rl.commands import cli
from rl.config.data import EvaluationOptions
from rl.data import media
from rl.data.encoded import Problem
from rl.data.limits import cut_row
from rl.data.reader import DataReader
from rl.data.rows.forms import read_labelled
from rl.errors import DataError
from rl.stages.unpaired import _mismatched

ONE, TWO = png(10), png(200, (24, 16))
URI = "data:image/png;base64," + base64.b64encode(ONE).decode()
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory, and a folder `rows` with pictures that paths in its files start from."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "one.png").write_bytes(ONE)
    (tmp_path / "rows" / "two.png").write_bytes(TWO)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "rows"


@pytest.fixture
def reader(model):
    """Makes the reader of a run on these data; all of them end with the test."""
    made = []

    def make(data, source=model, keys=None, **more):
        values = {"path": str(data)} if isinstance(data, (str, Path)) else data
        made.append(DataReader(run_config({"source": source} | (keys or {}), values, **more)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def problems(one: DataReader):
    config = one._config
    return one.problems(config.data, config.stages[0]).own


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(content):
    return {"type": "text", "text": content}


def lines(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verl(folder):
    """geometry3k as verl writes it."""
    row = {
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": ONE, "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "train.parquet")
    return folder / "train.parquet"


def trl(folder):
    """A dataset of TRL with a list of pictures, which `datasets` would decode."""
    part = {"type": library.Value("string"), "text": library.Value("string")}
    features = {
        "images": library.List(library.Image()),
        "prompt": library.List({"role": library.Value("string"), "content": library.List(part)}),
    }
    row = {
        "images": [Image.open(io.BytesIO(ONE))],
        "prompt": user(IMAGE | {"text": None}, text("Find x.")),
    }
    library.Dataset.from_list([row], features=library.Features(features)).save_to_disk(
        folder / "saved"
    )
    return folder / "saved"


def one_picture(folder):
    """A dataset with a column of one picture."""
    row = {"image": {"bytes": ONE, "path": None}, "prompt": "Find x."}
    features = library.Features({"image": library.Image(), "prompt": library.Value("string")})
    library.Dataset.from_list([row], features=features).save_to_disk(folder / "saved")
    return folder / "saved"


def openai(folder):
    return lines(
        folder / "openai.jsonl",
        {"prompt": user({"type": "image_url", "image_url": {"url": URI}}, text("Find x."))},
    )


def qwen(folder):
    return lines(
        folder / "qwen.jsonl",
        {"prompt": user({"type": "image", "image": "one.png"}, text("Find x."))},
    )


def table(folder):
    (folder / "rows.csv").write_text("image,prompt\none.png,Find x.\n")
    return folder / "rows.csv"


def template(folder):
    path = lines(folder / "q.jsonl", {"question": "Find x.", "images": ["one.png"]})
    return {"path": str(path), "prompt_template": "<image>{question}"}


def task(folder):
    (folder / "mine.py").write_text(
        "import numpy as np\n"
        "def shades(split):\n"
        "    picture = np.full((16, 24, 3), (10, 245, 128), np.uint8)\n"
        "    yield {'prompt': 'Find x.', 'image': picture, 'answer': '3'}\n"
    )
    return {"task": f"{folder / 'mine.py'}:shades"}


FORMS = [verl, trl, one_picture, openai, qwen, table, template, task]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_row_give_the_same_prompt(form, folder, reader):
    one = reader(form(folder))
    [problem] = problems(one)
    assert problem.example.prompt == user(IMAGE, text("Find x."))
    assert one.has_media
    [reference] = problem.expanded.references
    np.testing.assert_array_equal(reference.decode(), pixels(10))
    shown = one.tokenizer.decode(problem.ids)
    assert shown == f"[user]<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>Find x.[assistant]"
    assert (
        problem.expanded.index[problem.expanded.index >= 0].tolist() == list(range(6))
        and problem.expanded.rows == 6
    )
    [picture] = problem.example.columns["images"]
    assert "image" not in problem.example.columns and picture.size == (16, 24)
    np.testing.assert_array_equal(np.asarray(picture.open()), pixels(10))
    if form in (verl, trl, one_picture):
        assert isinstance(reference.source, bytes)


def test_sounds_are_read_by_a_model_that_hears(folder, reader, tmp_path):
    """The row's own column and the digest; tests of rollout/media compare the tokens with
    transformers."""
    (folder / "mine.py").write_text(
        "import numpy as np\n"
        "def tones(split):\n"
        "    sound = {'array': np.zeros(1600, np.float32), 'sampling_rate': 16000}\n"
        "    yield {'prompt': 'Listen.', 'audio': sound, 'answer': '3'}\n"
    )
    with pytest.raises(
        DataError,
        match="problem 0: sound 1: the row has a sound, but the model has no processor of sounds",
    ):
        problems(reader({"task": f"{folder / 'mine.py'}:tones"}))
    from rollout.media.rows import normalise

    _, references = normalise(
        "a", {"audio": {"array": np.ones(40, np.float32), "sampling_rate": 8000}}, "", folder
    )
    [sound] = media.contents(references, "audio")
    assert sound.rate == 8000 and sound.array().tolist() == [1.0] * 40


# Tokens and masks


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [text("One "), IMAGE, text(" two "), IMAGE]},
    {"role": "assistant", "content": "Yes é."},
    {"role": "user", "content": [text("Third "), IMAGE]},
    {"role": "assistant", "content": "No."},
]
FILES = ["one.png", "two.png", "one.png"]


@pytest.fixture(scope="module")
def theirs():
    """The processor of transformers, with a template that marks the turns of the assistant."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    tokens = tokenizer("qwen3_vl")
    tokens.chat_template = TEMPLATE
    keys = {key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    yield Qwen3VLProcessor(Qwen2VLImageProcessorPil(**keys), tokens, None, chat_template=TEMPLATE)
    patch.undo()


def as_transformers(theirs, messages, **how):
    """(ids, mask of the assistant) by transformers, with pictures in the parts."""
    contents = iter(["one.png", "two.png", "one.png"])
    given = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = [text(content)] if message["role"] != "assistant" else content
        parts = content
        if not isinstance(content, str):
            parts = [
                {"type": "image", "image": Image.open(Path("rows") / next(contents))}
                if part == IMAGE
                else part
                for part in content
            ]
        given.append({"role": message["role"], "content": parts})
    encoded = theirs.apply_chat_template(
        given, tokenize=True, return_dict=True, return_tensors=None, **how
    )
    return encoded["input_ids"][0], encoded.get("assistant_masks", [None])[0]


@pytest.mark.parametrize("train_on", ["assistant", "last_turn", "all"])
def test_demonstrations_and_masks_are_those_of_transformers(train_on, folder, reader, theirs):
    path = lines(folder / "talk.jsonl", {"messages": TALK, "images": FILES})
    one = reader(path)
    [row] = one.demonstrations(one._config.data, train_on).own
    ids, mask = as_transformers(theirs, TALK, return_assistant_tokens_mask=True)
    assert row.ids == list(ids) and 1 in row.mask
    if train_on == "assistant":
        assert row.mask == list(mask)
    trained = {"last_turn": "No.<eos>", "assistant": "Yes é.<eos>No.<eos>"}.get(train_on)
    if trained:
        assert (
            one.tokenizer.decode([i for i, m in zip(row.ids, row.mask, strict=True) if m])
            == trained
        )
    else:
        assert row.mask == [0, *(int(each < 0) for each in row.expanded.index[1:])]
    assert not any(np.asarray(row.mask)[row.expanded.index >= 0])
    assert [reference.size for reference in row.expanded.references] == [
        (16, 24),
        (24, 16),
        (16, 24),
    ]


def test_a_prompt_with_a_completion_is_the_conversation(folder, reader, theirs):
    """Prompt and completion as texts, as messages, and TRL's pairs: the same tokens as
    transformers'."""
    talk = [TALK[1], {"role": "assistant", "content": "Yes."}]
    expected, mask = as_transformers(theirs, talk, return_assistant_tokens_mask=True)
    prompt, images = "One <image> two <image>", FILES[:2]
    rows = [
        {"prompt": prompt, "completion": "Yes.", "images": images},
        {"prompt": talk[:1], "completion": talk[1:], "images": images},
        {
            "prompt": talk[:1],
            "completion": [{"role": "assistant", "content": [text("Yes.")]}],
            "images": images,
        },
    ]
    one = reader(lines(folder / "sft.jsonl", *rows))
    for row in one.demonstrations(one._config.data, "assistant").own:
        assert row.ids == list(expected) and row.mask == list(mask)
    for problem in problems(one):
        assert problem.ids == list(as_transformers(theirs, talk[:1], add_generation_prompt=True)[0])


PAIRS = [
    {
        "prompt": TALK[1:2],
        "chosen": [TALK[2]],
        "rejected": [{"role": "assistant", "content": [text("No.")]}],
    },
    {"prompt": "One <image> two <image>", "chosen": "Yes é.", "rejected": "No."},
    {"chosen": TALK[1:3], "rejected": [TALK[1], {"role": "assistant", "content": "No."}]},
]


@pytest.mark.parametrize("row", PAIRS, ids=["messages", "texts", "conversations"])
def test_both_answers_of_a_pair_follow_the_prompt_with_its_pictures(row, folder, reader, theirs):
    one = reader(lines(folder / "pairs.jsonl", row | {"images": FILES[:2]}))
    [pair] = one.pairs(one._config.data).own
    for answer, content in ((pair.chosen, "Yes é."), (pair.rejected, "No.")):
        talk = [TALK[1], {"role": "assistant", "content": content}]
        ids, mask = as_transformers(theirs, talk, return_assistant_tokens_mask=True)
        # A pair ends with what the assistant writes, without the line break after it.
        assert (
            answer.ids == list(ids)[:-1] and answer.mask == list(mask)[:-1] and answer.mask[-1] == 1
        )
        assert len(answer.expanded.tokens) == len(answer.ids) and answer.expanded.rows == 12


def test_an_answer_ends_with_what_the_assistant_writes(folder, reader):
    """The template writes a line break after the end of a turn, which no completion has."""
    row = {"prompt": "One <image>", "images": ["one.png"], "completion": "Yes.", "label": True}
    one = reader(
        lines(folder / "kto.jsonl", row, row | {"prompt": "<image> Other", "completion": "No."})
    )
    first, second = one.rows(
        one._config.data,
        ("x",),
        lambda example: [one.answer(example, example.completion)],
        lambda row: len(row.ids),
        cut_row,
        read=read_labelled,
    ).own
    assert one.tokenizer.decode(first.ids).endswith("Yes.<eos>") and len(
        first.expanded.tokens
    ) == len(first.ids)
    mixed = _mismatched(first, second, 256)
    assert (
        one.tokenizer.decode(mixed.ids).endswith("No.<eos>")
        and mixed.expanded.references == first.expanded.references
    )
    assert len(mixed.expanded.index) == first.mask.index(1)


def test_rows_of_text_are_those_of_a_text_model(folder, reader, model):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Draw <image>"},
                {"role": "assistant", "content": "No."},
            ]
        }
    ]
    path = lines(folder / "text.jsonl", *rows, {"prompt": "a", "completion": "b", "image": None})
    one, other = reader(path), reader(path, keys={"media": "never"})
    assert one.processors is not None and other.processors is None and other.loader is None
    read = [each.demonstrations(each._config.data, "assistant").own for each in (one, other)]
    assert read[0] == read[1] and [row.expanded for row in read[0]] == [None, None]
    assert not one.has_media and not other.has_media
    assert [p.example.columns for p in problems(one)] == [
        p.example.columns for p in problems(other)
    ]


def test_held_out_rows_and_the_system_message(folder, reader):
    path = lines(folder / "d.jsonl", {"prompt": "Find x.", "image": "one.png", "answer": "3"})
    one = reader({"path": str(path), "system": "Be brief."})
    one.read_evaluation(EvaluationOptions.model_validate({"data": str(path)}), one._config.stages)
    assert (
        one.evaluation_problems[0].example.prompt == user(IMAGE, text("Find x.")) and one.has_media
    )
    assert problems(one)[0].example.prompt[0] == {"role": "system", "content": "Be brief."}


def test_rows_go_to_other_processes_with_paths_and_each_file_once(folder, reader):
    rows = [{"prompt": "a", "image": "one.png"}, {"prompt": "b", "image": URI}]
    by_path, by_bytes = problems(reader(lines(folder / "d.jsonl", *rows)))
    for problem in (by_path, by_bytes):
        sent = serialization.write(problem)
        again = serialization.read(sent)
        assert (
            isinstance(again, Problem)
            and again.example == problem.example
            and again.ids == problem.ids
        )
        np.testing.assert_array_equal(again.expanded.turns, problem.expanded.turns)
        assert again.expanded.items == problem.expanded.items
        assert again.expanded.references[0].source == problem.example.references[0].source
        np.testing.assert_array_equal(again.example.columns["images"][0].array(), pixels(10))
        assert sent.count(base64.b64encode(ONE)) == (problem is by_bytes)
    assert (
        serialization.read(serialization.write(by_path)).example.references[0].source
        == Path("rows/one.png").absolute()
    )


def test_pictures_of_another_process_count(folder, reader, monkeypatch):
    """A process whose rows are all text has the column `images` for rewards where another one has
    pictures."""
    file = lines(folder / "d.jsonl", {"prompt": "a", "image": None})
    one, two = reader(file), reader(file)
    assert "images" not in problems(one)[0].example.columns and not one.has_media
    # Of errors, kinds, and of whether rows are too long.
    monkeypatch.setattr(
        processes,
        "all_gather_object",
        lambda own: [own, ["image"] if isinstance(own, list) else own],
    )
    (problem,) = problems(two)
    assert (
        two.has_media
        and problem.example.columns["images"] == []
        and "image" not in problem.example.columns
    )


def stored(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def claims(side: int) -> bytes:
    """A PNG file whose header says that it is `side` pixels high and wide."""
    header = struct.pack(">II", side, side) + ONE[24:29]
    return ONE[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + ONE[33:]


FRAMES = [Image.fromarray(pixels(shade)) for shade in (10, 200)]


@pytest.mark.parametrize(
    "content",
    [
        stored(FRAMES[0].convert("CMYK"), "JPEG"),
        stored(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        stored(Image.fromarray(np.full((16, 24), 7000, np.uint16))),
        stored(Image.new("RGB", (1, 1))),
        stored(Image.new("RGBA", (24, 16))),
    ],
    ids=["CMYK", "animation", "16 bits", "one pixel", "opacity"],
)
def test_unusual_pictures_are_read_by_header_and_content(content, folder, reader):
    (folder / "a.bin").write_bytes(content)
    one = reader(lines(folder / "d.jsonl", {"prompt": "a", "image": "a.bin"}))
    [problem] = problems(one)
    inputs = one.loader.inputs(problem.expanded.references)
    assert problem.expanded.items == tuple(inputs)
    [(item, values)] = inputs.items()
    assert values.shape == (item.rows * 4, 96) and np.isfinite(values).all()


# Refusals


REFUSALS = {
    "a missing file": (
        {"images": ["none.png"]},
        r"no such file: .*none.png \(relative paths start from",
    ),
    "an address": (
        {"images": ["https://example.org/a.png"]},
        "is an address of the network; download the picture",
    ),
    "no picture": ({"images": ["d.jsonl"]}, "not a picture that Pillow reads"),
    "more tags than pictures": (
        {"prompt": "<image><image>", "images": ["one.png"]},
        "1 pictures in the columns, but 2",
    ),
    "fewer tags than pictures": (
        {"prompt": "<image>", "images": ["one.png"] * 2},
        "2 pictures in the columns, but 1",
    ),
    "a part without a picture": (
        {"prompt": user(IMAGE, text("a"))},
        "0 pictures in the columns, but 1 parts",
    ),
    "a video": ({"prompt": user({"type": "video", "video": "a.mp4"})}, "message 0 has a video"),
    "a column of videos": ({"videos": ["a.mp4"]}, "a column of videos"),
    "a sound": (
        {"audio": {"array": [0.5] * 9, "sampling_rate": 8000}},
        "the model has no processor of sounds",
    ),
    "too long": ({"image": "long.png"}, "picture 1: a picture of 8x1608 pixels is too long"),
    "a token of the model": (
        {"prompt": "<|image_pad|>"},
        "contains '<|image_pad|>', which stands for a picture",
    ),
    "a bomb": (
        {"image": "bomb.png"},
        "picture 1: .*the picture has more than 89478485 pixels; scale it down",
    ),
    "a broken picture": ({"image": "cut.png"}, "picture 1: .*cut.png: broken picture"),
    "too many rows": (
        {"image": "large.png"},
        r"fill 64 embeddings, more than model.media_rows \(40\)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_row_is_refused_with_its_file_and_line(case, folder, reader, model):
    row, message = REFUSALS[case]
    (folder / "cut.png").write_bytes(ONE[:-30])
    (folder / "bomb.png").write_bytes(claims(50_000))
    (folder / "long.png").write_bytes(png(1, (8, 1608)))
    (folder / "large.png").write_bytes(png(1, (128, 128)))
    path = lines(folder / "d.jsonl", {"prompt": "fine", "image": "one.png"}, {"prompt": "a"} | row)
    with pytest.raises(DataError, match=f"^{path}:2: .*{message}"):
        problems(reader(path, keys={"media_rows": 40}))


def test_rows_longer_than_max_length_count_the_rows_of_pictures(folder, reader):
    path = lines(folder / "d.jsonl", {"prompt": "a", "image": "one.png"})
    [problem] = problems(reader(path))
    assert problems(reader(path, max_length=len(problem.ids) + 8))
    with pytest.raises(
        DataError,
        match=f"the {len(problem.ids) - 1} tokens that fit .*first {path}:1 with "
        f"{len(problem.ids)} tokens",
    ):
        problems(reader(path, max_length=len(problem.ids) + 7))


def test_a_model_without_a_processor_reads_text_only(folder, reader, tmp_path):
    source = model_directory(tmp_path / "bare", processor=False)
    good, bad = (
        lines(folder / "t.jsonl", {"prompt": "a"}),
        lines(folder / "d.jsonl", {"prompt": "a", "image": "one.png"}),
    )
    assert problems(reader(good, source=source))[0].ids
    with pytest.raises(
        DataError,
        match=f"{bad}:1: picture 1: the row has a picture, but .* of pictures: .*no "
        "preprocessor_config",
    ):
        problems(reader(bad, source=source))


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"prompt": user(text("a"), IMAGE | {"image": "one.png"})},
            "message 0 has a picture, but the model reads no",
        ),
        (
            {"prompt": user({"type": "input_audio", "data": "x"})},
            "message 0 has a sound, but the model reads no sounds",
        ),
        (
            {"prompt": "<image>a", "images": ["one.png"]},
            "has 1 pictures in column 'images' and as many <image> in its",
        ),
        (
            {"prompt": "<audio>a", "audios": ["one.wav"]},
            "has 1 sounds in column 'audios' and as many <audio>",
        ),
        ({"prompt": user(text("a"))}, "the content of message 0 must be a text"),
        (
            {"prompt": "a", "image": "one.png"},
            "has a picture in column 'image', but the model reads no pictures",
        ),
        (
            {"prompt": "a", "images": [None, {"bytes": "iVBOR", "path": None}]},
            "has a picture in column 'images'",
        ),
        (
            {"prompt": "a", "audio": {"array": [0.0, 0.5], "sampling_rate": 8000}},
            "has a sound in column 'audio'",
        ),
        (
            {"prompt": "a", "image": "data:image/png;base64,iVBOR"},
            "has a picture in column 'image'",
        ),
    ],
)
def test_a_text_model_refuses_pictures(row, message, folder, reader, model):
    path = lines(folder / "d.jsonl", {"prompt": "fine", "image": "a column"}, row)
    with pytest.raises(DataError, match=f"^{path}:2: .*{message}"):
        problems(reader(path, keys={"media": "never"}))


def test_a_column_of_a_text_model_stays_a_column(folder, reader, model):
    """A text that names no file is not a picture, nor are numbers."""
    columns = {
        "image": "a cat",
        "images": ["a", "x" * 5000],
        "audio": 7,
        "audios": [[0.5, 1], None],
    }
    path = lines(folder / "d.jsonl", {"prompt": "<image> is a tag"} | columns)
    [problem] = problems(reader(path, keys={"media": "never"}))
    assert problem.example.columns == columns and problem.expanded is None


@pytest.mark.parametrize(
    ("task", "what"),
    [("pictures", "picture in column 'image'"), ("tones", "sound in column 'audio'")],
)
def test_a_task_of_pictures_or_sounds_needs_a_model_that_reads_them(task, what, tmp_path, capsys):
    model = {"source": "tiny-deepseek", "overrides": {"vocab_size": 320}}
    run = {"model": model, "tokenizer": "bytes", "data": {"task": task}, "max_length": 128}
    run |= {
        "stages": [{"algorithm": "sft", "steps": 1}],
        "run": {"dir": str(tmp_path / "run")},
        "platform": "cpu",
    }
    (tmp_path / "run.yml").write_text(json.dumps(run))
    for more in (["--check"], []):
        assert cli.train_main([*more, str(tmp_path / "run.yml")]) == 3
        assert (
            f"task {task}, problem 0: the row has a {what}, but the model reads no "
            in capsys.readouterr().err
        )
    assert not (tmp_path / "run").exists()


def test_the_extra_is_named_where_pillow_is_missing(folder, reader, monkeypatch):
    path = lines(folder / "d.jsonl", {"prompt": "a", "image": "one.png"})
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(
        DataError, match=rf"{path}:1: picture 1: .*need Pillow; pip install 'duet-rl\[vision\]'"
    ):
        problems(reader(path))


# Rewards


def test_rewards_get_pictures_that_open_on_use(folder, reader):
    """Files by path, bytes and arrays, in the process of the worker; all other columns as they
    are."""
    (folder / "score.py").write_text(
        "import numpy as np\n"
        "def shade(completions, images, answer):\n"
        "    scores = []\n"
        "    for pictures, right in zip(images, answer):\n"
        "        assert all(np.array_equal(np.asarray(each.open()), each.array()) for each in "
        "pictures)\n"
        "        scores.append(float(sum(each.array()[0, 0, 0] + each.size[0] for each in "
        "pictures)) + right)\n"
        "    return scores\n"
        "def count(completions, **columns):\n"
        "    return [float(len(each)) for each in columns['images']]\n"
    )
    rows = [
        {"prompt": "a", "images": ["one.png", URI], "answer": 1000},
        {"prompt": "b", "images": [], "answer": 2000},
        {"prompt": "c", "images": ["two.png"], "answer": 3000},
    ]
    read = problems(reader(lines(folder / "d.jsonl", *rows)))
    columns = {
        name: [p.example.columns[name] for p in read for _ in range(2)]
        for name in ("images", "answer")
    }
    columns["images"][-1] = media.contents(
        [media.rows.normalise("a", {"image": pixels(7)}, "", folder)[1][0]], "image"
    )
    functions = tuple((f"{folder / 'score.py'}:{name}", 1.0, {}) for name in ("shade", "count"))
    with Runner(RunnerOptions(functions, workers=1)) as runner:
        scores = runner.score(["p"] * 6, ["c"] * 6, columns, groups=[0, 0, 1, 1, 2, 2])
    assert not scores.faults
    first = 10 + 16 + 10 + 16 + 1000
    assert scores.rewards[:, 0].tolist() == [
        first,
        first,
        2000,
        2000,
        200 + 24 + 3000,
        7 + 16 + 3000,
    ]
    assert scores.rewards[:, 1].tolist() == [2, 2, 0, 0, 1, 1]


def test_a_file_that_changed_is_a_fault_of_the_reward(folder, reader):
    path = lines(folder / "d.jsonl", {"prompt": "a", "image": "seldom.png"})
    (folder / "seldom.png").write_bytes(png(77))
    [problem] = problems(reader(path))
    (folder / "seldom.png").write_bytes(TWO)
    with pytest.raises(ValueError, match="seldom.png has changed since the run read it"):
        problem.example.columns["images"][0].array()
