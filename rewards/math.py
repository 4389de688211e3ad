"""1.0 where the completion's mathematical answer equals the `answer` column."""

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
    {"prompt": "Prove it.", "completion": "\\boxed{1}", "answer": None, "score": None},
]

_DECORATION = re.compile(r"\\(?:left|right|displaystyle|,|;|:|!)|\\text\s*\{([^{}]*)\}|\\mathrm\s*\{([^{}]*)\}|[\s$]|\\ ")
_ONLY_NUMBER = re.compile(r"[-−]?[$]?[\d.,]+(?:/\d+)?%?")


def _installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _check(verifier: str = "auto", **_) -> None:
    if verifier not in ("auto", "math-verify", "text"):
        raise ValueError(f"verifier is 'auto', 'math-verify' or 'text', not {verifier!r}")
    if verifier == "math-verify" and not _installed():
        raise ValueError("math-verify is not installed: pip install 'duet-rl[tasks]'")


def _prepare() -> None:
    if _installed():
        import math_verify

        math_verify.parse("$1$", parsing_timeout=None)  # builds its parser, 1 s the first time


@reward(check=_check, prepare=_prepare)
def math(prompts, completions, answer, verifier: str = "auto"):
    """1.0 if the answer in the completion is mathematically equal to `answer`, else 0.0; None where there is no `answer`
    to compare with.

    verifier: "math-verify" (symbolic comparison by that package), "text" (the rule below), or "auto": math-verify where
    it is installed. Text: the inside of the last \\boxed{}, else of `<answer>`, else what follows `####`, else the last
    number, compared without spaces, `$`, \\left, \\right and \\text; numbers and fractions by value.
    """
    symbolic = verifier == "math-verify" or (verifier == "auto" and _installed())
    equal = _equal_symbolic if symbolic else _equal_text
    return [
        None if right is None else equal(text_of(completion), str(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def _equal_symbolic(completion: str, right: str) -> float | None:
    """By math-verify, its own timeouts off: they use signals, and the runner's deadline is a hard one."""
    from math_verify import verify

    expected = _parsed(right)
    if not expected:
        return None
    from math_verify import parse

    given = parse(completion, parsing_timeout=None)
    return float(verify(expected, given, timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parsed(right: str) -> tuple:
    from math_verify import parse

    marked = right if "$" in right or "\\boxed" in right else f"${right}$"
    return tuple(parse(marked, parsing_timeout=None))


def _equal_text(completion: str, right: str) -> float | None:
    expected = _plain(_answer(right))
    given = _plain(_answer(completion))
    if not expected:
        return None
    if given == expected:
        return 1.0
    if boxed(completion) is None and given == _plain(completion):  # nothing marks the answer: the last number is it
        return numeric_answer([""], [completion], [expected])[0] if _ONLY_NUMBER.fullmatch(expected) else 0.0
    numbers = [re.sub(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}", r"\1/\2", side) for side in (given, expected)]
    if all(_ONLY_NUMBER.fullmatch(number) for number in numbers):
        return numeric_answer([""], [numbers[0]], [numbers[1]])[0]
    return 0.0


def _answer(text: str) -> str:
    inside = boxed(text)
    return answer_span(text) if inside is None else inside


def _plain(text: str) -> str:
    """Text of an answer without what only sets it in type."""
    undecorated = _DECORATION.sub(lambda found: found[1] or found[2] or "", text)
    return re.sub(r"\s", "", undecorated).rstrip(".")
