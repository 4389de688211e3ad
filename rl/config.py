"""The schema of a run's YAML file. Every key that exists is declared here; anything else is refused.

Imports neither jax nor transformers: a file is checked before anything slow starts. `rl/configfile.py` reads the files
and turns what pydantic says into file:line messages.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

import rl.algorithms


class Strict(BaseModel):
    """Unknown keys and values of another type are refused; `1e3` is a whole number where one is wanted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    shorthand: ClassVar[str | None] = None
    """Key for which a plain text stands: `model: tiny` is `model: {source: tiny}`."""

    @model_validator(mode="before")
    @classmethod
    def _as_people_write(cls, values):
        if isinstance(values, str) and cls.shorthand:
            return {cls.shorthand: values}
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name, field in cls.model_fields.items():
            value, kinds = values.get(name), accepted_types(field.annotation)
            if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
                values[name] = int(value)
            # A section left empty (`optimizer:` with every line below commented out) is the section's defaults.
            elif name in values and value is None and type(None) not in kinds and not kinds <= {int, float, bool, str}:
                del values[name]
        return values


def accepted_types(annotation: Any) -> set[Any]:
    """The members of a union, or the type itself; `list[int]` counts as list."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {kind for member in typing.get_args(annotation) for kind in accepted_types(member)}
    if typing.get_origin(annotation) is Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    return {typing.get_origin(annotation) or annotation}


class WandbOptions(Strict):
    """Mirror of events.jsonl to Weights & Biases. Without an account use mode: offline."""

    project: str = Field("duet", description="project of the run at Weights & Biases")
    name: str | None = Field(None, description="default: the name of the run's folder")
    mode: Literal["online", "offline"] = Field("offline", description="offline writes to the run's folder and needs no account")


class RunOptions(Strict):
    dir: str = Field("runs/default", description="folder of the run; an existing run there is continued")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end of a stage")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints that stay on the disk")
    log_every: int = Field(1, ge=1, description="steps between lines on the console")
    wandb: WandbOptions | None = Field(None, description="mirror to Weights & Biases; `{}` for its defaults")
    tensorboard: bool = Field(False, description="mirror to the folder tensorboard/ of the run")


# Fields of ModelOptions that are sections of policy/extensions.py.
_EXTENSIONS: tuple[str, ...] = ()


class ModelOptions(Strict):
    shorthand: ClassVar[str | None] = "source"

    source: str = Field(description="Hugging Face directory, or the name of a file in configs/models/")
    overrides: dict[str, Any] = Field({}, description="keys of the Hugging Face configuration to change; random weights only")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the matrix products")
    param_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype in which weights are stored")
    remat: Literal["none", "full", "minimal", "save_dot_except_mlp", "save_qkv_proj", "save_out_proj"] = Field(
        "full", description="what the backward pass computes again: full keeps the input of each layer only, none keeps all"
    )
    scan: bool = Field(True, description="scan over stacked layers when training (False: unrolled)")
    expert_parallel: Literal["auto", "gather", "all_to_all", "hidden"] = Field(
        "auto", description="how tokens and experts meet along the mesh axis `expert`, see docs/experts.md; auto: gather"
    )
    batch_split: bool = Field(
        False,
        description="updates take the rows of each device in two halves, so that in layers with experts the collectives of one "
        "run under the products of the other; the number of rows of a micro-batch becomes even on each device",
    )

    @model_validator(mode="after")
    def _splittable(self):
        if self.batch_split and self.expert_parallel == "all_to_all":
            raise ValueError("`batch_split` interleaves the collectives of `expert_parallel` gather or hidden, not of all_to_all")
        return self

    @property
    def changes(self) -> dict[str, Any]:
        """Keys of the Hugging Face configuration to change, with the sections of policy/extensions.py that are set here."""
        sections = {name: part.model_dump() for name in _EXTENSIONS if (part := getattr(self, name)) is not None}
        return self.overrides | ({"duet": sections} if sections else {})


class TokenizerOptions(Strict):
    shorthand: ClassVar[str | None] = "source"

    source: str = Field(description="directory of a tokenizer, or a built-in one: bytes, characters")
    alphabet: str | None = Field(None, description="characters: the characters that exist")
    chat_template: str | None = Field(None, description="file of a jinja chat template that replaces the tokenizer's own")


class MeshOptions(Strict):
    """Number of devices along each axis; -1 takes what is left. `rules` maps logical axis names to mesh axes."""

    data: int = Field(1, description="copies of the weights, each for a part of the batch")
    fsdp: int = Field(-1, description="parts into which weights, gradients and moments are cut; they split the batch too")
    tensor: int = Field(1, description="parts into which heads and feed-forward layers are cut")
    expert: int = Field(1, description="parts into which the experts are spread")
    context: int = Field(1, description="parts into which sequences are cut")
    rules: dict[str, list[str]] = Field({}, description="logical axis: mesh axes, laid over the default rules")


class GeneratorOptions(Strict):
    slots: int = Field(64, ge=1, description="completions decoded at the same time")
    prefill_chunk: int = Field(256, ge=1, description="prompt tokens per prefill call")
    tokens_per_dispatch: int = Field(16, ge=1, description="decoding steps between two looks of the host")


class ColumnNames(Strict):
    """Names of the columns of a file or hub dataset."""

    prompt: str = Field("prompt", description="text or list of messages")
    completion: str = Field("completion", description="demonstration: text or list of messages")
    messages: str = Field("messages", description="whole conversation, in place of prompt and completion")


class DataOptions(Strict):
    """Either `task` (problems generated in code) or `path` (a JSONL, CSV or Parquet file, a folder, or a hub name)."""

    shorthand: ClassVar[str | None] = "path"

    task: str | None = Field(None, description="arithmetic, or any reasoning-gym task by name")
    options: dict[str, Any] = Field({}, description="options of the task")
    path: str | None = Field(None, description="relative paths start at the working directory")
    subset: str | None = Field(None, description="configuration of a hub dataset that has several")
    split: str | None = Field(None, description="default: train; for evaluation eval (tasks) or test (hub)")
    columns: ColumnNames = Field(ColumnNames(), description="names of the columns")
    prompt_template: str | None = Field(None, description="text with {column} fields that makes the prompt from a row")
    system: str | None = Field(None, description="system message put before the prompt; implies chat")
    chat: bool = Field(False, description="render plain prompts as a user message through the chat template")
    limit: int | None = Field(None, ge=1, description="use only the first rows")

    @model_validator(mode="after")
    def _one_source(self):
        if (self.task is None) == (self.path is None):
            raise ValueError("give exactly one of `task` and `path`")
        return self


class SamplingOptions(Strict):
    temperature: float = Field(1.0, ge=0.0, description="logits are divided by it; 0 is greedy, from which nothing is learnt")
    top_k: int = Field(0, ge=0, description="0: all")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="the likeliest tokens that hold this share of the probability")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="tokens at least this share as likely as the likeliest")
    max_new_tokens: int = Field(256, ge=1, description="tokens of a completion at most; with its prompt within max_length")
    stop: list[str] = Field([], description="texts that end a completion")
    stop_token_ids: list[int] = Field([], description="besides the tokenizer's end-of-sequence token")


class EvaluationOptions(Strict):
    """Before the first and after the last step of every stage, and every `every` steps."""

    data: DataOptions = Field(description="the held-out problems")
    every: int = Field(0, ge=0, description="steps; 0: only first and last")
    problems: int = Field(256, ge=1, description="the first ones of the data, at most")
    samples: int = Field(0, ge=0, description="sampled completions for each problem, for pass@k; 0: greedy only")
    k: list[int] = Field([1], description="values of k for eval/pass@k; each at most `samples`")
    temperature: float = Field(1.0, gt=0.0, description="of the sampled completions")
    correct_at: float = Field(1.0, description="a completion counts as correct from this reward on")


class RewardOptions(Strict):
    shorthand: ClassVar[str | None] = "name"

    name: str = Field(description="registered name, package.module:function, file.py:function, or entry point")
    weight: float = Field(1.0, description="factor of its scores in the sum")
    options: dict[str, Any] = Field({}, description="keyword arguments handed to the function")


class RewardSettings(Strict):
    functions: list[RewardOptions] = Field(min_length=1, description="the reward is their weighted sum")
    workers: int = Field(2, ge=1, description="processes that call the functions")
    timeout_s: float = Field(10.0, gt=0.0, description="deadline of one call on one group of completions")
    on_error: Literal["continue", "stop"] = Field(
        "continue", description="continue: a sample on which a function fails has no score; stop: the run ends, exit code 6"
    )


class OptimizerOptions(Strict):
    """AdamW. Weight decay acts on matrices only."""

    learning_rate: float = Field(1e-5, gt=0.0, description="at its peak")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimiser updates over which the learning rate rises in a line")
    final_fraction: float = Field(0.0, ge=0.0, le=1.0, description="last learning rate of linear and cosine, as a share")
    weight_decay: float = Field(0.0, ge=0.0, description="times the learning rate, taken off the matrices at each update")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0.0, lt=1.0, description="decay of the mean of squared gradients")
    eps: float = Field(1e-8, gt=0.0, description="added to the root of the mean of squares")
    clip_norm: float | None = Field(1.0, gt=0.0, description="gradients of a larger norm are scaled down to it; null: never")


class RouterOptions(Strict):
    """How the routers of mixture-of-experts layers are kept balanced."""

    bias_rate: float = Field(1e-3, ge=0.0, description="step of the selection bias after each update; 0: it stays")
    balance_coef: float = Field(0.0, ge=0.0, description="weight of the balance loss (DeepSeek-V3: 1e-4)")
    balance: Literal["sequence", "batch"] = Field(
        "sequence",
        description="even use within each sequence, or over all tokens of an update (with micro-batches one more forward pass)",
    )
    capacity_factor: float | None = Field(
        None, gt=0.0, description="sft: an expert takes so many times its even share of a row, and drops the rest; null: all"
    )
    ragged_buffer_factor: float | None = Field(
        None,
        gt=0.0,
        description="sft with expert_parallel all_to_all: a device has room for so many times its even share of all choices, "
        "and drops the rest; null: for the worst case",
    )


class UntilOptions(Strict):
    """Ends a stage before its last step, after the first step whose `metric` reaches a bound."""

    metric: str = Field(description="a name of docs/metrics.md, e.g. loss; looked at after each step that has it")
    at_least: float | None = Field(None, description="the stage ends when the metric is this or more")
    at_most: float | None = Field(None, description="the stage ends when the metric is this or less")

    @model_validator(mode="after")
    def _one_bound(self):
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of `at_least` and `at_most`")
        return self


class AlgorithmOptions(Strict):
    """`name` and the fields of that algorithm's dataclass in rl/algorithms/, defaults filled in."""

    model_config = ConfigDict(extra="allow", frozen=True)
    shorthand: ClassVar[str | None] = "name"

    name: str = Field(description="one of the algorithms below")

    @model_validator(mode="after")
    def _known(self):
        algorithm = rl.algorithms.get(self.name, **(self.model_extra or {}))
        # A saved run says every number it used, so that it stays the same run when a default changes.
        self.__pydantic_extra__.update({f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)})
        return self


class StageOptions(Strict):
    algorithm: AlgorithmOptions = Field(description="its name, or its name and options")
    steps: int = Field(ge=0, description="generation batches (grpo, ppo) or optimiser steps (sft)")
    until: UntilOptions | None = Field(None, description="end the stage earlier, when a metric reaches a bound")
    prompts_per_step: int = Field(32, ge=1, description="prompts (grpo, ppo) or demonstrations (sft) of one step")
    samples_per_prompt: int = Field(8, ge=1, description="completions of each prompt: the group")
    updates_per_step: int = Field(1, ge=1, description="optimiser updates made from the completions of one step")
    micro_batch: int | None = Field(None, ge=1, description="rows in one gradient computation; changes speed and memory only")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of activations dropped in updates of the policy")
    optimizer: OptimizerOptions = Field(OptimizerOptions(), description="optimizer of the policy")
    critic: OptimizerOptions = Field(OptimizerOptions(), description="optimizer of the critic (ppo)")
    router: RouterOptions = Field(RouterOptions(), description="balance of mixture-of-experts layers")
    sampling: SamplingOptions = Field(SamplingOptions(), description="of completions; sft: of its evaluations, which are greedy")
    data: DataOptions | None = Field(None, description="instead of the run's data")
    rewards: RewardSettings | None = Field(None, description="instead of the run's rewards")

    @model_validator(mode="after")
    def _even(self):
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError("`prompts_per_step` must be a multiple of `updates_per_step`")
        return self


class RunConfig(Strict):
    run: RunOptions = Field(RunOptions(), description="what is kept and shown; changes no number")
    seed: int = Field(0, ge=0, description="of random weights, order of the data and every draw")
    platform: Literal["auto", "cpu", "tpu", "gpu"] = Field("auto", description="auto: the best that jax finds")
    model: ModelOptions = Field(description="what is trained")
    tokenizer: TokenizerOptions | None = Field(None, description="default: the model's directory")
    mesh: MeshOptions = Field(MeshOptions(), description="how arrays are spread over devices")
    generator: GeneratorOptions = Field(GeneratorOptions(), description="how completions are decoded")
    max_length: int = Field(1024, ge=2, description="tokens of a prompt and its completion together; the cache's length")
    data: DataOptions | None = Field(None, description="what all stages learn from")
    rewards: RewardSettings | None = Field(None, description="how completions are scored")
    evaluation: EvaluationOptions | None = Field(None, description="accuracy on held-out problems; null: none")
    stages: list[StageOptions] = Field(min_length=1, description="one after the other, each from the weights of the one before")
    every_stage: dict[str, Any] = Field({}, description="laid over each stage, e.g. to make any run small")
    if_given: dict[str, Any] = Field({}, description="laid over those sections that the files before have, e.g. evaluation")

    @property
    def stage_names(self) -> list[str]:
        """sft, grpo, ...; repeated ones grpo-2, grpo-3."""
        kinds = [stage.algorithm.name for stage in self.stages]
        counts = [kinds[: number + 1].count(kind) for number, kind in enumerate(kinds)]
        return [kind if count == 1 else f"{kind}-{count}" for kind, count in zip(kinds, counts, strict=True)]
