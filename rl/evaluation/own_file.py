"""A file of one's own as a task: `rl eval MODEL --data FILE --reward NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from policy.json_types import JsonValue
from rl.config import yaml_tree
from rl.config.data import DataOptions, source_name
from rl.data import datasets
from rl.data.encoded import Example
from rl.data.media import kinds_of, with_lists
from rl.data.rows.files import DataRow
from rl.data.rows.forms import read_example
from rl.errors import DataError
from rl.evaluation.flags import EvalFlags
from rl.evaluation.problems import KeyedExample, Shot, as_messages, key_of
from rl.evaluation.task import Task, parsed

if TYPE_CHECKING:
    from rl.data.encoding import ExampleEncoder


def task_name(flags: EvalFlags) -> str:
    """Returns the name of a file of one's own as a task."""
    return source_name(Path(flags.data or "").stem)


def own_task(data: str, flags: EvalFlags) -> Task:
    """Returns the task of a file of one's own. Raises ConfigError for a reward that cannot be
    used."""
    scores = {}
    for text in flags.rewards:
        score: JsonValue = {"reward": text}
        if text.lstrip().startswith("{"):
            score = yaml_tree.plain(yaml_tree.parse(text, lambda line: "--reward"))
        if isinstance(score, dict) and flags.correct_at is not None:
            score = {"correct_at": flags.correct_at} | score
        name = str(score.get("reward")) if isinstance(score, dict) else text
        name = source_name(name.rpartition(":")[2])
        scores[name if name not in scores else f"{name}-{len(scores) + 1}"] = score
    values = {
        "about": f"the rows of {data}",
        "source": data,
        "prompt": "{{ prompt }}",
        "columns": dict(flags.columns),
        "scores": scores,
        "chat": False,
        "max_new_tokens": 256,
    }
    return parsed(values, lambda key: "--reward" if key[:1] == ("scores",) else "command line")


def own_examples(
    task: Task, flags: EvalFlags, encoder: ExampleEncoder, chat: bool
) -> list[KeyedExample]:
    """Returns the rows of a file of one's own, after the shots that its first rows are."""
    shots = flags.few_shot or 0
    options = DataOptions.model_validate(
        {
            "path": task.source,
            "chat": chat,
            "system": task.system,
            "split": flags.split,
            "limit": None if flags.limit is None else flags.limit + shots,
        }
    )
    read = partial(_read_renamed, task.columns)
    try:
        dataset = datasets.load(options, read=read, held_out=True, processors=encoder.processors)
    except DataError as error:
        raise DataError(str(error).replace("set data.columns.", "add --columns ")) from None
    examples = with_lists(dataset.examples, sorted(kinds_of(dataset)))
    if shots >= len(examples):
        raise DataError(
            f"{task.source}: has {len(examples)} rows, and --few-shot takes {shots} of them"
        )
    solved = [_solved(example) for example in examples[:shots]]
    return [
        KeyedExample(_with_shots(solved, example), key_of(example)) for example in examples[shots:]
    ]


def _read_renamed(
    columns: dict[str, str], where: str, row: DataRow, options: DataOptions
) -> Example:
    for name, column in columns.items():
        if column not in row:
            raise ValueError(
                f"no column {column!r}, which --columns names (columns: {', '.join(map(str, row))})"
            )
        row = {**row, name: row[column]}
    return read_example(where, row, options)


def _solved(example: Example) -> Shot:
    asked = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
    target = example.completion or example.columns.get("answer")
    if target is None or not isinstance(asked, str):
        raise DataError(
            f"{example.where}: a shot of --few-shot needs a text as its prompt, and `completion` "
            "or `answer`"
        )
    return Shot(asked, f" {target}")


def _with_shots(shots: Sequence[Shot], example: Example) -> Example:
    if not shots:
        return example
    if isinstance(example.prompt, str):
        before = "\n\n".join(shot.prompt + shot.target for shot in shots)
        return replace(example, prompt=f"{before}\n\n{example.prompt}")
    first = len(example.prompt) > 1 and example.prompt[0]["role"] == "system"
    turns = as_messages(shots, "")[:-1]
    prompt = [*example.prompt[:first], *turns, *example.prompt[first:]]
    return replace(example, prompt=prompt)
