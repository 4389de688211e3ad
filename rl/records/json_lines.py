"""Writes and reads JSON lines. They are strict JSON: a number that is not finite is written as
null."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def line(record: Mapping[str, object]) -> str:
    """Returns a record as one line of strict JSON."""
    return (
        json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        + "\n"
    )


def parse(data: bytes, place: str) -> dict[str, Any]:
    """Returns the record of a line. Raises ValueError, which names `place` (file:line), for a
    damaged one."""
    try:
        record = json.loads(data)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: damaged line; mend or delete it to go on")
    return record


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file without a torn last line. Raises ValueError for damage before the
    last line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for index, each in enumerate(lines):
        try:
            complete = each.endswith(b"\n") and isinstance(json.loads(each), dict)
        except ValueError:
            complete = False
        if not complete:
            if index < len(lines) - 1:
                raise ValueError(f"{path}:{index + 1}: damaged line; mend or delete it to go on")
            return lines[:index]
    return lines


def complete_end(data: mmap.mmap) -> int:
    """Returns the bytes of a file without a torn last line: one that has no end or is no JSON
    object."""
    end = data.rfind(b"\n") + 1
    start = data.rfind(b"\n", 0, end - 1) + 1 if end else 0
    try:
        return end if isinstance(json.loads(data[start:end]), dict) else start
    except ValueError:
        return start


def number_of_line(data: mmap.mmap, start: int) -> int:
    """Returns the number, from 1, of the line that begins at byte `start`."""
    return data[:start].count(b"\n") + 1


def _finite(value: object) -> object:
    """Converts a value for strict JSON: arrays become lists, numbers that are not finite become
    None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    if isinstance(value, str):
        # A byte-level model can write half of a surrogate pair, which has no UTF-8.
        return value.encode("utf-8", "replace").decode()
    to_list = getattr(value, "tolist", None)
    if to_list is not None:
        return _finite(to_list())
    return None if isinstance(value, float) and not math.isfinite(value) else value
