"""The sections `data`, `evaluation` and `rewards` of a run's YAML file."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

import rollout.types
from policy.json_types import JsonValue
from rewards.registry import REWARD_MODEL
from rl.config.schema import HOME, Section, Strict, fields_of, with_home

_NOT_OF_EVALUATIONS = {field.name for field in dataclasses.fields(rollout.types.SamplingParams)} - {
    *rollout.types.LOGITS_PROCESSORS
}
_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret(_key)?|passw(or)?d|credentials?"
    r"|(access|auth|bearer|api|hf)_token)$",
    re.IGNORECASE,
)
# Keys of well-known services by their prefixes, and user:password in an address.
_SECRET_VALUE = re.compile(
    r"^(sk-|hf_|ghp_|github_pat_|xox[bap]-|AKIA)[\w-]{16,}$|^\w+://[^/\s:@]+:[^/\s@]+@"
)


def refuse_secrets(options: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the options. Raises ValueError, without the value, for an option that holds a secret.

    Configurations are printed, saved and shown in reports.
    """
    for name, value in options.items():
        if (
            isinstance(value, str)
            and value
            and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
        ):
            raise ValueError(
                f"`{name}` holds a secret, and configurations are printed, saved and shown in "
                "reports; let the "
                "function "
                f'read it from the environment, for example os.environ["{name.upper()}"]'
            )
    return options


PluginOptions = Annotated[dict[str, Any], AfterValidator(refuse_secrets)]
"""Options of a task or reward, which may be anyone's code."""


class ColumnNames(Strict):
    """Names of the columns of a file or hub dataset."""

    prompt: str = Field(default="prompt", description="text or list of messages")
    completion: str = Field(
        default="completion", description="demonstration: text or list of messages"
    )
    messages: str = Field(
        default="messages", description="full conversation, in place of prompt and completion"
    )
    chosen: str = Field(
        default="chosen",
        description="preferred answer of a pair (dpo, reward_model): text or list of messages",
    )
    rejected: str = Field(
        default="rejected", description="other answer of a pair, in the same form"
    )
    margin: str = Field(
        default="margin",
        description="by how much the scores of a pair are to differ (reward_model); absent: 0",
    )
    source: str | None = Field(
        default=None,
        description="column that says where a row came from, such as data_source; metrics and "
        "samples go by it (docs/data.md); null: the name of the dataset in a list of datasets",
    )


class DataOptions(Strict):
    """Either `task` (problems generated in code) or `path` (a JSONL, CSV or Parquet file, a folder,
    or a hub name)."""

    shorthand: ClassVar[str | None] = "path"
    exactly_one: ClassVar[tuple[str, ...]] = ("task", "path")
    belongs_to: ClassVar[dict[str, tuple[str, ...]]] = {
        "task": ("options", "split"),
        "path": ("subset", "split", "columns", "prompt_template"),
    }

    task: str | None = Field(
        default=None, description="arithmetic, pictures, tones, or any reasoning-gym task by name"
    )
    options: PluginOptions = Field(default={}, description="options of the task")
    path: Annotated[str | None, HOME] = Field(
        default=None,
        description="file, folder, a dataset of the Hugging Face hub: org/name, or "
        "hf://org/name@revision, or a URL such as gs://bucket/rows.jsonl (docs/remote.md); "
        "relative paths start at the working directory",
    )
    subset: str | None = Field(
        default=None, description="configuration of a hub dataset that has several"
    )
    split: str | None = Field(
        default=None, description="default: train; for evaluation eval (tasks) or test (hub)"
    )
    columns: ColumnNames = Field(default=ColumnNames(), description="names of the columns")
    prompt_template: str | None = Field(
        default=None, description="text with {column} fields that makes the prompt from a row"
    )
    system: str | None = Field(
        default=None, description="system message put before the prompt; implies chat"
    )
    chat: bool = Field(
        default=False,
        description="render plain prompts as a user message through the chat template",
    )
    limit: int | None = Field(default=None, ge=1, description="use only the first rows")
    too_long: Literal["refuse", "drop", "truncate"] = Field(
        default="refuse",
        description="rows that are longer than max_length: end the run, leave them out, or cut "
        "the end of demonstrations "
        "and answers (a prompt is never cut; one that is too long is left out)",
    )


class NamedDataOptions(DataOptions):
    """A dataset of a list of datasets: the keys of one dataset, and its name."""

    name: str | None = Field(
        default=None,
        description="name of the dataset in metrics, samples and messages: letters, digits and "
        "_ . -; null: the last part of its path without the ending, or its task",
    )

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str | None) -> str | None:
        if name is not None and name != source_name(name):
            raise ValueError(f"has letters, digits and _ . - only, got {name!r}")
        return name

    @property
    def label(self) -> str:
        """Returns the name of the dataset."""
        if self.name is not None:
            return self.name
        if self.path is None:
            return source_name(str(self.task).rpartition(":")[2])
        path = PurePath(self.path.rpartition("@")[0] or self.path)
        is_file = path.suffix.lower() in _ENDINGS
        return source_name(path.stem if is_file else path.name)


class WeightedDataOptions(NamedDataOptions):
    """A dataset of a list of datasets that a stage draws from: the keys of one dataset, its name
    and its weight."""

    weight: float | None = Field(
        default=None,
        gt=0,
        description="share of the rows that come from it, in relation to the weights of the "
        "others; all datasets of a list have one, or none has: each row then comes equally often",
    )


_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def source_name(text: str) -> str:
    """Returns a text as the name of a source in metrics: other characters than letters, digits and
    _ . - become -."""
    return re.sub(r"[^\w.-]+", "-", text) or "-"


AnyDataset = TypeVar("AnyDataset", bound=NamedDataOptions)


def _one_or_list_of(kind: type[AnyDataset]) -> WrapValidator:
    """Returns the validator of one dataset, a list of datasets, or none. It looks at the form of
    the value first, so that errors are about the form that was written."""
    entries: TypeAdapter[Any] = TypeAdapter(cast(Any, list)[kind])

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, list):
            return _checked_list(entries.validate_python(value))
        return handler(None) if value is None else DataOptions.model_validate(value)

    return WrapValidator(validate)


def _checked_list(options: list[AnyDataset]) -> list[AnyDataset]:
    if not options:
        raise ValueError("a list of datasets has one or more, got none")
    labels = Counter(each.label for each in options)
    if repeated := next((label for label, count in labels.items() if count > 1), None):
        raise ValueError(f"two datasets are called {repeated!r}; give each a `name`")
    weights = [each.weight for each in options if isinstance(each, WeightedDataOptions)]
    if None in weights and any(weight is not None for weight in weights):
        label = next(each.label for each in options if getattr(each, "weight", None) is None)
        raise ValueError(f"{label} has no weight and others have one; give all a `weight`, or none")
    return options


TrainedData = Annotated[
    DataOptions | list[WeightedDataOptions] | None, _one_or_list_of(WeightedDataOptions)
]
"""Data of stages: one dataset, or several that are drawn from by weight."""


HeldOutData = Annotated[DataOptions | list[NamedDataOptions], _one_or_list_of(NamedDataOptions)]
"""Data that nothing is trained on: one dataset, or several with numbers of their own."""


def datasets_of(
    data: DataOptions | Sequence[NamedDataOptions] | None,
) -> list[DataOptions]:
    """Returns the datasets of a section of data; [] without one."""
    if data is None:
        return []
    return [data] if isinstance(data, DataOptions) else list(data)


def _refuses_long_rows(
    data: DataOptions | list[NamedDataOptions],
) -> DataOptions | list[NamedDataOptions]:
    if any(each.too_long != "refuse" for each in datasets_of(data)):
        raise ValueError(
            "`too_long` cannot change held-out rows: the numbers of an evaluation are those of "
            "all its rows"
        )
    return data


def _by_token_id(biases: object) -> object:
    """Returns a mapping with integers for its keys, which are texts in YAML. Raises ValueError for
    other keys."""
    if not isinstance(biases, dict):
        return biases
    if wrong := [key for key in biases if not str(key).isdecimal()]:
        raise ValueError(f"its keys are token ids, got {wrong[0]!r}")
    return {int(key): bias for key, bias in biases.items()}


@fields_of(rollout.types.SamplingParams, leave_out=_NOT_OF_EVALUATIONS)
class EvaluationOptions(Section):
    """Before the first and after the last step of every stage, and every `every` steps."""

    data: Annotated[HeldOutData, AfterValidator(_refuses_long_rows)] = Field(
        description="the held-out problems: a dataset, or a list of datasets, which are also "
        "measured one by one (eval/NAME/greedy_accuracy)"
    )
    every: int = Field(default=0, ge=0, description="steps; 0: only first and last")
    problems: int = Field(default=256, ge=1, description="the first ones of each dataset, at most")
    samples: int = Field(
        default=0,
        ge=0,
        description="sampled completions for each problem, for pass@k; 0: greedy only",
    )
    k: list[int] = Field(
        default=[1], description="values of k for eval/pass@k; each at most `samples`"
    )
    maj: list[int] = Field(
        default=[],
        description="values of k for eval/maj@k, whether the answer that most of k samples give "
        "is right; each at most `samples`",
    )
    temperature: float = Field(default=1.0, gt=0.0, description="of the sampled completions")
    correct_at: float = Field(
        default=1.0, description="a completion counts as correct from this reward on"
    )
    metrics: Annotated[list[str], HOME] = Field(
        default=[],
        description="further metrics of the greedy completions, each file.py:function or "
        "package.module:function",
    )
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_by_token_id)] = Field(
        default=None,
        description="Numbers from -100 to 100 that are added to the logits of tokens, by token id.",
    )

    @property
    def processors(self) -> dict[str, Any]:
        """Returns the fields of SamplingParams that change logits."""
        return {name: getattr(self, name) for name in rollout.types.LOGITS_PROCESSORS}


class RewardOptions(Strict):
    shorthand: ClassVar[str | None] = "name"

    name: Annotated[str, HOME] = Field(
        description="registered name, package.module:function, file.py:function, or entry point"
    )
    weight: float = Field(default=1.0, description="factor of its scores in the sum")
    options: PluginOptions = Field(
        default={}, description="keyword arguments handed to the function"
    )

    @field_validator("options")
    @classmethod
    def _source(cls, options: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        """Expands the home directory in the source of a reward model; other options belong to
        anyone's code."""
        if info.data.get("name") == REWARD_MODEL and "source" in options:
            return options | {"source": with_home(options["source"])}
        return options


class RewardSettings(Strict):
    functions: list[RewardOptions] = Field(
        min_length=1, description="the reward is their weighted sum"
    )
    workers: int = Field(default=2, ge=1, description="processes that call the functions")
    timeout_s: float = Field(
        default=10.0, gt=0.0, description="deadline of one call on one group of completions"
    )
    on_error: Literal["continue", "stop"] = Field(
        default="continue",
        description="continue: a sample on which a function fails has no score; stop: the run "
        "ends, exit code 6",
    )
    unscored_steps: int = Field(
        default=2,
        ge=0,
        description="steps in a row in which no completion has a score, after which the run ends "
        "with exit code 6; a stage with fewer steps ends so after its last; 0: never",
    )
