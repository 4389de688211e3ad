"""The schema of a run's YAML file. Every key that exists is declared here or in a section; any
other key is refused.

Imports neither jax nor transformers: a file is checked before anything slow starts.
`rl/config/files.py` reads the files and turns what pydantic says into file:line messages.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, LiteralString, cast
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

import rollout.types
from policy.mesh.axes import STATIONARY_RULES
from policy.ops.seeds import SEEDS
from policy.runtime import Runtime
from rl.config.data import EvaluationOptions, RewardSettings, TrainedData
from rl.config.mesh import MeshOptions
from rl.config.model import ModelOptions, TeacherOptions, TokenizerOptions
from rl.config.schema import FINITE, HOME, Section, Strict, fields_of
from rl.config.stage import BY_MATRIX, ONE_BY_NUMBER, StageOptions
from rl.config.stage_names import numbered
from rl.errors import ConfigError


class WandbOptions(Strict):
    """Mirror of events.jsonl to Weights & Biases. Without an account use mode: offline."""

    project: str = Field(default="duet", description="project of the run at Weights & Biases")
    name: str | None = Field(default=None, description="default: the name of the run's folder")
    mode: Literal["online", "offline"] = Field(
        default="offline", description="offline writes to the run's folder and needs no account"
    )


class MLflowOptions(Strict):
    """Mirror of events.jsonl to MLflow ([trackers.md](trackers.md#mlflow))."""

    experiment: str = Field(
        default="duet", min_length=1, description="experiment of the run; it is made if missing"
    )
    name: str | None = Field(default=None, description="default: the name of the run's folder")
    uri: str | None = Field(
        default=None,
        description="tracking server or store, such as http://host:5000; null: that of "
        "MLFLOW_TRACKING_URI, or else a SQLite file in the folder mlflow/ of the run",
    )

    @field_validator("uri")
    @classmethod
    def _without_password(cls, uri: str | None) -> str | None:
        if uri is not None and "@" in urlsplit(uri).netloc:
            raise ValueError(
                "the address holds a user or a password, which the run would save; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment, or the "
                "full address as MLFLOW_TRACKING_URI"
            )
        return uri


class TrackioOptions(Strict):
    """Mirror of events.jsonl to Trackio ([trackers.md](trackers.md#trackio))."""

    project: str = Field(default="duet", min_length=1, description="project of the run")
    name: str | None = Field(
        default=None,
        description="first part of the run's name, which ends with an id of its own; default: "
        "the name of the run's folder",
    )
    space: str | None = Field(
        default=None,
        description="Space of the Hugging Face hub that shows the run, USER/NAME; null: that of "
        "TRACKIO_SPACE_ID, or else the folder TRACKIO_DIR, or else the folder trackio/ of the run",
    )


class SampleRecords(Strict):
    """Which completions are kept in samples.jsonl and tokens.bin."""

    every: int = Field(
        default=1, ge=0, description="steps between steps whose completions are kept; 0: none"
    )
    share: float = Field(
        default=1.0, gt=0, le=1, description="share of the prompts whose completions are kept"
    )
    keep_gib: float = Field(
        default=20.0,
        gt=0,
        description="GiB of full files in samples/ that stay on the disk; the oldest go first",
    )

    def keeps_step(self, step: int) -> bool:
        """Whether completions of this step are kept."""
        return bool(self.every) and step % self.every == 0

    def keeps_prompt(self, prompt_id: int) -> bool:
        """Whether completions of this prompt are kept: for a share of all numbers, the same in
        every run."""
        digest = hashlib.blake2b(prompt_id.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.share * 2**64


class RunOptions(Strict):
    dir: Annotated[str | None, HOME] = Field(
        default=None,
        description="local folder of the run; an existing run there is continued; null: "
        "runs/FILE-NUMBER, by the name of the configuration file and the first number that is free",
    )
    remote: Annotated[str | None, HOME] = Field(
        default=None,
        description="remote folder that gets a copy of the run after each checkpoint, as "
        "gs://bucket/run or any URL of fsspec; a start with an empty `dir` goes on from it "
        "(docs/remote.md); null: none",
    )
    checkpoint_every: int = Field(
        default=50, ge=0, description="steps between checkpoints; 0: only at the end of a stage"
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="newest checkpoints that stay on the disk"
    )
    probe: int | None = Field(
        default=None,
        ge=0,
        description="prompts sampled before the first step of the first stage that samples; a "
        "number: the run ends with exit code 3 if it cannot learn from them (docs/diagnose.md); "
        "0: none; null: 32 with a warning only, none for random weights",
    )
    changed_data: Literal["refuse", "allow"] = Field(
        default="refuse",
        description="rows, or held-out rows, that have changed since the run was last started: "
        "refuse them with exit code 3, or allow the run to go on with them",
    )
    samples: SampleRecords = Field(
        default=SampleRecords(), description="which completions are kept"
    )
    log_every: int = Field(default=1, ge=1, description="steps between lines on the console")
    wandb: WandbOptions | None = Field(
        default=None, description="mirror to Weights & Biases; `{}` for its defaults"
    )
    mlflow: MLflowOptions | None = Field(
        default=None, description="mirror to MLflow; `{}` for its defaults"
    )
    trackio: TrackioOptions | None = Field(
        default=None, description="mirror to Trackio; `{}` for its defaults"
    )
    tensorboard: bool = Field(
        default=False, description="mirror to the folder tensorboard/ of the run"
    )
    program_cache: str | None = Field(
        default="~/.cache/duet-rl/programs",
        description="folder of compiled programs, kept for later runs; JAX_COMPILATION_CACHE_DIR "
        "goes first; null: none is kept",
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


class ExportOptions(Strict):
    """What `export/` of a run holds whose last stage trains an adapter; see adapters.md."""

    adapter: bool = Field(default=True, description="the adapter in the form of peft")
    merged: bool = Field(
        default=False,
        description="the model with the adapter merged into its weights; in merged/ of "
        "the export if that has the adapter too",
    )

    @model_validator(mode="after")
    def _something(self):
        if not (self.adapter or self.merged):
            raise ValueError("nothing would be exported: set `adapter` or `merged` to true")
        return self


@fields_of(
    rollout.types.GeneratorOptions,
    leave_out=("record_routes", "record_values", "record_kept", "queue"),
)
class GeneratorSection(Section):
    slots: int = Field(
        default=64,
        ge=1,
        description="most completions decoded at the same time (max_num_seqs); fewer if a step "
        "and an evaluation need fewer",
    )
    strict_shapes: bool = Field(
        default=False,
        description="all programs are compiled before the first step, and a late one is an error; "
        "false: in the background, and a step waits for its own",
    )
    rules: dict[str, list[str]] | None = Field(
        default=None,
        description="logical axis: mesh axes, merged over `mesh.rules` while rollouts decode; or "
        "`stationary`, rules under which no weight is sent. Weights are copied to these shardings "
        "once per step (docs/meshes.md); null: the trained shardings",
    )

    @field_validator("rules", mode="before")
    @classmethod
    def _by_name(cls, rules):
        """Replaces a name by the rules that it stands for."""
        if not isinstance(rules, str):
            return rules
        if rules != "stationary":
            raise ValueError(
                f"no rules are called {rules!r} (nearest: stationary); or give a mapping, as "
                "mesh.rules is one"
            )
        return {name: list(axes) for name, axes in STATIONARY_RULES.items()}


class Change(Strict):
    """Keys that got other values when the run was continued after this step. The run writes it:
    `stages` and the other sections hold the new values, which hold from the next step on
    ([resume.md](resume.md#change-a-run-that-goes-on))."""

    stage: int = Field(ge=0, description="number of the stage, from 0")
    step: int = Field(ge=1, description="last step of the stage with the values before")
    was: Annotated[dict[str, Any], FINITE] = Field(
        min_length=1,
        description="the values before, by dotted key, such as `stages.0.optimizer.learning_rate: "
        "1.0e-5`",
    )

    @property
    def place(self) -> tuple[int, int]:
        """Stage and step as a pair, by which changes are ordered."""
        return self.stage, self.step


class RunConfig(Strict):
    run: RunOptions = Field(
        default=RunOptions(), description="what is kept and shown; changes no number"
    )
    profile: ProfileOptions | None = Field(
        default=None, description="steps that jax's profiler records; null: none. Changes no number"
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=SEEDS,
        description="of random weights, order of the data and every draw; all seeds differ",
    )
    platform: Literal["auto", "cpu", "tpu", "gpu"] = Field(
        default="auto", description="auto: the best that jax finds"
    )
    model: ModelOptions = Field(description="what is trained")
    tokenizer: TokenizerOptions | None = Field(
        default=None, description="default: the model's directory"
    )
    mesh: MeshOptions = Field(
        default=MeshOptions(), description="how arrays are spread over devices"
    )
    generator: GeneratorSection = Field(
        default=GeneratorSection(), description="how completions are decoded"
    )
    max_length: int = Field(
        default=1024,
        ge=2,
        description="tokens of a prompt and its completion together; the cache's length",
    )
    data: TrainedData = Field(
        default=None,
        description="what all stages learn from: a dataset, or a list of datasets with weights",
    )
    rewards: RewardSettings | None = Field(default=None, description="how completions are scored")
    teacher: TeacherOptions | None = Field(
        default=None, description="the model that stages of `distill` learn from"
    )
    evaluation: EvaluationOptions | None = Field(
        default=None, description="accuracy on held-out problems; null: none"
    )
    export: ExportOptions = Field(
        default=ExportOptions(), description="the final weights of a run with an adapter"
    )
    stages: list[StageOptions] = Field(
        min_length=1, description="one after the other, each from the weights of the one before"
    )
    changes: list[Change] = Field(
        default=[],
        description="values that a continued run replaced, in the order of the steps; "
        "written by the run, not by you",
    )
    every_stage: dict[str, Any] = Field(
        default={}, description="merged over each stage, e.g. to make any run small"
    )
    if_present: dict[str, Any] = Field(
        default={},
        description="merged over the sections that the files before have, e.g. evaluation",
    )

    @model_validator(mode="after")
    def _matrices_on_the_device(self):
        """Refuses optimizers that compute with a matrix at a time where weights are in host
        memory."""
        weights = [
            key
            for key, in_host_memory in (
                ("model.host_parameters: true", self.model.host_parameters),
                ("model.table_memory: host", self.model.table_memory == "host"),
            )
            if in_host_memory
        ]
        refused = [
            ("stages", index, key, "name")
            for index, stage in enumerate(self.stages)
            for key in (("optimizer", "critic") if stage.has_critic else ("optimizer",))
            if getattr(stage, key).name in BY_MATRIX
        ]
        if weights and refused:
            text = f"must be {ONE_BY_NUMBER} with {' and '.join(weights)}"
            kind = PydanticCustomError("weights_in_host_memory", cast(LiteralString, text))
            raise ValidationError.from_exception_data(
                "RunConfig",
                [
                    {
                        "type": kind,
                        "loc": path,
                        "input": getattr(self.stages[path[1]], path[2]).name,
                    }
                    for path in refused
                ],
            )
        return self

    @property
    def runtime(self) -> Runtime:
        """How the model is computed in this run."""
        return replace(self.model.runtime, max_length=self.max_length)

    @property
    def directory(self) -> Path:
        """Folder of the run. Raises ConfigError if none is set."""
        if self.run.dir is None:
            raise ConfigError("run.dir is missing; set it, for example run.dir=runs/NAME")
        return Path(self.run.dir)

    @property
    def stage_names(self) -> list[str]:
        """Names of the stages: the algorithm, and a number from the second use on (grpo,
        grpo-2)."""
        return numbered([stage.algorithm.name for stage in self.stages])

    def rewards_of(self, stage: StageOptions) -> RewardSettings | None:
        """Returns how completions of a stage are scored: by its own rewards, or those of the
        run."""
        return stage.rewards or self.rewards
