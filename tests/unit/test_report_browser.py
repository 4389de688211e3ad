"""The report in a headless Chromium with the network off: nothing is requested, nothing fails,
texts stay texts."""

import re

import pytest
from browser import CHROMIUM, Browser
from test_report import EVIL, event, sample, write_run

from rl.commands import cli

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
    pytest.mark.xdist_group("chromium"),
]
SHOWN = EVIL.replace("\x00", "\u2400")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a run of two stages with a spike, a value that is not finite, and hostile
    texts."""
    run, events = tmp_path_factory.mktemp("runs") / "run", []
    for stage, steps in (("sft", 300), ("grpo", 700)):
        for step in range(1, steps + 1):
            metrics = {
                "loss": 900.0 if (stage, step) == ("sft", 250) else 2.0 - step / steps,
                "time__update": 1.0,
                "time__idle": 0.1,
            }
            if stage == "grpo":
                metrics |= {
                    "reward__mean": step / steps,
                    "reward__std": 0.1,
                    f"rewards/{EVIL}/mean": 0.5,
                    "x__y": 1.0,
                }
                metrics |= (
                    {"eval__greedy_accuracy": step / 700, "eval__problems": 64}
                    if step % 50 == 0
                    else {}
                )
                metrics |= {"entropy": None if step == 300 else 1.0}
            events.append(event(stage, step, **metrics))
    rows = [
        sample(step, 0, completion="plain", reward=step % 2, prompt=EVIL) for step in range(1, 30)
    ]
    rows[8] |= {"completion": EVIL, "finish": "length"}
    assert cli.main(["report", str(write_run(run, events, rows))]) == 0
    with Browser() as browser:
        browser.file = run / "report.html"
        browser.open(browser.file)
        yield browser


def test_nothing_fails_and_nothing_is_requested(page):
    assert page.errors == []
    assert [address for address in page.requests if not address.endswith("/run/report.html")] == []
    # The policy refuses what the page does not name: an inline handler that a text might bring.
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img id=z src=x "
        'onerror="document.title=1">\')'
    )
    page.evaluate("document.getElementById('z').remove()")
    assert page.evaluate("document.title") == "run - rl report" and any(
        "Content Security" in each for each in page.errors
    )
    page.errors.clear()


def test_texts_of_a_run_show_as_text(page):
    assert (
        page.evaluate("document.images.length") == 0
        and page.evaluate("document.scripts.length") == 2
    )
    texts = page.evaluate(
        "[...document.querySelectorAll('.sample pre')].map(node => node.textContent)"
    )
    assert texts.count(SHOWN) == 29 + 1  # every prompt, one completion
    assert SHOWN in page.evaluate(
        "document.querySelector('#charts details').textContent"
    )  # in the name of a metric


def test_samples_are_filtered(page):
    count = "[...document.querySelectorAll('.sample')].filter(node => !node.hidden).length"
    everything = page.evaluate(count)
    page.evaluate("document.querySelector('[data-kind=\"cut off\"]').click()")
    assert everything == 29 and page.evaluate(count) == 1
    page.evaluate("document.querySelector('[data-kind=\"\"]').click()")
    page.evaluate("words.value = 'PLAIN'; words.dispatchEvent(new Event('input'))")
    assert page.evaluate(count) == 28
    page.evaluate("words.value = ''; words.dispatchEvent(new Event('input'))")


def test_hover_zoom_scale_and_smoothing(page):
    page.evaluate("document.querySelector('#chart-loss').scrollIntoView()")
    box = "document.querySelector('#chart-loss svg.plot').getBoundingClientRect()"
    left, top, width = (page.evaluate(f"{box}.{side}") for side in ("left", "top", "width"))
    page.mouse("mouseMoved", left + width * 0.65, top + 60)
    shown = page.evaluate("tip.hidden ? '' : tip.textContent")
    assert re.match(
        r"grpo, step 3[45]\d, mean of up to 3 stepsloss 1.5\d* \(1.\d+ to 1.\d+\)", shown
    ), shown
    ink = "document.querySelector('#chart-loss .ink').innerHTML"
    before = page.evaluate(ink)
    for kind, x, more in (
        ("mousePressed", 0.5, {"button": "left", "clickCount": 1}),
        ("mouseMoved", 0.7, {"button": "left", "buttons": 1}),
        ("mouseReleased", 0.7, {"button": "left", "clickCount": 1}),
    ):
        page.mouse(kind, left + width * x, top + 60, **more)
    zoomed = page.evaluate(ink)
    ticks = page.evaluate(
        "[...document.querySelectorAll('#chart-loss .grid text')].map(node => "
        "Number(node.textContent))"
    )
    assert zoomed != before and max(ticks) < 10  # the spike of sft is outside
    page.evaluate("reset.click()")
    ticks = page.evaluate(
        "[...document.querySelectorAll('#chart-loss .grid text')].map(node => "
        "Number(node.textContent))"
    )
    assert max(ticks) >= 500
    page.evaluate("scale.value = 'log'; scale.dispatchEvent(new Event('change'))")
    labels = page.evaluate(
        "[...document.querySelectorAll('#chart-loss .grid text')].map(node => node.textContent)"
    )
    assert labels == ["1", "10", "100", "1,000"]
    page.evaluate("smooth.value = 0.9; smooth.dispatchEvent(new Event('input'))")
    assert "faint" in page.evaluate(ink)
    assert page.errors == []


def test_the_script_draws_what_the_page_holds(page):
    """Scale and marks that the script computes are those of the SVG drawn in Python."""
    page.open(page.file)
    labels = "[...svg.querySelectorAll('.grid text')].map(node => node.textContent).join()"
    read = f"[...document.querySelectorAll('svg.plot')].map(svg => {labels})"
    drawn = page.evaluate(read)
    page.evaluate("scale.dispatchEvent(new Event('change'))")
    assert page.evaluate(read) == drawn and len(drawn) > 4


@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    page.resize(width, 900)
    assert page.evaluate("document.documentElement.scrollWidth") == width
