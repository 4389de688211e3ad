"""Compares the answer in the completion with the `answer` column, as text."""

import re

from rewards.registry import reward
from rewards.text import answer_span, text_of

EXAMPLES = [
    {"prompt": "Capital of France?", "completion": "Paris", "answer": "Paris", "score": 1.0},
    {
        "prompt": "Capital of France?",
        "completion": "<answer> Paris </answer>",
        "answer": "Paris",
        "score": 1.0,
    },
    {
        "prompt": "Capital of France?",
        "completion": "Lyon. #### Paris",
        "answer": "Paris",
        "score": 1.0,
    },
    {"prompt": "Capital of France?", "completion": "It is Paris.", "answer": "Paris", "score": 0.0},
    {
        "prompt": "Capital of France?",
        "completion": "Lyon",
        "answer": ["Paris", "paris"],
        "score": 0.0,
    },
    {
        "prompt": "Capital of France?",
        "completion": "Answer: paris.",
        "answer": "Paris",
        "options": {"pattern": r"Answer: *(\S+)", "ignore_case": True, "strip": " ."},
        "score": 1.0,
    },
    {"prompt": "An open question", "completion": "Perhaps", "answer": None, "score": None},
]


def _check(pattern: str | None = None, **_) -> None:
    if pattern is not None:
        _compile(pattern)


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None


def _answer(
    completion: str,
    pattern: str | None = None,
    strip: str | None = None,
    ignore_case: bool = False,
) -> str | None:
    given = answer_span(completion, pattern)
    return None if given is None else _normal(given, strip, ignore_case)


def _normal(text: object, strip: str | None, ignore_case: bool) -> str:
    text = str(text).strip(strip)
    return text.casefold() if ignore_case else text


@reward(check=_check, answer=_answer)
def exact_answer(
    prompts: list,
    completions: list,
    answer: list,
    pattern: str | None = None,
    strip: str | None = None,
    ignore_case: bool = False,
) -> list[float | None]:
    """Returns 1.0 if the last answer in the completion equals `answer`, else 0.0; None where
    `answer` is None.

    answer: column of texts or numbers (compared as text), or of lists with all accepted answers.
    pattern: regular expression whose group 1 is the answer; the last match counts. Without a
    pattern, the answer is the
        inside of the last `<answer>...</answer>`, else the text after the last `####`, else the
        full completion.
    strip: characters to remove from both ends of both texts; None: white space.
    ignore_case: ignore upper and lower case.
    """

    def normal(text: object) -> str:
        return _normal(text, strip, ignore_case)

    scores = []
    for completion, right in zip(completions, answer, strict=True):
        given = answer_span(text_of(completion), pattern)
        accepted = right if isinstance(right, list) else [right]
        if right is None:
            scores.append(None)
        else:
            scores.append(
                float(given is not None and normal(given) in [normal(one) for one in accepted])
            )
    return scores
