"""Makes the JSON Schemas in configs/: `python -m rl.config.editors.documents` writes them.

`RUN` describes a complete configuration, `PARTIAL` a file that is merged over another one, `PRESET`
a file of configs/presets/, and `MODEL` a file of configs/models/.
"""

from __future__ import annotations

from typing import Any

from policy import families, remat
from policy.mesh.axes import AXES, DEFAULT_RULES, DESCRIPTIONS, REPLICATED, UNUSED
from rl.config.data import DataOptions, EvaluationOptions, RewardOptions
from rl.config.editors.algorithms import algorithm
from rl.config.editors.files import DIALECT, MODEL, PARTIAL, PRESET, REWARD, RUN, text_of
from rl.config.editors.json_schema import Json, SchemaWriter
from rl.config.editors.plugins import PLUGIN, add_options, reward_name, task_name
from rl.config.mesh import MeshOptions, SliceOptions
from rl.config.model import ModelOptions, TokenizerOptions
from rl.config.packaged import PACKAGED, model_presets
from rl.config.run import GeneratorSection, ProfileOptions, RunConfig
from rl.config.stage import StageOptions

_MERGED = ("every_stage", "if_present")
_SECTIONS = {
    "vision_config": "the tower of pictures",
    "audio_config": "the tower of sounds",
    "processor_config": "content of processor_config.json: how pictures and sounds become inputs "
    "of the towers",
}


def documents() -> dict[str, Json]:
    """Returns the name of each file -> its schema. Names of installed plugins are not part of
    them."""
    return {RUN: _run(), PARTIAL: _partial(), PRESET: _preset(), MODEL: _model()}


def _run() -> Json:
    writer = _writer()
    root = writer.object(RunConfig, partial=False)
    root["required"] = [
        name for name, field in RunConfig.model_fields.items() if field.is_required()
    ]
    required = [name for name, field in StageOptions.model_fields.items() if field.is_required()]
    root["allOf"] = [_in_each_stage(name) for name in required]
    return _titled(RUN, "Duet: a run", "A complete configuration for rl-train.", root, writer)


def _in_each_stage(name: str) -> Json:
    """Requires a key in each stage, unless `every_stage` sets it."""
    given = {
        "required": ["every_stage"],
        "properties": {"every_stage": {"type": "object", "required": [name]}},
    }
    return {
        "if": {"not": given},
        "then": {"properties": {"stages": {"items": {"required": [name]}}}},
    }


def _partial() -> Json:
    writer = _writer()
    about = "A configuration that is merged over another one. No key is required."
    return _titled(
        PARTIAL, "Duet: a part of a run", about, writer.object(RunConfig, partial=True), writer
    )


def _preset() -> Json:
    writer = _writer()
    root = writer.object(StageOptions, partial=True)
    return _titled(
        PRESET, "Duet: a preset", "A file of configs/presets/: keys of a stage.", root, writer
    )


def _titled(file: str, title: str, about: str, root: Json, writer: SchemaWriter) -> Json:
    add_options(writer)
    heading = {"$schema": DIALECT, "title": title, "description": about}
    return (
        heading
        | {key: value for key, value in root.items() if key != "description"}
        | {"definitions": writer.definitions}
    )


def _model() -> Json:
    """Returns the schema of the keys of a Hugging Face configuration that name its family; others
    depend on it."""
    modules = [families.get(name) for name in families.known()]
    kinds = sorted({kind for module in modules for kind in families.model_types(module)})
    classes = sorted({name for module in modules for name in module.ARCHITECTURES})
    names = {
        key: None
        for file in model_presets().values()
        for key in _keys(file)
        if key.endswith("_size")
    }
    properties = {
        "architectures": {
            "type": "array",
            "items": {"enum": classes},
            "minItems": 1,
            "description": "class of transformers; it decides the family",
        },
        "model_type": {"enum": kinds, "description": "decides the family if no class does"},
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", *sorted(names)), _COUNT),
    }
    inner = {key: value for key, value in properties.items() if key != "architectures"}
    properties["text_config"] = {
        "type": "object",
        "properties": inner,
        "description": "keys of the text model in a model that also reads pictures or sounds",
    }
    for key, description in _SECTIONS.items():
        properties[key] = {"type": ["object", "null"], "description": description}
    return {
        "$schema": DIALECT,
        "title": "Duet: an architecture",
        "description": "A file of configs/models/: the keys of a Hugging Face configuration.",
        "type": "object",
        "anyOf": [{"required": ["architectures"]}, {"required": ["model_type"]}],
        "properties": properties,
    }


def _keys(file: Any) -> list[str]:
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


def _writer() -> SchemaWriter:
    values = {
        (RunConfig, "every_stage"): lambda writer, _: writer.section(StageOptions, partial=True),
        (RunConfig, "if_present"): lambda writer, _: writer.reference(
            "if_present", lambda: _if_present(writer)
        ),
        (StageOptions, "algorithm"): algorithm,
        (ModelOptions, "source"): lambda *_: _one_of_or_text(model_presets()),
        (ModelOptions, "remat_tensors"): lambda *_: _remat_tensors(),
        (TokenizerOptions, "source"): lambda *_: _one_of_or_text(("bytes", "characters")),
        (DataOptions, "task"): lambda *_: task_name(),
        (RewardOptions, "name"): lambda writer, _: writer.reference(REWARD, reward_name),
        (EvaluationOptions, "k"): lambda writer, partial: writer.list_of(_COUNT, partial),
        (EvaluationOptions, "metrics"): lambda writer, partial: writer.list_of(PLUGIN, partial),
        (ProfileOptions, "steps"): lambda writer, _: (
            writer.list_of(_COUNT, False) | {"minItems": 2, "maxItems": 2}
        ),
        (MeshOptions, "rules"): lambda writer, _: writer.reference("rules", _rules),
        (GeneratorSection, "rules"): lambda writer, _: {
            "anyOf": [{"enum": ["stationary"]}, writer.reference("rules", _rules)]
        },
    }
    for model in (MeshOptions, SliceOptions):
        values |= {(model, axis): lambda *_: _AXIS for axis in DESCRIPTIONS}
    unused = {
        axis: {"const": 1, "description": f"only 1 device: {text}", "doNotSuggest": True}
        for axis, text in UNUSED.items()
    }
    return SchemaWriter(values, {MeshOptions: unused}, given_elsewhere=[StageOptions])


_COUNT = {"type": "integer", "minimum": 1}
_AXIS = {"anyOf": [_COUNT, {"const": -1}]}


def _if_present(writer: SchemaWriter) -> Json:
    schema = writer.object(RunConfig, partial=True)
    properties = {
        name: value for name, value in schema["properties"].items() if name not in _MERGED
    }
    return schema | {"properties": properties}


def _one_of_or_text(names: Any) -> Json:
    """Returns the schema of a text, for which editors offer the names."""
    return {"anyOf": [{"enum": [*names]}, {"type": "string"}]}


def _rules() -> Json:
    """Returns the schema of sharding rules: logical axis -> mesh axes."""
    axes = {"type": "array", "items": {"enum": [*AXES, *UNUSED]}}
    logical = dict.fromkeys(dict.fromkeys((*DEFAULT_RULES, *REPLICATED)), axes)
    return {"type": "object", "properties": logical, "additionalProperties": False}


def _remat_tensors() -> Json:
    places = {"enum": ["device", "offload", "remat"]}
    tensors = {name: {"description": text} | places for name, text in remat.TENSORS.items()}
    return {"type": "object", "properties": tensors, "additionalProperties": False}


def main() -> None:
    """Writes the schemas into configs/."""
    for name, document in documents().items():
        (PACKAGED / name).write_text(text_of(document), encoding="utf-8")


if __name__ == "__main__":
    main()
