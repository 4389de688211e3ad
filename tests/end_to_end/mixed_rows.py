"""Rows of text next to rows with one and two contents, and a reward that opens the pictures: for
runs in these tests."""

from rewards.text import text_of
from rl.tasks import pictures, tones

WORDS = ("one", "two", "three", "four", "five")


def _drawn(split, count: int) -> list[tuple[str, object]]:
    drawn = pictures.problems(pictures.Options(problems=400), split)
    return [(each.columns["answer"], each.columns["image"]) for each in drawn[:count]]


def _rows(split, with_contents):
    """Every second row is text, so that one of two processes has no picture."""
    for n, ((right, one), (other, two)) in enumerate(
        zip(_drawn(split, 24), _drawn(split, 48)[24:], strict=False)
    ):
        yield with_contents(n % 4, right, other, one, two)
        yield {"prompt": f"say {WORDS[n % 5]}", "right": WORDS[n % 5], "wrong": WORDS[(n + 1) % 5]}


def _with_pictures(kind, right, other, one, two):
    prompt, images, wrong = [
        ("is <image> or <image> the same colour?", [one, two], other),
        ("<image><image>", [one, one], "twice"),
        ("what <image>", [one], "black"),
        ("<image>is this", [one], other),
    ][kind]
    return {"prompt": prompt, "images": images, "right": right, "wrong": wrong + " no"}


def prompts(split):
    """Prompts with an answer."""
    for row in _rows(split, _with_pictures):
        yield row | {"completion": row["right"], "answer": row["right"]}


def pairs(split):
    """The same with a right and a wrong answer."""
    for row in _rows(split, _with_pictures):
        yield {"prompt": row["prompt"], "chosen": row["right"], "rejected": row["wrong"]} | (
            {"images": row["images"]} if "images" in row else {}
        )


def text(split):
    """Text alone."""
    return [row for row in prompts(split) if "images" not in row]


def unseen(split):
    """Text, and pictures after the first eight rows."""
    return [*text(split)[:8], *prompts(split)]


def conversations(split):
    """Demonstrations whose last turn of the user ends with a picture."""
    for answer, image in _drawn(split, 24):
        ask = {"role": "user", "content": [{"type": "text", "text": "colour?"}, {"type": "image"}]}
        turns = [ask, {"role": "assistant", "content": answer}, ask]
        yield {"prompt": turns, "completion": answer, "images": [image, image]}


def sounds(split):
    """Rows with a sound, with a picture and a sound, and of text."""
    notes = tones.problems(tones.Options(), split)
    for n, (note, (colour, image)) in enumerate(zip(notes, _drawn(split, 24), strict=False)):
        audio, right = note.columns["audio"], note.columns["answer"]
        if n % 3 == 0:
            yield {
                "prompt": "<audio>note?",
                "audios": [audio],
                "completion": right,
                "answer": right,
            }
        elif n % 3 == 1:
            row = {"prompt": "<image>and<audio>", "audios": [audio], "images": [image]}
            yield row | {"completion": colour, "answer": colour}
        else:
            yield {"prompt": "say one", "completion": "one", "answer": "one"}


def varied(prompts, completions, images):
    """Distinct letters of a completion and the brightness of its pictures; every row has the
    column."""
    shades = [sum(float(each.array().mean()) for each in shown) / 1000 for shown in images]
    return [
        len(set(text_of(each))) + shade for each, shade in zip(completions, shades, strict=True)
    ]


def odd(prompts, completions, completion_lengths):
    """Whether a completion has an odd number of letters and tokens."""
    lengths = zip(completions, completion_lengths, strict=True)
    return [float((len(text_of(each)) + tokens) % 2) for each, tokens in lengths]
