"""Rows as examples: prompts, demonstrations, conversations, pairs and labelled answers.

A row is malformed if it has none of the forms; the readers then raise ValueError, and
`MissingColumn` for a column that the options ask for.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat, overload

from rl.config.data import ColumnNames, DataOptions
from rl.data.encoded import Example, Messages
from rl.data.rows.files import DataRow
from rl.data.rows.messages import read_messages, read_tools
from rl.errors import ConfigError
from rollout.text.roles import misspelt

RowReader = Callable[[str, DataRow, DataOptions], Example]
"""(where, row, options) -> Example."""

_RESERVED = ("prompt", "prompts", "completion", "completions", "messages")
"""Columns that rewards do not receive, because the run passes arguments of these names."""

_SHAREGPT = "conversations"
"""The column of conversations in files in ShareGPT's form."""

_LABELS = {
    True: 1.0,
    False: 0.0,
    "true": 1.0,
    "false": 0.0,
    "1": 1.0,
    "0": 0.0,
}  # 1 and 1.0 equal True


_ROLES_ELSEWHERE = {
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "human": "user",
}

_OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "problem", "input"),
    "completion": ("response", "output", "answer", "solution", "target"),
    "chosen": ("chosen_response", "preferred", "accepted"),
    "rejected": ("rejected_response", "dispreferred"),
}
"""What columns of a meaning are called in published datasets."""


class MissingColumn(ValueError):
    """A row lacks a column that the options ask for."""


def read_example(
    where: str, row: DataRow, options: DataOptions, demonstrations: bool = False
) -> Example:
    """Reads a row with a prompt or a conversation. demonstrations: it must have an answer."""
    return _with_tools(_read_example(where, row, options, demonstrations), row)


def _read_example(where: str, row: DataRow, options: DataOptions, demonstrations: bool) -> Example:
    columns = {key: value for key, value in row.items() if key not in _RESERVED}
    if _is_conversation(row, options, demonstrations):
        return _conversation(where, row, options, columns, demonstrations)
    name = options.columns.completion
    prompt = _prompt(row, options)
    completion = row.get(name)
    if completion is None:
        if demonstrations:
            raise _missing(name, row, "demonstrations need it; set data.columns.completion=COLUMN")
        return Example(_with_system(prompt, options), columns=columns, where=where)
    if isinstance(completion, str):
        if demonstrations and not completion:
            raise ValueError(f"`{name}` is empty")
        return Example(_with_system(prompt, options), completion, columns=columns, where=where)
    answered = _continued(prompt, _answer_messages(completion, name), name)
    asked = _with_system(answered.prompt, options)
    messages = [*asked, *answered.answer]
    return Example(asked, messages=messages, columns=columns, where=where, first=len(asked))


def read_pair(where: str, row: DataRow, options: DataOptions) -> Example:
    """Reads a preference. Without a prompt, the answers are full conversations; the prompt is their
    common start."""
    names = options.columns
    both = f"`{names.chosen}` and `{names.rejected}`"
    chosen = _answer(row, names.chosen)
    rejected = _answer(row, names.rejected)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"{both} must both be texts, or both lists of messages")
    if isinstance(chosen, str) or isinstance(rejected, str):
        prompt = _prompt(row, options)
        pair = (chosen, rejected)
    elif _has_prompt(row, options) or chosen[0]["role"] == "assistant":
        asked = _prompt(row, options)
        better = _continued(asked, chosen, names.chosen)
        worse = _continued(asked, rejected, names.rejected)
        if _texts(better.prompt) != _texts(worse.prompt):
            raise ValueError(f"{both} do not have the same system message")
        prompt = better.prompt
        pair = (better.answer, worse.answer)
    else:
        shared = _common_start(chosen, rejected, names)
        prompt = chosen[:shared]
        pair = (chosen[shared:], rejected[shared:])
    if pair[0] == pair[1]:
        raise ValueError(f"{both} are equal: there is nothing to learn from this pair")
    margin = _margin(row, names.margin)
    return _with_tools(
        Example(_with_system(prompt, options), pair=pair, margin=margin, where=where), row
    )


def read_labelled(where: str, row: DataRow, options: DataOptions) -> Example:
    """Reads a labelled answer (`label_of` returns its label), or a pair where there is no label."""
    if row.get("label") is None and row.get(options.columns.chosen) is not None:
        return read_pair(where, row, options)
    if "label" not in row:
        raise _missing("label", row, "labelled answers need it: true or false")
    if _label(row["label"]) is None:
        raise ValueError(f"`label` must be true or false (1 or 0), got {row['label']!r}")
    return read_example(where, row, options, demonstrations=True)


def label_of(example: Example) -> float:
    """Returns the label of an example of `read_labelled`: 1 for a good answer, 0 for a bad one."""
    label = _label(example.columns["label"])
    assert label is not None  # read_labelled has checked it
    return label


def _label(value: object) -> float | None:
    if isinstance(value, str):
        return _LABELS.get(value.strip().lower())
    return _LABELS.get(value) if isinstance(value, (bool, int, float)) else None


def _with_tools(example: Example, row: DataRow) -> Example:
    """Returns an example of messages with the tools of its row. Without messages no template writes
    them."""
    if isinstance(example.prompt, str) or "tools" not in row:
        return example
    return replace(example, tools=read_tools(row["tools"]))


# Conversations


def _conversation(
    where: str,
    row: DataRow,
    options: DataOptions,
    columns: dict[str, object],
    demonstrations: bool,
) -> Example:
    name = _messages_column(row, options.columns)
    said = read_messages(row[name], name)
    answered = said[-1]["role"] == "assistant"
    if answered and len(said) == 1:
        raise ValueError(f"`{name}` holds an answer only")
    messages = _with_system(said, options)
    if demonstrations and not answered:
        role = _role_of(said[-1]["role"])
        raise ValueError(f"the last of `{name}` must be the assistant's, to learn from; {role}")
    prompt, full = (messages[:-1], messages) if answered else (messages, None)
    return Example(prompt, messages=full, columns=columns, where=where)


def _is_conversation(row: DataRow, options: DataOptions, demonstrations: bool) -> bool:
    """Returns whether a row is read as its messages. If it has a prompt as well, the prompt and its
    completion are read; a demonstration that has a prompt and no completion is read as its
    messages."""
    names = options.columns
    if row.get(_messages_column(row, names)) is None or options.prompt_template is not None:
        return False
    return row.get(names.prompt) is None or (demonstrations and row.get(names.completion) is None)


def _messages_column(row: DataRow, names: ColumnNames) -> str:
    return _SHAREGPT if row.get(names.messages) is None and _SHAREGPT in row else names.messages


@dataclass(frozen=True)
class _Answered:
    """A prompt and an answer to it, both as messages."""

    prompt: Messages
    answer: Messages


def _continued(prompt: str | Messages, answer: Messages, name: str) -> _Answered:
    """Returns the prompt and what follows it in the messages of column `name`.

    The messages are the answer alone, or a full conversation that begins with the prompt
    (UltraFeedback), whose system message is then the prompt's. Raises ValueError for messages that
    neither follow the prompt nor begin with it.
    """
    asked = _as_messages(prompt)
    first = answer[0]["role"]
    if first in ("assistant", "tool"):
        return _Answered(asked, answer)
    own_system, questions = _split_system(asked)
    system, said = _split_system(answer)
    if _texts(said[: len(questions)]) == _texts(questions) and len(said) > len(questions):
        if own_system and system and _texts(own_system) != _texts(system):
            raise ValueError(f"`{name}` has another system message than the prompt")
        return _Answered([*(own_system or system), *questions], said[len(questions) :])
    if not system and asked[-1]["role"] == "assistant":
        return _Answered(asked, answer)
    raise ValueError(
        f"`{name}` begins with a message of the {first} that is not the prompt's. It must be the "
        "answer alone, or a conversation that begins with the prompt; data.columns.prompt=none "
        "reads conversations without a prompt"
    )


def _common_start(chosen: Messages, rejected: Messages, names: ColumnNames) -> int:
    """Returns how many messages two conversations have in common at the start."""
    both = f"`{names.chosen}` and `{names.rejected}`"
    places = itertools.zip_longest(chosen, rejected)
    shared = next((place for place, (one, other) in enumerate(places) if one != other), len(chosen))
    if shared == 0:
        raise ValueError(
            f"{both} do not begin with the same message, and there is no `{names.prompt}`"
        )
    if len(chosen) == len(rejected) == shared:
        raise ValueError(f"{both} are equal: there is nothing to learn from this pair")
    if shared == min(len(chosen), len(rejected)):
        raise ValueError(
            f"one of {both} is the beginning of the other, and there is no `{names.prompt}`"
        )
    return shared


def _split_system(messages: Messages) -> tuple[Messages, Messages]:
    """Returns (the system message, or nothing; the other messages)."""
    count = int(messages[0]["role"] in ("system", "developer"))
    return messages[:count], messages[count:]


def _texts(messages: Messages) -> list[tuple[str, Any]]:
    """Returns the role and content of each message. White space around a text does not count."""
    contents = (message["content"] for message in messages)
    stripped = [content.strip() if isinstance(content, str) else content for content in contents]
    return [(message["role"], content) for message, content in zip(messages, stripped, strict=True)]


def _as_messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


# Columns


def _answer(row: DataRow, name: str) -> str | Messages:
    if name not in row:
        raise _missing(
            name,
            row,
            "pairs need it; set data.columns.chosen=COLUMN and data.columns.rejected=COLUMN",
        )
    value = row[name]
    if value is None or value == "":
        raise ValueError(f"`{name}` is empty")
    return value if isinstance(value, str) else _answer_messages(value, name)


def _answer_messages(value: object, name: str) -> Messages:
    answer = read_messages(value, name)
    if answer[-1]["role"] != "assistant":
        raise ValueError(
            f"the last message of `{name}` must be the assistant's; {_role_of(answer[-1]['role'])}"
        )
    return answer


def _role_of(role: str) -> str:
    meant = _ROLES_ELSEWHERE.get(role.strip().lower()) or misspelt(role)
    return f"its role is {role!r}" + (
        f", here {meant!r}" if meant is not None and meant != role else ""
    )


def _margin(row: DataRow, name: str) -> float:
    """Returns the margin as a number, also from the text of a CSV file; 0 if the row has none."""
    value = row.get(name)
    if value is None:
        return 0.0
    try:
        margin = float(value) if isinstance(value, (str, SupportsFloat)) else math.nan
    except ValueError:
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}")
    return margin


def _has_prompt(row: DataRow, options: DataOptions) -> bool:
    return row.get(options.columns.prompt) is not None or options.prompt_template is not None


def _prompt(row: DataRow, options: DataOptions) -> str | Messages:
    """Returns the prompt of a row, without the system message of the options."""
    name = options.columns.prompt
    if options.prompt_template is not None:
        prompt: Any = _filled(options.prompt_template, row)
    elif (
        row.get(name) is None
        and row.get(conversation := _messages_column(row, options.columns)) is not None
    ):
        return read_messages(row[conversation], conversation)
    elif name in row:
        prompt = row[name]
    else:
        raise _missing(name, row, "set data.columns.prompt=COLUMN")
    if not isinstance(prompt, str):
        return read_messages(prompt, name)
    if not prompt:
        raise ValueError(f"`{name}` is empty")
    return _as_messages(prompt) if options.chat or options.system is not None else prompt


@overload
def _with_system(prompt: Messages, options: DataOptions) -> Messages: ...
@overload
def _with_system(prompt: str | Messages, options: DataOptions) -> str | Messages: ...
def _with_system(prompt: str | Messages, options: DataOptions) -> str | Messages:
    """Puts the system message of the options before messages that have none."""
    if (
        options.system is None
        or isinstance(prompt, str)
        or prompt[0]["role"] in ("system", "developer")
    ):
        return prompt
    return [{"role": "system", "content": options.system}, *prompt]


def _filled(template: str, row: DataRow) -> str:
    """Replaces each {column} of `template`. Accepts plain names only, so that a template cannot
    read attributes."""
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
            raise ConfigError(
                f"data.prompt_template: {{{name}}} is not the name of a column; write {{{{ for a "
                "brace"
            )
        if name not in row:
            raise _missing(name, row, "data.prompt_template asks for it")
        if row[name] is None:
            raise ValueError(f"`{name}` is null, and data.prompt_template asks for it")
        parts.append(str(row[name]))
    return "".join(parts)


def _missing(name: str, row: DataRow, why: str) -> MissingColumn:
    for column, others in _OTHER_NAMES.items():
        if other := next((each for each in others if each in row), None):
            why = why.replace(f"data.columns.{column}=COLUMN", f"data.columns.{column}={other}")
    only = next(iter(row)) if len(row) == 1 else ""
    if mark := next((mark for mark in ";\t|" if mark in only), None):
        why = (
            f"its only column has {mark!r} in its name; separate the columns of a CSV file with "
            "commas"
        )
    return MissingColumn(
        f"no column `{name}` (columns: {', '.join(f'`{key}`' for key in row) or 'none'}); {why}"
    )
