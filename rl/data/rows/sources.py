"""Reads the rows of a dataset from a generated task, a file, a folder, or the Hugging Face hub."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from rewards.suggest import nearest_path
from rl import tasks
from rl.config.data import DataOptions
from rl.data.hub import hub_name
from rl.data.rows import folders
from rl.data.rows.files import DataRow, Malformed, Rows, problem_of, read_file
from rl.errors import ConfigError, DataError
from rl.remote.cache import fetched
from rl.remote.faults import RemoteError
from rl.remote.urls import is_remote

_BATCH = 16
"""Rows of a table that are in memory at a time, because they may hold the bytes of pictures."""

_STATES = ("state.json", "dataset_dict.json")
"""Files of a dataset that the package `datasets` saved."""


def read_rows(options: DataOptions, held_out: bool) -> Rows:
    """Reads the rows of a task, a file, a folder or a dataset of the Hugging Face hub.

    Rows with a text that UTF-8 cannot hold, and rows that are nested too deeply, are Malformed.
    Pictures and sounds of the package `datasets` are {bytes, path}; it decodes none.
    held_out: read the split of an evaluation.
    Raises ConfigError for a name that does not exist, DataError for a source that cannot be read.
    """
    if options.task is not None:
        return _readable(_task_rows(options.task, options, held_out))
    assert options.path is not None  # DataOptions has a task or a path
    return _readable(_path_rows(options.path, options, held_out))


def _readable(rows: Rows) -> Rows:
    for where, row in rows:
        problem = None if isinstance(row, Malformed) else problem_of(row)
        yield where, row if problem is None else Malformed(problem)


def folder_of(options: DataOptions) -> Path:
    """Returns the folder that paths in rows start from: that of the data file, of a saved dataset,
    or of the file of a task. Rows of other tasks and of the hub start from the working directory.
    """
    name = options.path or (options.task or "").rpartition(":")[0]
    path = _existing(name)
    if path.is_dir() and options.path is not None:
        return path
    return path.parent if path.is_file() else Path()


def is_downloaded(name: str) -> bool:
    """Tells whether a dataset is on the Hugging Face hub or at a URL, and no file of this machine."""
    return is_remote(name) or hub_name(name, alone=True) is not None


def _existing(name: str) -> Path:
    """Returns the path of a file or folder that exists, also one that the package has, or the local
    copy of a URL; any other path as it is. Raises DataError for a URL that cannot be read."""
    from rl.config.packaged import packaged

    path = Path(name)
    if is_remote(name) and not path.exists():
        try:
            return fetched(name)
        except RemoteError as error:
            raise DataError(f"data {name}: {error}") from None
    return path if path.exists() else packaged(path) or path


def _task_rows(task: str, options: DataOptions, held_out: bool) -> Rows:
    split = options.split or ("eval" if held_out else "train")
    try:
        problems = tasks.problems(
            task, options.options, cast(tasks.Split, split)
        )  # another split is a ValueError
    except ValueError as error:
        raise ConfigError(f"data: {error}") from None
    for number, problem in enumerate(problems):
        row = {"prompt": problem.prompt, "completion": problem.completion, **problem.columns}
        yield f"task {task}, problem {number}", row


def _path_rows(name: str, options: DataOptions, held_out: bool) -> Rows:
    path = _existing(name)
    split = options.split or ("test" if held_out else "train")
    if path.is_file():
        return read_file(path)
    if path.is_dir():
        plain = options.subset is None and split.isidentifier()
        if plain and not _is_saved(path) and folders.has_own_files(path):
            return folders.read_folder(path, split)
        return _library_rows(options, split, path)
    if hub_name(name, alone=True) is None:
        raise ConfigError(
            f"no such file or directory: {name} (from {Path.cwd()}){nearest_path(name)}"
        )
    return _library_rows(options, split, None)


def _is_saved(directory: Path) -> bool:
    """Returns whether the package `datasets` saved this folder."""
    return any((directory / state).is_file() for state in _STATES)


def _library_rows(options: DataOptions, split: str, directory: Path | None) -> Rows:
    """Reads a saved dataset, a folder that only `datasets` reads, or (directory None) the hub, with
    that package."""
    import datasets

    name = str(directory or options.path)
    try:
        if directory is not None and _is_saved(directory):
            dataset: Any = datasets.load_from_disk(str(directory))
            if isinstance(dataset, datasets.DatasetDict):
                if split not in dataset:
                    raise DataError(
                        f"{directory}: no split {split!r}, there are "
                        f"{', '.join(map(str, dataset))}; set data.split"
                    )
                dataset = dataset[split]
            elif options.split is not None:
                raise DataError(
                    f"{directory}: holds one dataset without splits, so data.split cannot be "
                    f"{split!r}"
                )
        else:
            repository = None if directory else hub_name(name, alone=True)
            source, revision = repository or (name, None)
            dataset = datasets.load_dataset(source, options.subset, split=split, revision=revision)
    except DataError:
        raise
    except (
        Exception
    ) as error:  # `datasets` raises its own errors, and errors of pyarrow, fsspec and the network
        where = (
            directory
            or f"{options.path} (no such file here{nearest_path(name)}, so looked for on the "
            "Hugging Face hub)"
        )
        raise DataError(
            f"{where}: split {split!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    return _numbered(_undecoded(dataset), name)


def _undecoded(dataset: Any) -> Iterable[dict[str, Any]]:
    """Returns the rows of a dataset with pictures and sounds as {bytes, path}, also inside lists
    and mappings.

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


def _numbered(rows: Iterable[DataRow], name: str) -> Rows:
    number = 0
    try:
        for number, row in enumerate(rows):
            yield f"{name}: row {number}", dict(row)
    except (
        Exception
    ) as error:  # of pyarrow, of a decoder of the package `datasets`, or of the network
        raise DataError(
            f"{name}: no row after row {number} can be read: {type(error).__name__}: {error}"
        ) from None
