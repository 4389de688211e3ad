"""Defines a finding of a check of tokenizer and data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rl.errors import DataError

Level = Literal["refuse", "warn", "note"]


class Refused(DataError):
    """Tokenizer or data with which a run would learn something else than its author means."""


@dataclass(frozen=True)
class Finding:
    """The result of a check that did not pass, or a remark.

    check: its number in docs/diagnose.md. level: refuse (a run does not start), warn, note. text:
    what is wrong and where.
    change: what to type. stage: name of the stage; None: the full run.
    """

    check: int
    level: Level
    text: str
    change: str = ""
    stage: str | None = None

    def line(self) -> str:
        """Returns the finding as one line of a table."""
        return f"{self.level} {self.check:2}  {self.message()}"

    def message(self) -> str:
        """Returns stage, text and what to type."""
        place = f"{self.stage}: " if self.stage else ""
        end = f". {self.change}" if self.change else ""
        return f"{place}{self.text}{end}"

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as values that JSON can hold."""
        return asdict(self)
