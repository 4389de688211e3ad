"""Tells rows of data that changed between the first start of a run and its continuation.

run.json holds a fingerprint of the rows of each stage and of the held-out problems. It is the sum
of a hash of each row with its number, so that it does not depend on the number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import TypedDict

from policy.mesh import processes
from rl.config.data import DataOptions, datasets_of
from rl.config.run import RunConfig
from rl.data.encoded import Example, Problem
from rl.data.shard import Shard
from rl.errors import DataError
from rl.records.run_files import attempt_entries
from rl.stages.stage import StageKind
from rollout.media.expand import Expanded
from rollout.media.reference import Reference

HELD_OUT = "evaluation"
_BITS = 128


class Fingerprint(TypedDict):
    """The number of rows, and the sum of their hashes."""

    rows: int
    sha256: str


Fingerprints = Mapping[str, Fingerprint]
"""Name of a stage, or HELD_OUT -> the fingerprint of its rows."""


def fingerprints(stages: Sequence[StageKind], evaluated: Sequence[Problem]) -> Fingerprints:
    """Returns the fingerprints of the rows, and of the problems of the evaluations. All processes
    call it in the same order."""
    sums: dict[int, int] = {}
    shards = {
        stage.name: rows
        for stage in stages
        if isinstance(rows := getattr(stage, "rows", None), Shard)
    }
    held = {_held_out_of(stage.name): getattr(stage, "held_out_rows", None) for stage in stages}
    shards |= {name: rows for name, rows in held.items() if isinstance(rows, Shard)}
    for shard in shards.values():
        if id(shard) not in sums:
            sums[id(shard)] = _of_shard(shard)
    parts = processes.all_gather_object([sums[id(shard)] for shard in shards.values()])
    result = {
        name: _entry(shard.total, sum(part[place] for part in parts))
        for place, (name, shard) in enumerate(shards.items())
    }
    if evaluated:  # every process has all of them
        result[HELD_OUT] = _entry(len(evaluated), _sum(enumerate(evaluated)))
    return result


def check(
    config: RunConfig, now: Fingerprints, directory: Path, first_stage: int, ended: bool
) -> str | None:
    """Compares the rows with those of the newest attempt in run.json. Returns a note if changed
    ones are allowed.

    first_stage: index of the stage that goes on. ended: whether that stage is over. Raises
    DataError for rows of it or of a later stage that changed.
    """
    recorded = [
        entry["data"]
        for entry in attempt_entries(directory, [])
        if isinstance(entry.get("data"), dict)
    ]
    names = config.stage_names[first_stage + ended :]
    if not recorded or not names:
        return None
    changed = [
        text
        for name in (*names, *map(_held_out_of, names), HELD_OUT)
        if (text := _difference(_described(config, name), recorded[-1].get(name), now.get(name)))
    ]
    if not changed:
        return None
    if config.run.changed_data == "allow":
        return f"run.changed_data: allow: {'; '.join(changed)}"
    raise DataError(
        "\n".join(
            [
                *changed,
                "restore the rows, or set run.changed_data=allow to go on with the rows as they "
                "are now",
            ]
        )
    )


def _difference(what: str, then: object, now: Fingerprint | None) -> str | None:
    if (
        not isinstance(then, dict) or now is None or then == now
    ):  # an older version recorded nothing
        return None
    if then.get("rows") != now["rows"]:
        return (
            f"{what} changed: {then.get('rows'):,} rows when the run was last started, "
            f"{now['rows']:,} now"
        )
    return f"{what} changed: {now['rows']:,} rows as before, with other contents"


def _held_out_of(stage: str) -> str:
    """Returns the name of the fingerprint of the held-out rows of a stage."""
    return f"{stage}.held_out"


def _described(config: RunConfig, name: str) -> str:
    data: Sequence[DataOptions] = ()
    rows = f"the rows of {name}"
    if name == HELD_OUT:
        data = datasets_of(config.evaluation and config.evaluation.data)
        rows = "the held-out rows"
    for stage, options in zip(config.stage_names, config.stages, strict=True):
        if name == stage:
            data = datasets_of(options.data or config.data)
        elif name == _held_out_of(stage) and options.held_out is not None:
            data = datasets_of(options.held_out.data)
            rows = f"the held-out rows of {stage}"
    names = ", ".join(each.path or f"task {each.task}" for each in data)
    return f"{rows} ({names})" if names else rows


def _entry(rows: int, total: int) -> Fingerprint:
    return {"rows": rows, "sha256": f"{total % 2**_BITS:0{_BITS // 4}x}"}


def _of_shard(shard: Shard) -> int:
    examples = shard.numbered_examples()
    return _sum((number, (row, examples.get(number))) for number, row in shard.numbered().items())


def _sum(numbered: Iterable[tuple[int, object]]) -> int:
    return sum(_hash(number, row) for number, row in numbered) % 2**_BITS


def _hash(number: int, row: object) -> int:
    text = json.dumps([number, row], default=_plain, separators=(",", ":"))
    return int.from_bytes(
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[: _BITS // 8], "big"
    )


def _plain(value: object) -> object:
    """Returns what counts of an object of a row: tokens, columns, and the digests of pictures and
    sounds."""
    if isinstance(value, Example):  # its prompt and answers are the tokens
        return [value.columns, value.margin]
    if isinstance(value, Expanded):
        return [value.tokens.tolist(), value.references]
    if isinstance(value, Reference):
        return [value.kind, value.digest, list(value.size)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Number) or hasattr(value, "isoformat"):
        return str(value)
    return type(value).__name__
