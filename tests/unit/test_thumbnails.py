"""Lines of samples with pictures and sounds, and their thumbnails, against Pillow and the bytes of
the run."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import picture_runs
import pytest
from picture_runs import COLOURS, disc, expanded, landscape, picture, problem, sound
from PIL import Image

from rl.records import messages, thumbnails
from rl.records.events import Events
from rl.records.run_files import MEDIA
from rl.records.thumbnails import SIDE, Thumbnails
from rl.stages.sampling.records import references, sample_lines, write_samples
from rollout.media.reference import refer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return picture_runs.write(tmp_path_factory.mktemp("pictures"))


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_a_line_says_what_its_prompt_shows_and_holds_no_content(run):
    every = lines(run)
    assert len(every) == 3 * 5 * 2
    [first] = every[0]["media"]
    red = picture(disc(COLOURS["red"]))
    assert first == {"kind": "image", "digest": red.digest, "width": 32, "height": 32, "rows": 16}
    assert every[0]["prompt"][1]["content"][0] == {"type": "image"}
    place, clip, strip = every[8]["media"]
    assert (place["width"], place["height"], place["rows"]) == (
        640,
        480,
        3 * 64,
    )  # tiles are added up
    assert (clip["kind"], clip["seconds"], clip["rate"], clip["rows"]) == ("audio", 2.5, 16_000, 63)
    assert (strip["width"], strip["height"], strip["rows"]) == (5000, 4, 20)
    assert max(map(len, (run / "samples.jsonl").read_text().splitlines())) < 2000


def test_equal_pictures_in_sequence_are_two_entries():
    one = picture(landscape())
    rows = [
        entry["rows"]
        for entry in messages.entries(
            expanded((one, (3, 4)), (one, (3, 4)), (one, (5,)), (one, (5,)))
        )
    ]
    assert rows == [7, 7, 5, 5]


def test_text_runs_have_the_lines_they_had():
    plain = problem([{"role": "user", "content": "1 + 1?"}], None, answer="2")
    sampled, scores = picture_runs.step([plain], 0)
    line = sample_lines(sampled, scores, "grpo", 1, scores.total)[0]
    assert (
        "media" not in line
        and line["prompt"] is not None
        and line["prompt"] == plain.example.prompt
    )
    assert not references(sampled)


def test_contents_of_parts_and_data_uris_of_columns_are_left_out():
    uri = "data:image/png;base64,iVBORw0KGgo="
    parts = [
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image", "image": b"\x89PNG"},
    ]
    own = {
        "answer": "data: none, really",
        "image": " DATA:image/png;base64,iVBO",
        "images": [b"\x89PNG"],
        "raw": b"\x89P",
    }
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    sampled, scores = picture_runs.step([problem(prompt, None, **own)], 0)
    line = sample_lines(sampled, scores, "grpo", 1, scores.total)[0]
    assert line["columns"] == {"answer": "data: none, really"}
    kept = [{"type": "image_url"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    assert line["prompt"] == [{"role": "user", "content": kept}]
    assert (
        prompt[0]["content"][0] is parts[0] and "image_url" in parts[0]
    )  # the row of data is unchanged


def test_each_picture_has_one_thumbnail(run):
    names = sorted(path.name for path in (run / MEDIA).iterdir())
    pictures = {item["digest"] for line in lines(run) for item in messages.pictures(line)}
    assert [name.partition(".")[0] for name in names] == sorted(pictures)
    assert [name.endswith(".jpg") for name in names].count(True) == 2 and len(names) == 4 + 2


@pytest.mark.parametrize(
    ("height", "width", "small"),
    [
        (1, 1, (1, 1)),
        (65, 64, (65, 64)),
        (1, 5000, (1, 256)),
        (5000, 1, (256, 1)),
        (480, 640, (192, 256)),
        (256, 200, (256, 200)),
    ],
)
@pytest.mark.parametrize("pillow", [True, False])
def test_sides_of_a_thumbnail(height, width, small, pillow, monkeypatch):
    if not pillow:
        monkeypatch.setitem(sys.modules, "PIL", None)
    content, ending = thumbnails.encode(landscape(height, width))
    monkeypatch.undo()
    with Image.open(io.BytesIO(content)) as image:
        jpeg = pillow and (height, width) != (1, 1)
        assert (image.format, ending) == (("JPEG", ".jpg") if jpeg else ("PNG", ".png"))
        assert image.size == small[::-1] and max(image.size) <= SIDE
        image.load()


def test_colours_of_both_kinds_are_those_of_the_picture(monkeypatch):
    pixels = landscape()
    means = np.asarray(Image.fromarray(pixels).resize((256, 192), Image.Resampling.BOX), np.float64)
    jpeg, _ = thumbnails.encode(pixels)
    monkeypatch.setitem(sys.modules, "PIL", None)
    png, _ = thumbnails.encode(pixels)
    monkeypatch.undo()
    small, _ = thumbnails.encode(pixels[:40, :64])
    # Blocks of 2 and 3 pixels against blocks of 2.5: they differ at the edge of sun and hills only.
    for content, mean in ((png, 1.0), (jpeg, 2.0)):
        assert np.abs(np.asarray(Image.open(io.BytesIO(content)), np.float64) - means).mean() < mean
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(small))), pixels[:40, :64]
    )  # tiny ones are exact
    np.testing.assert_array_equal(
        thumbnails.reduced(pixels, 192, 320)[:, 0], block_means(pixels)[:, 0]
    )


def block_means(pixels: np.ndarray) -> np.ndarray:
    """Means over blocks of 2 columns and of 2 or 3 rows, one at a time."""
    edges = [y * 480 // 192 for y in range(193)]
    rows = [
        pixels[a:b, :2].reshape(-1, 3).mean(axis=0) for a, b in zip(edges, edges[1:], strict=False)
    ]
    return np.floor(np.stack(rows) + 0.5).astype(np.uint8)[:, None]


def test_a_file_is_written_once_and_a_broken_one_is_a_note(tmp_path):
    notes: list[str] = []
    own = Thumbnails(tmp_path, notes.append)
    red, clip = picture(disc(COLOURS["red"])), sound()
    own.write([red, clip, red])
    own.wait()
    [file] = (tmp_path / MEDIA).iterdir()
    assert file.name == f"{red.digest}.png" and not notes
    file.write_bytes(b"kept")
    own.close()
    changed = tmp_path / "changed.png"
    Image.fromarray(disc(COLOURS["blue"])).save(changed)
    reference = refer("image", changed, tmp_path)
    Image.fromarray(disc(COLOURS["green"])).save(changed)
    again = Thumbnails(tmp_path, notes.append)
    again.write([red, reference, replace(reference, digest="0" * 64)])
    again.close()
    assert file.read_bytes() == b"kept" and len(list((tmp_path / MEDIA).iterdir())) == 1
    assert len(notes) == 1 and "has changed since" in notes[0] and str(tmp_path) in notes[0]


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / MEDIA).write_text("a file in the place of the folder")
    notes: list[str] = []
    own = Thumbnails(tmp_path, notes.append)
    own.write([picture(disc(colour)) for colour in COLOURS.values()])
    own.close()
    assert len(notes) == 1 and "The run goes on" in notes[0]


def test_prompts_that_are_not_recorded_have_no_thumbnails(tmp_path):
    config = picture_runs.config(tmp_path, samples={"share": 0.5})
    events = Events(config, tmp_path)
    kept = [number for number in range(4) if config.run.samples.keeps_prompt(number)]
    assert 0 < len(kept) < 4
    sampled, scores = picture_runs.step(list(map(picture_runs.question, COLOURS)), 0)
    write_samples(events, "grpo", 0, sampled, scores)
    events.close()
    expected = {f"{sampled.problems[n].expanded.references[0].digest}.png" for n in kept}
    assert {path.name for path in (tmp_path / MEDIA).iterdir()} == expected


@pytest.mark.parametrize(
    "name", ["", "..", "../config", "a" * 63, "A" * 64, "a" * 64 + "/", "a" * 64 + "\n", "g" * 64]
)
def test_only_digests_are_names(run, name):
    assert thumbnails.find(run, name) is None and thumbnails.read(run, name) is None


def test_a_file_that_is_no_picture_is_not_read(tmp_path):
    folder = tmp_path / MEDIA
    folder.mkdir()
    (folder / f"{'a' * 64}.jpg").write_bytes(b"<script>")
    (folder / f"{'b' * 64}.png").write_bytes(
        thumbnails.png(disc((1, 2, 3))) + bytes(thumbnails.MOST_BYTES)
    )
    (folder / f"{'c' * 64}.png").write_bytes(thumbnails.png(disc((1, 2, 3))))
    assert (
        thumbnails.read(tmp_path, "a" * 64) is None and thumbnails.read(tmp_path, "b" * 64) is None
    )
    assert thumbnails.read(tmp_path, "c" * 64).kind == "image/png"


def test_pieces_stand_where_their_parts_stand(run):
    shown = [messages.flat(pieces) for _, pieces in messages.messages(lines(run)[8], "prompt")]
    place, clip, strip = (item["digest"][:8] for item in lines(run)[8]["media"])
    assert shown == [
        f"Here is a place:\n[picture 640x480, 192 rows, digest {place}..]\nand here its sound:\n"
        f"[sound 2.5 s, 16,000 Hz, 63 rows, digest {clip}..]\nWhat connects them, and what is on "
        "this strip?\n"
        f"[picture 5000x4, 20 rows, digest {strip}..]"
    ]


@pytest.mark.parametrize(
    "media", [None, [], "x", [1], [{"kind": "video"}], [{"kind": "image", "width": "<b>"}]]
)
def test_damaged_entries_of_a_line_are_shown_as_far_as_they_go(media):
    record = {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text"}, 7]}],
        "media": media,
    }
    [(role, pieces)] = messages.messages(record, "prompt")
    assert role == "user" and messages.flat(pieces) == '[picture]\n{"type": "text"}7'
    assert messages.start(
        record, "prompt", 60
    ) == '[picture] {"type": "text"}7' and messages.identity(record)
