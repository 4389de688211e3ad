"""Reads the rows of a dataset from a generated task, a file, a folder, or the Hugging Face hub."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl.config.data import DataOptions
from rl.data import tasks
from rl.data.hub import hub_name
from rl.errors import ConfigError, DataError


@dataclass(frozen=True)
class Malformed:
    """A row that cannot be read; `text` says why."""

    text: str


_BATCH = 16
"""Rows of a table that are in memory at a time, because they may hold the bytes of pictures."""

Rows = Iterator[tuple[str, dict[str, Any] | Malformed]]
"""(place of the row for messages, the row)."""


def read_rows(options: DataOptions, held_out: bool, decode: bool = True) -> Rows:
    """Reads the rows of a task, a file, a folder or a dataset of the Hugging Face hub.

    held_out: read the split of an evaluation.
    decode: let the package `datasets` decode pictures and sounds; false: they stay {bytes, path}.
    Raises ConfigError for a name that does not exist, DataError for a source that cannot be read.
    """
    if options.task is not None:
        return _task_rows(options.task, options, held_out)
    assert options.path is not None  # DataOptions has a task or a path
    return _path_rows(options.path, options, held_out, decode)


def folder_of(options: DataOptions) -> Path:
    """Returns the folder that paths in rows start from: that of the data file, of a saved dataset, or of the file of a
    task. Rows of other tasks and of the hub start from the working directory."""
    name = options.path or (options.task or "").rpartition(":")[0]
    path = _existing(name)
    if path.is_dir() and options.path is not None:
        return path
    return path.parent if path.is_file() else Path()


def _existing(name: str) -> Path:
    """Returns the path of a file or folder that exists, also one that the package has; any other path as it is."""
    from rl.config.packaged import packaged

    path = Path(name)
    return path if path.exists() else packaged(path) or path


def _task_rows(task: str, options: DataOptions, held_out: bool) -> Rows:
    split = options.split or ("eval" if held_out else "train")
    try:
        problems = tasks.problems(task, options.options, cast(tasks.Split, split))  # another split is a ValueError
    except ValueError as error:
        raise ConfigError(f"data: {error}") from None
    for number, problem in enumerate(problems):
        row = {"prompt": problem.prompt, "completion": problem.completion, **problem.columns}
        yield f"task {task}, problem {number}", row


def _path_rows(name: str, options: DataOptions, held_out: bool, decode: bool) -> Rows:
    path = _existing(name)
    if path.is_dir():
        return _library_rows(options, held_out, decode, path)
    if path.is_file():
        kind = path.suffix.lower()
        if kind not in _READERS:
            raise DataError(f"{path}: unknown kind of file; there are {', '.join(_READERS)}")
        return _READERS[kind](path)
    if hub_name(name, alone=True) is None:
        raise ConfigError(f"no such file or directory: {name} (from {Path.cwd()})")
    return _library_rows(options, held_out, decode, None)


def _text_lines(path: Path) -> Iterator[tuple[int, str | Malformed]]:
    """Yields numbered lines. Bytes that are not UTF-8 make only their own line malformed."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, Malformed(f"not UTF-8: {error.reason} at byte {error.start}")


def _jsonl_rows(path: Path) -> Rows:
    for number, line in _text_lines(path):
        where = f"{path}:{number}"
        if isinstance(line, Malformed):
            yield where, line
        elif line.strip():
            yield where, _json_row(line)


def _json_row(line: str) -> dict[str, Any] | Malformed:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = (
            f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        )
        return Malformed(f"not valid JSON: {reason}")
    return row if isinstance(row, dict) else Malformed(f"must be an object {{...}}, is {type(row).__name__}")


def _json_rows(path: Path) -> Rows:
    """Reads a .json file: one list of objects, or JSON lines."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            rows = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError):
        rows = None
    if not isinstance(rows, list):
        yield from _jsonl_rows(path)
        return
    for number, row in enumerate(rows):
        wrong = Malformed(f"must be an object {{...}}, is {type(row).__name__}")
        yield f"{path}: entry {number}", row if isinstance(row, dict) else wrong


def _csv_rows(path: Path) -> Rows:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    lines = ((line if isinstance(line, str) else "\ufffd\n") for _, line in _text_lines(path))
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"{path}:{reader.line_num}", Malformed(f"not valid CSV: {error}")
            continue
        where = f"{path}:{reader.line_num}"
        names = len(reader.fieldnames or ())
        if None in row or None in row.values():
            have = names + len(row[None]) if None in row else sum(value is not None for value in row.values())
            yield where, Malformed(f"{have} fields, but the header has {names}")
        elif any("\ufffd" in value for value in row.values()):
            yield where, Malformed("not UTF-8")
        else:
            yield where, row


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


def _library_rows(options: DataOptions, held_out: bool, decode: bool, directory: Path | None) -> Rows:
    """Reads a saved dataset, a folder of data files, or (directory None) the hub, with the package `datasets`."""
    import datasets

    split = options.split or ("test" if held_out else "train")
    name = str(directory or options.path)
    try:
        saved = directory is not None and any(
            (directory / name).is_file() for name in ("state.json", "dataset_dict.json")
        )
        if saved:
            dataset: Any = datasets.load_from_disk(str(directory))
            if isinstance(dataset, datasets.DatasetDict):
                if split not in dataset:
                    raise DataError(
                        f"{directory}: no split {split!r}, there are {', '.join(map(str, dataset))}; set data.split"
                    )
                dataset = dataset[split]
            elif options.split is not None:
                raise DataError(f"{directory}: holds one dataset without splits, so data.split cannot be {split!r}")
        else:
            repository = None if directory else hub_name(name, alone=True)
            source, revision = repository or (name, None)
            dataset = datasets.load_dataset(source, options.subset, split=split, revision=revision)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises its own errors, and errors of pyarrow, fsspec and the network
        where = directory or f"{options.path} (no such file here, so looked for on the Hugging Face hub)"
        raise DataError(f"{where}: split {split!r} cannot be loaded: {type(error).__name__}: {error}") from None
    return _numbered(dataset if decode else _undecoded(dataset), name)


def _undecoded(dataset: Any) -> Iterable[dict[str, Any]]:
    """Returns the rows of a dataset with pictures and sounds as {bytes, path}, also inside lists and mappings.

    `Dataset.cast` would write a copy of a dataset with lists of pictures.
    """
    import datasets

    stored = getattr(dataset, "features", None)
    if stored is None or not _stop_decoding(features := copy.deepcopy(dict(stored))):
        return dataset
    undecoded = datasets.Features(features)
    tables = dataset.with_format("arrow").iter(batch_size=_BATCH)
    return (undecoded.decode_example(row) for table in tables for row in table.to_pylist())


def _stop_decoding(feature: Any) -> bool:
    """Sets `decode` of all features in this one to false. Returns whether there are any."""
    if isinstance(feature, (dict, list)):
        parts = feature.values() if isinstance(feature, dict) else feature
        return sum(_stop_decoding(part) for part in parts) > 0  # all of them, not up to the first
    if hasattr(feature, "decode"):
        feature.decode = False
        return True
    return hasattr(feature, "feature") and _stop_decoding(feature.feature)


def _numbered(rows: Iterable[dict[str, Any]], name: str) -> Rows:
    for number, row in enumerate(rows):
        yield f"{name}: row {number}", dict(row)
