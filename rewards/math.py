"""Compares the answer in the completion with the `answer` column, mathematically."""

import functools
import importlib.util
import re

from rewards.numeric_answer import numeric_answer
from rewards.registry import reward
from rewards.text import answer_span, boxed, text_of

EXAMPLES = [
    {"prompt": "1/4 + 1/4?", "completion": "so \\boxed{\\frac{1}{2}}", "answer": "\\frac{1}{2}", "score": 1.0},
    {"prompt": "1/4 + 1/4?", "completion": "so \\boxed{0.5}", "answer": "$\\frac{1}{2}$", "score": 1.0},
    {"prompt": "2 + 2?", "completion": "\\boxed{5}, no, \\boxed{4}", "answer": "4", "score": 1.0},
    {"prompt": "2 + 2?", "completion": "the answer is \\boxed{5}", "answer": "\\boxed{4}", "score": 0.0},
    {"prompt": "sides?", "completion": "\\boxed{\\left( 3, \\text{ 4 } \\right)}", "answer": "(3, 4)", "score": 1.0},
    {"prompt": "2 + 2?", "completion": "I do not know", "answer": "4", "score": 0.0},
    {"prompt": "2 + 2?", "completion": "\\boxed{3x+4}", "answer": "4", "score": 0.0},
    {
        "prompt": "2 + 2?",
        "completion": "\\boxed{x = 4.0}",
        "answer": "4",
        "options": {"verifier": "text"},
        "score": 1.0,
    },
    {"prompt": "a half?", "completion": "It is 1/2.", "answer": "0.5", "options": {"verifier": "text"}, "score": 1.0},
    {"prompt": "Prove it.", "completion": "\\boxed{1}", "answer": None, "score": None},
]

_DECORATION = re.compile(
    r"\\(?:left|right|displaystyle|,|;|:|!)|\\text\s*\{([^{}]*)\}|\\mathrm\s*\{([^{}]*)\}|[\s$]|\\ "
)
_ONLY_NUMBER = re.compile(r"[-−]?(?:[\d.,]+(?:/\d+)?(?:\\?%)?|\\[dt]?frac\{\d+\}\{\d+\})")


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


@reward(check=_check, prepare=_prepare)
def math(prompts: list, completions: list, answer: list, verifier: str = "auto") -> list[float | None]:
    """Returns 1.0 if the answer in the completion equals `answer` mathematically, else 0.0; None if `answer` is None.

    verifier: "math-verify" (symbolic comparison by that package), "text" (the rule below), or "auto": math-verify if it
        is installed, else text. Text compares the inside of the last \\boxed{}, else of `<answer>`, else the text after
        `####`, else the last number, without spaces, `$`, \\left, \\right and \\text. Numbers and fractions are
        compared by value.
    """
    symbolic = verifier == "math-verify" or (verifier == "auto" and _installed())
    equal = _equal_symbolic if symbolic else _equal_text
    return [
        None if right is None else equal(text_of(completion), str(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def _equal_symbolic(completion: str, right: str) -> float | None:
    """Compares with math-verify. Its timeouts use signals and are off; the runner enforces the deadline."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    expected = _parsed(right)
    if not expected:
        return None
    last = boxed(completion)  # math-verify makes a set of several boxes
    given = parse(completion if last is None else f"\\boxed{{{last}}}", parsing_timeout=None)
    return float(verify(expected, given, timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parsed(right: str) -> list:
    from math_verify import parse  # pyright: ignore[reportMissingImports]

    marked = right if "$" in right or "\\boxed" in right else f"${right}$"
    return parse(marked, parsing_timeout=None)


def _equal_text(completion: str, right: str) -> float | None:
    expected = _plain(_marked(right))
    if not expected:
        return None
    given = _plain(_marked(completion))
    if given == expected:
        return 1.0
    if not _ONLY_NUMBER.fullmatch(expected):
        return 0.0
    is_marked = _marked(completion) != completion
    if is_marked and not _ONLY_NUMBER.fullmatch(given.rpartition("=")[2]):  # 3x + 5 is not 5
        return 0.0
    return numeric_answer([""], [given if is_marked else completion], [expected])[0]


def _marked(text: str) -> str:
    """Returns the part of a text that is marked as its answer, or all of the text."""
    inside = boxed(text)
    if inside is None:
        inside = answer_span(text)
    return text if inside is None else inside


def _plain(text: str) -> str:
    """Returns the text of an answer without typesetting commands and white space."""
    undecorated = _DECORATION.sub(lambda match: match[1] or match[2] or "", text)
    return re.sub(r"\s", "", undecorated).rstrip(".")
