"""What the command line and a task say together: the problems as token ids, how they are sampled
and what scores them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from policy.json_types import JsonObject, JsonValue
from rewards import registry
from rl.config import yaml_tree
from rl.config.data import DataOptions, RewardOptions, RewardSettings, source_name
from rl.data import datasets
from rl.data.encoded import Example, Problem
from rl.data.media import kinds_of, with_lists
from rl.data.rows.files import DataRow
from rl.data.rows.forms import read_example
from rl.errors import ConfigError, DataError
from rl.evaluation.problems import KeyedExample, RowSource, Shot, as_messages, key_of
from rl.evaluation.task import Score, Task, parsed

if TYPE_CHECKING:
    from rl.data.encoding import ExampleEncoder
    from rollout.types import SamplingParams


@dataclass(frozen=True)
class EvalFlags:
    """What the command line says; None: as the task has it.

    data: file or folder with the rows. columns: name -> column of that file. rewards: texts of
    --reward. seed: of sampling and of shuffled options.
    """

    seed: int = 0
    data: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    rewards: tuple[str, ...] = ()
    split: str | None = None
    samples: int | None = None
    k: tuple[int, ...] | None = None
    maj: tuple[int, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    limit: int | None = None
    few_shot: int | None = None
    chat: bool | None = None
    system: str | None = None
    correct_at: float | None = None


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


def with_flags(task: Task, flags: EvalFlags) -> Task:
    """Returns a task as the command line changes it. Raises ConfigError for numbers that do not fit
    together."""
    changed = {
        name: value
        for name in ("samples", "temperature", "top_p", "max_new_tokens", "system", "split")
        if (value := getattr(flags, name)) is not None
    }
    samples = changed.get("samples", task.samples)
    if samples > 1 and changed.get("temperature", task.temperature) == 0:
        if flags.temperature == 0:
            raise ConfigError(
                f"--samples {samples} --temperature 0: all samples of a problem would be the same; "
                "add --temperature 1, or --samples 1"
            )
        changed["temperature"] = 1.0
    for name in ("k", "maj"):
        given = getattr(flags, name)
        if given is None:
            changed[name] = [k for k in getattr(task, name) if k <= samples]
        elif wrong := [k for k in given if not 1 <= k <= samples]:
            raise ConfigError(
                f"--{name} {wrong[0]}: between 1 and the samples of a problem ({samples}); add "
                f"--samples {max(given)}"
            )
        else:
            changed[name] = [*given]
    if flags.k is None and samples > 1 and not changed["k"]:
        changed["k"] = [samples]
    if flags.stop:
        changed["stop"] = [*task.stop, *flags.stop]
    changed_task = parsed(task.model_dump() | changed, lambda key: "command line")
    _check(changed_task, flags)
    return changed_task


def _check(task: Task, flags: EvalFlags) -> None:
    if task.maj:
        first = next(iter(task.scores.values()))
        if registry.answer_of(first.reward, first.options) is None:
            raise ConfigError(
                f"maj@{task.maj[0]}: reward {first.reward} does not tell what a completion "
                "answers; use math, numeric_answer, exact_answer or choice_answer, or register "
                "yours with @reward(answer=...)"
            )
    for score in task.scores.values():
        if score.reward == registry.REWARD_MODEL:
            raise ConfigError(
                "--reward reward_model: reward models score in a run only (docs/rewards.md); name "
                "a function"
            )
    if flags.few_shot and task.shots is None and not flags.rewards:
        raise ConfigError(
            f"--few-shot {flags.few_shot}: the task has no rows for shots (`shots` of its file)"
        )


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


def prepared(
    name: str, task: Task, flags: EvalFlags, encoder: ExampleEncoder, params: SamplingParams
) -> PreparedTask:
    """Reads the rows of a task and encodes its prompts. params: those of the model, with its stop
    tokens. Raises ConfigError, DataError."""
    templated = encoder.tokenizer.chat_template is not None
    chat = flags.chat if flags.chat is not None else task.chat and templated
    if chat and not templated:
        raise ConfigError("--chat: the tokenizer has no chat template; leave --chat out")
    if task.system is not None and not chat:
        advice = "add --chat" if templated else "the tokenizer has none, so leave the text out"
        raise ConfigError(f"--system, or `system` of the task: needs a chat template; {advice}")
    if flags.few_shot is not None:
        shots = flags.few_shot
    else:
        shots = task.shots.count if task.shots else 0
    if flags.rewards:
        examples = _own_examples(task, flags, encoder, chat)
    else:
        examples = RowSource(task, flags.data, chat, flags.seed).examples(flags.limit, shots)
    _check_columns(task, [each.example for each in examples])
    problems = []
    for example in (each.example for each in examples):
        try:
            problems.append(Problem(example, *encoder.prompt(example)))
        except ValueError as error:
            raise DataError(f"{example.where}: {error}") from None
    own = replace(
        params,
        n=task.samples,
        temperature=task.temperature,
        top_p=task.top_p if task.temperature else 1.0,
        max_new_tokens=task.max_new_tokens,
        stop=flags.stop if chat else tuple(task.stop),
    )
    settings = json.loads(task.model_dump_json(exclude={"about", "written", "rows", "timeout_s"}))
    settings |= {"source": flags.data or task.source, "shots": shots, "chat": chat}
    settings["stop"] = [*own.stop]
    settings |= {"seed": flags.seed, "limit": flags.limit, "problems": len(problems)}
    keys = [each.key for each in examples]
    settings["rows"] = _digest(keys)
    settings["prompts"] = _digest([problem.ids for problem in problems])
    return PreparedTask(name, task, problems, keys, own, settings)


def _digest(value: Sequence[JsonValue]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _own_examples(
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


def base_of(flags: EvalFlags) -> str:
    """Returns the name of a file of one's own as a task."""
    return source_name(Path(flags.data or "").stem)
