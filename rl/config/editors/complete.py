"""Completes `key.path=value` and the names of files on a command line, from the shipped schema.

A shell calls it at each press of Tab, so it imports neither pydantic nor the models of the
configuration.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl.config.editors import files

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

_DIGITS = re.compile(r"\d+")
_UNSAFE = re.compile(r"([^\w@%+=:,./~-])")
_CONFIGS = (".yml", ".yaml")
_VALUES = {"boolean": ("true", "false"), "null": ("null",)}

Candidate = tuple[str, str]
"""(word, description)."""


def main(arguments: Sequence[str]) -> int:
    """Prints a candidate and its description, with a tab between, on each line. Returns the exit
    code.

    arguments: the shell, then the words of the command line up to the cursor; the last one is to be
    completed.
    """
    shell, *words = arguments
    escape = shell == "bash"  # zsh and fish quote what they insert
    word = re.sub(r"\\(.)", r"\1", words[-1]) if escape else words[-1]
    for candidate, description in candidates(word, words[:-1]):
        shown = _UNSAFE.sub(r"\\\1", candidate) if escape else candidate
        sys.stdout.write(f"{shown}\t{description}\n")
    return 0


def candidates(word: str, before: Sequence[str] = ()) -> list[Candidate]:
    """Returns what an argument of `rl-train` may be that begins with `word`.

    A candidate that ends in `.`, `=` or `/` is not complete. before: earlier words of the line;
    files and overrides among them tell the number of stages and their algorithms.
    """
    schema = Schema(files.read(files.PARTIAL), _stages(before))
    key, equals, value = word.partition("=")
    if equals:
        values = [(f"{key}={one}", "") for one in schema.values(key) if one.startswith(value)]
        if values or not schema.takes_text(key):
            return values
        return [(f"{key}={path}", "") for path in _paths(value, ())]
    return [
        *schema.keys(word),
        *((path, "") for path in _paths(word, _CONFIGS)),
        *_packaged(word, before),
    ]


class Schema:
    """The keys of a configuration. Paths are dotted, with indices."""

    def __init__(self, schema: JsonSchemaValue, algorithms: list[str | None]):
        """algorithms: the algorithm of each stage; None if it is not known."""
        self._root = schema
        self._algorithms = algorithms

    def keys(self, prefix: str) -> Iterator[Candidate]:
        """Yields keys that begin with a prefix, to the next dot or to the `=`, each with its
        description."""
        parent, _, last = prefix.rpartition(".")
        parts = parent.split(".") if parent else []
        start = f"{parent}." if parent else ""
        seen = set()
        for node in self._nodes(parts):
            for name, value in self._children(node, parts):
                inner = list(self._flat(value))
                ends = [
                    end
                    for end, is_end in (
                        (".", any(map(_holds_keys, inner))),
                        ("=", any(map(_is_value, inner))),
                    )
                    if is_end
                ]
                for end in ends:
                    word = f"{start}{name}{end}"
                    if name.startswith(last) and word not in seen:
                        seen.add(word)
                        yield word, self._description(value)

    def values(self, path: str) -> list[str]:
        """Returns the values that a key accepts, if they can be listed."""
        result: dict[str, None] = {}
        for node in self._nodes(path.split(".")):
            listed = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
            result |= dict.fromkeys("null" if one is None else str(one) for one in listed)
            for kind in _types(node):
                result |= dict.fromkeys(_VALUES.get(kind, ()))
        return list(result)

    def takes_text(self, path: str) -> bool:
        """Whether the value of a key may be any text, such as a path."""
        return any(
            "string" in _types(node) and not {"enum", "const"} & node.keys()
            for node in self._nodes(path.split("."))
        )

    def _nodes(self, parts: Sequence[str]) -> Iterator[JsonSchemaValue]:
        """Yields the alternatives of the value at a path."""
        nodes = [*self._flat(self._root)]
        for number, part in enumerate(parts):
            nodes = [
                value
                for node in nodes
                for name, value in self._children(node, parts[:number])
                if name == part or (name.isdigit() and part.isdigit())
            ]
            nodes = [flat for node in nodes for flat in self._flat(node)]
        yield from nodes

    def _children(
        self, node: JsonSchemaValue, parts: Sequence[str]
    ) -> Iterator[tuple[str, JsonSchemaValue]]:
        """Yields the keys of a mapping, or the indices of a list of sections, each with its
        schema."""
        if (
            parts[:1] == ["stages"]
            and parts[2:] == ["algorithm"]
            and not self._is_of(node, parts[1])
        ):
            return
        yield from (
            (name, value)
            for name, value in node.get("properties", {}).items()
            if "doNotSuggest" not in value
        )
        entry = node.get("items")
        if entry is not None and any(_holds_keys(each) for each in self._flat(entry)):
            for index in range(max(1, len(self._algorithms)) if list(parts) == ["stages"] else 1):
                yield str(index), entry

    def _is_of(self, node: JsonSchemaValue, stage: str) -> bool:
        """Whether a schema of options is the one of the stage's algorithm."""
        number = int(stage) if _DIGITS.fullmatch(stage) else len(self._algorithms)
        name = self._algorithms[number] if number < len(self._algorithms) else None
        properties = node.get("properties", {})
        if name is None:
            return "name" not in properties or "preset" in properties
        named = properties.get("name", {}).get("const") == name
        return named or name in properties.get("preset", {}).get("enum", ())

    def _flat(self, node: JsonSchemaValue) -> Iterator[JsonSchemaValue]:
        """Yields the alternatives of a schema, references resolved."""
        if "$ref" in node:
            yield from self._flat(self._root["$defs"][node["$ref"].rpartition("/")[2]])
            return
        yield {key: value for key, value in node.items() if key not in ("anyOf", "allOf")}
        for branch in (*node.get("anyOf", ()), *node.get("allOf", ())):
            if "if" not in branch:
                yield from self._flat(branch)

    def _description(self, node: JsonSchemaValue) -> str:
        if "description" not in node and "$ref" in node:
            node = next(self._flat(node))
        return " ".join(node.get("description", "").split())


def _types(node: JsonSchemaValue) -> list[str]:
    kinds = node.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _holds_keys(node: JsonSchemaValue) -> bool:
    return "properties" in node or ("items" in node and "$ref" in str(node["items"]))


def _is_value(node: JsonSchemaValue) -> bool:
    scalars = {"string", "number", "integer", "boolean"} & {*_types(node)}
    free = "object" in _types(node) and "properties" not in node and "patternProperties" not in node
    plain_list = "array" in _types(node) and not _holds_keys(node)
    return bool(scalars) or "enum" in node or "const" in node or free or plain_list


def _paths(start: str, endings: Sequence[str]) -> Iterator[str]:
    """Yields directories, with `/`, and files with one of the endings (none: all) whose path begins
    with `start`."""
    folder, slash, last = start.rpartition("/")
    try:
        entries = sorted(
            os.scandir(Path(f"{folder}{slash}").expanduser()), key=lambda entry: entry.name
        )
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(last) and (last.startswith(".") or not entry.name.startswith(".")):
            if entry.is_dir():
                yield f"{folder}{slash}{entry.name}/"
            elif not endings or entry.name.endswith(tuple(endings)):
                yield f"{folder}{slash}{entry.name}"


def _packaged(start: str, before: Sequence[str]) -> Iterator[Candidate]:
    """Yields the names of packaged runs that begin with `start`, unless files of this folder are
    meant."""
    from rl.config.packaged import run_names

    for name in sorted(run_names()):
        if name.startswith(start) and name not in before and not Path(name).exists():
            yield name, "packaged configuration"


def _stages(words: Sequence[str]) -> list[str | None]:
    """Returns the algorithm or preset of each stage, from the files and overrides of a command
    line."""
    algorithms: list[str | None] = []
    for word in words:
        if word.endswith(_CONFIGS) and "=" not in word:
            algorithms = _algorithms(word) or algorithms
    for word in words:
        match = re.fullmatch(r"stages\.(\d+)\.algorithm(?:\.(?:name|preset))?=(\w+)", word)
        if match and int(match[1]) < len(algorithms):
            algorithms[int(match[1])] = match[2]
    return algorithms


def _algorithms(file: str) -> list[str | None]:
    """Returns the algorithm of each stage of a file, [] if it has none or cannot be read."""
    from rl.config import yaml_tree
    from rl.config.packaged import packaged
    from rl.errors import ConfigError

    path = Path(file).expanduser()
    path = path if path.is_file() else packaged(file) or path
    try:
        config = yaml_tree.plain(yaml_tree.parse(path.read_text(encoding="utf-8-sig"), str))
    except (OSError, UnicodeDecodeError, ConfigError):
        return []
    stages = config.get("stages") if isinstance(config, dict) else None
    return [_algorithm(stage) for stage in stages] if isinstance(stages, list) else []


def _algorithm(stage: object) -> str | None:
    algorithm = stage.get("algorithm") if isinstance(stage, dict) else None
    if isinstance(algorithm, dict):
        algorithm = algorithm.get("preset", algorithm.get("name"))
    return algorithm if isinstance(algorithm, str) else None
