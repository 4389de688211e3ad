"""The rows of a task as problems: columns, options, shots and prompts. Free of jax."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from policy.json_types import JsonObject, JsonValue
from rewards import registry
from rewards.text import quoted
from rl.config.data import DataOptions
from rl.data.encoded import Example, Messages
from rl.data.hub import PREFIX, hub_name
from rl.data.rows import folders
from rl.data.rows.files import Malformed, Rows
from rl.data.rows.sources import read_rows
from rl.errors import DataError
from rl.evaluation.task import LETTERS, Choices, Task
from rl.evaluation.templates import fill

_RESERVED = ("prompt", "prompts", "completion", "completions", "messages")
"""Columns that rewards do not receive, because they get arguments of these names."""


@dataclass(frozen=True)
class Shot:
    """A solved problem before a prompt."""

    prompt: str
    target: str


@dataclass(frozen=True)
class KeyedExample:
    """A problem with its prompt as the model gets it. key: as `key_of` makes it."""

    example: Example
    key: str


@dataclass(frozen=True)
class RowSource:
    """Where the rows of a task come from. path: a file or folder in place of the task's source, or
    None. chat: whether prompts are messages. seed: of the shuffled options."""

    task: Task
    path: str | None
    chat: bool
    seed: int

    def examples(self, limit: int | None, shots: int) -> list[KeyedExample]:
        """Returns the problems, the first `limit` of them, with so many shots each. Raises
        DataError for rows that cannot be read, and for columns that they lack."""
        task = self.task
        solved = self._shots(shots) if shots else {}
        needed = _needed(task)
        examples = []
        for number, (where, row) in enumerate(itertools.islice(self._rows(task.split), limit)):
            try:
                values = _values(task, row, (self.seed, number))
                same = task.shots.same if task.shots and shots else None
                key = None if same is None else values[same]
                if same is not None and len(solved.get(key, ())) < shots:
                    raise ValueError(f"there are no {shots} shots with {same} {key!r}")
                prompt = self._prompt(solved.get(key, ()), fill(task.prompt, values))
                answer = None if task.answer is None else fill(task.answer, values)
                question = _key(task, row)
            except (ValueError, KeyError) as error:
                raise DataError(f"{where}: {_message(error, row, task)}") from None
            columns = {
                name: value
                for name, value in values.items()
                if name not in _RESERVED and (needed is None or name in needed)
            }
            columns |= {} if answer is None else {"answer": answer}
            example = Example(prompt, columns=columns, where=where)
            examples.append(KeyedExample(example, question))
        if not examples:
            raise DataError(f"{self.path or task.source}: split {task.split!r} has no rows")
        return examples

    def _shots(self, count: int) -> dict[object, list[Shot]]:
        """Returns the first `count` shots by the value of the column `same`; all under None without
        such a column."""
        task = self.task
        assert task.shots is not None  # checked with the count
        if self.path is not None and Path(self.path).is_file():
            raise DataError(
                f"{self.path}: one file has no split {task.shots.split!r} for the shots; name a "
                f"folder with {task.shots.split}.jsonl and {task.split}.jsonl, or add --few-shot 0"
            )
        result: dict[object, list[Shot]] = {}
        for number, (where, row) in enumerate(self._rows(task.shots.split)):
            try:
                values = _values(task, row, (self.seed, number))
                key = None if task.shots.same is None else values[task.shots.same]
                own = result.setdefault(key, [])
                if len(own) < count:
                    own.append(Shot(fill(task.prompt, values), fill(task.shots.target, values)))
            except (ValueError, KeyError) as error:
                raise DataError(f"{where}: {_message(error, row, task)}") from None
            if task.shots.same is None and len(own) == count:
                return result
        if task.shots.same is None:
            raise DataError(
                f"{self.path or task.source}: split {task.shots.split!r} has no {count} rows"
            )
        return result

    def _rows(self, split: str) -> Iterator[tuple[str, JsonObject]]:
        """Yields (place, row) of a split. Raises DataError."""
        for where, row in self._read(split):
            if isinstance(row, Malformed):
                raise DataError(f"{where}: {row.text}")
            yield where, row

    def _read(self, split: str) -> Rows:
        """Yields (place, row) of a split. Raises DataError, with what to type without a network."""
        try:
            yield from read_rows(self._options(split), held_out=True)
        except DataError as error:
            if self.path is not None or (hub := hub_name(self.task.source, alone=True)) is None:
                raise
            folder = hub.name.rpartition("/")[2]
            revision = f" --revision {self.task.revision}" if self.task.revision else ""
            raise DataError(
                f"{error}. Without a network, download it elsewhere with `hf download {hub.name} "
                f"--repo-type dataset{revision} --local-dir {folder}`, and add --data "
                f"{quoted(folder)}"
            ) from None

    def _options(self, split: str) -> DataOptions:
        task = self.task
        path = self.path
        subset = task.subset
        if path is None:
            path = task.source
            hub = hub_name(path, alone=True)
            if hub is not None and task.revision and hub.revision is None:
                path = f"{PREFIX}{hub.name}@{task.revision}"
        elif Path(path).is_file() or (Path(path).is_dir() and folders.has_own_files(Path(path))):
            subset = None  # the files are those of the subset
        return DataOptions.model_validate({"path": path, "subset": subset, "split": split})

    def _prompt(self, shots: Sequence[Shot], asked: str) -> str | Messages:
        """Returns a prompt with its shots: a text, or messages with a turn for each."""
        task = self.task
        if not self.chat:
            texts = [*(shot.prompt + shot.target for shot in shots), asked]
            return "\n\n".join([*filter(None, [task.instruction]), *texts])
        return as_messages(shots, asked, task.instruction, task.system)


def as_messages(
    shots: Sequence[Shot], asked: str, instruction: str | None = None, system: str | None = None
) -> Messages:
    """Returns a conversation: the system message, a turn for each shot, and the question. The
    instruction stands before the first of them."""
    first = f"{instruction}\n\n" if instruction else ""
    messages: Messages = [{"role": "system", "content": system}] if system else []
    for shot in shots:
        messages.append({"role": "user", "content": f"{first}{shot.prompt}"})
        messages.append({"role": "assistant", "content": shot.target.strip()})
        first = ""
    return [*messages, {"role": "user", "content": f"{first}{asked}"}]


def key_of(example: Example) -> str:
    """Returns a text that is equal for problems with the same prompt, pictures, sounds and answer.

    Of messages the last one counts as the prompt. example: without shots and instruction, and with
    options in the order of their columns; so however a problem is asked, its key is the same.
    """
    prompt = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
    media = [reference.digest for reference in example.references]
    value = [prompt, example.columns.get("answer"), media]
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _key(task: Task, row: JsonObject) -> str:
    """Returns the key of a row."""
    values = _values(task, row)
    answer = values.get("answer") if task.answer is None else fill(task.answer, values)
    return key_of(Example(fill(task.prompt, values), columns={"answer": answer}))


def _values(
    task: Task, row: JsonObject, shuffle: tuple[int, int] | None = None
) -> dict[str, JsonValue]:
    """Returns what templates read of a row. shuffle: (seed, number of the row), by which options
    are shuffled; None: they are not. Raises KeyError for a column that it lacks."""
    values = dict(row) | {name: row[column] for name, column in task.columns.items()}
    if task.choices is not None:
        values |= _choices(task.choices, row, shuffle)
    return values


def _choices(
    choices: Choices, row: JsonObject, shuffle: tuple[int, int] | None
) -> dict[str, JsonValue]:
    """Returns `choices` and `answer` of a row. shuffle: as for `_values`."""
    if choices.options is not None:
        assert choices.right_index is not None
        options = row[choices.options]
        index = row[choices.right_index]
        if isinstance(options, str) or not isinstance(options, Sequence):
            raise ValueError(f"`{choices.options}` is no list of options")
        if not isinstance(index, int | float | str):
            raise ValueError(f"`{choices.right_index}` is no number of an option")
        texts = [str(each) for each in options]
        right = int(index)
        if not 0 <= right < len(texts):
            raise ValueError(f"`{choices.right_index}` is {right}, of {len(texts)} options")
    else:
        assert choices.right is not None
        names = [choices.right, *choices.wrong]
        order = [*range(len(names))]
        if shuffle is not None:
            order = np.random.default_rng(shuffle).permutation(len(names)).tolist()
        texts = [str(row[names[place]]).strip() for place in order]
        right = order.index(0)
    if len(texts) > len(LETTERS):
        raise ValueError(f"has {len(texts)} options; there are {len(LETTERS)} letters")
    shown = [{"letter": letter, "text": text} for letter, text in zip(LETTERS, texts, strict=False)]
    return {"choices": shown, "answer": LETTERS[right]}


def _needed(task: Task) -> set[str] | None:
    """Returns the columns that rewards and tables read; None: all."""
    names = {*task.by, "answer"}
    for score in task.scores.values():
        parameters = registry.parameters(registry.load(score.reward), score.reward)
        if parameters.open:
            return None
        names |= {*parameters.names} | ({score.of_each} if score.of_each else set())
    return names


def _message(error: Exception, row: JsonObject, task: Task) -> str:
    """Returns why a row is no problem of the task; for a column that it lacks also what the task
    was written for."""
    if not isinstance(error, KeyError):
        return str(error)
    text = f"no column {error.args[0]!r} (columns: {', '.join(map(str, row)) or 'none'})"
    if task.revision is None and task.written is None:
        return text
    version = " of ".join(filter(None, (task.revision, task.written)))
    return (
        f"{text}. The task was written for revision {version}; a copy of its file with other "
        "`columns` reads other columns (docs/evaluation.md)"
    )
