"""Serialization of values between the processes of a run, as JSON: reading a message never executes
code.

A value that JSON lacks becomes an object with one key, the name of its type: tuples, dicts with
keys of any type, numpy arrays, bytes, paths, and objects of the classes that `register_type` has
registered.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_REGISTERED: dict[str, type] = {}


def register_type(*kinds: type[T]) -> type[T]:
    """Registers classes whose objects can be serialized. Returns the first, so that it can decorate
    a class.

    Dataclasses and named tuples are serialized by their fields, exceptions by their text.
    """
    for kind in kinds:
        _REGISTERED[kind.__name__] = kind
    return kinds[0]


register_type(OSError)


def write(value: object) -> bytes:
    """Serializes a value. Raises TypeError if its type is not registered."""
    return json.dumps(_plain(value, {})).encode()


def read(text: bytes) -> Any:
    """Reads a value back. Numpy numbers become Python numbers; an exception gets its nearest
    registered class."""
    return _value(json.loads(text), [])


def _plain(value: object, seen: dict[int, int]) -> Any:
    """Returns a value as JSON. seen: number of each bytes object so far by its id; a file that
    several objects refer to is written once."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_plain(each, seen) for each in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(key, seen), _plain(each, seen)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, bytes):
        if id(value) in seen:
            return {"again": seen[id(value)]}
        seen[id(value)] = len(seen)
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
    if kind := next(
        (each for each in type(value).__mro__ if _REGISTERED.get(each.__name__) is each), None
    ):
        if isinstance(value, BaseException):
            return {kind.__name__: str(value)}
        fields = [getattr(value, name) for name in _fields(kind)]
        return {kind.__name__: [_plain(each, seen) for each in fields]}
    if type(value) is tuple:
        return {"tuple": [_plain(each, seen) for each in value]}
    raise TypeError(f"{type(value).__name__} cannot be told to the other processes")


def _value(plain: Any, seen: list[bytes]) -> Any:
    """Reads JSON. seen: the bytes objects so far, in the order in which they were written."""
    if isinstance(plain, list):
        return [_value(each, seen) for each in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, content)] = plain.items()
    if kind == "dict":
        return {_value(key, seen): _value(each, seen) for key, each in content}
    if kind == "path":
        return Path(content)
    if kind == "bytes":
        seen.append(base64.b64decode(content))
        return seen[-1]
    if kind == "again":
        return seen[content]
    if kind == "array":
        dtype, shape, data = content
        return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
    if kind == "tuple":
        return tuple(_value(each, seen) for each in content)
    cls = _REGISTERED[kind]
    return (
        cls(content)
        if issubclass(cls, BaseException)
        else cls(*(_value(each, seen) for each in content))
    )


def _fields(kind: type) -> tuple[str, ...]:
    named = getattr(kind, "_fields", None)
    return named if named is not None else tuple(each.name for each in dataclasses.fields(kind))
