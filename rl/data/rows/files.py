"""Reads data files: JSONL, JSON, CSV, TSV and Parquet. A value stays what the file says: a text
stays a text."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rl.errors import DataError

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData


@dataclass(frozen=True)
class Malformed:
    """A row that cannot be read; `text` says why."""

    text: str


DataRow: TypeAlias = Mapping[str, object]
"""The columns of a row by name, with the values of its source."""

Rows = Iterator[tuple[str, dict[str, Any] | Malformed]]
"""(place of the row for messages, the row)."""

_PACKED = (".gz", ".zst", ".zip", ".bz2", ".xz", ".tar")

_DEEPEST = 100
"""Most lists and objects inside each other in a row."""

_LONGEST_CELL = 2**31 - 1
"""Most characters of a cell of a CSV file. Python's own bound is 131,072, less than a long
conversation."""

_BATCH_BYTES = 16 * 2**20
_BATCH_ROWS = 1024
"""Most bytes and rows of a Parquet file that are read at a time. Equal values count once in its
metadata."""
_BUFFER = 2**20
"""Bytes that are read at a time of each column of a Parquet file."""


def read_file(path: Path) -> Rows:
    """Reads a data file by its suffix. Raises DataError for one that cannot be read."""
    kind = path.suffix.lower()
    if kind in _PACKED:
        raise DataError(f"{path}: a packed file; unpack it")
    if kind not in READERS:
        raise DataError(f"{path}: unknown kind of file; there are {', '.join(READERS)}")
    return READERS[kind](path)


def problem_of(value: object, depth: int = 0) -> str | None:
    """Returns why no tokenizer and no reward can read a value; None: they can."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            wrong = f"{value[error.start]!r} at character {error.start} of {value[:20]!r}"
            return (
                f"a text holds half of a surrogate pair ({wrong}); remove it or write the full "
                "character"
            )
    elif isinstance(value, (dict, list, tuple)):
        if depth > _DEEPEST:
            return f"nested more than {_DEEPEST} deep"
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return next(
            (problem for part in parts if (problem := problem_of(part, depth + 1)) is not None),
            None,
        )
    return None


@dataclass(frozen=True)
class _Line:
    """A line of a file. `problem`: why its bytes are not UTF-8; None: they are."""

    number: int
    text: str
    problem: str | None = None


def _lines(path: Path) -> Iterator[_Line]:
    """Yields the lines of a file. Bytes that are not UTF-8 spoil only their own line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            try:
                yield _Line(number, raw.decode(encoding))
            except UnicodeDecodeError as error:
                wrong = f"byte 0x{raw[error.start]:02x} at place {error.start}"
                problem = f"not UTF-8 ({wrong}); save the file as UTF-8"
                yield _Line(number, raw.decode(encoding, errors="replace"), problem)


def _jsonl_rows(path: Path) -> Rows:
    for line in _lines(path):
        where = f"{path}:{line.number}"
        if line.problem is not None:
            yield where, Malformed(line.problem)
        elif line.text.strip():
            yield where, parse_row(line.text)


def _json_rows(path: Path) -> Rows:
    """Reads a .json file: a list of objects, one object, or JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        yield from _jsonl_rows(path)  # which names the lines that are not UTF-8
        return
    value = parse(text)
    if isinstance(value, Malformed):
        if text.lstrip().startswith("["):
            raise DataError(f"{path}: {value.text}")
        yield from _jsonl_rows(path)
        return
    if isinstance(value, dict) and (wrong := _not_one_row(value)):
        raise DataError(f"{path}: {wrong}")
    for number, row in enumerate(value if isinstance(value, list) else [value]):
        yield f"{path}: entry {number}", _as_row(row)


def _not_one_row(value: DataRow) -> str | None:
    """Returns what is wrong with an object that holds rows and is none itself, or None. A row may
    hold lists of messages, and texts next to them."""
    lists = [each for each in value.values() if isinstance(each, list)]
    if len(lists) != len(value) or not lists:
        return None
    has_objects = [any(isinstance(each, dict) for each in part) for part in lists]
    is_messages = all(
        isinstance(each, dict) and {"role", "from"} & each.keys() for part in lists for each in part
    )
    if is_messages:
        return None
    if len(lists) == 1 and all(has_objects):
        return f"its rows stand below the key {next(iter(value))!r}; write the list of rows alone"
    if any(has_objects) or len({len(part) for part in lists}) > 1:
        return None
    return "one object with a list for each column; write a list of rows, [{...}, {...}]"


def parse_row(text: str) -> dict[str, Any] | Malformed:
    """Returns the row that a line of JSON holds."""
    return _as_row(parse(text))


def parse(text: str) -> Any:
    """Returns the value of a JSON text, or why there is none as Malformed."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        return Malformed(f"not valid JSON: {error.msg} ({line}column {error.colno})")
    except RecursionError:
        return Malformed("not valid JSON: nested too deeply")
    except ValueError:  # Python refuses to read longer integers
        return Malformed(
            "not valid JSON: an integer has more than 4,300 digits; write it as a text"
        )


def _as_row(value: object) -> dict[str, Any] | Malformed:
    if isinstance(value, Malformed):
        return value
    if isinstance(value, dict):
        return next((wrong for item in value.items() if (wrong := _not_finite(*item))), value)
    return Malformed(f"must be an object {{...}}, is {type(value).__name__}")


def _not_finite(name: str, value: object) -> Malformed | None:
    """Returns what is wrong with a column of JSON that holds a number that is not finite, or None.
    Python reads NaN, Infinity and 1e999, which a reward would turn into a score."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return Malformed(f"column `{name}` holds {one}, which is no finite number; write null")
        if isinstance(one, (dict, list)):
            waiting += one.values() if isinstance(one, dict) else one
    return None


def _csv_rows(path: Path) -> Rows:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    problems: dict[int, str] = {}

    def texts() -> Iterator[str]:
        for line in _lines(path):
            if line.problem is not None:
                problems[line.number] = line.problem
            yield line.text

    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    try:
        names = _header(path, next(reader, []), problems)
    except csv.Error as error:
        raise DataError(f"{path}:1: not valid CSV: {error}") from None
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"{path}:{first}", Malformed(f"not valid CSV: {error}")
            continue
        wrong = [
            problems[number] for number in range(first, reader.line_num + 1) if number in problems
        ]
        if not cells:  # an empty line
            continue
        yield f"{path}:{first}", _csv_row(names, cells, wrong)


def _header(path: Path, names: list[str], problems: dict[int, str]) -> list[str]:
    """Returns the names of the columns. Raises DataError for names that are not UTF-8 or occur
    twice."""
    if problems:
        raise DataError(f"{path}:{min(problems)}: {problems[min(problems)]}")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(
            f"{path}:1: the header has the column `{twice[0]}` twice; give each column a name of "
            "its own"
        )
    return names


def _csv_row(names: list[str], cells: list[str], problems: list[str]) -> dict[str, Any] | Malformed:
    if problems:
        return Malformed(problems[0])
    if len(cells) != len(names):
        return Malformed(f"{len(cells)} fields, but the header has {len(names)}")
    return dict(zip(names, cells, strict=True))


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        # Without a buffer, pages of a full row group are in memory at a time.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
            for batch in file.iter_batches(batch_size=_batch_size(file.metadata)):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def _batch_size(metadata: FileMetaData) -> int:
    """Returns the rows of a Parquet file that are read at a time: about _BATCH_BYTES, by the sizes
    in its metadata."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    widest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    return min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, widest)))


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}
