"""Checks the form of a completion with a regular expression."""

import re

from rewards.registry import reward
from rewards.text import text_of

_THINK = r"<think>.*?</think>\s*<answer>.*?</answer>"
EXAMPLES = [
    {
        "prompt": "2 + 2?",
        "completion": "<think>two and two</think>\n<answer>4</answer>\n",
        "options": {"pattern": _THINK},
        "score": 1.0,
    },
    {
        "prompt": "2 + 2?",
        "completion": "two and two<answer>4</answer>",
        "raw": "<think>two and two</think><answer>4</answer>",
        "options": {"pattern": _THINK},
        "score": 1.0,
    },
    {
        "prompt": "2 + 2?",
        "completion": "<answer>4</answer>",
        "options": {"pattern": _THINK},
        "score": 0.0,
    },
    {
        "prompt": "2 + 2?",
        "completion": "So <ANSWER>4</ANSWER> it is",
        "options": {"pattern": "<answer>", "match": "search", "ignore_case": True},
        "score": 1.0,
    },
    {
        "prompt": "2 + 2?",
        "completion": "4",
        "options": {"pattern": "<answer>", "match": "search"},
        "score": 0.0,
    },
]


def _check(pattern: str = "", match: str = "fullmatch", **_) -> None:
    if match not in ("fullmatch", "search"):
        raise ValueError(f"match is 'fullmatch' or 'search', not {match!r}")
    if not pattern:
        raise ValueError("it needs the option `pattern`, a regular expression")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None


@reward(check=_check)
def regex_format(
    prompts: list,
    completions: list,
    pattern: str,
    match: str = "fullmatch",
    ignore_case: bool = False,
    raw: list[str] | None = None,
) -> list[float]:
    """Returns 1.0 if `pattern` matches, else 0.0.

    raw: completions with their special tokens, as the run gives them: in some models <think> is
    one. None: as they are
        in `completions`.
    pattern: regular expression in Python's syntax; `.` matches newlines too.
    match: "fullmatch" (all of the completion without white space at its ends) or "search" (any part
    of it). ignore_case: ignore upper and lower case.
    """
    compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    matches = compiled.fullmatch if match == "fullmatch" else compiled.search
    texts = [text_of(completion) for completion in completions] if raw is None else raw
    return [float(matches(text.strip()) is not None) for text in texts]
