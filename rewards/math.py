"""Compares the answer in the completion with the `answer` column, mathematically."""

import functools
import importlib.util
import re
from typing import Any

from rewards.answers import forms, numbers
from rewards.answers.forms import Answer
from rewards.registry import reward
from rewards.text import answer_span, boxed, text_of

EXAMPLES = [
    {
        "prompt": "1/4 + 1/4?",
        "completion": "so \\boxed{\\frac{1}{2}}",
        "answer": "\\frac{1}{2}",
        "score": 1.0,
    },
    {
        "prompt": "1/4 + 1/4?",
        "completion": "so \\boxed{0.5}",
        "answer": "$\\frac{1}{2}$",
        "score": 1.0,
    },
    {"prompt": "2 + 2?", "completion": "\\boxed{5}, no, \\boxed{4}", "answer": "4", "score": 1.0},
    {
        "prompt": "2 + 2?",
        "completion": "the answer is \\boxed{5}",
        "answer": "\\boxed{4}",
        "score": 0.0,
    },
    {
        "prompt": "sides?",
        "completion": "\\boxed{\\left( 3, \\text{ 4 } \\right)}",
        "answer": "(3, 4)",
        "score": 1.0,
    },
    {"prompt": "Roots?", "completion": "\\boxed{4}", "answer": "3, 4", "score": 0.0},
    {"prompt": "Price?", "completion": "\\boxed{18.9}", "answer": "\\$18.90", "score": 1.0},
    {"prompt": "2 + 2?", "completion": "I do not know", "answer": "4", "score": 0.0},
    {"prompt": "2 + 2?", "completion": "\\boxed{3x+4}", "answer": "4", "score": 0.0},
    {
        "prompt": "2 + 2?",
        "completion": "\\boxed{x = 4.0}",
        "answer": "4",
        "options": {"verifier": "text"},
        "score": 1.0,
    },
    {
        "prompt": "a half?",
        "completion": "It is 1/2.",
        "answer": "0.5",
        "options": {"verifier": "text"},
        "score": 1.0,
    },
    {"prompt": "Prove it.", "completion": "\\boxed{1}", "answer": None, "score": None},
]

_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]{3,}|[A-Z]{2}|[A-Za-z]*[\u0080-\uffff].*")
_NO_VALUE = re.compile(r"[<>]|\\(?:approx|sim|simeq|le|ge|ne|lt|gt)(?![A-Za-z])|[-+*/^]\s*$")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])(?![ei](?![A-Za-z]))[A-Za-z]")
_NOT_SYMBOLIC = re.compile(r":|\\[lc]?dots|\d_|\.\.\.|(?<![\\A-Za-z])[A-Za-z]{3,}\s+[A-Za-z]{2,}")
"""What math-verify reads as something else: ratios and times, gaps, bases, sentences."""


def _installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _check(verifier: str = "auto", **_) -> None:
    if verifier not in ("auto", "math-verify", "text"):
        raise ValueError(f"verifier is 'auto', 'math-verify' or 'text', not {verifier!r}")
    if verifier == "math-verify" and not _installed():
        raise ValueError("math-verify is not installed: pip install 'duet-rl[tasks]'")


def _prepare() -> None:
    if _installed():
        import math_verify  # pyright: ignore[reportMissingImports]

        math_verify.parse("$1$", parsing_timeout=None)  # imports sympy and builds the parser


def _answer(completion: str, **_) -> str | None:
    """Returns the normal form of what a text answers: of a number its value."""
    marked = _marked(completion)
    if marked == completion:
        number = numbers.last(completion)
        return None if number is None else numbers.name(number)
    form = forms.read(marked)
    return numbers.name(form.number) if form.number else form.text or None


@reward(check=_check, prepare=_prepare, answer=_answer)
def math(
    prompts: list, completions: list, answer: list, verifier: str = "auto"
) -> list[float | None]:
    """Returns 1.0 if the answer in the completion equals `answer` mathematically, else 0.0; None if
    `answer` is None.

    verifier: "text" compares forms: numbers by value (fractions, roots, powers, units, percent),
    lists and sets in any
        order, pairs and intervals with their brackets, and all else as text, without spaces and
        typesetting. "math-verify" compares what is no number by that package. "auto": math-verify
        if it is installed, else text.
    The answer is the inside of the last \\boxed{} (\\fbox{}), else of `<answer>`, else the text
    after `####`, else, if `answer` is a number, the last number, else all of the text or its last
    formula ($...$, \\(...\\)). A box that is not closed holds no answer.
    """
    symbolic = verifier == "math-verify" or (verifier == "auto" and _installed())
    return [
        None if right is None else _score(text_of(completion), str(right), symbolic)
        for completion, right in zip(completions, answer, strict=True)
    ]


def _score(completion: str, right: str, symbolic: bool) -> float | None:
    expected = _read(_marked(right))
    if not expected.text:
        return None
    marked = _marked(completion)
    given = forms.read(marked)
    equal = _equal_symbolic if symbolic else _equal_text
    if marked == completion and expected.number:
        number = numbers.last(completion)
        if number is not None and given.number and given.number.value == number.value:
            number = given.number  # with its unit
        return float(number is not None and numbers.same(number, expected.number))
    candidates = [given]
    if marked == completion and (formulas := _FORMULA.findall(completion)):
        candidates.append(forms.read("".join(formulas[-1])))
    return float(any(forms.equal(one, expected, equal) for one in candidates))


_read = functools.lru_cache(maxsize=4096)(forms.read)


def _marked(text: str) -> str:
    """Returns the part of a text that is marked as its answer, or all of the text."""
    inside = boxed(text)
    if inside is None:
        inside = answer_span(text)
    return text if inside is None else inside


def _equal_text(given: Answer, expected: Answer) -> bool:
    return False  # `forms.equal` compares the texts themselves


def _equal_symbolic(given: Answer, expected: Answer) -> bool:
    """Compares with math-verify. Its timeouts use signals and are off; the runner enforces the
    deadline."""
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    pair = (given, expected)
    if any(_WORD.fullmatch(one.text) or _NOT_SYMBOLIC.search(one.source) for one in pair):
        return False
    if any(one.number for one in pair) and any(
        _VARIABLE.search(one.source) or _NO_VALUE.search(one.source) for one in pair
    ):  # it takes 5m, < 5 and 5+ for 5
        return False
    if ("=" in given.source) != ("=" in expected.source):  # it takes 2x = 4 for 4
        return False
    ours = _parsed(expected.source)
    theirs = _parsed(given.source)
    if not ours or not theirs or not verify(ours, theirs, timeout_seconds=None):
        return False
    return _agree(ours[0], theirs[0])


def _agree(expected: Any, given: Any) -> bool:
    """Whether two constants agree to six digits; true for what is no constant. math-verify takes
    1/10! for 1/11!."""
    if (
        not (getattr(expected, "is_number", False) and getattr(given, "is_number", False))
        or expected.is_zero
    ):
        return True
    try:
        return abs(complex((given / expected).evalf()) - 1) < 1e-6
    except TypeError:  # no finite number
        return False


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list:
    from math_verify import parse  # pyright: ignore[reportMissingImports]

    return parse(f"${text}$", parsing_timeout=None)
