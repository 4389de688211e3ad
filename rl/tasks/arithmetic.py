"""Generates sums, differences and products of small integers, which a model with random weights can
learn.

The problems are all expressions `a op b [op c ...]` with operands from `min_operand` to
`max_operand`, numbered in mixed radix. If there are more than `problems`, a fixed random sample of
that size is drawn.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rl.tasks import Split, TaskProblem, hash_share, is_held_out

_DRAW = 20250601


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the problems and their demonstrations. Raises ValueError for invalid ones."""

    operations: list[str] = field(default_factory=lambda: ["+"])
    """Any of + - *; products bind tighter than sums."""
    terms: int = 2
    """Number of operands of a problem."""
    min_terms: int | None = None
    """Fewest operands, for problems of several lengths; null: every problem has `terms`
    operands."""
    decay: float = 1.0
    """With `min_terms`: number of problems with n + 1 operands per problem with n. Below 1, long
    problems are rare."""
    min_operand: int = 0
    max_operand: int = 99
    style: Literal["plain", "reversed", "scratchpad", "steps"] = "plain"
    """Form of the demonstration. For 57+68: plain `125`; reversed `521`, units first; scratchpad
    `15+110=125`, sums of the columns first. For 2+3*4+5: steps `2+12+5=14+5=19`, one operation per
    step."""
    prompt: str = "{problem}="
    """Text of the prompt."""
    spaces: bool = False
    """Write the problem of the prompt with spaces around its operations: `57 + 68`."""
    end: str = ""
    """Text after the demonstration."""
    noise: float = 0.0
    """Share of the digits of training demonstrations that are wrong, chosen by a hash of the
    problem. `answer` stays right."""
    eval_share: float = 0.1
    """Share of the problems for evaluation, chosen by a hash of the problem."""
    problems: int = 50_000
    """Most distinct problems in both splits together."""

    def __post_init__(self):
        for name in ("terms", "min_operand", "max_operand", "problems"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"`{name}` must be an integer, got {getattr(self, name)!r}")
        if self.min_terms is not None and (
            type(self.min_terms) is not int or not 2 <= self.min_terms <= self.terms
        ):
            raise ValueError(
                f"`min_terms` must be an integer from 2 to `terms`, got {self.min_terms!r}"
            )
        if not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise ValueError(f"`decay` must lie above 0 and at most at 1, got {self.decay!r}")
        if (
            not isinstance(self.operations, list)
            or not self.operations
            or set(self.operations) - set("+-*")
        ):
            raise ValueError(f"`operations` must be a list of + - *, got {self.operations!r}")
        if not 2 <= self.terms <= 8:
            raise ValueError(f"`terms` must lie between 2 and 8, got {self.terms}")
        if not 0 <= self.min_operand < self.max_operand <= 10**6:
            raise ValueError(
                "`max_operand` must lie above `min_operand` and below 10**6, got "
                f"{self.max_operand}"
            )
        if self.style not in ("plain", "reversed", "scratchpad", "steps"):
            raise ValueError(
                f"`style` must be plain, reversed, scratchpad or steps, got {self.style!r}"
            )
        if not isinstance(self.prompt, str) or self.prompt.count("{problem}") != 1:
            raise ValueError(f"`prompt` must hold {{problem}} once, got {self.prompt!r}")
        if not isinstance(self.spaces, bool):
            raise ValueError(f"`spaces` must be true or false, got {self.spaces!r}")
        if not isinstance(self.end, str):
            raise ValueError(f"`end` must be a text, got {self.end!r}")
        if not isinstance(self.noise, (int, float)) or not 0 <= self.noise < 1:
            raise ValueError(f"`noise` must be at least 0 and below 1, got {self.noise!r}")
        if not isinstance(self.eval_share, (int, float)) or not 0 < self.eval_share < 1:
            raise ValueError(f"`eval_share` must lie between 0 and 1, got {self.eval_share!r}")
        if self.problems < 10:
            raise ValueError(f"`problems` must be at least 10, got {self.problems}")


def count(options: Options) -> int:
    """Returns the number of distinct expressions with `terms` operands."""
    operands = options.max_operand - options.min_operand + 1
    return len(set(options.operations)) ** (options.terms - 1) * operands**options.terms


def problems(options: Options, split: Split) -> list[TaskProblem]:
    """Returns the problems of a split. The hash orders the evaluation's, so that the first n are a
    random sample."""
    expressions = [
        expression(number, one) for one in _by_length(options) for number in _numbers(one)
    ]
    chosen = [
        e for e in expressions if is_held_out(identity(e), options.eval_share) == (split == "eval")
    ]
    if split == "eval":
        chosen.sort(key=lambda e: (hash_share(identity(e)), e))
    return [_problem(e, options, noise=options.noise if split == "train" else 0.0) for e in chosen]


def expression(number: int, options: Options) -> str:
    """Returns the expression with a number in 0 .. count - 1, e.g. `12+34`."""
    operations = sorted(set(options.operations))
    operands = options.max_operand - options.min_operand + 1
    parts = []
    for place in range(options.terms):
        if place:
            number, which = divmod(number, len(operations))
            parts.append(operations[which])
        number, operand = divmod(number, operands)
        parts.append(str(operand + options.min_operand))
    return "".join(parts)


def identity(text: str) -> str:
    """Returns a text that is equal for equal problems, such as `34+12` and `12+34`, or `3*4+5` and
    `5+4*3`."""
    return "".join(sorted(sign + "*".join(sorted(factors)) for sign, factors in _summands(text)))


def value(text: str) -> int:
    """Returns the value of an expression."""
    return sum(_values(text))


def demonstration(text: str, style: str) -> str:
    """Returns the demonstration of an expression in a style of `Options`."""
    answer = str(value(text))
    if style == "reversed":
        return answer[::-1]
    if style == "plain":
        return answer
    if style == "steps":
        return "=".join(_one_by_one(text))
    steps = _columns(text)
    return "=".join([_sum_text(step) for step in steps if len(step) > 1] + [answer])


def _problem(text: str, options: Options, noise: float) -> TaskProblem:
    answer = demonstration(text, "reversed" if options.style == "reversed" else "plain")
    completion = _with_noise(demonstration(text, options.style), text, noise) + options.end
    shown = re.sub(r"([-+*])", r" \1 ", text) if options.spaces else text
    return TaskProblem(
        options.prompt.replace("{problem}", shown), completion, {"answer": answer, "problem": text}
    )


def _with_noise(demonstration: str, text: str, noise: float) -> str:
    """Replaces a share of the digits by other digits, the same ones each time."""
    if not noise:
        return demonstration
    result = ""
    for place, sign in enumerate(demonstration):
        chance = hash_share(
            f"{text} {place}"
        )  # below `noise` it is uniform, so it also draws the wrong digit
        wrong = sign.isdigit() and chance < noise
        result += str((int(sign) + 1 + int(9 * chance / noise)) % 10) if wrong else sign
    return result


def _by_length(options: Options) -> list[Options]:
    """Returns the options of each number of operands, with its share of the problems."""
    lengths = range(options.min_terms or options.terms, options.terms + 1)
    shares = [options.decay ** (n - lengths[0]) for n in lengths]
    counts = [math.ceil(options.problems * share / sum(shares)) for share in shares]
    return [
        replace(options, terms=n, min_terms=None, problems=max(10, count))
        for n, count in zip(lengths, counts, strict=True)
    ]


def _numbers(options: Options) -> list[int]:
    total = count(options)
    if total <= options.problems:
        return list(range(total))
    generator = np.random.Generator(np.random.Philox(_DRAW))
    drawn = {}
    while len(drawn) < options.problems:
        # Python integers, because three operands up to 10**6 exceed 64 bits.
        words = generator.integers(0, 2**32, size=(options.problems, 6), dtype=np.uint64).tolist()
        for row in words:
            number = sum(word << (32 * i) for i, word in enumerate(row)) % total
            drawn.setdefault(number)
            if len(drawn) == options.problems:
                break
    return list(drawn)


def _summands(text: str) -> list[tuple[str, list[str]]]:
    """Returns the signed products: `2*3-4` -> [("+", ["2", "3"]), ("-", ["4"])]."""
    return [
        (sign or "+", product.split("*")) for sign, product in re.findall(r"([+-]?)([\d*]+)", text)
    ]


def _values(text: str) -> list[int]:
    """Returns the signed values of the summands."""
    values = []
    for sign, factors in _summands(text):
        product = 1
        for factor in factors:
            product *= int(factor)
        values.append(-product if sign == "-" else product)
    return values


def _columns(text: str) -> list[list[int]]:
    """Returns lists of numbers whose sums equal the value of `text`: its products, then the sums of
    its columns."""
    summands = _summands(text)
    values = _values(text)
    steps = []
    if len(values) == 1 and len(summands[0][1]) == 2:
        left, right = summands[0][1]
        return [[int(left) * int(digit) * 10**place for place, digit in enumerate(reversed(right))]]
    if any(len(factors) > 1 for _, factors in summands):
        steps.append(values)
    columns = max(len(str(abs(number))) for number in values)
    if columns > 1:
        signed = [(1 if number >= 0 else -1, abs(number)) for number in values]
        steps.append(
            [sum(s * (n // 10**c % 10) for s, n in signed) * 10**c for c in range(columns)]
        )
    return steps


def _one_by_one(text: str) -> list[str]:
    """Returns `text` after each of its operations: products from the left, then sums from the
    left."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    operations = re.findall(r"[+*-]", text)
    steps = []
    while operations:
        at = operations.index("*") if "*" in operations else 0
        left = numbers[at]
        right = numbers.pop(at + 1)
        operation = operations.pop(at)
        numbers[at] = (
            left * right if operation == "*" else left + right if operation == "+" else left - right
        )
        rest = zip(operations, numbers[1:], strict=True)
        steps.append(
            str(numbers[0]) + "".join(f"{operation}{number}" for operation, number in rest)
        )
    return steps


def _sum_text(numbers: list[int]) -> str:
    return str(numbers[0]) + "".join(f"{number:+d}" for number in numbers[1:])
