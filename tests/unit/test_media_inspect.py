"""Pictures in `rl inspect`, in the prompts of `rl generate` and in `rl reward test`."""

import json

import numpy as np
import pytest
from media_rows import model_directory, pixels, png
from media_tokenizers import tokenizer

from policy.media import Item
from rl.commands import cli
from rl.data import media
from rl.data.encoding import ExampleEncoder
from rl.data.inspect import inspect, show
from rl.data.inspect.pieces import labels
from rl.data.prompts import problems, read_prompts
from rl.errors import DataError
from rl.run.load import load
from rollout.media.expand import Expanded
from rollout.media.reference import Reference

IMAGE = {"type": "image"}
ANSWER = {"role": "assistant", "content": "Yes."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(model, tmp_path):
    """Writes the file of a run on these rows."""

    def written(*rows):
        (tmp_path / "photo.png").write_bytes(png(3))
        (tmp_path / "tall.png").write_bytes(png(4, (24, 16)))
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "reward.py").write_text(
            "def sees(completions, images):\n"
            "    return [float(each[0].array().shape == (16, 24, 3)) for each in images]\n"
        )
        values = {
            "model": model,
            "data": str(tmp_path / "rows.jsonl"),
            "rewards": {"functions": [f"{tmp_path / 'reward.py'}:sees"], "workers": 1},
            "max_length": 96,
            "stages": [{"algorithm": "sft", "steps": 1, "sampling": {"max_new_tokens": 8}}],
        }
        (tmp_path / "run.yml").write_text(json.dumps(values))
        return tmp_path / "run.yml"

    return written


def row(question, *images):
    return {"messages": [{"role": "user", "content": question}, ANSWER], "images": list(images)}


def test_the_rows_of_a_picture_are_one_piece(run, capsys):
    file = run(
        row("<image>Is it?<image>", "photo.png", "tall.png"), row("Is <image> it?", "tall.png")
    )
    shown = "\n".join(show.lines(inspect(load([file], []), rewards=False), 2, color=False))
    first = "[picture 1: 2x3 rows 0..5, 24x16 px, photo.png]"
    assert shown.count(first) == 2 and "[picture 2: 3x2 rows 6..11, 16x24 px, tall.png]" in shown
    assert f"<|vision_start|>{first}<|vision_end|>Is it?" in shown and "<|image_pad|>" not in shown
    assert (
        "trained on, 2 pictures of 12 tokens" in shown
        and "trained on, 1 picture of 6 tokens" in shown
    )
    assert (
        "2 rows, stops: <eos> (258), 3 pictures of 9.0 tokens in a row on average, 12 at most"
        in shown
    )
    values = show.to_json(inspect(load([file], []), rewards=False), 1)
    [picture, other] = [
        each for each in values["stages"][0]["shown"][0]["tokens"] if "count" in each
    ]
    assert (picture["count"], picture["text"], picture["kind"]) == (6, first, "prompt") and other[
        "count"
    ] == 6
    assert first in show.page(inspect(load([file], []), rewards=False), 1)


def test_checks_see_texts_and_pictures_of_rows(run, model):
    """One text with two pictures is no repetition, and the tokens of rows are no text."""
    rows = [row("<image>Is it?", name) for name in ("photo.png", "tall.png")]
    inspection = inspect(load([run(*rows)], []))
    findings, [stage] = inspection.faults, inspection.stages
    assert not [each for each in findings if each.level != "note" and each.check in (6, 9, 11, 12)]
    placeholder = stage.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert all(placeholder in each.ids and placeholder not in each.text_ids for each in stage.rows)
    assert "2 demonstrations get a mean reward of 0.5 (0 to 1)" in [
        each.text for each in findings if each.check == 13
    ]
    again = inspect(load([run(*rows, rows[0])], []), rewards=False).faults
    assert [each.text for each in again if each.check == 12] == ["1 of 3 prompts occur before"]
    special = inspect(
        load([run(row("<image>Is <eos> it?", "photo.png"))], []), rewards=False
    ).faults
    assert any("contain special tokens as text" in each.text for each in special)
    bad = inspect(load([run(row("<image>Is it?", "none.png"))], []), rewards=False).faults
    assert any(
        "rows.jsonl:1: picture 1: no such file" in each.text and each.level == "refuse"
        for each in bad
    )
    file = run(row("<image>Is it?", "cut.png"))
    file.with_name("cut.png").write_bytes(png(3)[:-30])
    bad = inspect(load([file], []), rewards=False).faults
    assert any(
        "rows.jsonl:1: picture 1: " in each.text
        and "cut.png: broken picture" in each.text
        and each.level == "refuse"
        for each in bad
    )


def test_a_small_share_of_trained_tokens_counts_texts_only(run, tmp_path):
    file = run(row("<image>?", "large.png"))
    (tmp_path / "large.png").write_bytes(png(5, (128, 128)))  # 64 rows, 4 tokens of an answer
    [finding] = [
        each for each in inspect(load([file], []), rewards=False).faults if each.check == 11
    ]
    shown = int(finding.text.split("%")[0])
    assert finding.level == "note" and shown > 10, finding


def test_tiles_of_one_picture_and_sounds_are_named():
    kinds = [Reference("image", d, (30, 40), b"", "") for d in ("aa", "aa", "bb")]
    sound = Reference("audio", "cc", (4000, 8000), np.zeros(4000, np.float32), "")
    tiles = [Item("image", f"aa-{n}", (4, 4), 4) for n in (0, 1, 0, 1)]
    items = (*tiles, Item("audio", "cc", (50, 1), 13), Item("image", "bb", (2, 4), 2))
    index = np.arange(31, dtype=np.int32)
    expanded = Expanded(index, index, None, None, items, index, (*kinds[:2], sound, kinds[2]))
    assert expanded.owners == [0, 0, 1, 1, 2, 3]
    assert labels(expanded) == [
        "[picture 1, tile 1: 2x2 rows 0..3, 40x30 px, bytes]",
        "[picture 1, tile 2: 2x2 rows 4..7, 40x30 px, bytes]",
        "[picture 2, tile 1: 2x2 rows 8..11, 40x30 px, bytes]",
        "[picture 2, tile 2: 2x2 rows 12..15, 40x30 px, bytes]",
        "[sound 1: rows 16..28, 0.50 s at 8000 Hz, array]",
        "[picture 3: 1x2 rows 29..30, 40x30 px, bytes]",
    ]


def test_prompts_of_a_file_have_their_pictures(model, tmp_path):
    (tmp_path / "photo.png").write_bytes(png(3))
    file = tmp_path / "prompts.jsonl"
    part = {
        "role": "user",
        "content": [IMAGE | {"image": "photo.png"}, {"type": "text", "text": "What?"}],
    }
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in ([part], "Only text")))
    tokens = tokenizer("qwen3_vl")
    encoder = ExampleEncoder(tokens, media.processors_of(tmp_path.joinpath(model), tokens))
    one, other = problems(read_prompts(str(file)), encoder, tmp_path)
    assert (
        one.expanded.rows == 6
        and one.example.prompt[0]["content"][0] == IMAGE
        and other.expanded is None
    )
    assert tokens.decode(other.ids) == "Only text"
    with pytest.raises(
        DataError,
        match=r"prompts.jsonl:1: message 0 has a picture, but the model reads no pictures",
    ):
        problems(read_prompts(str(file)), ExampleEncoder(tokens), tmp_path)
    (tmp_path / "photo.png").unlink()
    with pytest.raises(DataError, match=r"prompts.jsonl:1: picture 1: no such file"):
        problems(read_prompts(str(file)), encoder, tmp_path)


def test_the_examples_of_a_reward_may_have_pictures(tmp_path, capsys):
    (tmp_path / "photo.png").write_bytes(png(3))
    file = tmp_path / "reward.py"
    file.write_text(
        "import numpy as np\n"
        "def shade(completions, images):\n"
        "    return [float(sum(each.open().getpixel((0, 0))[0] for each in row)) for row in "
        "images]\n"
        "EXAMPLES = [\n"
        "    {'prompt': 'p', 'completion': 'c', 'image': 'photo.png', 'score': 3.0},\n"
        "    {'prompt': 'p', 'completion': 'c', 'images': ['photo.png'] * 2, 'score': 6.0},\n"
        "    {'prompt': 'p', 'completion': 'c', 'image': np.full((2, 2, 3), 9, np.uint8), "
        "'score': 9.0},\n"
        "]\n"
    )
    assert cli.main(["reward", "test", f"{file}:shade"]) == 0
    assert "3 of 3 passed" in capsys.readouterr().out
    (tmp_path / "photo.png").unlink()
    assert cli.main(["reward", "test", f"{file}:shade"]) == 2
    assert "EXAMPLES[0]" in (out := capsys.readouterr().out) and "no such file" in out
    assert pixels(3).shape == (16, 24, 3)
