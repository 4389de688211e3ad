"""A task that is ready to be sampled: its problems as token ids, how completions are drawn, and
what scores them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from policy.json_types import JsonObject, JsonValue
from rl.config.data import RewardOptions, RewardSettings
from rl.data import datasets
from rl.data.encoded import Example, Problem
from rl.errors import ConfigError, DataError
from rl.evaluation.flags import EvalFlags
from rl.evaluation.own_file import own_examples
from rl.evaluation.problems import RowSource
from rl.evaluation.task import Score, Task

if TYPE_CHECKING:
    from rl.data.encoding import ExampleEncoder
    from rollout.text.interface import Tokenizer
    from rollout.types import SamplingParams


@dataclass(frozen=True)
class PreparedTask:
    """A task, ready to be sampled.

    problems: with token ids. keys: of each problem, as `key_of` makes them. params: how completions
    are drawn. settings: all that decides the numbers, as eval.json keeps it.
    """

    name: str
    task: Task
    problems: list[Problem]
    keys: list[str]
    params: SamplingParams
    settings: JsonObject


def prepared(
    name: str, task: Task, flags: EvalFlags, encoder: ExampleEncoder, params: SamplingParams
) -> PreparedTask:
    """Reads the rows of a task and encodes its prompts. params: those of the model, with its stop
    tokens. Raises ConfigError, DataError."""
    chat = _uses_template(task, flags, encoder.tokenizer)
    shots = task.shots.count if task.shots else 0
    if flags.few_shot is not None:
        shots = flags.few_shot
    if flags.rewards:
        examples = own_examples(task, flags, encoder, chat)
    else:
        examples = RowSource(task, flags.data, chat, flags.seed).examples(flags.limit, shots)
    _check_columns(task, [each.example for each in examples])
    problems = [_encoded(each.example, encoder) for each in examples]
    keys = [each.key for each in examples]
    params = replace(
        params,
        n=task.samples,
        temperature=task.temperature,
        top_p=task.top_p if task.temperature else 1.0,
        max_new_tokens=task.max_new_tokens,
        stop=flags.stop if chat else tuple(task.stop),
    )
    settings = json.loads(task.model_dump_json(exclude={"about", "written", "rows", "timeout_s"}))
    settings |= {
        "source": flags.data or task.source,
        "shots": shots,
        "chat": chat,
        "stop": [*params.stop],
        "seed": flags.seed,
        "limit": flags.limit,
        "problems": len(problems),
        "rows": _digest(keys),
        "prompts": _digest([problem.ids for problem in problems]),
    }
    return PreparedTask(name, task, problems, keys, params, settings)


def _uses_template(task: Task, flags: EvalFlags, tokenizer: Tokenizer) -> bool:
    """Returns whether prompts go through the chat template. Raises ConfigError if they should, and
    there is none."""
    templated = tokenizer.chat_template is not None
    chat = flags.chat if flags.chat is not None else task.chat and templated
    if chat and not templated:
        raise ConfigError("--chat: the tokenizer has no chat template; leave --chat out")
    if task.system is not None and not chat:
        advice = "add --chat" if templated else "the tokenizer has none, so leave the text out"
        raise ConfigError(f"--system, or `system` of the task: needs a chat template; {advice}")
    return chat


def _encoded(example: Example, encoder: ExampleEncoder) -> Problem:
    try:
        return Problem(example, *encoder.prompt(example))
    except ValueError as error:
        raise DataError(f"{example.where}: {error}") from None


def _digest(value: Sequence[JsonValue]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _check_columns(task: Task, examples: Sequence[Example]) -> None:
    """Raises DataError for a column that a reward or a table needs and the rows lack."""
    functions = [
        RewardOptions(name=each.reward, options=each.options) for each in task.scores.values()
    ]
    problem = next(datasets.column_problems(RewardSettings(functions=functions), examples), None)
    if problem is not None:
        raise DataError(
            f"{problem}. Name the column: with --data alone by --columns answer=COLUMN, with a task "
            "in `columns` of its file"
        )
    names = [*task.by, *(each.of_each for each in task.scores.values() if each.of_each)]
    for name in names:
        if missing := next((each for each in examples if name not in each.columns), None):
            raise DataError(f"{missing.where}: no column {name!r}, which the task names")


def weights_of(score: Score, problems: Sequence[Problem]) -> list[float] | None:
    """Returns how often each problem counts for a score; None: once."""
    if score.of_each is None:
        return None
    return [float(len(problem.example.columns[score.of_each] or ())) for problem in problems]
