"""Reads numbers as people and models write them: decimals, fractions, powers, roots, percent,
currencies and units.

A number is a constant expression of +, -, *, /, ^, \\frac, \\sqrt, \\pi and parentheses, with what
may stand around it. `full` takes texts of `spelling.uniform`, `last` any.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from rewards.answers.spelling import THIN, uniform
from rewards.answers.units import CURRENCIES, SCALES, unit

Value = Fraction | float
"""A rational number, or the nearest float of an irrational one."""

_LONGEST = (
    400  # digits of a number; longer ones are refused, because reading them takes quadratic time
)
_TAIL = 2000  # characters at the end of a text in which its last number is looked for first
_DIGIT = re.compile(r"\d")
_MOST_BITS = 20_000  # of a power
_CLOSE = 1e-6
_THOUSANDS = rf"[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:{THIN}\d{{3}})+|(?:'\d{{3}})+)(?!\d|,\d)"
_TOKEN = re.compile(
    rf"""(?P<list>(?!{_THOUSANDS})\d+(?:,\d+)+)
    |(?P<number>(?:{_THOUSANDS}|\d+)(?:\.\d+)?(?:[eE][-+]?\d{{1,3}}(?![\w.]))?|\.\d+)
    |(?P<command>\\[A-Za-z]+)
    |(?P<text>"[^"]*")
    |(?P<word>[A-Za-z]+)
    |(?P<mark>\\.|[^\s{THIN}])""",
    re.VERBOSE,
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?![\d,])")

_UNIT_PART = re.compile(r'"|[A-Za-z]+|\^\{?[23]\}?|[/*%$€£¥₹]|\S')
_DEGREE = re.compile(r"\^?\s*(?:\{\s*\\circ\s*\}|\\circ)")
_OPENS_NUMBER = (*"=([{,:<>", r"\le", r"\ge", r"\approx", r"\ne")


class NoNumber(ValueError):
    """A text that was to be read as a number is none."""


_ERRORS = (NoNumber, OverflowError, ZeroDivisionError, RecursionError)


@dataclass(frozen=True)
class Number:
    """A real number.

    percent: a percent sign follows; `value` is what stands before it. unit: its canonical name, ""
    without one. decimal: it is written with a decimal point.
    """

    value: Value
    percent: bool = False
    unit: str = ""
    decimal: bool = False


def full(text: str) -> Number | None:
    """Returns the number that all of a text is, with sign, currency, percent sign and unit, or
    None."""
    try:
        return _Reader(_joined_thousands(text)).all()
    except _ERRORS:
        return None


def last(text: str) -> Number | None:
    """Returns the last number in a text, or None.

    A minus counts as a sign if it is attached to the number and follows neither a number nor a
    word, or if it follows an equals sign, a comma, a colon or an opening bracket. It is none in a
    range (3-5, 3 - 5) and as the bullet of a list. Exponents, indices and digits within a word
    (H2O) are not numbers. If the last is a list without spaces (0,5) or cannot be read (5/0), the
    result is None.
    """
    end = text[-_TAIL:]
    if not _DIGIT.search(end, _TAIL // 2):  # reading all of a long text takes long
        end = text
    reader = _Reader(_joined_thousands(uniform(end)), within=True)
    result: Number | None = None
    while reader.token():
        start = reader.at
        if reader.token() in ("^", "_"):
            reader.at += 1
            reader.skip_group()
        elif reader.kinds[start] == "list":
            result = None
            reader.at += 1
        elif reader.starts_number():
            try:
                result = reader.next()
            except _ERRORS:
                result = None
                reader.at = max(start + 1, reader.at)
        else:
            reader.at += 1
    return result


def _joined_thousands(text: str) -> str:
    return _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)


def equal(given: Number, expected: Number, close: Callable[[Value, Value], bool]) -> bool:
    """Tells whether two numbers are the same by `close(given, expected)`; two units that differ are
    a difference.

    If one of the two has a percent sign, its number and a hundredth of it both match, because
    datasets do not agree. A unit that only one of them has does not count.
    """
    if given.unit and expected.unit and given.unit != expected.unit:
        return False
    pairs = [(given.value, expected.value)]
    if given.percent and not expected.percent:
        pairs.append((given.value / 100, expected.value))
    if expected.percent and not given.percent:
        pairs.append((given.value, expected.value / 100))
    return any(close(one, other) for one, other in pairs)


def same(given: Number, expected: Number) -> bool:
    """Tells whether two numbers are equal.

    Rational numbers are compared exactly, irrational ones to twelve digits. A decimal of a number
    that has no finite decimals is equal to six digits: 0.3333333 is 1/3.
    """
    has_decimals = _is_decimal(given.value), _is_decimal(expected.value)
    rounded = given.decimal != expected.decimal and not all(has_decimals)

    def close(one: Value, other: Value) -> bool:
        if rounded:
            return abs(Fraction(one) - Fraction(other)) <= Fraction(_CLOSE) * abs(Fraction(other))
        if isinstance(one, float) and isinstance(other, float):
            return math.isclose(one, other, rel_tol=1e-12)
        return type(one) is type(other) and one == other

    return equal(given, expected, close)


def name(number: Number) -> str:
    """Returns a text that is equal for numbers of the same value, whatever their unit; to nine
    digits for one that is no rational number."""
    value = number.value
    shown = str(value) if isinstance(value, Fraction) else f"{value:.9g}"
    return f"{shown}{'%' * number.percent}"


def _is_decimal(value: Value) -> bool:
    """Tells whether a number has finitely many decimals."""
    if isinstance(value, float):
        return False
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


class Unit(NamedTuple):
    """What the text after a number says: a factor, whether it is a percentage, and the unit in
    canonical form."""

    scale: int
    percent: bool
    name: str


class _Reader:
    """Reads numbers from a text, token by token. `at` is the number of the next token.

    within: numbers are parts of the text, and a parenthesis after one is no factor.
    """

    def __init__(self, text: str, within: bool = False):
        self.text = text
        self.within = within
        matches = list(_TOKEN.finditer(text))
        self.tokens = [match[0] for match in matches]
        self.kinds = [match.lastgroup for match in matches]
        self.starts = [match.start() for match in matches]
        self.ends = [match.end() for match in matches]
        self.at = 0
        self.decimal = False

    def token(self, ahead: int = 0) -> str:
        """Returns a token from the next one on, "" after the last."""
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, *tokens: str) -> str:
        """Passes the next token if it is one of these and returns it, else returns ""."""
        token = self.token()
        if token not in tokens:
            return ""
        self.at += 1
        return token

    def need(self, token: str) -> None:
        """Passes this token. Raises NoNumber if it is not the next one."""
        if not self.take(token):
            raise NoNumber(f"{token} expected")

    def skip_group(self) -> None:
        """Passes one token, or a group in braces."""
        depth = 0
        while token := self.token():
            depth += {"{": 1, "}": -1}.get(token, 0)
            self.at += 1
            if depth <= 0:
                return

    def starts_number(self) -> bool:
        """Whether a number can start at the next token: a digit that is not attached to a letter,
        or a command."""
        before = self.text[self.starts[self.at] - 1] if self.starts[self.at] else " "
        if self.kinds[self.at] == "number":
            return (
                not (before.isascii() and before.isalpha()) or self.kinds[self.at - 1] == "command"
            )
        return self.token() in (r"\frac", r"\sqrt", r"\pi")

    def all(self) -> Number:
        """Reads the full text as a number. Raises NoNumber."""
        sign = self.take("-", "+")
        currency = self._currency()
        sign = self.take("-", "+") or sign
        value = self._sum(-1 if sign == "-" else 1)
        end = self.ends[self.at - 1]
        unit = self._unit(self.text[end:])
        return Number(
            _finite(value * unit.scale), unit.percent, currency or unit.name, self.decimal
        )

    def next(self) -> Number:
        """Reads a number that begins at the next token, with its sign, scale and percent sign.
        Raises NoNumber."""
        self.decimal = False
        sign = -1 if self._is_negative() else 1
        value = self._product()
        scale = SCALES.get(self.token(), 1)
        self.at += scale > 1
        percent = bool(self.take("%", "percent"))
        return Number(_finite(sign * scale * value), percent, decimal=self.decimal)

    def _currency(self) -> str:
        if self.token() in ("US", "USD", "EUR", "GBP", "Rs"):
            self.at += 1
        return CURRENCIES.get(self.take(*CURRENCIES), "")

    def _is_negative(self) -> bool:
        """Whether a minus stands before the next token that is its sign."""
        number = self.at
        back = self.at - 1
        while back >= 0 and self.tokens[back] in CURRENCIES:
            number = back
            back = back - 1
        if back < 0 or self.tokens[back] != "-":
            return False
        before = back - 1
        between = self.text[self.ends[before] if before >= 0 else 0 : self.starts[back]]
        if self.ends[back] == self.starts[number]:
            follows = before >= 0 and (
                self.kinds[before] in ("number", "word") or self.tokens[before] in tuple(")]}%.")
            )
            return not (follows and not between)
        return before >= 0 and "\n" not in between and self.tokens[before] in _OPENS_NUMBER

    def _unit(self, text: str) -> Unit:
        """Reads the text after a number. Raises NoNumber."""
        scale = 1
        percent = False
        units = []
        quoted = False
        attached = text[:1].isalpha()
        for part in _UNIT_PART.findall(_DEGREE.sub(" degree ", text)):
            if part == '"':
                quoted = not quoted
            elif part in ("%", "percent"):
                percent = True
            elif part in SCALES:
                scale *= SCALES[part]
            elif part in CURRENCIES:
                units.append(CURRENCIES[part])
            elif units and part[0] in "^/*":
                units.append(part.replace("{", "").replace("}", ""))
            elif units == ["degree"] and part in ("C", "F"):
                units.append(part)
            elif part.isalpha() and (name := unit(part, quoted, attached)):
                units.append(name)
            elif part != ".":
                raise NoNumber(f"{part} follows")
            attached = False
        if len(units) > 5:
            raise NoNumber("a sentence follows")
        return Unit(scale, percent, " ".join(sorted(units)))

    def _sum(self, sign: int = 0) -> Value:
        """Reads a sum. sign: that of its first term, if it has been read."""
        if not sign:
            sign = -1 if self.take("-", "+") == "-" else 1
        total = sign * self._product()
        while operation := self.take("-", "+"):
            term = self._product()
            total = total - term if operation == "-" else total + term
        return total

    def _product(self) -> Value:
        value = self._power()
        while True:
            start = self.at
            times_ten = (
                self.token() in ("x", "X") and self.token(1) == "10" and self.token(2) == "^"
            )
            implicit = self.token() in (r"\sqrt", r"\pi") or (
                self.token() == "(" and not self.within
            )
            operation = "*" if times_ten else self.take("*", "/")
            self.at += times_ten
            if not operation and not implicit:
                return value
            try:
                factor = self._power()
            except NoNumber:  # what follows is not a part of the number
                self.at = start
                return value
            value = value / factor if operation == "/" else value * factor

    def _power(self) -> Value:
        base = self._atom()
        if self.token() != "^" or _DEGREE.match(self.text, self.starts[self.at]):
            return base
        start = self.at
        self.at += 1
        sign = -1 if self.take("-") else 1
        try:
            exponent = sign * self._atom()
        except NoNumber:
            self.at = start
            return base
        if isinstance(exponent, float):
            raise NoNumber("an irrational exponent")
        return _root(_integer_power(base, exponent.numerator), exponent.denominator)

    def _atom(self) -> Value:
        if self.at < len(self.tokens) and self.kinds[self.at] == "number":
            return self._digits()
        opening = self.take("(", "{", r"\frac", r"\sqrt", r"\pi")
        if opening == r"\frac":
            above = self._argument()
            return above / self._argument()
        if opening == r"\sqrt":
            degree: Value = Fraction(2)
            if self.take("["):
                degree = self._sum()
                self.need("]")
            if isinstance(degree, float) or degree.denominator != 1:
                raise NoNumber("a root of this degree")
            return _root(self._argument(), degree.numerator)
        if opening == r"\pi":
            return math.pi
        if not opening:
            raise NoNumber(f"{self.token()} is no number")
        value = self._sum()
        self.need(")" if opening == "(" else "}")
        return value

    def _argument(self) -> Value:
        if self.token() not in ("{", "("):
            raise NoNumber("an argument expected")
        return self._atom()

    def _digits(self) -> Value:
        """Reads a number in digits, or a mixed number: 1 1/2, 1\\frac{1}{2}."""
        token = self.token()
        if len(token) > _LONGEST:
            raise NoNumber("too many digits")
        self.at += 1
        self.decimal = self.decimal or "." in token
        value = Fraction(token.replace(",", "").replace(THIN, "").replace("'", ""))
        if not token.isdigit():
            return value
        if self.token() == r"\frac":
            part = self._atom()
            if isinstance(part, float) or not 0 < part < 1:
                raise NoNumber("no mixed number")
            return value + part
        above = self.token()
        below = self.token(2)
        if above.isdigit() and self.token(1) == "/" and below.isdigit() and int(above) < int(below):
            self.at += 3
            return value + Fraction(int(above), int(below))
        return value


def _finite(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        raise NoNumber("too large")
    return value


def _integer_power(base: Value, exponent: int) -> Value:
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > _MOST_BITS:
            raise NoNumber("too large a power")
    return base**exponent


def _root(value: Value, degree: int) -> Value:
    """Returns a root, exactly where it is rational."""
    if degree == 1:
        return value
    if value < 0 or degree < 1:
        raise NoNumber("no real root")
    if isinstance(value, Fraction):
        roots = [round(part ** (1 / degree)) for part in (value.numerator, value.denominator)]
        if roots[0] ** degree == value.numerator and roots[1] ** degree == value.denominator:
            return Fraction(*roots)
    return float(value) ** (1 / degree)
