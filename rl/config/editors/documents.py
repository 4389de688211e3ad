"""Makes the JSON Schemas in configs/: `python -m rl.config.editors.documents` writes them.

`RUN` describes a complete configuration, `PARTIAL` a file that is merged over another one, `PRESET`
a file of configs/presets/, and `MODEL` a file of configs/models/. What they share is in
`DEFINITIONS`, where a name that ends in `-partial` is of a file that is merged over others.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import JsonSchemaValue

from policy import families, remat
from policy.mesh.axes import AXES, DEFAULT_RULES, DESCRIPTIONS, REPLICATED, UNUSED
from rl.config.data import (
    DataOptions,
    EvaluationOptions,
    NamedDataOptions,
    RewardOptions,
    WeightedDataOptions,
)
from rl.config.editors import plugins
from rl.config.editors.algorithms import algorithm, algorithm_part
from rl.config.editors.files import (
    COMMENT,
    DEFINITIONS,
    DIALECT,
    MODEL,
    PARTIAL,
    PRESET,
    RUN,
    needed,
    text_of,
)
from rl.config.editors.json_schema import ConfigSchema, PartSchema, named, one_of, options_model
from rl.config.mesh import MeshOptions, SliceOptions
from rl.config.model import ModelOptions, TokenizerOptions
from rl.config.packaged import PACKAGED, model_presets
from rl.config.run import GeneratorSection, ProfileOptions, RunConfig
from rl.config.schema import Strict
from rl.config.stage import StageOptions

_DATASETS = (DataOptions, NamedDataOptions, WeightedDataOptions)
_MERGED = ("every_stage", "if_present")
_SECTIONS = {
    "vision_config": "the tower of pictures",
    "audio_config": "the tower of sounds",
    "processor_config": "content of processor_config.json: how pictures and sounds become inputs "
    "of the towers",
}
_Count = Annotated[int, Field(ge=1)]
_TITLES = {
    RUN: ("Duet: a run", "A complete configuration for rl-train."),
    PARTIAL: (
        "Duet: a part of a run",
        "A configuration that is merged over another one. No key is required.",
    ),
    PRESET: ("Duet: a preset", "A file of configs/presets/: keys of a stage."),
    MODEL: (
        "Duet: an architecture",
        "A file of configs/models/: the keys of a Hugging Face configuration.",
    ),
}


def documents() -> dict[str, JsonSchemaValue]:
    """Returns the name of each file -> its schema. Names of installed plugins are not part of
    them."""
    definitions = _definitions()
    roots = {
        RUN: [_defined("RunConfig"), *_in_each_stage()],
        PARTIAL: [_defined("RunConfig-partial")],
        PRESET: [_defined("StageOptions-partial")],
        MODEL: [_defined("architecture")],
    }
    result = {file: _headed(*_TITLES[file], {"allOf": root}) for file, root in roots.items()}
    shared = {"$defs": needed(json.dumps(roots), definitions)}
    about = "Definitions that the other schemas of this folder refer to."
    return result | {DEFINITIONS: _headed("Duet: definitions", about, shared)}


def _defined(name: str) -> JsonSchemaValue:
    return {"$ref": f"{DEFINITIONS}#/$defs/{name}"}


def _headed(title: str, about: str, schema: JsonSchemaValue) -> JsonSchemaValue:
    return {"$schema": DIALECT, "$comment": COMMENT, "title": title, "description": about} | schema


def _in_each_stage() -> list[JsonSchemaValue]:
    """Returns schemas of a run that require keys in each stage, unless `every_stage` sets them."""
    fields = StageOptions.model_fields
    required = [name for name, field in fields.items() if field.is_required()]
    alternatives = StageOptions.exactly_one
    return [
        *(_unless_every_stage_has((name,), {"required": [name]}) for name in required),
        _unless_every_stage_has(alternatives, {"oneOf": one_of(alternatives)}),
    ]


def _unless_every_stage_has(keys: tuple[str, ...], demand: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema of a run whose stages meet a demand if `every_stage` has none of the
    keys."""
    any_of_them = {"type": "object", "anyOf": [{"required": [key]} for key in keys]}
    given = {"required": ["every_stage"], "properties": {"every_stage": any_of_them}}
    return {
        "if": {"not": given},
        "then": {"properties": {"stages": {"items": demand}}},
    }


def _definitions() -> dict[str, JsonSchemaValue]:
    fields: Any = {
        name: (field.annotation, field)
        for name, field in RunConfig.model_fields.items()
        if name not in _MERGED
    }
    if_present = create_model("if_present", __base__=Strict, **fields)
    types = _types()
    of_parts = types | {
        (RunConfig, "every_stage"): StageOptions | None,
        (RunConfig, "if_present"): if_present | None,
        (StageOptions, "algorithm"): algorithm_part(),
    }
    choices = {
        RewardOptions: ("name", plugins.reward_options()),
        **dict.fromkeys(_DATASETS, ("task", plugins.task_options())),
    }
    unused = {
        axis: {"const": 1, "description": f"only 1 device: {text}", "doNotSuggest": True}
        for axis, text in UNUSED.items()
    }
    rest = ({MeshOptions: unused}, choices, [StageOptions])
    complete = ConfigSchema(types, *rest).definitions_of(RunConfig, _architecture())
    partial = PartSchema(of_parts, *rest).definitions_of(RunConfig)
    shared = _with_parts(_with_options(complete), _with_options(partial))
    for name in _MERGED:
        own = shared["RunConfig-partial"]["properties"][name]
        shared["RunConfig"]["properties"][name] = own
    return shared


def _with_options(definitions: dict[str, JsonSchemaValue]) -> dict[str, JsonSchemaValue]:
    """Returns the definitions with one for each option that several algorithms have in one form."""
    algorithms = [
        schema["properties"]
        for name, schema in definitions.items()
        if name.startswith(("algorithm-", "presets-"))
    ]
    forms = Counter(
        (key, json.dumps(option))
        for options in algorithms
        for key, option in options.items()
        if key not in ("name", "preset")
    )
    shared: dict[str, JsonSchemaValue] = {}
    for (key, form), count in forms.most_common():
        if count > 1:
            shared.setdefault(f"option-{key}", json.loads(form))
    for options in algorithms:
        for key, option in options.items():
            if shared.get(f"option-{key}") == option:
                options[key] = {"$ref": f"#/$defs/option-{key}"}
    return definitions | shared


def _with_parts(
    complete: dict[str, JsonSchemaValue], partial: dict[str, JsonSchemaValue]
) -> dict[str, JsonSchemaValue]:
    """Returns the definitions of both. Those of parts that differ get `-partial` behind their
    names."""
    same = partial.keys() & complete.keys()

    def renamed(schema: JsonSchemaValue) -> JsonSchemaValue:
        def name(match: re.Match[str]) -> str:
            return match[0] if match[1] in same else match[0][:-1] + '-partial"'

        return json.loads(re.sub(r'/\$defs/([^"]+)"', name, json.dumps(schema)))

    while different := {name for name in same if renamed(partial[name]) != complete[name]}:
        same -= different
    own = {f"{name}-partial": renamed(partial[name]) for name in partial if name not in same}
    return complete | own


def _types() -> dict[tuple[type, str], Any]:
    """Returns (section, key) -> what editors offer, where the annotation of the key says less."""
    rules = _rules()
    types: dict[tuple[type, str], Any] = {
        (StageOptions, "algorithm"): algorithm(),
        (ModelOptions, "source"): Literal[*model_presets()] | str,
        (ModelOptions, "remat_tensors"): _remat_tensors(),
        (TokenizerOptions, "source"): Literal["bytes", "characters"] | str,
        **{(model, "task"): plugins.task_name() for model in _DATASETS},
        (RewardOptions, "name"): plugins.reward_name(),
        (EvaluationOptions, "k"): list[_Count],
        (EvaluationOptions, "metrics"): list[plugins.Plugin],
        (ProfileOptions, "steps"): Annotated[list[_Count], Field(min_length=2, max_length=2)],
        (MeshOptions, "rules"): rules,
        (GeneratorSection, "rules"): Literal["stationary"] | rules | None,
    }
    for model in (MeshOptions, SliceOptions):
        types |= {(model, axis): _Count | Literal[-1] for axis in DESCRIPTIONS}
    return types


def _rules() -> type[BaseModel]:
    """Returns the model of sharding rules: logical axis -> mesh axes."""
    axes: Any = Literal[*AXES, *UNUSED]
    optional = (named("axes", list[axes]), Field(default_factory=list))
    return options_model("rules", dict.fromkeys((*DEFAULT_RULES, *REPLICATED), optional))


def _remat_tensors() -> type[BaseModel]:
    places = Literal["device", "offload", "remat"]
    fields = {
        name: (places, Field(default_factory=str, description=text))
        for name, text in remat.TENSORS.items()
    }
    return options_model("remat_tensors", fields)


def _architecture() -> type[BaseModel]:
    """Returns the model of the keys of a Hugging Face configuration that name its family; others
    depend on it."""
    modules = [families.get(name) for name in families.known()]
    kinds = sorted({kind for module in modules for kind in families.model_types(module)})
    classes = sorted({name for module in modules for name in module.ARCHITECTURES})
    sizes = {
        key for file in model_presets().values() for key in _keys(file) if key.endswith("_size")
    }

    def optional(annotation: object, about: str | None = None) -> Any:
        return annotation, Field(default_factory=str, description=about)

    counts = ("num_hidden_layers", "num_attention_heads", *sorted(sizes))
    decoder = {
        "model_type": optional(Literal[*kinds], "decides the family if no class does"),
        **dict.fromkeys(counts, optional(_Count)),
    }
    config = ConfigDict(extra="allow", protected_namespaces=())
    text = create_model("text_config", __config__=config, **decoder)
    known = Annotated[list[Literal[*classes]], Field(min_length=1)]
    about = "keys of the text model in a model that also reads pictures or sounds"
    fields = {
        "architectures": optional(known, "class of transformers; it decides the family"),
        **decoder,
        "text_config": optional(text, about),
        **{key: optional(dict[str, Any] | None, about) for key, about in _SECTIONS.items()},
    }
    either: Any = {"anyOf": [{"required": ["architectures"]}, {"required": ["model_type"]}]}
    config = config | ConfigDict(json_schema_extra=either)
    return create_model("architecture", __config__=config, **fields)


def _keys(file: Traversable) -> list[str]:
    """Returns the keys of a decoder: those of the file, or of its `text_config`."""
    keys = []
    section = None
    for line in file.read_text(encoding="utf-8").splitlines():
        key = line.partition(":")[0].strip()
        if line[:1].isalpha():
            section = key
        if line[:1].isalpha() or (section == "text_config" and line[:3].strip().isalpha()):
            keys.append(key)
    return keys


def main() -> None:
    for name, document in documents().items():
        (PACKAGED / name).write_text(text_of(document), encoding="utf-8")


if __name__ == "__main__":
    main()
