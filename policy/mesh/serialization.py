"""Values as bytes, between the processes of a run: JSON, and nothing that could execute anything.

What JSON lacks becomes an object with one key, its kind: tuples, dicts with keys of any kind, numpy arrays, paths, and objects of
the classes that `carried` was told of.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

_CARRIED: dict[str, type] = {}


def carried(*kinds: type) -> type:
    """Lets objects of these classes travel: dataclasses and named tuples by their fields, exceptions by their text. Usable as a
    decorator of one."""
    for kind in kinds:
        _CARRIED[kind.__name__] = kind
    return kinds[0]


carried(OSError)


def write(value: Any) -> bytes:
    """Raises TypeError for what is of no kind that is carried."""
    return json.dumps(_plain(value)).encode()


def read(text: bytes) -> Any:
    """The value again; numbers of numpy are Python's, and an exception is of the nearest class that is carried."""
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
    if kind := next((each for each in type(value).__mro__ if _CARRIED.get(each.__name__) is each), None):
        if isinstance(value, BaseException):
            return {kind.__name__: str(value)}
        fields = [getattr(value, name) for name in _fields(kind)]
        return {kind.__name__: [_plain(each) for each in fields]}
    if type(value) is tuple:
        return {"tuple": [_plain(each) for each in value]}
    raise TypeError(f"{type(value).__name__} cannot be told to the other processes")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, content)] = plain.items()
    if kind == "dict":
        return {_value(key): _value(each) for key, each in content}
    if kind == "path":
        return Path(content)
    if kind == "array":
        dtype, shape, data = content
        return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
    if kind == "tuple":
        return tuple(_value(each) for each in content)
    made = _CARRIED[kind]
    return made(content) if issubclass(made, BaseException) else made(*map(_value, content))


def _fields(kind: type) -> tuple[str, ...]:
    named = getattr(kind, "_fields", None)
    return named if named is not None else tuple(each.name for each in dataclasses.fields(kind))
