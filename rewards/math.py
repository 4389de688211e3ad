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
        import math_verify

        math_verify.parse("$1$", parsing_timeout=None)  # imports sympy and builds the parser


@reward(check=_check, prepare=_prepare)
def math(prompts, completions, answer, verifier: str = "auto"):
    """1.0 if the answer in the completion is mathematically equal to `answer`, else 0.0; None where `answer` is None.

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
    from math_verify import parse, verify

    expected = _parsed(right)
    if not expected:
        return None
    last = boxed(completion)  # of several boxes math-verify makes a set
    given = parse(completion if last is None else f"\\boxed{{{last}}}", parsing_timeout=None)
    return float(verify(expected, given, timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parsed(right: str) -> list:
    from math_verify import parse

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
    """The part of a text that is marked as its answer, or all of it."""
    inside = boxed(text)
    return answer_span(text) if inside is None else inside


def _plain(text: str) -> str:
    """Text of an answer without what only sets it in type."""
    undecorated = _DECORATION.sub(lambda found: found[1] or found[2] or "", text)
    return re.sub(r"\s", "", undecorated).rstrip(".")
