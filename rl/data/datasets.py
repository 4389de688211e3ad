"""Loads datasets: rows of a file, a folder, the Hugging Face hub or a generated task, as prompts
and demonstrations.

A row has one of four forms: a prompt alone; a prompt and a completion; a conversation (`messages`,
each a mapping of `role` and `content`); a prompt with a chosen and a rejected answer. Prompt,
completion and answers may be lists of messages. Every row is checked when the dataset is loaded.
Malformed rows are listed with file and line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rewards import RewardError, registry
from rewards.workers.columns import plain
from rl.config.data import DataOptions, NamedDataOptions, RewardSettings, source_name
from rl.data import media
from rl.data.encoded import Example
from rl.data.rows.files import Malformed
from rl.data.rows.forms import MissingColumn, RowReader, read_example, read_pair
from rl.data.rows.sources import folder_of, read_rows
from rl.errors import DataError
from rollout.media.processors import Processors

_SHOWN = 20
"""Most rows in one error message."""


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of their source; a `RowOrder` shuffles them. `total`: number of rows in
    all parts."""

    examples: list[Example]
    name: str
    total: int

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    @property
    def columns(self) -> set[str]:
        """Names of the columns that every row has."""
        return set.intersection(*(set(example.columns) for example in self.examples))

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)


def load(
    options: DataOptions,
    *,
    demonstrations: bool = False,
    pairs: bool = False,
    read: RowReader | None = None,
    held_out: bool = False,
    part: tuple[int, int] = (0, 1),
    processors: Processors | None = None,
) -> Dataset:
    """Reads and checks a dataset.

    Args:
        demonstrations: every row must have an answer (SFT).
        pairs: every row must have a chosen and a rejected answer.
        read: makes the Example of a row, instead of the readers for the forms above.
        held_out: read data of an evaluation: the split `eval` of a task, or `test` of a dataset
        with splits. part: (i, n): check and keep every n-th row only, from row i on.
        processors: of a model that reads pictures or sounds; None: rows with them are malformed.
        The examples have
            references to them, and `media.with_lists` makes the columns of rewards.

    Raises:
        ConfigError: a file or task does not exist, or column names contradict each other.
        DataError: rows are malformed, a column does not exist, or the dataset has no rows.
    """
    rows = read_rows(options, held_out)
    name = f"task {options.task}" if options.task is not None else str(options.path)
    base = folder_of(options)
    examples = []
    problems = _Problems()
    options = _task_columns(options)
    if read is None:
        read = (
            read_pair if pairs else functools.partial(read_example, demonstrations=demonstrations)
        )
    total = 0
    for number, (where, row) in enumerate(itertools.islice(rows, options.limit)):
        total += 1
        if number % part[1] != part[0]:
            continue
        if isinstance(row, Malformed):
            problems.add(where, row.text)
            continue
        try:
            example = _with_source(read(where, row, options), _source_of(row, options))
            if processors is None:
                examples.append(media.refuse(example, row, base))
            else:
                examples.append(media.with_references(example, row, base, processors))
        except MissingColumn as error:
            raise DataError(f"{where}: {error}") from None
        except ValueError as error:
            problems.add(where, str(error))
    problems.raise_if_any()
    if not total:
        raise DataError(f"{name}: the dataset has no rows")
    return Dataset(examples, name, total)


def has_sources(options: DataOptions) -> bool:
    """Whether rows of a dataset know where they came from."""
    return isinstance(options, NamedDataOptions) or options.columns.source is not None


def _source_of(row: Mapping[str, object], options: DataOptions) -> str | None:
    """Returns where a row came from, as in `Example.source`. Raises MissingColumn."""
    column = options.columns.source
    if column is None:
        return options.label if isinstance(options, NamedDataOptions) else None
    if row.get(column) is None:
        raise MissingColumn(
            f"no column {column!r}, which `columns.source` names; there are "
            f"{', '.join(map(str, row)) or 'none'}"
        )
    return source_name(str(row[column]))


def _with_source(example: Example, source: str | None) -> Example:
    """Returns an example that knows where it came from. Rewards get it as the column `source`,
    unless the row has one."""
    if source is None:
        return example
    return replace(example, source=source, columns={"source": source} | example.columns)


def column_problems(settings: RewardSettings, examples: Sequence[Example]) -> Iterator[str]:
    """Yields why rewards cannot take the columns of examples: a column that a reward needs and the
    examples lack (a line for each set of columns), and a value of a type that rewards do not get,
    such as a date."""
    first: dict[frozenset[str], Example] = {}
    for example in examples:
        first.setdefault(frozenset(example.columns), example)
    complete = True
    for columns, example in first.items():
        for function in settings.functions:
            try:
                registry.check(function.name, function.options, columns)
            except RewardError as error:
                complete = False
                yield f"{example.where}: {error}"
    if not complete:
        return
    names = {name for function in settings.functions for name in _arguments(function.name)}
    for example in examples:
        for name in sorted(names & example.columns.keys()):
            try:
                plain(example.columns[name], f"column {name!r}")
            except RewardError as error:
                yield f"{example.where}: {error}; store it as one of these"


def _arguments(reward: str) -> tuple[str, ...]:
    return registry.parameters(registry.locate(reward).function, reward).names


class _Problems:
    """Collects malformed rows for one error message."""

    def __init__(self):
        self.lines: list[str] = []
        self.count = 0

    def add(self, where: str, text: str) -> None:
        self.count += 1
        if len(self.lines) < _SHOWN:
            self.lines.append(f"{where}: {text}")

    def raise_if_any(self) -> None:
        if self.count:
            more = [f"... and {self.count - _SHOWN} more rows"] if self.count > _SHOWN else []
            raise DataError("\n".join([*self.lines, *more]))


def _task_columns(options: DataOptions) -> DataOptions:
    """Replaces the names of columns by the defaults for a task, whose rows have these columns."""
    if options.task is None:
        return options
    columns = type(options.columns).model_validate({})
    return options.model_copy(update={"columns": columns})
