"""Loads datasets: rows of a file, a folder, the Hugging Face hub or a generated task, as prompts and demonstrations.

A row has one of four forms: a prompt alone; a prompt and a completion; a conversation (`messages`, each a mapping of
`role` and `content`); a prompt with a chosen and a rejected answer. Prompt, completion and answers may be lists of
messages. Every row is checked when the dataset is loaded. Malformed rows are listed with file and line.
"""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewards import RewardError, registry
from rl.config.data import DataOptions, RewardSettings
from rl.data import media
from rl.data.encoded import Example, Messages
from rl.data.rows import Malformed, folder_of, read_rows
from rl.errors import ConfigError, DataError
from rollout.media.processors import Processors

RowReader = Callable[[str, dict[str, Any], DataOptions], Example]
"""(where, row, options) -> Example."""
_SHOWN = 20
"""Most rows in one error message."""
_RESERVED = ("prompt", "prompts", "completion", "completions", "messages")
"""Columns that rewards do not receive, because the run passes arguments of these names."""


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of their source; `order` shuffles them. `total`: number of rows in all parts."""

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
        held_out: read data of an evaluation: the split `eval` of a task, or `test` of a dataset with splits.
        part: (i, n): check and keep every n-th row only, from row i on.
        processors: of a model that reads pictures or sounds; None: rows with them are malformed. The examples have
            references to them, and `media.with_lists` makes the columns of rewards.

    Raises:
        ConfigError: a file or task does not exist, or column names contradict each other.
        DataError: rows are malformed, a column does not exist, or the dataset has no rows.
    """
    rows = read_rows(options, held_out, decode=processors is None)
    name = f"task {options.task}" if options.task is not None else str(options.path)
    base = folder_of(options)
    examples, problems = [], _Problems()
    options = _task_columns(options)
    if read is None:
        read = read_pair if pairs else functools.partial(read_example, demonstrations=demonstrations)
    total = 0
    for number, (where, row) in enumerate(itertools.islice(rows, options.limit)):
        total += 1
        if number % part[1] != part[0]:
            continue
        if isinstance(row, Malformed):
            problems.add(where, row.text)
            continue
        try:
            example = read(where, row, options)
            if processors is None:
                examples.append(media.refuse(example, row, base))
            else:
                examples.append(media.with_references(example, row, base, processors))
        except _MissingColumn as error:
            raise DataError(f"{where}: {error}") from None
        except ValueError as error:
            problems.add(where, str(error))
    problems.raise_if_any()
    if not total:
        raise DataError(f"{name}: the dataset has no rows")
    return Dataset(examples, name, total)


def order(seed: int, rows: int, index: int) -> int:
    """Returns the row of the `index`-th prompt of a run: each epoch is a permutation of all rows.

    The result depends on the arguments only, so that a resumed run continues with the next prompt.
    """
    epoch, place = divmod(index, rows)
    return int(_permutation(seed, rows, epoch)[place])


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, rows: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(rows)


def check_lengths(dataset: Dataset, length: Callable[[Example], int], longest: int, advice: str) -> None:
    """Raises DataError, with a list of rows, if `length(example)` in tokens exceeds `longest` for any example."""
    problems = _Problems()
    for example in dataset:
        tokens = length(example)
        if tokens > longest:
            problems.add(example.where, f"{tokens} tokens, but only {longest} fit; {advice}")
    problems.raise_if_any()


# Rows to examples


def missing_columns(settings: RewardSettings, examples: Iterable[Example]) -> Iterator[str]:
    """Yields a line for each reward that needs a column which the examples lack: one for each set of columns."""
    first: dict[frozenset[str], Example] = {}
    for example in examples:
        first.setdefault(frozenset(example.columns), example)
    for columns, example in first.items():
        for function in settings.functions:
            try:
                registry.check(function.name, function.options, columns)
            except RewardError as error:
                yield f"{example.where}: {error}"


class _MissingColumn(ValueError):
    """A row lacks a column that the options ask for."""


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


def read_example(where: str, row: dict[str, Any], options: DataOptions, demonstrations: bool = False) -> Example:
    """Reads a row with a prompt or a conversation. Raises ValueError for a row that is malformed."""
    names = options.columns
    columns = {key: value for key, value in row.items() if key not in _RESERVED}
    is_conversation = names.messages in row and options.prompt_template is None and names.prompt not in row
    if is_conversation:
        messages = _with_system(_messages(row[names.messages], names.messages), options)
        answered = messages[-1]["role"] == "assistant"
        if answered and len(messages) == 1:
            raise ValueError(f"`{names.messages}` holds an answer only")
        if demonstrations and not answered:
            raise ValueError(f"the last of `{names.messages}` must be the assistant's, to learn from")
        prompt, full = (messages[:-1], messages) if answered else (messages, None)
        return Example(prompt, messages=full, columns=columns, where=where)
    prompt = _prompt(row, options)
    if names.completion not in row or row[names.completion] is None:
        if demonstrations:
            raise _missing(names.completion, row, "demonstrations need it; set data.columns.completion=COLUMN")
        return Example(prompt, columns=columns, where=where)
    completion = row[names.completion]
    if isinstance(completion, str):
        if demonstrations and not completion:
            raise ValueError(f"`{names.completion}` is empty")
        return Example(prompt, completion, columns=columns, where=where)
    answer = _messages(completion, names.completion)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if answer[-1]["role"] != "assistant":
        raise ValueError(f"the last message of `{names.completion}` must be the assistant's")
    return Example([*prompt, *answer[:-1]], messages=[*prompt, *answer], columns=columns, where=where)


def read_pair(where: str, row: dict[str, Any], options: DataOptions) -> Example:
    """Reads a preference. Without a prompt, the answers are full conversations; the prompt is their common start."""
    names = options.columns
    chosen, rejected = _answer(row, names.chosen), _answer(row, names.rejected)
    both = f"`{names.chosen}` and `{names.rejected}`"
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"{both} must both be texts, or both lists of messages")
    if chosen == rejected:
        raise ValueError(f"{both} are equal: there is nothing to learn from this pair")
    if names.prompt in row or options.prompt_template is not None or isinstance(chosen, str):
        prompt = _prompt(row, options)
        if isinstance(prompt, str) and not isinstance(chosen, str):
            prompt = [{"role": "user", "content": prompt}]
    else:
        shared = next(i for i, (one, other) in enumerate(itertools.zip_longest(chosen, rejected)) if one != other)
        if shared == 0:
            raise ValueError(f"{both} do not begin with the same message, and there is no `{names.prompt}`")
        if shared == min(len(chosen), len(rejected)):
            raise ValueError(f"one of {both} is the beginning of the other, and there is no `{names.prompt}`")
        prompt, chosen, rejected = _with_system(chosen[:shared], options), chosen[shared:], rejected[shared:]
    return Example(prompt, pair=(chosen, rejected), margin=_margin(row, names.margin), where=where)


def _answer(row: dict[str, Any], name: str) -> str | Messages:
    if name not in row:
        raise _missing(name, row, "pairs need it; set data.columns.chosen=COLUMN and data.columns.rejected=COLUMN")
    if row[name] is None or row[name] == "":
        raise ValueError(f"`{name}` is empty")
    if isinstance(row[name], str):
        return row[name]
    answer = _messages(row[name], name)
    if answer[-1]["role"] != "assistant":
        raise ValueError(f"the last message of `{name}` must be the assistant's")
    return answer


def _margin(row: dict[str, Any], name: str) -> float:
    """Returns the margin as a number, also from the text of a CSV file; 0 if the row has none."""
    if row.get(name) is None:
        return 0.0
    try:
        margin = float(row[name])
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"`{name}` must be a finite number, got {row[name]!r}")
    return margin


def _prompt(row: dict[str, Any], options: DataOptions) -> str | Messages:
    name = options.columns.prompt
    if options.prompt_template is not None:
        prompt: Any = _filled(options.prompt_template, row)
    elif name not in row:
        raise _missing(name, row, "set data.columns.prompt=COLUMN")
    else:
        prompt = row[name]
    if not isinstance(prompt, str):
        prompt = _messages(prompt, name)
    elif not prompt:
        raise ValueError(f"`{name}` is empty")
    elif options.chat or options.system is not None:
        prompt = [{"role": "user", "content": prompt}]
    return prompt if isinstance(prompt, str) else _with_system(prompt, options)


def _with_system(messages: Messages, options: DataOptions) -> Messages:
    if options.system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": options.system}, *messages]


def _filled(template: str, row: dict[str, Any]) -> str:
    """Replaces each {column} of `template`. Accepts plain names only, so that a template cannot read attributes."""
    parts = []
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"data.prompt_template: {error}; write {{{{ for a brace") from None
    for text, name, specification, conversion in fields:
        parts.append(text)
        if name is None:
            continue
        if specification or conversion or not name.isidentifier():
            raise ConfigError(f"data.prompt_template: {{{name}}} is not the name of a column; write {{{{ for a brace")
        if name not in row:
            raise _missing(name, row, "data.prompt_template asks for it")
        parts.append(str(row[name]))
    return "".join(parts)


def _missing(name: str, row: dict[str, Any], why: str) -> _MissingColumn:
    only = next(iter(row)) if len(row) == 1 else ""
    if mark := next((mark for mark in ";\t|" if mark in only), None):
        why = f"its only column has {mark!r} in its name; separate the columns of a CSV file with commas"
    return _MissingColumn(f"no column `{name}` (columns: {', '.join(f'`{key}`' for key in row) or 'none'}); {why}")


def _messages(value: Any, name: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{name}` must be a text or a list of messages, got {type(value).__name__}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"`{name}`: message {number} must be a mapping with `role` and `content`")
        if not isinstance(message.get("content"), (str, list)):  # lists of parts: rl/data/media.py
            raise ValueError(f"`{name}`: the content of message {number} must be a text")
    return [dict(message) for message in value]
