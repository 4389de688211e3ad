"""Reads the prompts of `rl generate`: lines of text, or rows of a JSONL file, also with pictures
and sounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rewards.suggest import nearest_path
from rl.data import media
from rl.data.encoded import Example, Problem
from rl.data.encoding import ExampleEncoder
from rl.data.rows.files import READERS, DataRow, Malformed, parse_row, problem_of, read_file
from rl.data.rows.messages import read_messages, read_tools
from rl.errors import DataError
from rollout.text.roles import misspelt, unusual_role

FORMS = tuple(kind for kind in READERS if kind != ".jsonl")


class Prompt(NamedTuple):
    """A line of a file of prompts: its place for messages, and its row; `prompt` is a text or a
    list of messages."""

    where: str
    row: dict[str, Any]


def read_prompts(file: str) -> list[Prompt]:
    """Reads *.jsonl, on each line an object with `prompt` (or `messages`) and columns of pictures
    and sounds as in data, and files of the other forms of data (FORMS); of any other file, and of
    `-` (standard input), each line is a prompt. Empty lines are left out.

    Raises DataError with file and line for a prompt that cannot be read, and for a file without
    prompts.
    """
    prompts = list(_prompts(file))
    if not prompts:
        raise DataError(f"{file}: no prompts")
    return prompts


def _prompts(file: str) -> Iterator[Prompt]:
    if Path(file).suffix.lower() in FORMS and Path(file).is_file():
        for where, row in read_file(Path(file)):
            yield Prompt(where, _checked(where, row))
        return
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--prompts {file}: {error.strerror}{nearest_path(file)}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompts {file}: not UTF-8 (byte {error.start}); save the file as UTF-8"
        ) from None
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            where = f"{file}:{number}"
            row = parse_row(line) if file.endswith(".jsonl") else {"prompt": line}
            yield Prompt(where, _checked(where, row))


def _checked(where: str, row: DataRow | Malformed) -> dict[str, Any]:
    """Returns a row with `prompt`. Raises DataError for one that has none, or that cannot be
    read."""
    if isinstance(row, Malformed):
        raise DataError(f"{where}: {row.text}")
    if (problem := problem_of(row)) is not None:
        raise DataError(f"{where}: {problem}")
    if not row.get("prompt") and row.get("messages"):
        row = {**row, "prompt": row["messages"]}
    if not row.get("prompt"):
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{where}: not an object with `prompt`, a text or a list of messages (columns: "
            f"{columns})"
        )
    return dict(row)


def problems(prompts: Sequence[Prompt], encoder: ExampleEncoder, base: Path) -> list[Problem]:
    """Returns the prompts as token ids, with their pictures and sounds.

    encoder: its processors are those of the model, None of one that reads texts only. base: folder
    that relative paths start from, that of the file. Raises DataError with file and line for a
    prompt that the model cannot read.
    """
    result = []
    for where, row in prompts:
        try:
            prompt = row["prompt"]
            if not isinstance(prompt, str):
                prompt = read_messages(prompt, "prompt")
            tools = None if isinstance(prompt, str) else read_tools(row.get("tools"))
            example = Example(prompt, where=where, tools=tools)
            for message in example.prompt if isinstance(example.prompt, list) else ():
                role = str(message["role"])
                if misspelt(role) and (text := unusual_role(role, encoder.tokenizer)):
                    raise ValueError(text)
            if encoder.processors is None:
                media.refuse_media(example, row, base)
            else:
                example = media.with_references(example, row, base, encoder.processors)
            result.append(Problem(example, *encoder.prompt(example)))
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
    return result
