"""Compares two answers by their form: numbers, lists, sets, pairs and intervals, plus-minus, named
values, and texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rewards.answers import numbers
from rewards.answers.numbers import Number
from rewards.answers.spelling import THIN, uniform

AnswersEqual = Callable[["Answer", "Answer"], bool]
"""(given, expected) -> whether two answers are equal, of which one at least is no more than a
text."""

_LONGEST = 2000  # characters of an answer that is more than a text
_PIECE = re.compile(
    r"""(?P<open>\\begin\b|\\\{|[(\[{])|(?P<close>\\end\b|\\\}|[)\]}])
    |(?P<comma>[,;]\s*(?:"(?:and|or)"|(?:and|or)\b)?
      |"(?:and|or)"|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))
    |(?P<union>\\cup(?![A-Za-z]))
    |(?P<equals>(?<![<>!:\\=])=(?!=))
    |(?P<element>\\in(?![A-Za-z]))
    |(?P<skip>\\[A-Za-z]+|\\.|"[^"]*")""",
    re.VERBOSE,
)
_OPERATOR = re.compile(r"[-+*/^<>]|\\(?:frac|sqrt|pm|le|ge|ne)\b")
_BRACED = re.compile(r"(?<=[\^_])\{(\w)\}")
_QUOTED = re.compile(r'"([^"]*)"')
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_MINUS_PLUS = re.compile(r"\\mp(?![A-Za-z])")
_BRACKETS = {"(": ")]", "[": ")]"}


@dataclass(frozen=True)
class Answer:
    """The normal form of an answer.

    kind: number; text; list (values in any order, each as often as it stands there); set; union; or
    the two brackets of a pair, tuple or interval.
    source: the answer as it is written. text: the same without spaces. name: what stands before its
    equals sign, or "".
    """

    kind: str
    source: str
    number: Number | None = None
    items: tuple[Answer, ...] = ()
    name: str = ""

    @property
    def text(self) -> str:
        return _squeezed(self.source)


def read(text: str) -> Answer:
    """Returns the normal form of an answer, whose text is all of `text`."""
    if len(text) > 2 * _LONGEST:
        return Answer("text", text)
    text = uniform(text).strip().rstrip(".;,").strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip().rstrip(".;,").strip()
    if text.count("$") % 2 == 0:
        text = text.replace("$", "")
    if len(text) > _LONGEST:
        return Answer("text", text)
    try:
        return _read(text)
    except RecursionError:
        return Answer("text", text)


def equal(given: Answer, expected: Answer, compare: AnswersEqual) -> bool:
    """Tells whether two answers are the same. compare: compares where one of them is no more than a
    text."""
    if given.name and expected.name and given.name != expected.name:
        return False
    if given.number and expected.number:
        return numbers.same(given.number, expected.number)
    if "text" in (given.kind, expected.kind):
        return given.text == expected.text or compare(given, expected)
    if given.kind == expected.kind == "set" or {given.kind, expected.kind} == {"set", "list"}:
        pairs = ((given.items, expected.items), (expected.items, given.items))
        return all(
            any(equal(one, other, compare) for other in those)
            for these, those in pairs
            for one in these
        )
    if given.kind != expected.kind or len(given.items) != len(expected.items):
        return False
    if given.kind in ("list", "union"):
        return _same_in_any_order(given.items, expected.items, compare)
    return all(
        equal(one, other, compare) for one, other in zip(given.items, expected.items, strict=True)
    )


def _same_in_any_order(
    given: Sequence[Answer], expected: Sequence[Answer], compare: AnswersEqual
) -> bool:
    left = list(expected)
    for one in given:
        match = next((other for other in left if equal(one, other, compare)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _read(text: str) -> Answer:
    text = text.strip()
    if quoted := _QUOTED.fullmatch(text):
        return _read(quoted[1])
    if text[:1] in _BRACKETS and text[-1:] in _BRACKETS[text[0]] and _closes_last(text):
        return _bracketed(text)
    number = numbers.full(text)
    if number is not None:
        return Answer("number", text, number)
    if len(parts := _split(text, "comma")) > 1 and all(parts):
        return Answer("list", text, items=tuple(_read(part) for part in parts))
    if len(parts := _split(text, "union")) > 1:
        return Answer("union", text, items=tuple(_read(part) for part in parts))
    for separator in ("equals", "element"):
        if len(parts := _split(text, separator)) > 1:
            return _named(text, parts)
    if text.startswith("{") and _closes_last(text):
        return _read(text[1:-1])
    if text.startswith(r"\{") and _closes_last(text) and not re.search(r":|\||\\mid", text):
        items = [part for part in _split(text[2:-2], "comma") if part]
        return Answer("set", text, items=tuple(_read(item) for item in items))
    if _PLUS_MINUS.search(text):
        signs = (("+", "-"), ("-", "+"))
        return Answer("list", text, items=tuple(_read(_with_signs(text, *pair)) for pair in signs))
    return Answer("text", text.removeprefix("+").strip())


def _named(text: str, parts: list[str]) -> Answer:
    """Returns the answer after `x =` or `x \\in`; an equation of other terms is a text."""
    *names, value = parts
    if (
        len(names) == 1
        and numbers.full(names[0])
        and not _OPERATOR.search(value)
        and numbers.full(value) is None
    ):
        names, value = [value], names[0]  # 7 = x
    answer = _read(value)
    computed = answer.number and all(_is_same_number(name, answer.number) for name in names[1:])
    first = names[0]
    if (
        first
        and not _OPERATOR.search(_outside_brackets(first))
        and not first[0].isdigit()
        and (computed or len(names) == 1)
    ):
        return Answer(answer.kind, answer.source, answer.number, answer.items, _squeezed(first))
    if answer.number and all(_is_same_number(name, answer.number) for name in names):
        return answer
    return Answer("text", text)


def _is_same_number(text: str, number: Number) -> bool:
    other = numbers.full(text)
    return other is not None and numbers.same(other, number)


def _bracketed(text: str) -> Answer:
    inner = _split(text[1:-1], "comma")
    if len(inner) == 1 and text[0] == "(" and text[-1] == ")":
        return _read(inner[0])
    if len(inner) == 1 or not all(inner):
        return Answer("text", text)
    return Answer(text[0] + text[-1], text, items=tuple(_read(part) for part in inner))


def _split(text: str, separator: str) -> list[str]:
    """Returns the parts between separators outside of brackets: all of the text if brackets do not
    match."""
    parts = []
    start = 0
    depth = 0
    for match in _PIECE.finditer(text):
        kind = match.lastgroup
        depth += (kind == "open") - (kind == "close")
        if depth < 0:
            return [text]
        if kind == separator and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [text] if depth else [*parts, text[start:].strip()]


def _closes_last(text: str) -> bool:
    """Whether the bracket that a text begins with is closed by its last character."""
    depth = 0
    for match in _PIECE.finditer(text):
        depth += (match.lastgroup == "open") - (match.lastgroup == "close")
        if depth == 0:
            return match.end() == len(text)
    return False


def _outside_brackets(text: str) -> str:
    return re.sub(r"\([^()]*\)|_\{[^{}]*\}|_.", "", text)


def _with_signs(text: str, plus: str, minus: str) -> str:
    return _PLUS_MINUS.sub(plus, _MINUS_PLUS.sub(minus, text))


def _squeezed(text: str) -> str:
    bare = re.sub(rf'[\s"{THIN}]', "", text)
    return _BRACED.sub(r"\1", bare)
