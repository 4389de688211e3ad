"""Drawn pictures and notes: equal on every machine, disjoint splits, and what is asked about is
there."""

import hashlib

import numpy as np
import pytest

from rl import tasks
from rl.config.data import DataOptions
from rl.data.rows.sources import read_rows
from rl.tasks import pictures, tones
from rollout.media.rows import normalise

QUESTIONS = ("colour", "where", "count", "shape", "digit")
# Digests of the first 20 training problems, as drawn with numpy 2.4 on x86-64.
PINNED = {
    "colour": "95095298e8ff1db3",
    "where": "83f60a995a1a4edf",
    "count": "a470c135bcc6d42d",
    "shape": "3ac09271d0508f70",
    "digit": "008c5595a3684d66",
    "tones": "94b8372690a294d9",
}


def problems(name, split="train", **options):
    return tasks.problems(name, {"problems": 300} | options, split)


def content(problem):
    columns = problem.columns
    return (columns["image"] if "image" in columns else columns["audio"]["array"]).tobytes()


def digest(name, **options):
    text = hashlib.sha256()
    for problem in problems(name, **options)[:20]:
        text.update(content(problem) + problem.completion.encode())
    return text.hexdigest()[:16]


@pytest.mark.parametrize("question", QUESTIONS)
def test_pictures_are_those_of_every_machine(question):
    assert digest("pictures", question=question) == PINNED[question]


def test_notes_are_those_of_every_machine():
    assert digest("tones") == PINNED["tones"]


@pytest.mark.parametrize(
    ("name", "options"), [("pictures", {"question": q}) for q in QUESTIONS] + [("tones", {})]
)
def test_splits_share_no_problem_and_hold_all_answers(name, options):
    train, held_out = problems(name, **options), problems(name, "eval", **options)
    contents = [content(problem) for problem in train + held_out]
    assert len(set(contents)) == len(contents) == 300
    assert 10 < len(held_out) < 60
    answers = {
        "tones": set(tones.NOTES),
        "colour": set(pictures.COLOURS),
        "where": set(pictures.PLACES),
    }
    answers |= {
        "count": set(pictures.DIGITS[1:6]),
        "shape": set(pictures.SHAPES),
        "digit": set(pictures.DIGITS),
    }
    assert {problem.completion for problem in train} == answers[options.get("question", name)]
    assert all(problem.columns["answer"] == problem.completion for problem in train)


def test_pictures_that_differ_in_noise_alone_are_in_one_split():
    calm, noisy = (problems("pictures", "eval", noise=noise) for noise in (0, 60))
    assert [problem.completion for problem in calm] == [problem.completion for problem in noisy]
    difference = np.stack([p.columns["image"] for p in noisy]) - np.stack(
        [p.columns["image"] for p in calm]
    ).astype(int)
    assert 50 < np.abs(difference).max() <= 60 and abs(difference.mean()) < 1


def test_the_answer_is_what_is_drawn():
    """Read back from pictures without noise: the shape is what lies outside of the colours of the
    background."""
    for problem in problems("pictures", question="where", noise=0)[:50]:
        y, x = np.nonzero(problem.columns["image"].max(axis=2) > 130)
        vertical = "upper" if y.max() < 16 else "lower"
        horizontal = "left" if x.max() < 16 else "right"
        assert (y.max() < 16 or y.min() >= 16) and (x.max() < 16 or x.min() >= 16)
        assert problem.completion == f"{vertical} {horizontal}"
    for problem in problems("pictures", question="colour", noise=0)[:50]:
        image = problem.columns["image"]
        colour = image[image.max(axis=2) > 130].mean(axis=0)
        names = list(pictures.COLOURS)
        nearest = np.argmin([np.abs(colour - pictures.COLOURS[name]).sum() for name in names])
        assert problem.completion == names[nearest]


@pytest.mark.parametrize("size", [16, 17, 64, 512])
def test_pictures_have_any_side(size):
    for question in QUESTIONS:
        drawn = problems("pictures", question=question, size=size, problems=10)
        assert {problem.columns["image"].shape for problem in drawn} == {(size, size, 3)}
        assert drawn[0].columns["image"].dtype == np.uint8


def test_the_answer_is_what_is_played():
    for problem in problems("tones", noise=0.0)[:100]:
        wave, rate = problem.columns["audio"]["array"], problem.columns["audio"]["sampling_rate"]
        assert wave.dtype == np.float32 and (len(wave), rate) == (5120, 8000)
        power = np.abs(np.fft.rfft(wave * np.hanning(len(wave)), 2**18))
        frequency = np.argmax(power) * rate / 2**18
        number = 12 * np.log2(frequency / 440) + 9
        assert problem.completion == tones.NOTES[round(number) % 12]
        assert 523 * 0.98 < frequency < 523 * 8


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "pictures",
            {"question": "why"},
            "`question` must be colour, where, count, shape, digit, got 'why'",
        ),
        ("pictures", {"size": 15}, "`size` must be an integer from 16 to 512, got 15"),
        ("pictures", {"size": 32.0}, "`size` must be an integer from 16 to 512, got 32.0"),
        ("pictures", {"noise": 101}, "`noise` must be an integer from 0 to 100"),
        ("pictures", {"problems": True}, "`problems` must be an integer from 10"),
        ("pictures", {"eval_share": 1}, "`eval_share` must lie between 0 and 1"),
        ("pictures", {"colour": "red"}, "task pictures has no option `colour`"),
        ("tones", {"seconds": 0}, "`seconds` must be a number from 0.1 to 30"),
        (
            "tones",
            {"octaves": 4, "first_octave": 5},
            "notes up to 7948 Hz need a `rate` of at least 15896, got 8000",
        ),
        ("tones", {"cents": 41}, "`cents` must be an integer from 0 to 40"),
        ("tones", {"noise": "loud"}, "`noise` must be a number from 0.0 to 0.5"),
    ],
)
def test_an_option_that_cannot_be_is_refused(name, options, message):
    with pytest.raises(ValueError) as caught:
        tasks.check(name, options)
    assert message in str(caught.value)


@pytest.mark.parametrize(("task", "kind"), [("pictures", "image"), ("tones", "audio")])
def test_rows_become_prompts_with_their_content(task, kind, tmp_path):
    where, row = next(
        iter(read_rows(DataOptions(task=task, options={"problems": 10}), held_out=False))
    )
    prompt, (reference,) = normalise(row["prompt"], row, where, tmp_path)
    assert prompt == [
        {"role": "user", "content": [{"type": kind}, {"type": "text", "text": row["prompt"]}]}
    ]
    assert (reference.kind, reference.size) == (kind, (32, 32) if kind == "image" else (5120, 8000))
