"""The sections `model`, `tokenizer` and `teacher` of a run's YAML file."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from policy.adapter_spec import AdapterSpec
from policy.config import HyperConnections, MultiTokenPrediction, Runtime, WeightType
from policy.fields.ngrams import EngramSection
from policy.remat import NAMES as REMAT_POLICIES
from rl.config.schema import FINITE, HOME, Section, Strict, fields_of


@fields_of(HyperConnections)
class HyperConnectionOptions(Section):
    """Manifold-constrained hyper-connections (arXiv 2512.24880) in place of the residual
    connections of all layers."""

    @model_validator(mode="after")
    def _possible(self):
        HyperConnections(**self.model_dump())  # raises ValueError
        return self


@fields_of(EngramSection)
class EngramOptions(Section):
    """Engram (arXiv 2601.07372): in some layers, a table of vectors that the last tokens look up by
    their hash. Tokens whose texts differ in spelling only (capitals, accents, white space) count as
    one."""

    @model_validator(mode="after")
    def _possible(self):
        EngramSection(**self.model_dump())  # raises ValueError
        return self


# Fields of ModelOptions that are sections of policy/fields/extensions.py.
_EXTENSIONS: tuple[str, ...] = ("hyper_connections", "engram", "multi_token_prediction")


@fields_of(MultiTokenPrediction, depth=1)
class MultiTokenPredictionOptions(Section):
    """Modules next to the decoder that predict further tokens, each with a layer like the decoder's
    last. A directory holds their weights in the format of DeepSeek-V3's layer 61 or of an earlier
    run. They start from random weights where its config.json announces none
    (`num_nextn_predict_layers` absent or 0) and no file has a part of one. `missing` is for
    directories that announce modules without weights, and for a depth beyond the modules in the
    files.
    """

    missing: Literal["refuse", "fresh"] = Field(
        default="refuse",
        description="modules that the files should hold and lack: refuse the directory, or start "
        "them from random weights",
    )


@fields_of(AdapterSpec)
class AdapterOptions(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) over weights that stay as they are: stages train
    the adapters alone; see adapters.md."""

    source: Annotated[str | None, HOME] = Field(
        default=None,
        description="directory of an adapter of PEFT to start from: rank, alpha, and which weights "
        "have an adapter, then follow from it; null: a new adapter",
    )

    @model_validator(mode="after")
    def _of_the_source(self):
        named = [
            name
            for name, declared in type(self).model_fields.items()
            if name not in ("source", "dtype") and getattr(self, name) != declared.default
        ]
        if self.source is not None and named:
            raise ValueError(
                f"`source` says what {', '.join(named)} is; leave out {', '.join(named)}, or source"
            )
        return self

    @property
    def spec(self) -> AdapterSpec:
        """Returns the adapter as data; the weights of the model that it names are not known yet."""
        named = self.model_dump(exclude={"source"})
        for name, value in named.items():
            named[name] = tuple(value) if isinstance(value, list) else value
        return AdapterSpec(**named)


# Keys of ModelOptions that are fields of Runtime.
_RUNTIME = [field.name for field in dataclasses.fields(Runtime) if "description" in field.metadata]


@fields_of(Runtime, leave_out=("remat", "remat_tensors"))
class ModelOptions(Section):
    shorthand: ClassVar[str | None] = "source"

    source: Annotated[str, HOME] = Field(
        description="Hugging Face directory, the name of a file in configs/models/ (random "
        "weights), a model on the Hugging Face hub: org/name, or hf://org/name@revision, or a URL such "
        "as gs://bucket/model (docs/remote.md)"
    )
    overrides: Annotated[dict[str, Any], FINITE] = Field(
        default={},
        description="keys of the Hugging Face configuration to change; random weights only",
    )
    remat: Literal["auto", *REMAT_POLICIES] = Field(  # pyright: ignore[reportInvalidTypeForm]
        default="auto",
        description="which activations are recomputed: none keeps the results of all products, "
        "full only the input of each layer; memory.md describes the others. auto: the run chooses "
        "when it first starts, from the memory of a device",
    )
    remat_tensors: dict[str, Literal["device", "offload", "remat"]] = Field(
        default={},
        description="remat: custom only: where each tensor named in memory.md is kept (offload: "
        "host memory), or remat",
    )
    hyper_connections: HyperConnectionOptions | None = Field(
        default=None,
        description="several residual streams; `{}` for the defaults; random weights only",
    )
    engram: EngramOptions | None = Field(
        default=None, description="tables that the last tokens look up; random weights only"
    )
    multi_token_prediction: MultiTokenPredictionOptions | None = Field(
        default=None,
        description="modules that predict further tokens; null: none, or what the directory's "
        "config.json says",
    )

    adapter: AdapterOptions | None = Field(
        default=None,
        description="adapters that stages train in place of the weights; `{}` for the defaults; "
        "null: stages train the weights",
    )
    media: Literal["auto", "never"] = Field(
        default="auto",
        description="pictures and sounds: auto reads those of the data with the towers of the "
        "model; never reads no tower, and refuses rows with them",
    )
    media_rows: int | None = Field(
        default=None,
        ge=1,
        description="most embeddings that the pictures and sounds of one row of data may fill; "
        "longer rows are refused. null: as many as max_length has room for",
    )

    @property
    def runtime(self) -> Runtime:
        """Returns how the model is computed; with `full` where the run has not chosen yet (`auto`)
        or trains nothing."""
        shared = {name: getattr(self, name) for name in _RUNTIME if name != "remat_tensors"}
        shared["remat"] = "full" if self.remat == "auto" else self.remat
        adapter = None if self.adapter is None else self.adapter.spec
        tensors = tuple(self.remat_tensors.items())
        return Runtime(**shared, remat_tensors=tensors, adapter=adapter)

    @property
    def sections(self) -> dict[str, dict]:
        """Returns the sections of policy/fields/extensions.py that are set here."""
        parts = {name: part for name in _EXTENSIONS if (part := getattr(self, name)) is not None}
        return {name: part.model_dump(exclude={"missing"}) for name, part in parts.items()}

    @property
    def changes(self) -> dict[str, Any]:
        """Returns the keys of the Hugging Face configuration to change, `sections` included."""
        return self.overrides | ({"duet": self.sections} if self.sections else {})


class ChatTemplateOptions(Strict):
    """The chat template of a run, in place of the tokenizer's own, and what it is rendered with."""

    shorthand: ClassVar[str | None] = "file"

    file: Annotated[str | None, HOME] = Field(
        default=None, description="file of a jinja chat template; default: the tokenizer's own"
    )
    variables: dict[str, Any] = Field(
        default={},
        description="variables of the template, such as {enable_thinking: false}, wherever it is "
        "rendered",
    )
    history: Literal["template", "last"] = Field(
        default="template",
        description="turns of a demonstration that the template rewrites when the next message is "
        "added: template: each is learned in a row of its own, as it was when it was the last; "
        "last: only turns that the full conversation leaves as they were are learned",
    )


def _as_date(text: str | None) -> str | None:
    if text is not None:
        try:
            datetime.date.fromisoformat(text)
        except ValueError:
            raise ValueError(f"must be a day such as 2026-01-31, got {text!r}") from None
    return text


class TokenizerOptions(Strict):
    shorthand: ClassVar[str | None] = "source"

    source: Annotated[str | None, HOME] = Field(
        default=None,
        description="directory of a tokenizer, a repository of the Hugging Face hub (org/name, "
        "hf://org/name@revision), a URL, or a built-in one: bytes, characters; default: the model's "
        "directory",
    )
    alphabet: str | None = Field(default=None, description="characters: the characters that exist")
    chat_template: ChatTemplateOptions | None = Field(
        default=None,
        description="file of a jinja chat template that replaces the tokenizer's own, and its "
        "variables",
    )
    date: Annotated[str | None, AfterValidator(_as_date)] = Field(
        default=None,
        description="the day that chat templates read as today, as 2026-01-31; null: the day on "
        "which the run first starts",
    )


class TeacherOptions(Strict):
    """A frozen model whose next-token distributions a stage learns from (`distill`, `gkd`, `opd`),
    on the mesh of the run: `source`. Or its likeliest tokens, which `rl teach` wrote: `files`
    (`distill`)."""

    shorthand: ClassVar[str | None] = "source"
    exactly_one: ClassVar[tuple[str, ...]] = ("source", "files", "sources")
    belongs_to: ClassVar[Mapping[str, tuple[str, ...]]] = {"sources": ("by",)}

    source: Annotated[str | None, HOME] = Field(
        default=None,
        description="Hugging Face directory with the tokenizer of the run, the directory of a "
        "finished run, a model on the hub or at a URL; or the name of a file in configs/models/ (random "
        "weights, to try a configuration). opd also: policy, the policy before the updates of the "
        "step; reference, the policy at the start of the stage, or as `reference_every` renews it",
    )
    files: Annotated[str | None, HOME] = Field(
        default=None,
        description="directory that `rl teach` wrote; the run then loads no teacher; see "
        "distillation.md",
    )
    sources: dict[str, Annotated[str, HOME]] | None = Field(
        default=None,
        description="opd: several teachers; value of the column `by` -> source. Each completion is "
        "scored by one",
    )
    by: str | None = Field(default=None, description="column of the data that names the teacher")
    prompt: str | None = Field(
        default=None,
        description="opd: the prompt that the teacher reads, in place of the text of the prompt or "
        "of its last user message. {prompt} stands for that text, {completion} for the "
        "demonstration, {success} for another completion of the group with a reward of at least "
        "correct_at, {NAME} for a column of the data",
    )
    correct_at: float = Field(
        default=1.0, description="reward from which on a completion is a {success}"
    )
    overrides: Annotated[dict[str, Any], FINITE] = Field(
        default={},
        description="keys of the Hugging Face configuration to change; random weights only",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="type of its products and weights; null: model.dtype"
    )
    weights: WeightType | None = Field(
        default=None,
        description="type in which the weights of its products are stored, with a scale per "
        "output channel (nf4: for each 64 of its inputs); null: dtype",
    )
    host_memory: bool = Field(
        default=False,
        description="its weights live in host memory; one layer at a time is on the device",
    )

    @model_validator(mode="after")
    def _chosen_by_a_column(self):
        if (self.sources is None) != (self.by is None):
            raise ValueError("`sources` and `by` go together: value of the column -> source")
        if self.sources is not None and not self.sources:
            raise ValueError("`sources` names no teacher")
        return self

    @property
    def is_own(self) -> bool:
        """Whether the teacher is the policy itself, or the reference of the stage."""
        return self.source in ("policy", "reference")

    @property
    def models(self) -> list[TeacherOptions]:
        """Returns the options of each model that a stage loads, with one `source`."""
        if self.sources is not None:
            one = {"sources": None, "by": None}
            names = sorted(set(self.sources.values()))
            return [self.model_copy(update={"source": name, **one}) for name in names]
        return [] if self.source is None or self.is_own else [self]

    @property
    def label(self) -> str:
        """Returns what messages call the teacher: its source, its files or its sources."""
        names = self.source or self.files or sorted(set((self.sources or {}).values()))
        return names if isinstance(names, str) else ", ".join(names)
