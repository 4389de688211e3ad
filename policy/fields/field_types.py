"""Compares the values of a DecoderConfig with the types that its fields declare. Free of jax."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Integer fields that may be negative or 0: offsets, ids and numbers of layers. All others count
# something.
_ANY_INTEGER = ("offset", "pad_id", "multipliers", "sections", "deepstack")
# Numbers that are divided by, or of which a power or a logarithm is taken; and numbers of which a
# root is taken.
_POSITIVE = ("theta", "softcap", "logit_softcap", "factor")
_NOT_NEGATIVE = ("eps", "norm_eps", "initializer_range")
# Fields that may be infinite: a bound that bounds nothing.
_ANY_SIZE = ("dt_limit",)


def wrong_fields(part: object) -> Iterator[str]:
    """Yields what is wrong with the fields of a dataclass and of the dataclasses in it: a value of
    another type than declared, an integer below 1, a number that is not finite, or one outside the
    domain of what is computed with it."""
    for name, hint in _hints(type(part)).items():
        yield from _wrong(name, getattr(part, name), hint)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _wrong(name: str, value: object, hint: object) -> Iterator[str]:
    if not _fits(value, hint):
        yield f"{name} is {_shown(value)}"
    elif is_dataclass(value):
        yield from wrong_fields(value)
    elif isinstance(value, tuple):
        for each in value:
            if is_dataclass(each):
                yield from wrong_fields(each)
            elif not isinstance(each, tuple):
                yield from _wrong_number(name, each)
    else:
        yield from _wrong_number(name, value)


def _wrong_number(name: str, value: object) -> Iterator[str]:
    if type(value) is int and value < 1 and name not in _ANY_INTEGER:
        yield f"{name} is {value}"
    if isinstance(value, float) and (
        math.isnan(value) or math.isinf(value) and name not in _ANY_SIZE
    ):
        yield f"{name} is {value}"
    if isinstance(value, (int, float)) and (
        name in _POSITIVE and value <= 0 or name in _NOT_NEGATIVE and value < 0
    ):
        yield f"{name} is {value}"


def _fits(value: object, hint: Any) -> bool:
    """Returns whether a value has a declared type. Integers fit floats, booleans are no numbers."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, type(inner[0])) and value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if hint in (Any, None, NoneType):
        return hint is Any or value is None
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(
            value, bool
        )
    return isinstance(value, hint)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
