"""One element of the list `stages` of a run's YAML file, with its sections."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field, field_validator, model_validator

import rl.algorithms
import rollout.types
from rl.config.data import HeldOutData, PluginOptions, RewardSettings, TrainedData
from rl.config.model import TeacherOptions
from rl.config.schema import HOME, Section, Strict, accepted_types, as_integer, fields_of


@fields_of(
    rollout.types.SamplingParams,
    leave_out=("n", *rollout.types.OF_REQUESTS, *rollout.types.CHANGES_OF_RATIOS),
    max_new_tokens=256,
)
class SamplingOptions(Section):
    """How completions are drawn, and where they end besides the tokenizer's end-of-sequence token.
    `evaluation` has the keys for penalties and biases."""

    filters: Literal["renormalise", "ignore"] = Field(
        default="renormalise",
        description="log-probabilities, entropy and KL of the loss where top_k, top_p or min_p "
        "filter, or bad_words or min_tokens forbid tokens. renormalise: over the ids that these "
        "left for each token, which the sampler records. ignore: over all ids; the gradient is "
        "then biased",
    )
    max_kept: int = Field(
        default=128,
        ge=1,
        description="most ids that are recorded for a token under renormalise, and at most top_k "
        "where it is set; a token with more leaves the loss (sampler/kept_overflow)",
    )


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "update_scale": "match_rms_adamw",
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
    },
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "sgd": {"momentum": 0.9, "nesterov": False},
    "adafactor": {"decay_rate": 0.8, "clip_threshold": 1.0, "scale_parameter": False},
}
"""Name of an optimizer -> default of each option that it reads besides those that all read
(rl/training/optimizer.py)."""
BY_MATRIX = ("muon", "adafactor")
"""Optimizers whose change of a number depends on the other numbers of its matrix."""
BY_NUMBER = tuple(name for name in OPTIMIZERS if name not in BY_MATRIX)
"""The other optimizers, which may update a layer of a stack at a time."""
ONE_BY_NUMBER = f"{', '.join(BY_NUMBER[:-1])} or {BY_NUMBER[-1]}"
"""These names in a sentence."""
if TYPE_CHECKING:
    OptimizerName: TypeAlias = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


class OptimizerOptions(Strict):
    """The optimizer, its learning rates and where its moments live
    ([optimizers.md](optimizers.md)). Weight decay acts on matrices, tables and kernels, and on no
    norm or bias.

    Options from `beta1` to `scale_parameter` belong to some optimizers. Such an option is null
    where its optimizer does not read it, and a value is refused there; the optimizer's own default
    takes the place of null where it does.

    The learning rate follows from the number of the step in its stage and of the update in the
    step, also where updates before it changed nothing. Update u of a stage (from 0, with k =
    updates_per_step in step s = floor(u / k) of S, from 0) has learning_rate * (u + 1) / (w + 1) in
    the warm-up, u < w = warmup_steps. After it, with t = (s - floor(w / k)) / (S - 1 - floor(w /
    k)) and f = final_fraction: learning_rate (constant), learning_rate * (f + (1 - f)(1 - t))
    (linear), learning_rate * (f + (1 - f)(1 + cos(pi t)) / 2) (cosine). A policy counts from its
    first step after critic_warmup. `rl plan` and the report draw it.
    """

    name: OptimizerName = Field(default="adamw", description="the rule of an update")
    learning_rate: float = Field(default=1e-5, gt=0.0, description="at its peak")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="after the warm-up, by the formula above"
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="updates, not steps, over which the learning rate rises in a line; a step "
        "makes updates_per_step updates",
    )
    final_fraction: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="learning rate of the last step with linear and cosine, as a share of the "
        "peak; 0: the last step changes nothing",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0.0,
        description="times the learning rate, taken off the matrices at each update",
    )
    beta1: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="decay of the mean of gradients (adamw, muon for weights that are no matrices: "
        "0.9); share of the mean in the sign (lion: 0.9)",
    )
    beta2: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="decay of the mean of squared gradients (adamw, muon for weights that are no "
        "matrices: 0.999), or of the mean of gradients (lion: 0.99)",
    )
    eps: float | None = Field(
        default=None,
        gt=0.0,
        description="added to the root of the mean of squares (adamw, muon for weights that are no "
        "matrices: 1e-8)",
    )
    momentum: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="decay of the mean of gradients (muon: 0.95), or of their sum (sgd: 0.9, and 0 "
        "keeps no sum)",
    )
    nesterov: bool | None = Field(
        default=None,
        description="the momentum is decayed and added to the gradient once more (muon: true; sgd: "
        "false)",
    )
    ns_steps: int | None = Field(
        default=None,
        ge=1,
        description="Newton-Schulz iterations that make the momentum of a matrix nearly orthogonal "
        "(muon: 5)",
    )
    update_scale: Literal["match_rms_adamw", "original"] | None = Field(
        default=None,
        description="factor of an orthogonal matrix (muon). match_rms_adamw, the default: 0.2 * "
        "sqrt(max(d_in, d_out)), which suits learning rates of AdamW; original: sqrt(max(1, d_out "
        "/ d_in)), for rates near 0.02",
    )
    decay_rate: float | None = Field(
        default=None,
        gt=0.0,
        description="update t decays the mean of squares by 1 - t^-decay_rate (adafactor: 0.8)",
    )
    clip_threshold: float | None = Field(
        default=None,
        gt=0.0,
        description="largest root mean square of the change of a matrix, before the learning rate "
        "(adafactor: 1)",
    )
    scale_parameter: bool | None = Field(
        default=None,
        description="the change of a matrix is proportional to the root mean square of its weights "
        "(adafactor: false)",
    )
    clip_norm: float | None = Field(
        default=1.0,
        gt=0.0,
        description="gradients of a larger norm are scaled down to it; null: never",
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="of its moments; float32 keeps weights in bfloat16 in float32 as well, so "
        "that small steps add up",
    )
    host_memory: bool = Field(
        default=False,
        description="its moments live in host memory; an update takes them a layer at a time "
        f"({', '.join(BY_NUMBER)})",
    )

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, values: object) -> object:
        if isinstance(values, str):
            raise ValueError(f"must be a mapping of keys to values; write {{name: {values}}}")
        return values

    @model_validator(mode="after")
    def _own_options(self):
        """Refuses options that the optimizer does not read, and fills in the defaults of others."""
        own = OPTIMIZERS[self.name]
        others = {option for options in OPTIMIZERS.values() for option in options} - own.keys()
        for option in sorted(others):
            if getattr(self, option) is not None:
                raise ValueError(
                    f"{self.name} does not read `{option}`, only {', '.join(own)} and the options "
                    "of all optimizers; leave it out, or set it to null"
                )
        if self.host_memory and self.name in BY_MATRIX:
            raise ValueError(
                f"{self.name} computes with a matrix at a time, and `host_memory` takes a layer "
                f"apart; leave it out, or use {ONE_BY_NUMBER}"
            )
        for option, default in own.items():
            if getattr(self, option) is None:
                object.__setattr__(self, option, default)
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError(
                "`nesterov: true` needs a `momentum` above 0; set one, or leave `nesterov` out"
            )
        return self


class RouterOptions(Strict):
    """How the routers of mixture-of-experts layers are kept balanced."""

    bias_rate: float = Field(
        default=1e-3,
        ge=0.0,
        description="step of the selection bias after each update; 0: it stays",
    )
    balance_coef: float = Field(
        default=0.0, ge=0.0, description="weight of the balance loss (DeepSeek-V3: 1e-4)"
    )
    balance: Literal["sequence", "batch"] = Field(
        default="sequence",
        description="even use within each sequence, or over all tokens of an update (with "
        "micro-batches one more forward pass)",
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0.0,
        description="sft: an expert takes so many times its even share of a row, and drops the "
        "rest; null: all",
    )
    ragged_buffer_factor: float | None = Field(
        default=None,
        gt=0.0,
        description="sft with expert_parallel all_to_all: a device has room for so many times its "
        "even share of all choices, and drops the rest; null: for the worst case",
    )


class IndexerOptions(Strict):
    """How indexers (DeepSeek-V3.2) learn which keys a query needs. They get gradients from their
    own loss only, and this loss reaches no other weight."""

    training: Literal["off", "dense_warmup", "sparse"] = Field(
        default="off",
        description="off: they stay as they are; dense_warmup: attention is over all keys and "
        "only they learn; "
        "sparse: attention is over the selected keys, and they learn together with the rest",
    )
    coef: float = Field(default=1.0, gt=0.0, description="weight of their loss")


class PredictionOptions(Strict):
    """Training of the modules of `model.multi_token_prediction` on the tokens that the stage trains
    on."""

    coef: float = Field(
        default=0.3,
        gt=0.0,
        description="weight of their cross-entropy in the loss (DeepSeek-V3: 0.3, later 0.1)",
    )
    detach: bool = Field(
        default=False,
        description="only the modules learn from it: the policy, its embedding and head get no "
        "gradient from it",
    )


class UntilOptions(Strict):
    """Ends a stage before its last step, after the first step whose `metric` reaches a bound."""

    exactly_one: ClassVar[tuple[str, ...]] = ("at_least", "at_most")

    metric: str = Field(
        description="a name of docs/metrics.md that the stage can have, e.g. loss; looked at "
        "after each step that has it"
    )
    at_least: float | None = Field(
        default=None, description="the stage ends when the metric is this or more"
    )
    at_most: float | None = Field(
        default=None, description="the stage ends when the metric is this or less"
    )


class HeldOutOptions(Strict):
    """The loss on rows that the stage does not train on, without a gradient: before the first step
    of the stage, after its last one, and every `every` steps (sft, dpo, kto, reward_model)."""

    data: HeldOutData = Field(
        description="the rows, in the form of the rows of the stage: a dataset, or a list of "
        "datasets, which are also measured one by one (held_out/NAME/loss); without a `split`, "
        "`eval` of a task and `test` of a dataset of the hub"
    )
    every: int = Field(default=0, ge=0, description="steps; 0: only first and last")


class CurriculumOptions(Strict):
    """Chooses the rows of each step, and observes their rewards (docs/data.md)."""

    shorthand: ClassVar[str | None] = "name"

    name: Annotated[str, HOME] = Field(
        description="pass_rate (leaves out rows that are always or never solved), file.py:function "
        "or package.module:function"
    )
    options: PluginOptions = Field(
        default={}, description="keyword arguments handed to the function"
    )


class BestOptions(Strict):
    """Keeps the checkpoint of the best step of the stage, in addition to the newest ones.

    Steps with the metric count, from the first one on; of equal values the first is the best. A
    checkpoint is written whenever the metric gets better, whatever `run.checkpoint_every` is.
    """

    metric: str = Field(
        description="a metric of an evaluation or of held-out rows (docs/metrics.md), e.g. "
        "held_out/loss or eval/greedy_accuracy"
    )
    mode: Literal["max", "min"] = Field(description="whether larger or smaller values are better")
    take: Literal["best", "last"] = Field(
        default="best",
        description="which weights the next stage starts from and `export/` gets: those of the "
        "best step, or of the last",
    )


class AlgorithmOptions(Strict):
    """`name` and the fields of that algorithm's dataclass in rl/algorithms/, defaults filled in."""

    model_config = ConfigDict(extra="allow", frozen=True)
    shorthand: ClassVar[str | None] = "name"

    name: str = Field(
        description="one of the algorithms below; or, in its place, `preset`: a file of "
        "configs/presets/"
    )

    @model_validator(mode="after")
    def _known(self):
        fields = type(rl.algorithms.get(self.name)).__pydantic_fields__
        options = {
            option: as_integer(value, accepted_types(fields[option].annotation))
            if option in fields
            else value
            for option, value in (self.model_extra or {}).items()
        }
        algorithm = rl.algorithms.get(self.name, **options)
        # A saved run says every number it used, so that it stays the same run when a default
        # changes.
        assert self.__pydantic_extra__ is not None, "extra='allow' keeps the algorithm's fields"
        self.__pydantic_extra__.update(
            {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
        )
        return self


PRODUCER_OPTIONS = ("rollouts",)
"""Options that choose a producer (rl/stages/producers/choice.py). A stage that learns from data
alone refuses them."""


class StageOptions(Strict):
    exactly_one: ClassVar[tuple[str, ...]] = ("steps", "epochs")

    algorithm: AlgorithmOptions = Field(description="its name, or its name and options")
    steps: int | None = Field(
        default=None,
        ge=0,
        description="steps of the stage; each makes updates_per_step updates. A stage has `steps` "
        "or `epochs`",
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="passes over the rows of the data, in place of `steps`: the stage makes "
        "epochs * rows / prompts_per_step steps, rounded up; rows as the stage takes them "
        "(docs/data.md). The saved config.yml has the steps",
    )
    until: UntilOptions | None = Field(
        default=None, description="end the stage earlier, when a metric reaches a bound"
    )
    held_out: HeldOutOptions | None = Field(
        default=None,
        description="rows whose loss is measured during the stage (sft, dpo, kto, reward_model); "
        "null: none",
    )
    curriculum: CurriculumOptions | None = Field(
        default=None,
        description="what chooses the rows of each step; null: each pass has all rows in shuffled "
        "order",
    )
    best: BestOptions | None = Field(
        default=None,
        description="keep the best checkpoint by a metric, and go on with it; null: the last one "
        "counts",
    )
    prompts_per_step: int = Field(
        default=32,
        ge=1,
        description="prompts (grpo, ppo), demonstrations (sft) or pairs (dpo) of one step",
    )
    samples_per_prompt: int = Field(
        default=8, ge=1, description="completions of each prompt: the group"
    )
    updates_per_step: int = Field(
        default=1, ge=1, description="optimiser updates made from the completions of one step"
    )
    max_logp_diff: float | None = Field(
        default=None,
        gt=0,
        description="stop the run where generator and trainer differ by more in the mean "
        "log-probability of a token; null: never",
    )
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="sequences of full length, or pairs, in one gradient computation, whose "
        "tokens bound those of its "
        "packed rows (null: all, on CPU about 1,024 tokens); changes speed and memory only",
    )
    shared_prefix: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="compute what completions of a prompt, or answers of a pair, begin with once "
        "in updates and passes;"
        " auto: where nothing excludes it; changes speed, memory and last bits only",
    )
    trains: Literal["adapter", "weights"] | None = Field(
        default=None,
        description="adapter: the adapter of model.adapter learns, over weights that stay; "
        "weights: the weights learn, before the first stage that trains the adapter; null: "
        "adapter if the model has one",
    )
    freeze: list[str] | None = Field(
        default=None,
        description="weights that updates leave as they are: parts at the beginning of their "
        "paths, such as image.blocks or embed_tokens, or regular expressions that are searched in "
        "the names of the Hugging Face files, such as model.layers.0 (docs/freeze.md); null: the "
        "towers of pictures and sounds (image, audio), which a list without them trains; []: none",
    )
    diagnostics: bool = Field(
        default=False,
        description="log activations of each layer and gradient norms of each kind of part",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of activations dropped in updates of the policy"
    )
    optimizer: OptimizerOptions = Field(
        default=OptimizerOptions(), description="optimizer of the policy"
    )
    critic: OptimizerOptions = Field(
        default=OptimizerOptions(), description="optimizer of the critic (ppo)"
    )
    router: RouterOptions = Field(
        default=RouterOptions(), description="balance of mixture-of-experts layers"
    )
    router_replay: bool = Field(
        default=False,
        description="updates send tokens to the experts that the generator chose (grpo, ppo)",
    )
    indexer: IndexerOptions = Field(
        default=IndexerOptions(), description="training of the indexers of sparse attention"
    )
    mtp: PredictionOptions | None = Field(
        default=None,
        description="trains the modules of model.multi_token_prediction; null: they stay",
    )
    sampling: SamplingOptions = Field(
        default=SamplingOptions(),
        description="of completions; sft: of its evaluations, which are greedy",
    )
    rollouts: Annotated[str | None, HOME] = Field(
        default=None,
        description="folder of an earlier run: step n trains on the samples that its stage of this "
        "name recorded for step n, and samples nothing (docs/sampling.md); null: it samples",
    )
    data: TrainedData = Field(
        default=None, description="instead of the run's data; a dataset, or a list of datasets"
    )
    rewards: RewardSettings | None = Field(default=None, description="instead of the run's rewards")
    teacher: TeacherOptions | None = Field(
        default=None, description="instead of the run's teacher (distill, gkd, opd)"
    )

    @property
    def total_steps(self) -> int:
        """Returns `steps`. Raises ValueError for a stage with `epochs` whose rows have not been
        counted yet."""
        if self.steps is None:
            raise ValueError(
                f"the steps of {self.epochs:g} epochs follow from the rows, which have not been "
                "read"
            )
        return self.steps

    @property
    def runtime(self) -> dict[str, Any]:
        """Returns the fields of Runtime that the updates of this stage override."""
        full = {"adapter": None} if self.trains == "weights" else {}
        return full | {
            "indexer": self.indexer.training,
            "mtp": None if self.mtp is None else "detached" if self.mtp.detach else "joint",
            "record": ("activations",) if self.diagnostics else (),
            "capacity_factor": self.router.capacity_factor,
            "ragged_buffer_factor": self.router.ragged_buffer_factor,
        }

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm has a critic, which `critic` is the optimizer of."""
        options = self.algorithm.model_extra or {}
        return "values" in rl.algorithms.get(self.algorithm.name, **options).inputs

    @field_validator("freeze")
    @classmethod
    def _patterns(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"{name!r} is no regular expression: {error}") from None
        return names

    @model_validator(mode="after")
    def _even(self):
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError("`prompts_per_step` must be a multiple of `updates_per_step`")
        return self
