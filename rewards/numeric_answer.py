"""Compares the last number in the completion with the `answer` column, by value."""

import re
from fractions import Fraction

from rewards.registry import reward
from rewards.text import text_of

EXAMPLES = [
    {"prompt": "2 + 2?", "completion": "It is 4.", "answer": "4", "score": 1.0},
    {"prompt": "2 + 2?", "completion": "4, no, 5", "answer": 4, "score": 0.0},
    {"prompt": "Price?", "completion": "That costs $1,234.50", "answer": "1234.5", "score": 1.0},
    {"prompt": "3 - 5?", "completion": "3-5=-2", "answer": -2, "score": 1.0},
    {"prompt": "3 of 4?", "completion": "so 3/4 of them", "answer": 0.75, "score": 1.0},
    {"prompt": "3 of 4?", "completion": "75%", "answer": "3/4", "score": 1.0},
    {"prompt": "3 of 4?", "completion": "\\frac{3}{4}", "answer": "75", "score": 0.0},
    {"prompt": "Pi?", "completion": "3.14", "answer": 3.14159, "options": {"tolerance": 0.01}, "score": 1.0},
    {"prompt": "Next?", "completion": "100000000000000000001", "answer": "100000000000000000000", "score": 0.0},
    {"prompt": "2 + 2?", "completion": "four", "answer": "4", "score": 0.0},
    {"prompt": "Why?", "completion": "42", "answer": None, "score": None},
]

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}.])-)?\s?[$€£]?(?P<value>{_PLAIN})(?P<exponent>[eE][-+]?\d{{1,3}}(?!\d))?"
    rf"(?:\s?/\s?(?P<below>{_PLAIN}))?\s?(?P<percent>\\?%)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_LONGEST = 400  # digits of a number; longer numbers are ignored, because reading them takes quadratic time


def _check(tolerance: float = 1e-6, relative_tolerance: float = 0.0, **_) -> None:
    if tolerance < 0 or relative_tolerance < 0:
        raise ValueError("tolerance and relative_tolerance cannot be negative")


@reward(check=_check)
def numeric_answer(
    prompts: list, completions: list, answer: list, tolerance: float = 1e-6, relative_tolerance: float = 0.0
) -> list[float | None]:
    """Returns 1.0 if the last number of the completion is within the tolerance of `answer`, else 0.0.

    Returns None where `answer` holds no number. Accepts 1,234.5, $5, -3, 2e5, 3/4, \\frac{3}{4} and 75% as numbers. If
    one of the two has a percent sign, its number and a hundredth of it both match, because datasets do not agree; two
    numbers with a percent sign are compared as written.
    tolerance: largest |difference|, exact for integers of any size.
    relative_tolerance: added to the tolerance, times |answer|.
    """
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        expected = _last_number("" if right is None else str(right))
        given = _last_number(text_of(completion))
        if expected is None:
            scores.append(None)
        else:
            scores.append(float(given is not None and _equal(given, expected, tolerance, relative_tolerance)))
    return scores


def _last_number(text: str) -> tuple[Fraction, bool] | None:
    """Returns (value, whether a percent sign follows) for the last number of a text, or None."""
    text = _FRACTION.sub(r"\1/\2", text.replace("−", "-").replace("\\$", "$"))
    for match in reversed(list(_NUMBER.finditer(text))):
        if len(match.group()) > _LONGEST:
            continue
        value = Fraction(match["value"].replace(",", "") + (match["exponent"] or ""))
        below = Fraction((match["below"] or "1").replace(",", ""))
        if below:
            return (-value if match["sign"] else value) / below, match["percent"] is not None
    return None


def _equal(given: tuple, expected: tuple, tolerance: float, relative_tolerance: float) -> bool:
    allowed = Fraction(tolerance) + Fraction(relative_tolerance) * abs(expected[0])
    pairs = [(given[0], expected[0])]
    if given[1] and not expected[1]:
        pairs.append((given[0] / 100, expected[0]))
    if expected[1] and not given[1]:
        pairs.append((given[0], expected[0] / 100))
    return any(abs(one - other) <= allowed for one, other in pairs)
