"""Reads bodies of requests: JSON with a limit of bytes, checked fields, unknown ones refused by
name."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from starlette.requests import Request

from rewards.suggest import nearest
from rl.serve.errors import ApiError, invalid
from rl.serve.limits import ServerLimits

# Of a body that is too large, so many times the limit is read and dropped before the answer: a
# client that is still sending when the connection is closed does not see the answer.
_READ = 8
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body, which is read up to its first wrong item."""
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


class Fields(BaseModel):
    """An object in a body. A field that is null counts as left out, an unknown one is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}


class Body(Fields):
    """The fields of a request.

    ignored: fields that change nothing about an answer. neutral: fields of the API that Duet does
    not compute, with the values that ask for nothing; any other value is refused.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Checks the fields of a body. Raises ApiError with the name of the first wrong one."""
        kept = {}
        for name, value in fields.items():
            if value is None or name in cls.ignored:
                continue
            if name in cls.neutral:
                _check_neutral(name, value, cls.neutral[name])
                continue
            if name not in cls.model_fields:
                known = [*cls.model_fields, *cls.neutral, *cls.ignored]
                message = f"no such field{nearest(name, known)}"
                raise invalid(name, message, "unknown_parameter")
            kept[name] = value
        try:
            return cls.model_validate(kept)
        except ValidationError as error:
            raise _first_error(error, kept) from None


def _check_neutral(name: str, value: object, neutral: Sequence[object]) -> None:
    """Raises ApiError for a value that asks for something."""
    if any(type(value) is type(each) and value == each for each in neutral):
        return
    accepted = ", ".join(json.dumps(each) for each in (None, *neutral))
    raise invalid(
        name, f"not supported; leave it out, or set it to {accepted}", "unsupported_parameter"
    )


@dataclass(frozen=True)
class _Problem:
    """A field that does not fit. depth: how far inside the body it is."""

    param: str
    depth: int
    message: str
    code: str


def _first_error(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """Returns the first wrong field as an answer. A field of several types has an error for each;
    those that lie deepest inside of it are named."""
    details = error.errors(include_url=False, include_input=False)
    first = [each for each in details if each["loc"][:1] == details[0]["loc"][:1]]
    problems = [_problem(each, body) for each in first]
    deepest = max(problems, key=lambda problem: problem.depth)
    texts = [each.message for each in problems if each.param == deepest.param]
    return invalid(deepest.param or None, "; or: ".join(dict.fromkeys(texts)), deepest.code)


def _problem(detail: ErrorDetails, body: dict[str, Any]) -> _Problem:
    param = ""
    depth = 0
    value: Any = body
    for part, following in zip_longest(detail["loc"], detail["loc"][1:]):
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            param += f"[{part}]"
            value = value[part]
            depth += 1
        elif isinstance(value, dict) and (part in value or detail["type"] == "missing"):
            inner = value.get(part)
            in_this = following in value or (following and detail["type"] == "missing")
            if in_this and not isinstance(inner, (dict, list)):
                continue  # the name of a member of a union, which is that of a field, too
            param += f".{part}" if param else str(part)
            value = inner
            depth += 1
        # Other parts are names of pydantic for the members of a union.
    message = detail["msg"].removeprefix("Value error, ")
    return _Problem(param, depth, message, _CODES.get(detail["type"], "invalid_value"))


async def read_json(request: Request, limits: ServerLimits) -> dict[str, Any]:
    """Returns the object in the body of a request.

    Raises ApiError: 408 for a body that is not there in time, 413 for one with too many bytes, 400
    for anything but an object of JSON, for the words NaN and Infinity, for numbers that no float
    holds (1e999), and for texts that have no UTF-8.
    """
    try:
        async with asyncio.timeout(limits.sending):
            content = await _content(request, limits.body)
    except TimeoutError:
        message = f"the body was not complete after {limits.sending:g} seconds"
        raise ApiError(408, message, None, "request_timeout") from None
    try:
        text = content.decode("utf-8")
        body = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # halves of surrogate pairs have none
    except RecursionError:
        raise ApiError(400, "the body is nested too deep", None, "invalid_json") from None
    except UnicodeEncodeError:
        message = "the body holds half of a surrogate pair, which is no character"
        raise ApiError(400, message, None, "invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", None, "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be an object of JSON", None, "invalid_json")
    return body


async def _content(request: Request, most: int) -> bytearray:
    """Returns the body of a request. Raises ApiError for more than `most` bytes."""
    content = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most * _READ:
            break
        if size <= most:
            content += part
    if size > most:
        message = f"the body has more than {most} bytes (--max-body-mb)"
        raise ApiError(413, message, None, "request_too_large")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is too large for a number")
    return number
