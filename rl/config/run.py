"""The schema of a run's YAML file. Every key that exists is declared here; anything else is refused.

Imports neither jax nor transformers: a file is checked before anything slow starts. `rl/config/files.py` reads the files
and turns what pydantic says into file:line messages.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

import rl.algorithms
import rollout.types
from policy.config import HyperConnections, MultiTokenPrediction, Runtime
from policy.huggingface.ngrams import EngramSection
from policy.mesh.axes import STATIONARY_RULES
from policy.remat import NAMES as REMAT_POLICIES
from rl.config.mesh import MeshOptions
from rl.config.schema import Section, Strict, fields_of


class WandbOptions(Strict):
    """Mirror of events.jsonl to Weights & Biases. Without an account use mode: offline."""

    project: str = Field("duet", description="project of the run at Weights & Biases")
    name: str | None = Field(None, description="default: the name of the run's folder")
    mode: Literal["online", "offline"] = Field(
        "offline", description="offline writes to the run's folder and needs no account"
    )


class RunOptions(Strict):
    dir: str = Field("runs/default", description="folder of the run; an existing run there is continued")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end of a stage")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints that stay on the disk")
    log_every: int = Field(1, ge=1, description="steps between lines on the console")
    wandb: WandbOptions | None = Field(None, description="mirror to Weights & Biases; `{}` for its defaults")
    tensorboard: bool = Field(False, description="mirror to the folder tensorboard/ of the run")
    program_cache: str | None = Field(
        "~/.cache/duet-rl/programs",
        description="folder of compiled programs, kept for later runs; JAX_COMPILATION_CACHE_DIR goes first; null: none is kept",
    )


class ProfileOptions(Strict):
    """Recordings of jax's profiler, in the folder profile/ of the run, for TensorBoard or xprof."""

    steps: list[int] = Field(
        min_length=2, max_length=2, description="first and last step of each stage that is recorded"
    )

    @model_validator(mode="after")
    def _in_order(self) -> ProfileOptions:
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps: {self.steps} are no first and last step, counted from 1")
        return self


@fields_of(HyperConnections)
class HyperConnectionOptions(Section):
    """Manifold-constrained hyper-connections (arXiv 2512.24880) in place of the residual connections of all layers."""

    @model_validator(mode="after")
    def _possible(self):
        HyperConnections(**self.model_dump())  # raises ValueError
        return self


@fields_of(EngramSection)
class EngramOptions(Section):
    """Engram (arXiv 2601.07372): in some layers, a table of vectors that the last tokens look up by their hash. Tokens whose texts
    differ in spelling only (capitals, accents, white space) count as one."""

    @model_validator(mode="after")
    def _possible(self):
        EngramSection(**self.model_dump())  # raises ValueError
        return self


# Fields of ModelOptions that are sections of policy/huggingface/extensions.py.
_EXTENSIONS: tuple[str, ...] = ("hyper_connections", "engram", "multi_token_prediction")


@fields_of(MultiTokenPrediction, depth=1)
class MultiTokenPredictionOptions(Section):
    """Modules beside the decoder that predict further tokens, each with a layer like the decoder's last. A directory holds
    their weights as DeepSeek-V3's layer 61 or as a run that had them wrote them; where its config.json announces none
    (`num_nextn_predict_layers` absent or 0) and no file has a part of one, they start from random weights. `missing` is for
    directories that announce modules without weights, and for a depth beyond the modules in the files."""

    missing: Literal["refuse", "fresh"] = Field(
        "refuse",
        description="modules that the files should hold and lack: refuse the directory, or start them from random weights",
    )


# Keys of ModelOptions that are fields of Runtime.
_RUNTIME = [field.name for field in dataclasses.fields(Runtime) if "description" in field.metadata]


@fields_of(Runtime, leave_out=("remat", "remat_tensors"))
class ModelOptions(Section):
    shorthand: ClassVar[str | None] = "source"

    source: str = Field(description="Hugging Face directory, or the name of a file in configs/models/")
    overrides: dict[str, Any] = Field(
        {}, description="keys of the Hugging Face configuration to change; random weights only"
    )
    remat: Literal[REMAT_POLICIES] = Field(
        "full",
        description="what the backward pass computes again: full keeps the input of each layer only, none keeps all; the others "
        "stand in memory.md",
    )
    remat_tensors: dict[str, Literal["device", "offload", "remat"]] = Field(
        {},
        description="remat: custom only: where each tensor named in memory.md is kept (offload: host memory), or remat",
    )
    hyper_connections: HyperConnectionOptions | None = Field(
        None, description="several residual streams; `{}` for the defaults; random weights only"
    )
    engram: EngramOptions | None = Field(None, description="tables that the last tokens look up; random weights only")
    multi_token_prediction: MultiTokenPredictionOptions | None = Field(
        None, description="modules that predict further tokens; null: none, or what the directory's config.json says"
    )

    @property
    def runtime(self) -> Runtime:
        """How the model is computed."""
        shared = {name: getattr(self, name) for name in _RUNTIME if name != "remat_tensors"}
        return Runtime(**shared, remat_tensors=tuple(self.remat_tensors.items()))

    @property
    def sections(self) -> dict[str, dict]:
        """The sections of policy/huggingface/extensions.py that are set here."""
        parts = {name: part for name in _EXTENSIONS if (part := getattr(self, name)) is not None}
        return {name: part.model_dump(exclude={"missing"}) for name, part in parts.items()}

    @property
    def changes(self) -> dict[str, Any]:
        """Keys of the Hugging Face configuration to change, with those sections."""
        return self.overrides | ({"duet": self.sections} if self.sections else {})


class TokenizerOptions(Strict):
    shorthand: ClassVar[str | None] = "source"

    source: str = Field(description="directory of a tokenizer, or a built-in one: bytes, characters")
    alphabet: str | None = Field(None, description="characters: the characters that exist")
    chat_template: str | None = Field(
        None, description="file of a jinja chat template that replaces the tokenizer's own"
    )


@fields_of(rollout.types.GeneratorOptions, leave_out=("record_routes", "record_values"))
class GeneratorOptions(Section):
    slots: int = Field(64, ge=1, description="completions decoded at the same time (max_num_seqs)")
    strict_shapes: bool = Field(False, description="a program that was not compiled before the first step is an error")
    rules: dict[str, list[str]] | None = Field(
        None,
        description="logical axis: mesh axes, merged over `mesh.rules` while rollouts decode; or `stationary`, rules under which "
        "no weight is sent. Weights are copied to these shardings once per step (docs/meshes.md); null: the trained shardings",
    )

    @field_validator("rules", mode="before")
    @classmethod
    def _by_name(cls, rules):
        """The rules that a word stands for."""
        if not isinstance(rules, str):
            return rules
        if rules != "stationary":
            raise ValueError(
                f"no rules are called {rules!r} (nearest: stationary); or give a mapping, as mesh.rules is one"
            )
        return {name: list(axes) for name, axes in STATIONARY_RULES.items()}


class ColumnNames(Strict):
    """Names of the columns of a file or hub dataset."""

    prompt: str = Field("prompt", description="text or list of messages")
    completion: str = Field("completion", description="demonstration: text or list of messages")
    messages: str = Field("messages", description="whole conversation, in place of prompt and completion")
    chosen: str = Field(
        "chosen", description="of a pair (dpo, reward_model), the answer preferred: text or list of messages"
    )
    rejected: str = Field("rejected", description="of a pair, the other answer, in the same form")
    margin: str = Field(
        "margin", description="of a pair, by how much the scores are to differ (reward_model); absent: 0"
    )


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


@fields_of(rollout.types.SamplingParams, leave_out=("n",), max_new_tokens=256)
class SamplingOptions(Section):
    """How completions are drawn, and where they end besides the tokenizer's end-of-sequence token."""


class EvaluationOptions(Strict):
    """Before the first and after the last step of every stage, and every `every` steps."""

    data: DataOptions = Field(description="the held-out problems")
    every: int = Field(0, ge=0, description="steps; 0: only first and last")
    problems: int = Field(256, ge=1, description="the first ones of the data, at most")
    samples: int = Field(0, ge=0, description="sampled completions for each problem, for pass@k; 0: greedy only")
    k: list[int] = Field([1], description="values of k for eval/pass@k; each at most `samples`")
    temperature: float = Field(1.0, gt=0.0, description="of the sampled completions")
    correct_at: float = Field(1.0, description="a completion counts as correct from this reward on")
    metrics: list[str] = Field(
        [], description="further metrics of the greedy completions, each file.py:function or package.module:function"
    )


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
        "continue",
        description="continue: a sample on which a function fails has no score; stop: the run ends, exit code 6",
    )


class OptimizerOptions(Strict):
    """AdamW. Weight decay acts on matrices only."""

    learning_rate: float = Field(1e-5, gt=0.0, description="at its peak")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimiser updates over which the learning rate rises in a line")
    final_fraction: float = Field(
        0.0, ge=0.0, le=1.0, description="last learning rate of linear and cosine, as a share"
    )
    weight_decay: float = Field(
        0.0, ge=0.0, description="times the learning rate, taken off the matrices at each update"
    )
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0.0, lt=1.0, description="decay of the mean of squared gradients")
    eps: float = Field(1e-8, gt=0.0, description="added to the root of the mean of squares")
    clip_norm: float | None = Field(
        1.0, gt=0.0, description="gradients of a larger norm are scaled down to it; null: never"
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of its moments; float32 keeps weights in bfloat16 in float32 as well, so that small steps add up",
    )
    host_memory: bool = Field(
        False, description="its moments live in host memory; an update takes them a layer at a time"
    )


class RouterOptions(Strict):
    """How the routers of mixture-of-experts layers are kept balanced."""

    bias_rate: float = Field(1e-3, ge=0.0, description="step of the selection bias after each update; 0: it stays")
    balance_coef: float = Field(0.0, ge=0.0, description="weight of the balance loss (DeepSeek-V3: 1e-4)")
    balance: Literal["sequence", "batch"] = Field(
        "sequence",
        description="even use within each sequence, or over all tokens of an update (with micro-batches one more forward pass)",
    )
    capacity_factor: float | None = Field(
        None,
        gt=0.0,
        description="sft: an expert takes so many times its even share of a row, and drops the rest; null: all",
    )
    ragged_buffer_factor: float | None = Field(
        None,
        gt=0.0,
        description="sft with expert_parallel all_to_all: a device has room for so many times its even share of all choices, "
        "and drops the rest; null: for the worst case",
    )


class IndexerOptions(Strict):
    """How indexers (DeepSeek-V3.2) learn which keys a query needs. Only their loss reaches them, and it reaches only them."""

    training: Literal["off", "dense_warmup", "sparse"] = Field(
        "off",
        description="off: they stay as they are; dense_warmup: attention is over all keys and only they learn; "
        "sparse: attention is over the selected keys, and they learn beside the rest",
    )
    coef: float = Field(1.0, gt=0.0, description="weight of their loss")


class PredictionOptions(Strict):
    """Training of the modules of `model.multi_token_prediction` on the tokens that the stage trains on."""

    coef: float = Field(
        0.3, gt=0.0, description="weight of their cross-entropy in the loss (DeepSeek-V3: 0.3, later 0.1)"
    )
    detach: bool = Field(
        False, description="only the modules learn from it: the policy, its embedding and head feel nothing of it"
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

    name: str = Field(description="one of the algorithms below; or, in its place, `preset`: a file of configs/presets/")

    @model_validator(mode="after")
    def _known(self):
        algorithm = rl.algorithms.get(self.name, **(self.model_extra or {}))
        # A saved run says every number it used, so that it stays the same run when a default changes.
        self.__pydantic_extra__.update({f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)})
        return self


class StageOptions(Strict):
    algorithm: AlgorithmOptions = Field(description="its name, or its name and options")
    steps: int = Field(ge=0, description="generation batches (grpo, ppo), or optimiser steps (sft, dpo)")
    until: UntilOptions | None = Field(None, description="end the stage earlier, when a metric reaches a bound")
    prompts_per_step: int = Field(
        32, ge=1, description="prompts (grpo, ppo), demonstrations (sft) or pairs (dpo) of one step"
    )
    samples_per_prompt: int = Field(8, ge=1, description="completions of each prompt: the group")
    updates_per_step: int = Field(1, ge=1, description="optimiser updates made from the completions of one step")
    max_logp_diff: float | None = Field(
        None,
        gt=0,
        description="stop the run where generator and trainer differ by more in the mean log-probability of a token; null: never",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="packed rows in one gradient computation (null: all, on CPU 768 tokens); changes speed and memory only",
    )
    diagnostics: bool = Field(
        False, description="log activations of each layer and gradient norms of each kind of part"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of activations dropped in updates of the policy")
    optimizer: OptimizerOptions = Field(OptimizerOptions(), description="optimizer of the policy")
    critic: OptimizerOptions = Field(OptimizerOptions(), description="optimizer of the critic (ppo)")
    router: RouterOptions = Field(RouterOptions(), description="balance of mixture-of-experts layers")
    router_replay: bool = Field(
        False, description="updates send tokens to the experts that the generator chose (grpo, ppo)"
    )
    indexer: IndexerOptions = Field(IndexerOptions(), description="training of the indexers of sparse attention")
    mtp: PredictionOptions | None = Field(
        None, description="trains the modules of model.multi_token_prediction; null: they stay"
    )
    sampling: SamplingOptions = Field(
        SamplingOptions(), description="of completions; sft: of its evaluations, which are greedy"
    )
    data: DataOptions | None = Field(None, description="instead of the run's data")
    rewards: RewardSettings | None = Field(None, description="instead of the run's rewards")

    @property
    def runtime(self) -> dict[str, Any]:
        """Fields of Runtime that updates of this stage want otherwise."""
        return {
            "indexer": self.indexer.training,
            "mtp": None if self.mtp is None else "detached" if self.mtp.detach else "joint",
            "record": ("activations",) if self.diagnostics else (),
            "capacity_factor": self.router.capacity_factor,
            "ragged_buffer_factor": self.router.ragged_buffer_factor,
        }

    @model_validator(mode="after")
    def _even(self):
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError("`prompts_per_step` must be a multiple of `updates_per_step`")
        return self


class RunConfig(Strict):
    run: RunOptions = Field(RunOptions(), description="what is kept and shown; changes no number")
    profile: ProfileOptions | None = Field(
        None, description="steps that jax's profiler records; null: none. Changes no number"
    )
    seed: int = Field(0, ge=0, description="of random weights, order of the data and every draw")
    platform: Literal["auto", "cpu", "tpu", "gpu"] = Field("auto", description="auto: the best that jax finds")
    model: ModelOptions = Field(description="what is trained")
    tokenizer: TokenizerOptions | None = Field(None, description="default: the model's directory")
    mesh: MeshOptions = Field(MeshOptions(), description="how arrays are spread over devices")
    generator: GeneratorOptions = Field(GeneratorOptions(), description="how completions are decoded")
    max_length: int = Field(
        1024, ge=2, description="tokens of a prompt and its completion together; the cache's length"
    )
    data: DataOptions | None = Field(None, description="what all stages learn from")
    rewards: RewardSettings | None = Field(None, description="how completions are scored")
    evaluation: EvaluationOptions | None = Field(None, description="accuracy on held-out problems; null: none")
    stages: list[StageOptions] = Field(
        min_length=1, description="one after the other, each from the weights of the one before"
    )
    every_stage: dict[str, Any] = Field({}, description="laid over each stage, e.g. to make any run small")
    if_present: dict[str, Any] = Field(
        {}, description="laid over those sections that the files before have, e.g. evaluation"
    )

    @property
    def stage_names(self) -> list[str]:
        """sft, grpo, ...; repeated ones grpo-2, grpo-3."""
        kinds = [stage.algorithm.name for stage in self.stages]
        counts = [kinds[: number + 1].count(kind) for number, kind in enumerate(kinds)]
        return [kind if count == 1 else f"{kind}-{count}" for kind, count in zip(kinds, counts, strict=True)]
