"""Types of the lines of events.jsonl and samples.jsonl.

A file may be damaged or of an older version, so code that reads any folder takes a line as a
`RawLine` and checks what it uses. A line that this process wrote, or that was checked, has the keys
of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypeAlias, TypedDict

from policy.json_types import JsonValue

RawLine: TypeAlias = Mapping[str, object]
"""A line as it was read: keys may be missing or hold other values."""


class RecordedLine(TypedDict):
    """What every line has: the stage and its step, from which a run that continues cuts."""

    stage: str
    step: int


class MediaEntry(TypedDict):
    """A picture or sound of a prompt. rows: rows of embeddings that stand for it. A picture has
    `width` and `height` in pixels, a sound `seconds` and its `rate` in Hz."""

    kind: str
    digest: NotRequired[str]
    width: NotRequired[int]
    height: NotRequired[int]
    seconds: NotRequired[float]
    rate: NotRequired[int]
    rows: NotRequired[int]


class SampleRecord(RecordedLine):
    """A completion; `sample_lines` of rl/stages/sampling/records.py says what its keys hold."""

    prompt_id: int
    sample: int
    version: int | list[list[int]]
    prompt: str | list[dict[str, JsonValue]]
    completion: str
    raw: NotRequired[str]
    tokens: list[int]
    finish: str
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float | None
    columns: dict[str, JsonValue]
    reward_log: NotRequired[dict[str, str]]
    n_prompt: int
    n: int
    at: NotRequired[int]
    faults: NotRequired[dict[str, str]]
    eval: NotRequired[bool]
    media: NotRequired[list[MediaEntry]]
    segments: NotRequired[list[int]]
    source: NotRequired[str]
