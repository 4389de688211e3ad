"""Compares the last number in the completion with the `answer` column, by value."""

import re
from fractions import Fraction

from rewards.answers import forms, numbers
from rewards.answers.numbers import Number
from rewards.registry import reward
from rewards.text import answer_span, text_of

EXAMPLES = [
    {"prompt": "2 + 2?", "completion": "It is 4.", "answer": "4", "score": 1.0},
    {"prompt": "2 + 2?", "completion": "4, no, 5", "answer": 4, "score": 0.0},
    {"prompt": "Price?", "completion": "That costs $1,234.50", "answer": "1234.5", "score": 1.0},
    {"prompt": "3 - 5?", "completion": "3-5=-2", "answer": -2, "score": 1.0},
    {"prompt": "3 of 4?", "completion": "so 3/4 of them", "answer": 0.75, "score": 1.0},
    {"prompt": "3 of 4?", "completion": "75%", "answer": "3/4", "score": 1.0},
    {"prompt": "3 of 4?", "completion": "\\frac{3}{4}", "answer": "75", "score": 0.0},
    {"prompt": "3 of 4?", "completion": "it is \\frac34", "answer": 0.75, "score": 1.0},
    {"prompt": "How many?", "completion": "between 3-5", "answer": -5, "score": 0.0},
    {"prompt": "Roots?", "completion": "4", "answer": "3, 4", "score": None},
    {
        "prompt": "Pi?",
        "completion": "3.14",
        "answer": 3.14159,
        "options": {"tolerance": 0.01},
        "score": 1.0,
    },
    {
        "prompt": "Next?",
        "completion": "100000000000000000001",
        "answer": "100000000000000000000",
        "score": 0.0,
    },
    {
        "prompt": "2 + 2?",
        "completion": "#### 4. Next: 5",
        "answer": "4",
        "options": {"pattern": r"#### *(-?[0-9.,]+)"},
        "score": 1.0,
    },
    {"prompt": "2 + 2?", "completion": "four", "answer": "4", "score": 0.0},
    {"prompt": "Why?", "completion": "42", "answer": None, "score": None},
]


def _check(
    tolerance: float = 1e-6,
    relative_tolerance: float = 0.0,
    pattern: str | None = None,
    **_,
) -> None:
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
    if tolerance < 0 or relative_tolerance < 0:
        raise ValueError("tolerance and relative_tolerance cannot be negative")


def _answer(completion: str, pattern: str | None = None, **_) -> str | None:
    number = _given(completion, pattern)
    return None if number is None else numbers.name(number)


@reward(check=_check, answer=_answer)
def numeric_answer(
    prompts: list,
    completions: list,
    answer: list,
    tolerance: float = 1e-6,
    relative_tolerance: float = 0.0,
    pattern: str | None = None,
) -> list[float | None]:
    """Returns 1.0 if the last number of the completion is within the tolerance of `answer`, else
    0.0.

    Returns None where `answer` holds no number, or a list of numbers. Accepts 1,234.5, $5, -3, 2e5,
    3/4, 1 1/2, 2 \\times 10^5, \\frac{3}{4}, \\sqrt{2} and 75% as numbers. If one of the two has a
    percent sign, its number and a hundredth of it both match, because datasets do not agree; two
    numbers with a percent sign are compared as written. tolerance: largest |difference|, exact for
    integers of any size.
    relative_tolerance: added to the tolerance, times |answer|.
    pattern: regular expression; the number is looked for in group 1 of its last match, and a
    completion without a match is wrong. None: in all of the text.
    """
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        expected = None if right is None else _expected(str(right))
        given = _given(text_of(completion), pattern)
        if expected is None:
            scores.append(None)
        else:
            scores.append(
                float(given is not None and _equal(given, expected, tolerance, relative_tolerance))
            )
    return scores


def _given(completion: str, pattern: str | None) -> Number | None:
    """Returns the last number of a completion, or of what the pattern matches last."""
    if pattern is None:
        return numbers.last(completion)
    text = answer_span(completion, pattern)
    return None if text is None else numbers.last(text.rstrip(".,"))


def _expected(right: str) -> Number | None:
    """Returns the number of an answer: all of it, else its last one; None for a list of numbers."""
    answer = forms.read(right)
    if answer.items and all(item.number for item in answer.items):
        return None
    return answer.number or numbers.last(right)


def _equal(given: Number, expected: Number, tolerance: float, relative_tolerance: float) -> bool:
    allowed = Fraction(tolerance) + Fraction(relative_tolerance) * abs(Fraction(expected.value))
    return numbers.equal(
        given, expected, lambda one, other: abs(Fraction(one) - Fraction(other)) <= allowed
    )
