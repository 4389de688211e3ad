"""Samples with pictures and sounds in every reader: search, terminal, report, verdict, viewer,
static page."""

import base64
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import picture_runs
import pytest
from browser import CHROMIUM, Browser
from picture_runs import COLOURS, landscape, picture
from test_view import Served, files_served
from test_viewer import opened

from rl.commands import cli
from rl.records import thumbnails
from rl.records.events import EventLog
from rl.records.messages import pictures
from rl.records.run_files import MEDIA
from rl.stages.sampling.records import sample_lines, token_records
from rl.views.explain.record import read as read_record
from rl.views.report import page as report_page
from rl.views.report import pictures as embedding
from rl.views.viewer import records, search

pytestmark = pytest.mark.xdist_group("chromium")
chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
TOTAL = 3 * 5 * 2
FILTERS = {
    "": TOTAL,
    "disc": 24,
    '"its sound:"': 6,
    "/^Which/ step:2": 8,
    "image": 0,  # the type of a part, and no text of any
    "text": 0,
    "/image|text|user/": 0,
    "system": 0,  # a role
    "hills": 6,
    "answer": TOTAL,  # in the message of the system, and the name of a column
    "reward=1 disc": 12,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return picture_runs.write(tmp_path_factory.mktemp("runs") / "pictures")


@pytest.mark.parametrize(("text", "count"), FILTERS.items(), ids=FILTERS)
def test_a_search_reads_texts_only(run, text, count):
    assert len(search.search(opened(run), text)) == count


def test_words_of_reward_functions_are_searched(tmp_path):
    sampled, scores = picture_runs.step([picture_runs.question("red")], 0)
    scores.logs[1] = {"exact_answer": "not a colour"}
    log = EventLog(tmp_path)
    log.samples(sample_lines(sampled, scores, "grpo", 1, scores.total), token_records(sampled))
    index = opened(tmp_path)
    [place] = search.places(index, search.search(index, '"not a colour"'))
    assert place.record()["sample"] == 1 and not len(search.search(index, '"n_prompt"'))


def test_equal_questions_about_other_pictures_are_other_rows(run):
    index = opened(run)
    [place, *_] = search.places(index, search.search(index, "step:2 prompt:10 sample:0"))
    others = [each.record() for each in records.others(index, place)]
    assert len(others) == 2 * 2 and {each["columns"]["answer"] for each in others} == {"red"}
    assert (
        read_record(run).stages[0]._rows_of_data() == 5
    )  # the prompts of the samples come three times


def test_terminal_and_json(run, capsys):
    assert cli.main(["samples", str(run), "step:3 prompt:19 sample:0", "--tokens"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"place:\n\[picture 640x480, 192 rows, digest [0-9a-f]{8}\.\.\]\nand here its "
        r"sound:\n\[sound",
        out,
    )
    assert "[sound 2.5 s, 16,000 Hz, 63 rows" in out
    assert cli.main(["samples", str(run), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["media"][1]["kind"] == "audio" and "base64" not in json.dumps(lines)
    assert cli.main(["samples", str(run), "--limit", "2"]) == 0 and "[pi" in capsys.readouterr().out


def test_rescore_passes_the_messages_with_their_parts(run, capsys):
    code = (
        "def sees(prompts, completions):\n    return [float(p[-1]['content'][0]['type'] == "
        "'image') for p in prompts]\n"
    )
    (run / "mine.py").write_text(code)
    assert cli.main(["samples", str(run), "--rescore", f"{run}/mine.py:sees", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["functions"]["sees"]["after"] == pytest.approx(
        24 / 30
    )


def test_verdict_and_comparison_take_such_runs(run, tmp_path, capsys):
    assert cli.main(["explain", str(run)]) == 0
    other = picture_runs.write(tmp_path / "other", 2)
    assert cli.main(["compare", str(run), str(other), "--text"]) == 0
    assert "media/encode_seconds" in capsys.readouterr().out
    assert cli.main(["compare", str(run), str(other), "-o", str(tmp_path / "c.html")]) == 0
    shown = (tmp_path / "c.html").read_text()
    assert (
        shown.count("<symbol ") == 6 and "Seconds for pictures and sounds" in shown
    )  # each once for both


def test_a_report_holds_each_picture_once(run):
    assert cli.main(["report", str(run)]) == 0
    shown = (run / "report.html").read_text()
    uris = dict(
        re.findall(r'<symbol id="(p\d+)".*?href="data:(image/(?:png|jpeg);base64,[^"]+)"', shown)
    )
    files = {base64.b64encode(path.read_bytes()).decode() for path in (run / MEDIA).iterdir()}
    assert {uri.partition(",")[2] for uri in uris.values()} == files and len(uris) == 6
    assert shown.count('<use href="#p') == 24 + 2 * 6 and "6 of their 6 pictures" in shown
    assert (
        'aria-label="picture 640x480, 192 rows, digest' in shown
        and "sound 2.5 s, 16,000 Hz, 63 rows" in shown
    )
    assert "; img-src data:;" in shown


def test_a_page_stays_small_however_many_pictures_there_are(tmp_path):
    """Thumbnails of noise are as large as thumbnails get."""
    run = picture_runs.write(tmp_path, 1)
    [line, *_] = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    generator = np.random.default_rng(0)
    with (run / "samples.jsonl").open("a") as file:
        for number in range(60):
            reference = picture(generator.integers(0, 256, (256, 256, 3), np.uint8))
            content, ending = thumbnails.encode(reference.decode())
            thumbnails.write(run / MEDIA / f"{reference.digest}{ending}", content)
            media = [
                {
                    "kind": "image",
                    "digest": reference.digest,
                    "width": 256,
                    "height": 256,
                    "rows": 64,
                }
            ]
            file.write(
                json.dumps(line | {"step": 2, "prompt_id": number, "media": media, "columns": {}})
                + "\n"
            )
    assert sum(path.stat().st_size for path in (run / MEDIA).iterdir()) > report_page.MOST_BYTES
    assert cli.main(["report", str(run)]) == 0
    shown = (run / "report.html").read_text()
    assert len(shown.encode()) < report_page.MOST_BYTES
    symbols = re.findall(r"<symbol .*?</symbol>", shown)
    assert 5 < len(symbols) < 60 and sum(map(len, symbols)) <= embedding.MOST_BYTES
    assert f"{len(symbols)} of their 66 pictures" in shown
    assert shown.count('<div class="media">picture 256x256, 64 rows') == 66 - len(symbols)


def test_runs_without_pictures_have_the_policy_they_had(tmp_path):
    run = picture_runs.write(tmp_path, 1)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    texts = [
        {key: value for key, value in line.items() if key != "media"} | {"prompt": "1+1"}
        for line in lines
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    assert cli.main(["report", str(run)]) == 0
    shown = (run / "report.html").read_text()
    assert (
        "img-src" not in shown
        and "<symbol" not in shown
        and "their" not in shown.partition('id="samples"')[2][:400]
    )


@pytest.fixture(scope="module")
def server(run):
    server = Served(run, TOTAL)
    yield server
    server.end()


def test_a_thumbnail_needs_the_token_and_a_digest(server):
    for path in (server.run / MEDIA).iterdir():
        answer = server.get(f"/api/media/{path.stem}")
        assert answer.status == 200 and answer.read() == path.read_bytes()
        assert answer.getheader("content-type") == (
            "image/png" if path.suffix == ".png" else "image/jpeg"
        )
        assert answer.getheader("x-content-type-options") == "nosniff"
        assert server.get(f"/api/media/{path.stem}", **{"x-duet-token": "guess"}).status == 401
        assert server.get(f"/api/media/{path.name}").status == 404


@pytest.mark.parametrize(
    "name",
    [
        "0" * 64,
        "",
        "..",
        "../config.yml",
        "..%2fconfig.yml",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "%2fetc%2fpasswd",
        "..%5cconfig.yml",
        "%00",
        "a" * 5000,
    ],
)
def test_nothing_else_is_served(server, name):
    answer = server.get(f"/api/media/{name}")
    assert answer.status == 404 and b"tiny" not in (body := answer.read()) and len(body) < 300


@pytest.fixture(scope="module")
def page(server):
    with Browser() as browser:
        browser.open(server.url)
        browser.wait(f"document.querySelectorAll('#list li').length === {TOTAL}")
        yield browser
        assert browser.errors == []
        own = ("blob:", f"http://127.0.0.1:{server.port}/")
        assert all(address.startswith(own) for address in browser.requests)


def shown(browser: Browser, text: str, images: int) -> None:
    """Opens the only sample of a filter and waits for its pictures."""
    browser.evaluate(f"document.querySelector('#list').replaceChildren(); search({text!r})")
    browser.wait("document.querySelectorAll('#list li').length === 1")
    browser.evaluate("document.querySelector('#list li').click()")
    loaded = (
        "[...document.querySelectorAll('#right img')].filter(image => image.complete && "
        "image.naturalWidth).length"
    )
    browser.wait(f"{loaded} === {images}")


@chromium
def test_pictures_stand_between_the_texts_and_open_larger(page):
    shown(page, "step:3 prompt:19 sample:0", 2)
    order = (
        "[...document.querySelector('#right details').children].slice(1).map(node => "
        "node.textContent)"
    )
    first, place, then, sound, last, strip = page.evaluate(order)
    assert (first, then) == ("Here is a place:", "and here its sound:") and last.startswith(
        "What connects them"
    )
    assert (
        place.startswith("picture 640x480")
        and sound.startswith("sound 2.5 s")
        and strip.startswith("picture 5000x4")
    )
    alt = "[...document.querySelectorAll('#right img')].map(image => image.alt)"
    assert page.evaluate(alt) == [place, strip]
    width = page.evaluate("document.querySelector('#right img').getBoundingClientRect().width")
    page.evaluate("document.querySelector('.media button').click()")
    assert page.wait("$('large').open && document.querySelector('#large img').naturalWidth") == 256
    assert (
        page.evaluate("document.querySelector('#large img').getBoundingClientRect().width")
        > 3 * width
    )
    page.evaluate("document.querySelector('#large img').click()")
    assert not page.evaluate("$('large').open")


@chromium
def test_tokens_of_rows_are_shown_once_and_keep_their_numbers(page):
    shown(page, "step:3 prompt:15 sample:0", 1)
    page.wait("document.querySelectorAll('#strip .t').length === 5")
    texts = page.evaluate(
        "[...document.querySelectorAll('#strip .t')].map(node => node.textContent)"
    )
    assert texts == ["1", "5 × 16", "2", "9", "3"]
    colours = page.evaluate(
        "[...document.querySelectorAll('#strip .t')].map(node => "
        "Boolean(node.style.backgroundColor))"
    )
    assert colours == [False, False, False, True, True]  # log-probabilities of the completion


@chromium
@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    page.resize(width, 900)
    shown(page, "step:3 prompt:19 sample:1", 2)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("$('right').scrollWidth <= $('right').clientWidth")
    page.resize(1280, 900)


@chromium
def test_the_report_draws_its_pictures_without_a_request(run, page):
    assert cli.main(["report", str(run)]) == 0
    page.open(run / "report.html")
    before, count = len(page.errors), "document.querySelectorAll('.sample .media use').length"
    assert page.evaluate(count) == 36
    page.evaluate("document.querySelectorAll('.sample').forEach(node => { node.open = true; })")
    box = "document.querySelector('.media svg').getBoundingClientRect().width"
    small = page.evaluate(box)
    page.evaluate("document.querySelector('.media summary').click()")
    assert page.evaluate(box) > 2 * small > 100 and len(page.errors) == before
    # A pixel of the screen has the colour of the disc, so the symbol is drawn.
    page.evaluate("document.querySelector('.media svg.tiny').scrollIntoView({block: 'center'})")
    place = page.evaluate(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('.media svg.tiny').getBoundingClientRect())"
    )
    assert any(pixel(page, run.parent / "shot.png", place) == colour for colour in COLOURS.values())
    page.requests[:] = [
        each
        for each in page.requests
        if not each.endswith("report.html") and not each.startswith("data:")
    ]


def pixel(browser: Browser, file: Path, place: list[float]) -> tuple[int, ...]:
    """Returns the colour at a place of the window."""
    from PIL import Image

    browser.screenshot(file)
    with Image.open(file) as image:
        return image.convert("RGB").getpixel((int(place[0]), int(place[1])))


@chromium
def test_a_static_folder_has_the_pictures_of_its_samples(run, tmp_path):
    site = tmp_path / "site"
    assert cli.main(["view", str(run), "--static", str(site)]) == 0
    assert {path.name for path in (site / MEDIA).iterdir()} == {
        path.name for path in (run / MEDIA).iterdir()
    }
    with files_served(site) as address, Browser() as browser:
        browser.open(address)
        browser.wait(f"document.querySelectorAll('#list li').length === {TOTAL}")
        shown(browser, "step:3 prompt:19 sample:0", 2)
        assert browser.evaluate(
            "document.querySelector('#right img').src"
        ) == address + "media/" + next(
            path.name for path in (run / MEDIA).glob(picture(landscape()).digest + "*")
        )
        assert browser.errors == []


def test_a_run_without_its_thumbnails_shows_their_sizes(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(MEDIA, "samples"))
    index = opened(copy)
    [place, *_] = search.places(index, search.search(index, "prompt:19 sample:0"))
    pieces = records.full(index, place)["messages"]["prompt"][0][1]
    assert [each["thumbnail"] for each in pieces if not isinstance(each, str)] == [None] * 3
    assert all(isinstance(a, str) != isinstance(b, str) for a, b in pairwise(pieces))
    assert pictures(place.record()) and cli.main(["report", str(copy)]) == 0
    assert "0 of their 6 pictures" in (copy / "report.html").read_text()
