"""Searches the schema for a key that stands in the wrong place, or that another framework uses."""

from __future__ import annotations

import difflib
import functools
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

import rl.algorithms
from rewards.suggest import nearest
from rl.config.foreign import ABSENT, FOREIGN, NOTES
from rl.config.run import RunConfig

_SHOWN = 3  # most places or keys in one hint
_OPTIONS = "stages.N.algorithm."

_SECRET = re.compile(
    r"(^|_)(token|secret|password|credentials?|(api|access|secret|private)_?key)$", re.IGNORECASE
)
_VARIABLES = {
    "wandb": "WANDB_API_KEY",
    "remote": "that the client of the service reads (docs/remote.md)",
    "run": "that the client of the service reads (docs/remote.md), or HF_TOKEN",
    "": "HF_TOKEN",
}
"""Section of a configuration -> the environment variable of its secret."""

RENAMED: dict[str, str] = json.loads(
    Path(__file__).with_name("renamed.json").read_text(encoding="utf-8")
)
"""Key of an earlier version -> its name now."""


@functools.cache
def schema_keys() -> tuple[str, ...]:
    """Returns the dotted path of every key, options of all algorithms included; N is the index in a
    list."""
    options = {option: None for name in rl.algorithms.known() for option in _options(name)}
    return (*_keys(RunConfig, ""), *(_OPTIONS + option for option in options))


def _keys(model: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield path + name
        for section, is_list in models_in(field.annotation):
            yield from _keys(section, f"{path}{name}.{'N.' if is_list else ''}")


def models_in(annotation: object) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yields (model, whether it is the entry of a list) for each model in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    for argument in typing.get_args(annotation):
        yield from (
            (model, is_entry or typing.get_origin(annotation) is list)
            for model, is_entry in models_in(argument)
        )


def _options(algorithm: str) -> list[str]:
    return list(type(rl.algorithms.get(algorithm)).__pydantic_fields__)


def key_for(word: str) -> str | None:
    """Returns the first key that a name, a dotted path or a word of another framework stands for,
    or None.

    The key has the index 0 in place of N, or the indices of the path.
    """
    if re.sub(r"\.\d+(?=\.)", ".N", word) in schema_keys():
        return word
    key = FOREIGN.get(word) or next(
        (key for key in schema_keys() if key.rpartition(".")[2] == word), None
    )
    return key.replace(".N", ".0") if key else None


def unknown_key(path: tuple, value: object, siblings: list[str]) -> str:
    """Returns the message about a key that its section does not have.

    path: of the unknown key. value: its value, whose keys are explained too. siblings: valid keys
    of the section.
    """
    name = str(path[-1])
    if isinstance(value, str) and _SECRET.search(name) and name not in FOREIGN:
        section = next((name for name in _VARIABLES if name in path), "")
        return (
            "no secret stands in a configuration, which is printed and saved; set the environment "
            f"variable {_VARIABLES[section]}"
        )
    hint = (
        _inside(value) if isinstance(value, dict) and path[-1] in ABSENT else None
    ) or _elsewhere(path)
    hint = hint or _inside(value)
    return f"unknown key; {hint}" if hint else f"unknown key{nearest(path[-1], siblings)}"


def unknown_option(path: tuple, algorithm: str) -> str:
    """Returns the message about an option that an algorithm does not have."""
    options = _options(algorithm)
    hint = _elsewhere(path, options)
    text = f"{algorithm} has no option {path[-1]!r}"
    return f"{text}; {hint}" if hint else f"{text}{nearest(path[-1], options)}"


def _elsewhere(path: tuple, options: list[str] | None = None) -> str | None:
    """Says where the key at `path` belongs, or None. options: of the algorithm whose section holds
    the key."""
    word = str(path[-1])
    parent = ".".join("N" if isinstance(part, int) else str(part) for part in path[:-1])
    if word in ABSENT:
        return ABSENT[word]
    name = FOREIGN.get(word, "")
    # An option of other algorithms is no answer for this one.
    if name and not (
        options is not None
        and name.startswith(_OPTIONS)
        and name.removeprefix(_OPTIONS) not in options
    ):
        note = f": {NOTES[word]}" if word in NOTES else ""
        return (
            f"Duet calls it `{name}`"
            if name.rpartition(".")[2] != word
            else f"it belongs to {_section(name)}"
        ) + note
    close = difflib.get_close_matches(word, options or (), n=1, cutoff=0.8)
    places = [
        key
        for key in schema_keys()
        if key.rpartition(".")[2] == word and key.rpartition(".")[0] != parent
    ]
    if not places or close:
        return None
    return "it belongs to " + " or ".join(_section(key) for key in places[:_SHOWN])


def _section(key: str) -> str:
    section = key.rpartition(".")[0]
    return f"`{section}`" if section else "the top level"


def _inside(value: object) -> str | None:
    """Says where the keys of a section of another framework belong, or None."""
    words = dict.fromkeys(word for word in _leaves(value) if word in FOREIGN)
    shown = [f"`{word}` is `{FOREIGN[word]}`" for word in list(words)[:_SHOWN]]
    return "of its keys, " + ", ".join(shown) if shown else None


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, child in value.items():
            if isinstance(child, dict):
                yield from _leaves(child)
            else:
                yield key
