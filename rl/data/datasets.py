"""Datasets: rows of a file, a folder, the Hugging Face hub or a generated task, as prompts and demonstrations.

Four forms of a row: a prompt alone; a prompt and a completion; a conversation (`messages`, each a mapping of `role` and
`content`); a prompt with a chosen and a rejected answer. Prompt, completion and answers may themselves be lists of messages.
Every row is checked when the dataset is loaded; what is wrong is said with file and line.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import math
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.run import DataOptions
from rl.errors import ConfigError, DataError

Messages = list[dict[str, Any]]

RowReader = Callable[[str, dict[str, Any], DataOptions], "Example"]
"""(where, row, options) -> Example."""
_SHOWN = 20
"""Most rows named in one error."""
_RESERVED = ("prompt", "prompts", "completion", "completions", "messages")
"""Names that a reward function gets from the run itself, so no columns of these names are handed to it."""


@dataclass(frozen=True)
class Example:
    """One row.

    prompt: text, or messages for the chat template.
    completion: demonstration as text, or None.
    messages: the whole conversation of a demonstration in messages form, or None; `prompt` is then what precedes the
        last answer.
    pair: (chosen, rejected), the answers to `prompt` of a preference, each a text or messages, or None. margin: of the pair.
    columns: the row's columns, for rewards. where: file:line or the like.
    """

    prompt: str | Messages
    completion: str | None = None
    messages: Messages | None = None
    pair: tuple[str | Messages, str | Messages] | None = None
    margin: float = 0.0
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of their source; `order` says which is used when. `total`: how many there are, in all parts."""

    examples: list[Example]
    name: str
    total: int

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    @property
    def columns(self) -> set[str]:
        """Names of the columns that every row has, as rewards can ask for them."""
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
) -> Dataset:
    """Reads and checks a dataset.

    Args:
        demonstrations: every row must say what the model is to write (SFT).
        pairs: every row must hold a chosen and a rejected answer.
        read: makes the Example of a row, in place of the readers for the forms above.
        held_out: the data of an evaluation: of a task the split `eval`, of a dataset with splits `test`.
        part: (i, n): check and keep every n-th row only, from number i on.

    Raises:
        ConfigError: no such file, task or column names that contradict each other.
        DataError: malformed rows, a column that does not exist, a dataset without rows.
    """
    if options.task is not None:
        rows, name = _task_rows(options, held_out), f"task {options.task}"
    else:
        rows, name = _path_rows(options, held_out), options.path
    examples, problems = [], _Problems()
    options = _task_columns(options)
    if read is None:
        read = read_pair if pairs else functools.partial(read_example, demonstrations=demonstrations)
    total = 0
    for number, (where, row) in enumerate(itertools.islice(rows, options.limit)):
        total += 1
        if number % part[1] != part[0]:
            continue
        if isinstance(row, _Malformed):
            problems.add(where, row.text)
            continue
        try:
            examples.append(read(where, row, options))
        except _MissingColumn as error:
            raise DataError(f"{where}: {error}") from None
        except ValueError as error:
            problems.add(where, str(error))
    problems.raise_if_any()
    if not total:
        raise DataError(f"{name}: the dataset has no rows")
    return Dataset(examples, name, total)


def order(seed: int, rows: int, index: int) -> int:
    """The row that the `index`-th prompt of a run takes: each epoch is a permutation of all rows.

    A function of its arguments alone, so that a resumed run goes on with the prompt that was next.
    """
    epoch, place = divmod(index, rows)
    return int(_permutation(seed, rows, epoch)[place])


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, rows: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(rows)


def check_lengths(dataset: Dataset, length: Callable[[Example], int], longest: int, advice: str) -> None:
    """Raises DataError, naming rows, if `length(example)` in tokens passes `longest` for any example."""
    problems = _Problems()
    for example in dataset:
        tokens = length(example)
        if tokens > longest:
            problems.add(example.where, f"{tokens} tokens, but only {longest} fit; {advice}")
    problems.raise_if_any()


# Rows to examples


class _MissingColumn(ValueError):
    pass


@dataclass(frozen=True)
class _Malformed:
    text: str


class _Problems:
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
    """A task's rows have the standard columns, whatever the file they stand in for."""
    return options.model_copy(update={"columns": type(options.columns)()}) if options.task else options


def read_example(where: str, row: dict[str, Any], options: DataOptions, demonstrations: bool = False) -> Example:
    """Reads a row with a prompt or a conversation. Raises ValueError for a row that is malformed."""
    names = options.columns
    columns = {key: value for key, value in row.items() if key not in _RESERVED}
    wants_messages = names.messages in row and options.prompt_template is None and names.prompt not in row
    if wants_messages:
        messages = _with_system(_messages(row[names.messages], names.messages), options)
        answered = messages[-1]["role"] == "assistant"
        if answered and len(messages) == 1:
            raise ValueError(f"`{names.messages}` holds an answer only")
        if demonstrations and not answered:
            raise ValueError(f"the last of `{names.messages}` must be the assistant's, to learn from")
        prompt, whole = (messages[:-1], messages) if answered else (messages, None)
        return Example(prompt, messages=whole, columns=columns, where=where)
    prompt = _prompt(row, options)
    if names.completion not in row or row[names.completion] is None:
        if demonstrations:
            raise _missing(names.completion, row, "demonstrations need it (data.columns.completion names another)")
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
    """Reads a preference. Without a prompt its answers are full conversations, and the prompt is what both begin with."""
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
        raise _missing(name, row, "pairs need it (data.columns.chosen and data.columns.rejected name others)")
    if row[name] is None or row[name] == "":
        raise ValueError(f"`{name}` is empty")
    if isinstance(row[name], str):
        return row[name]
    answer = _messages(row[name], name)
    if answer[-1]["role"] != "assistant":
        raise ValueError(f"the last message of `{name}` must be the assistant's")
    return answer


def _margin(row: dict[str, Any], name: str) -> float:
    """Also of a CSV file, where it is a text; 0 where there is none."""
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
        raise _missing(name, row, "data.columns.prompt names another")
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
    """`template` with {column} replaced; only plain names, so that a template cannot reach into objects."""
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
    return _MissingColumn(f"no column `{name}`, there are {', '.join(f'`{key}`' for key in row) or 'none'}; {why}")


def _messages(value: Any, name: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{name}` must be a text or a list of messages, got {type(value).__name__}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"`{name}`: message {number} must be a mapping with `role` and `content`")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"`{name}`: the content of message {number} must be a text")
    return [dict(message) for message in value]


# Sources of rows: (where, row) or (where, _Malformed)

Rows = Iterator[tuple[str, "dict[str, Any] | _Malformed"]]


def _task_rows(options: DataOptions, held_out: bool) -> Rows:
    import rl.data.tasks

    try:
        problems = rl.data.tasks.problems(
            options.task, options.options, options.split or ("eval" if held_out else "train")
        )
    except ValueError as error:
        raise ConfigError(f"data: {error}") from None
    for number, problem in enumerate(problems):
        row = {"prompt": problem.prompt, "completion": problem.completion, **problem.columns}
        yield f"task {options.task}, problem {number}", row


def _path_rows(options: DataOptions, held_out: bool) -> Rows:
    from rl.config.checks import is_hub_name
    from rl.config.packaged import packaged

    path = Path(options.path)
    if not path.exists():
        path = packaged(path) or path
    if path.is_dir():
        return _library_rows(options, held_out, path)
    if path.is_file():
        kind = path.suffix.lower()
        if kind not in _READERS:
            raise DataError(f"{path}: unknown kind of file; there are {', '.join(_READERS)}")
        return _READERS[kind](path)
    if not is_hub_name(options.path):
        raise ConfigError(f"no such file or directory: {options.path} (from {Path.cwd()})")
    return _library_rows(options, held_out, None)


def _text_lines(path: Path) -> Iterator[tuple[int, str | _Malformed]]:
    """Numbered lines; bytes that are not UTF-8 spoil their line only."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, _Malformed(f"not UTF-8: {error.reason} at byte {error.start}")


def _jsonl_rows(path: Path) -> Rows:
    for number, line in _text_lines(path):
        where = f"{path}:{number}"
        if isinstance(line, _Malformed):
            yield where, line
        elif line.strip():
            yield where, _json_row(line)


def _json_row(line: str) -> dict[str, Any] | _Malformed:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        said = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        return _Malformed(f"not valid JSON: {said}")
    return row if isinstance(row, dict) else _Malformed(f"must be an object {{...}}, is {type(row).__name__}")


def _json_rows(path: Path) -> Rows:
    """A .json file is one list of objects, or JSON lines under another name."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            rows = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError):
        rows = None
    if not isinstance(rows, list):
        yield from _jsonl_rows(path)
        return
    for number, row in enumerate(rows):
        wrong = _Malformed(f"must be an object {{...}}, is {type(row).__name__}")
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
            yield f"{path}:{reader.line_num}", _Malformed(f"not valid CSV: {error}")
            continue
        where = f"{path}:{reader.line_num}"
        names = len(reader.fieldnames)
        if None in row or None in row.values():
            have = names + len(row[None]) if None in row else sum(value is not None for value in row.values())
            yield where, _Malformed(f"{have} fields, but the header has {names}")
        elif any("\ufffd" in value for value in row.values()):
            yield where, _Malformed("not UTF-8")
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


def _library_rows(options: DataOptions, held_out: bool, directory: Path | None) -> Rows:
    """A saved dataset, a folder of data files, or (directory None) the hub, read by `datasets`."""
    import datasets

    split = options.split or ("test" if held_out else "train")
    try:
        saved = directory is not None and any(
            (directory / name).is_file() for name in ("state.json", "dataset_dict.json")
        )
        if saved:
            dataset: Any = datasets.load_from_disk(str(directory))
            if isinstance(dataset, datasets.DatasetDict):
                if split not in dataset:
                    raise DataError(f"{directory}: no split {split!r}, there are {', '.join(dataset)}; set data.split")
                dataset = dataset[split]
            elif options.split is not None:
                raise DataError(f"{directory}: holds one dataset without splits, so data.split cannot be {split!r}")
        else:
            dataset = datasets.load_dataset(str(directory or options.path), options.subset, split=split)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises its own errors, those of pyarrow, of fsspec and of the network
        where = directory or f"{options.path} (no such file here, so looked for on the Hugging Face hub)"
        raise DataError(f"{where}: split {split!r} cannot be loaded: {type(error).__name__}: {error}") from None
    return _numbered(dataset, str(directory or options.path))


def _numbered(rows: Iterable[dict[str, Any]], name: str) -> Rows:
    for number, row in enumerate(rows):
        yield f"{name}: row {number}", dict(row)
