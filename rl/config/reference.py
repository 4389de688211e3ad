"""Writes docs/configuration.md from the schema: `python -m rl.config.reference >
docs/configuration.md`."""

from __future__ import annotations

import inspect
import json
import types
import typing
from typing import Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import rl.algorithms
from rl.config.keys import models_in
from rl.config.run import RunConfig
from rl.config.schema import Strict, accepted_types
from rl.config.stage import AlgorithmOptions

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m rl.config.reference` from the schema; edit the descriptions where
options are declared. -->

YAML files and overrides describe a run. They merge from left to right:

```bash
rl-train --check configs/quickstart.yml seed=1 stages.1.steps=3
```

`--check` checks keys, values, names, paths, the tokenizer and the first hundred rows of the data,
prints the values that differ from the defaults, and stops. Mappings merge; any other value replaces
the earlier one. An index changes an entry of a list (`stages.1.steps=3`). `data` has a task or a
path: one that a later file names replaces the other. `every_stage` merges into all stages,
`if_present` into the sections that exist. Unknown keys are refused with file, line and the right
place or the nearest valid keys. Keys of TRL, verl, Tunix and OpenRLHF are refused with the key of
Duet. All errors are reported at once. `1e-5` is a number. The value of an override is a number,
`true`, `false`, `null`, a list, a mapping or a quoted text in YAML; any other text is the full
text, with ` #`, blanks and line breaks. In a file ` #` begins a comment: quote a text that contains
it. `--check` notes unquoted texts that end at one. An empty section has its defaults. A file has at
most 262,144 characters and 20,000 values (an alias counts as all values that it repeats), nested at
most 32 deep. Relative paths start at the working directory, and `~` is the home directory in every
key and argument that is a path. The resolved configuration is saved as `config.yml` in the run's
folder; running that file repeats the run. Editors show this reference on hover, and check keys and
values while you write ([editors.md](editors.md)).

If a section has a *short form*, a plain text sets that one key: `model: tiny-deepseek` is
`model: {source: tiny-deepseek}`.
"""


def markdown() -> str:
    """Returns docs/configuration.md: a table of each section with its keys, and of each algorithm
    with its options."""
    parts = [_INTRODUCTION]
    for model, paths in _sections().items():
        parts.append(_section(model, paths))
        if model is AlgorithmOptions:
            parts += [_algorithm(name) for name in rl.algorithms.known()]
    return "\n".join(parts)


# The algorithm whose table the other tables refer to.
SHARED = "grpo"


def _sections() -> dict[type[BaseModel], list[str]]:
    """Returns every model of the schema -> its paths, in the order of their first occurrence."""
    sections: dict[type[BaseModel], list[str]] = {}

    def visit(model: type[BaseModel], path: str) -> None:
        sections.setdefault(model, []).append(path)
        for name, field in model.model_fields.items():
            for inner, is_list in models_in(field.annotation):
                visit(inner, ".".join(filter(None, (path, name, "N" if is_list else ""))))

    visit(RunConfig, "")
    return sections


def _section(model: type[BaseModel], paths: list[str]) -> str:
    title = ", ".join(f"`{path}`" for path in paths if path) or "Top level"
    lines = [f"## {title}", ""]
    if (
        model.__doc__
        and model not in (RunConfig, AlgorithmOptions)
        and model.__doc__ != Strict.__doc__
    ):
        lines += [inspect.cleandoc(model.__doc__), ""]
    if model is AlgorithmOptions:
        lines += ["The name of an algorithm, and the options of that algorithm, which follow.", ""]
    if shorthand := getattr(model, "shorthand", None):
        lines += [f"Short form: `{shorthand}`.", ""]
    own = model.model_fields
    sections = _sections()
    if extended := next((base for base in model.__mro__[1:] if base in sections), None):
        names = ", ".join(f"`{path}`" for path in sections[extended])
        lines += [f"The keys of {names}, and:", ""]
        own = {name: field for name, field in own.items() if name not in extended.model_fields}
    return "\n".join([*lines, *_table(own), ""])


def _algorithm(name: str) -> str:
    """Returns the table of an algorithm: all options of SHARED, and for others the options that
    differ from SHARED."""
    fields, shared = (type(rl.algorithms.get(each)).__pydantic_fields__ for each in (name, SHARED))
    lines = [f"### Options of `{name}`", ""]
    common = [
        option for option in fields if option in shared and _same(fields[option], shared[option])
    ]
    if name == SHARED or not common:
        return "\n".join([*lines, *_table(fields), ""])
    absent = [f"`{option}`" for option in shared if option not in fields]
    lines += [
        f"The options of `{SHARED}`{' except ' + ', '.join(absent) if absent else ''}, and:",
        "",
    ]
    different = {option: field for option, field in fields.items() if option not in common}
    return "\n".join([*lines, *_table(different), ""])


def _same(one: FieldInfo, other: FieldInfo) -> bool:
    return (one.default, one.description) == (other.default, other.description)


def _table(fields: dict[str, FieldInfo]) -> list[str]:
    rows = [("key", "value", "default", "")]
    rows += [
        (f"`{name}`", _value(field), _default(field), field.description or "")
        for name, field in fields.items()
    ]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|---|---|---|---|", *lines[1:]]


def _value(field: FieldInfo) -> str:
    """Describes the accepted values in words, with their bounds."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(one, key):g}"
        for one in field.metadata
        for key, sign in signs.items()
        if hasattr(one, key)
    ]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: object) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            sorted((_kind(one) for one in arguments), key=lambda kind: kind == "null")
        )
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if any(
        isinstance(kind, type) and issubclass(kind, BaseModel)
        for kind in accepted_types(annotation)
    ):
        return "section"
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "null",
        dict: "mapping",
    }
    return names.get(origin or annotation, "any value")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    print(markdown(), end="")
