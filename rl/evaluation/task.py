"""The schema of a task: a YAML file that says which rows are problems, how they become prompts, and
what scores the completions. Free of jax."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from policy.json_types import JsonValue
from rewards import RewardError, registry
from rewards.suggest import nearest, nearest_path
from rl.config import yaml_tree
from rl.config.data import PluginOptions
from rl.config.packaged import PACKAGED
from rl.config.schema import HOME, Strict
from rl.errors import ConfigError
from rl.evaluation.templates import check as check_template

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
METRICS = (
    *("problems", "samples", "unscored_samples", "truncated"),
    *("accuracy", "low", "high", "reward_mean"),
)
"""Ends of `eval/` metrics that every task has; a further score is a metric by its own name."""


class Shots(Strict):
    """Solved problems before a prompt."""

    split: str = Field(description="the split that they come from, its first rows")
    count: int = Field(default=0, ge=0, description="how many, unless --few-shot says otherwise")
    target: str = Field(description="template of the solution, which follows the prompt")
    same: str | None = Field(
        default=None, description="column whose value a shot shares with the problem"
    )


class Choices(Strict):
    """Options of a multiple-choice problem. Templates see them as `choices`, each with `letter` and
    `text`; `answer` is the letter of the right one."""

    exactly_one: ClassVar[tuple[str, ...]] = ("options", "right")

    options: str | None = Field(default=None, description="column with the list of all options")
    right_index: str | None = Field(
        default=None, description="column with the place of the right one in `options`, from 0"
    )
    right: str | None = Field(default=None, description="column with the right option")
    wrong: list[str] = Field(
        default=[], description="columns with the others; the seed shuffles them all"
    )

    @model_validator(mode="after")
    def _complete(self):
        if (self.options is None) != (self.right_index is None):
            raise ValueError("`options` and `right_index` go together")
        if (self.right is None) != (not self.wrong):
            raise ValueError("`right` and `wrong` go together")
        return self


class Score(Strict):
    """A reward, and the value from which a completion counts as right."""

    shorthand: ClassVar[str | None] = "reward"

    reward: Annotated[str, HOME] = Field(
        description="registered name, package.module:function or file.py:function"
    )
    options: PluginOptions = Field(default={}, description="options of the reward")
    correct_at: float = Field(
        default=1.0, description="a completion counts as right from this reward on"
    )
    of_each: str | None = Field(
        default=None,
        description="column with a list; the reward is the share of its entries that is right, and "
        "a problem counts as often as the list has entries",
    )


class Task(Strict):
    """What is measured, on which rows."""

    about: str = Field(description="one sentence, with the paper")
    source: Annotated[str, HOME] = Field(description="hub dataset, file or folder")
    revision: str | None = Field(
        default=None, description="commit of the hub dataset that the file was written for"
    )
    written: str | None = Field(
        default=None, description="year and month in which the columns were as the file says"
    )
    rows: int | None = Field(default=None, ge=1, description="rows of the split, for people")
    subset: str | None = Field(default=None, description="configuration of the hub dataset")
    split: str = Field(default="test", description="the split that is measured")
    columns: dict[str, str] = Field(
        default={},
        description="name in templates and rewards -> column of the source, where they differ",
    )
    choices: Choices | None = Field(default=None, description="options of the problem")
    system: str | None = Field(default=None, description="system message; needs chat")
    instruction: str | None = Field(
        default=None, description="text before the shots and the prompt, once"
    )
    prompt: str = Field(description="template of the prompt, in Jinja, from the columns of a row")
    answer: str | None = Field(
        default=None, description="template of the right answer; null: the column `answer`, if any"
    )
    shots: Shots | None = Field(default=None, description="solved problems before the prompt")
    chat: bool = Field(
        default=True,
        description="prompts go through the chat template of a model that has one",
    )
    stop: list[str] = Field(
        default=[], description="texts that end a completion after a plain prompt"
    )
    max_new_tokens: int = Field(default=1024, ge=1, description="most tokens of a completion")
    temperature: float = Field(default=0.0, ge=0.0, description="0: the most likely token")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="probability to draw from")
    samples: int = Field(default=1, ge=1, description="completions of a problem")
    k: list[int] = Field(default=[], description="values of k for pass@k")
    maj: list[int] = Field(default=[], description="values of k for maj@k")
    scores: dict[str, Score] = Field(
        min_length=1, description="name -> what scores a completion; the first is the headline"
    )
    by: list[str] = Field(
        default=[], description="columns whose values get accuracies of their own"
    )
    timeout_s: float = Field(default=10.0, gt=0, description="deadline of a reward for a problem")

    @field_validator("prompt", "answer", "instruction")
    @classmethod
    def _template(cls, text: str | None) -> str | None:
        if text is not None:
            check_template(text)
        return text

    @field_validator("shots")
    @classmethod
    def _other_split(cls, shots: Shots | None, info: ValidationInfo) -> Shots | None:
        if shots is not None:
            check_template(shots.target)
            if shots.split == info.data.get("split"):
                raise ValueError(f"shots come from another split than {shots.split!r}")
        return shots

    @field_validator("scores")
    @classmethod
    def _rewards(cls, scores: dict[str, Score]) -> dict[str, Score]:
        for name, score in scores.items():
            if re.fullmatch(r"[\w.-]+", name) is None:
                raise ValueError(f"{name!r}: a score has letters, digits and _ . - only")
            if name in METRICS:
                raise ValueError(f"{name!r} is a number of every evaluation; choose another name")
            try:
                registry.check(score.reward, score.options)
            except RewardError as error:
                raise ValueError(f"{name}: {error}") from None
        return scores


def names() -> list[str]:
    """Returns the names of the tasks of the package."""
    return sorted(path.stem for path in (PACKAGED / "tasks").glob("*.yml"))


def read(name: str) -> Task:
    """Returns the task of the package with this name, or the one in this file. Raises ConfigError
    with all that is wrong, each with its line."""
    path = PACKAGED / "tasks" / f"{name}.yml"
    if name not in names():
        path = Path(name).expanduser()
        if path.suffix not in (".yml", ".yaml"):
            raise ConfigError(
                f"--task {name}: no such task{nearest(name, names())}. A task of your own is a "
                "file, as --task my_task.yml (docs/evaluation.md)"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--task {name}: {reason}{nearest_path(name)}") from None
    tree = yaml_tree.parse(text, lambda line: f"{path}:{line}")
    return parsed(yaml_tree.plain(tree), lambda key: yaml_tree.locate(tree, key))


def parsed(values: JsonValue, place: Callable[[tuple[str | int, ...]], str]) -> Task:
    """Returns the task with these values. place: (keys that lead to a value) -> where it stands.
    Raises ConfigError with all that is wrong."""
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    lines = []
    for each in sorted(errors, key=lambda one: one["type"] == "missing"):
        key = tuple(part for part in each["loc"] if part != "[key]")
        dotted = ".".join(map(str, key))
        lines.append(f"{place(key)}: {dotted}: {_text(each, key)}".replace(": : ", ": "))
    raise ConfigError("\n".join(lines))


def _text(error: Mapping[str, Any], key: tuple[str | int, ...]) -> str:
    """Returns what is wrong with the value at `key`, by the type of the error of pydantic."""
    if error["type"] == "extra_forbidden":
        sections = {"shots": Shots, "choices": Choices, "scores": Score}
        section = Task if len(key) == 1 else sections.get(str(key[0]), Task)
        return f"unknown key{nearest(str(key[-1]), section.model_fields)}"
    if error["type"] == "missing":
        return "this key is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    value = error["input"]
    shown = repr(value) if isinstance(value, (str, int, float, bool)) else type(value).__name__
    return f"{error['msg'].replace('Input should', 'must')}, got {shown}"
