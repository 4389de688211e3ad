"""The filter language of `rl samples` and `rl view`: one line of terms, all of which a sample must
meet.

    step:100-200 reward<0.5 reward.format=0 len>800 finish:length fault:timeout eval prompt:123
    "some words" /regex/

A term with a leading `-` is one that a sample must not meet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rewards.suggest import nearest
from rl.errors import ConfigError
from rl.records.samples import LOGP_DIFF

NUMBERS = {
    "step": "step",
    "reward": "reward",
    "len": "len",
    "adv": "advantage",
    LOGP_DIFF: "logp_diff",
    "prompt": "prompt",
    "sample": "sample",
    "version": "version",
    "n_prompt": "n_prompt",
}
"""Word of a filter -> column of the index. `reward.NAME` is the score of one function."""
WORDS = ("stage", "finish", "fault")
FLAGS = ("eval", "fault", "unscored", "signal")
EXAMPLE = (
    'step:100-200 reward<0.5 reward.format=0 len>800 finish:length fault:timeout eval "some '
    'words" /regex/'
)
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_TERM = re.compile(
    r"""(?P<not>-?)(?:
      "(?P<words>(?:[^"\\]|\\.)*)"
    | /(?P<regex>(?:[^/\\]|\\.)+)/(?P<case>i?)
    | (?P<field>[A-Za-z_]\w*(?:\.[\w.:/-]*\w)?)(?P<op><=|>=|!=|<|>|=|:)(?P<value>\S+)
    | (?P<bare>[^\s"/]\S*)
    )(?=\s|$)""",
    re.VERBOSE,
)


class FilterError(ConfigError):
    """A filter that cannot be read."""


@dataclass(frozen=True)
class NumberTerm:
    """A column of numbers within low .. high; open_low, open_high: the bounds themselves are
    outside.

    outside: a number that is not within (`reward!=0`). A sample without a number meets neither, but
    meets `negated`.
    """

    column: str
    low: float
    high: float
    open_low: bool = False
    open_high: bool = False
    outside: bool = False
    negated: bool = False


@dataclass(frozen=True)
class Word:
    """The stage, the finish or a fault has this name."""

    column: str
    value: str
    negated: bool = False


@dataclass(frozen=True)
class Flag:
    """eval: of an evaluation; fault: a function gave no score; unscored: no reward; signal: an
    advantage other than 0.
    """

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Text:
    """Words in a sample; ASCII letters match in either case."""

    words: str
    negated: bool = False


@dataclass(frozen=True)
class Regex:
    """A pattern in the prompt or the completion."""

    pattern: re.Pattern[str]
    negated: bool = False


Term = NumberTerm | Word | Flag | Text | Regex


def parse(text: str) -> tuple[Term, ...]:
    """Reads a filter. Raises FilterError, which names the term and what to type."""
    terms: list[Term] = []
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        match = _TERM.match(text, place)
        if match is None:
            rest = text[place:].split()[0]
            hint = "a text ends with a quotation mark, a pattern with a slash"
            raise FilterError(
                f"filter: {rest!r} at character {place + 1}: {hint}; for example {EXAMPLE}"
            )
        terms.append(_term(match))
        place = match.end()
    return tuple(terms)


def _term(match: re.Match[str]) -> Term:
    negated = match["not"] == "-"
    if match["words"] is not None:
        return Text(re.sub(r"\\(.)", r"\1", match["words"]), negated)
    if match["regex"] is not None:
        try:
            return Regex(re.compile(match["regex"], re.IGNORECASE if match["case"] else 0), negated)
        except re.error as error:
            raise FilterError(f"filter: {match[0]}: no regular expression: {error}") from None
    if match["bare"] is not None:
        return _bare(match["bare"], negated)
    return _compared(match["field"], match["op"], match["value"], negated)


def _bare(word: str, negated: bool) -> Term:
    if word in FLAGS:
        return Flag(word, negated)
    field = re.fullmatch(r"([A-Za-z_][\w.]*)(?:[<>!]?=|[<>:])", word)
    word = field[1] if field else word
    if field or word in NUMBERS or word in WORDS:
        example = f"{word}<0.5" if word in NUMBERS else f"{word}:NAME"
        raise FilterError(f"filter: {word}: compare it with something, for example {example}")
    return Text(word, negated)


def _compared(field: str, op: str, value: str, negated: bool) -> Term:
    if field in WORDS:
        if op not in (":", "=", "!="):
            raise FilterError(
                f"filter: {field}{op}{value}: a name has no order; write {field}:{value}"
            )
        return Word(field, value, negated ^ (op == "!="))
    if field in NUMBERS or (field.startswith("reward.") and field != "reward."):
        return _number(NUMBERS.get(field, field), field, op, value, negated)
    hint = nearest(field, [*NUMBERS, *WORDS, "reward.NAME"])
    raise FilterError(
        f"filter: {field}{op}{value}: no such field{hint}; to look for this text, write "
        f'"{field}{op}{value}"'
    )


def _number(column: str, field: str, op: str, value: str, negated: bool) -> NumberTerm:
    single = re.fullmatch(_NUMBER, value)
    if op in (":", "=", "!="):
        outside = op == "!="
        span = re.fullmatch(rf"({_NUMBER})?-({_NUMBER})?", value)
        if single:
            return NumberTerm(column, float(value), float(value), outside=outside, negated=negated)
        if span and (span[1] or span[2]):
            low = float(span[1] or "-inf")
            high = float(span[2] or "inf")
            if low > high:
                raise FilterError(
                    f"filter: {field}{op}{value}: the range is empty; write "
                    f"{field}:{span[2]}-{span[1]}"
                )
            return NumberTerm(column, low, high, outside=outside, negated=negated)
        raise FilterError(
            f"filter: {field}{op}{value}: {value!r} is no number and no range; write "
            f"{field}:100-200"
        )
    if not single:
        raise FilterError(
            f"filter: {field}{op}{value}: {value!r} is no number; write {field}{op}0.5"
        )
    bound = float(value)
    if op[0] == "<":
        return NumberTerm(column, float("-inf"), bound, open_high=op == "<", negated=negated)
    return NumberTerm(column, bound, float("inf"), open_low=op == ">", negated=negated)
