"""How `rl inspect` and the start of a run write the faults of tokenizer and data."""

from __future__ import annotations

from typing import Any

from rl.errors import DataError, Fault


class Refused(DataError):
    """Tokenizer or data with which a run would learn something else than its author means."""


def line(fault: Fault) -> str:
    """Returns a fault as a line of a table: its level, the number of its check, its message."""
    return f"{fault.level} {fault.check:2}  {fault.message()}"


def to_json(fault: Fault) -> dict[str, Any]:
    """Returns a fault as `rl inspect --json` and inspection.json hold it."""
    return {
        "check": fault.check,
        "level": fault.level,
        "text": fault.text,
        "change": fault.change,
        "stage": fault.stage,
    }
