"""Parses YAML into trees that know the line of every key and value, and merges such trees.

Numbers, booleans and null follow the core schema of YAML 1.2: `1e-5` is a number (YAML 1.1, and so
PyYAML, reads a text), and `on`, `off`, `yes` and `no` are texts. Keys are always texts. The parser
constructs plain values only. Size, depth and number of values are bounded, so that every text is
refused quickly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from policy.json_types import JsonValue
from rewards.text import quoted
from rl.config.stage_names import numbered
from rl.errors import ConfigError

MAX_CHARACTERS = 2**18
MAX_DEPTH = 32
MAX_VALUES = 20_000
"""Bounds of one text. A value counts as often as aliases repeat it: nested aliases make 9^9 values
from one line."""

_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
)


class _NotYaml(ConfigError):
    """A text that is not YAML."""


class _TooDeep(yaml.MarkedYAMLError):
    """A node has more than MAX_DEPTH ancestors."""


class _Loader(yaml.SafeLoader):
    """Composes nodes up to MAX_DEPTH. The composer of PyYAML has no bound but Python's recursion
    limit."""

    yaml_implicit_resolvers: dict = {}
    _depth = 0

    def compose_node(self, parent, index):
        if self._depth > MAX_DEPTH:
            raise _TooDeep(problem_mark=self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers: dict = {}


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)
for _first_character, _pairs in yaml.SafeDumper.yaml_implicit_resolvers.items():
    _Dumper.yaml_implicit_resolvers.setdefault(_first_character, []).extend(_pairs)


@dataclass(frozen=True)
class PlacedValue:
    """A value and the place where it was written ("file:line", "override 2"). A mapping or list
    holds PlacedValues."""

    value: Any
    where: str
    key_where: str | None = None
    """Place of the key of the value; None in lists and at the root."""

    @property
    def place(self) -> str:
        """Returns the place of the key, or of the value if it has none."""
        return self.key_where or self.where


def parse(text: str, place: Callable[[int], str]) -> PlacedValue:
    """Parses one YAML document. `place(line)` returns the name of a line (from 1) for messages.

    Raises ConfigError for text that is not YAML, a key that is written twice, a tag that is not a
    plain value, and beyond MAX_CHARACTERS, MAX_DEPTH or MAX_VALUES.
    """
    node = _composed(text, place)
    reader = _Reader(place)
    tree = PlacedValue(None, place(1)) if node is None else reader.item(node, ())
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return tree


def typed_value(text: str, place: str) -> PlacedValue:
    """Returns the value of an override: of a text, all of it.

    YAML of numbers, booleans, null, lists, mappings and quoted texts has its value. Any other text
    keeps its ` #`, its line breaks and its blanks, because no comment can follow a value on the
    command line.

    Raises ConfigError for a list or mapping without its last bracket, and as `parse` does.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: not UTF-8") from None
    # YAML has no form without comments: while it is parsed, another character stands for `#`.
    sharp = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    value = text.strip(" \t").replace("#", sharp)
    if value.startswith("!") and not value.startswith("!!"):
        return PlacedValue(text, place)
    if value.startswith('"'):
        value = re.sub(r"(?<!\\)\n", r"\\n", value)  # YAML would fold the lines of a quoted text
    try:
        item = parse(value, lambda line: place)
    except _NotYaml:
        closing = {"[": "]", "{": "}"}.get(value[0])
        if closing and closing not in value:
            raise
        return PlacedValue(text, place)
    item = _replaced_text(item, sharp, "#")
    if not isinstance(item.value, str):
        return item
    if value.startswith("'"):
        return PlacedValue(value[1:-1].replace("''", "'").replace(sharp, "#"), place)
    is_block = value[0] in "|>" and "\n" in value
    return item if is_block or value.startswith(('"', "!!str ")) else PlacedValue(text, place)


def _replaced_text(item: PlacedValue, old: str, new: str) -> PlacedValue:
    """Returns the tree with `new` for `old` in every key and text."""
    value = item.value
    if isinstance(value, str):
        value = value.replace(old, new)
    elif isinstance(value, list):
        value = [_replaced_text(child, old, new) for child in value]
    elif isinstance(value, dict):
        value = {
            key.replace(old, new): _replaced_text(child, old, new) for key, child in value.items()
        }
    return PlacedValue(value, item.where, item.key_where)


_CUT = re.compile(r"(?: |\t)#|[ \t]+#+[^\s#]")
"""What follows a text that may go on: one blank and `#`, or `#` before a character. Comments of
people who align them have two blanks before and one after."""


def cut_texts(text: str, place: Callable[[int], str]) -> list[tuple[tuple, str, str]]:
    """Returns (path, place, value) of each unquoted text that ends at ` #`, where YAML begins a
    comment.

    Raises ConfigError as `parse` does.
    """
    result: list[tuple[tuple, str, str]] = []

    def visit(node: yaml.Node | None, path: tuple) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                visit(child, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                visit(child, (*path, index))
        elif isinstance(node, yaml.ScalarNode) and node.style is None and node.tag.endswith(":str"):
            is_cut = _CUT.match(text, node.end_mark.index)
            result.extend([(path, place(node.end_mark.line + 1), node.value)] if is_cut else [])

    parse(text, place)  # refuses an alias inside what it stands for
    visit(_composed(text, place), ())
    return result


def _composed(text: str, place: Callable[[int], str]) -> yaml.Node | None:
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{place(1)}: a configuration has at most {MAX_CHARACTERS:,} characters")
    try:
        return _Loader(text).get_single_node()
    except _TooDeep as error:
        raise _too_deep(place(error.problem_mark.line + 1 if error.problem_mark else 1)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise _NotYaml(f"{place(line)}: not valid YAML (column {column}): {reason}") from None
    except yaml.YAMLError as error:
        raise _NotYaml(f"{place(1)}: not valid YAML: {error}") from None


class _Reader:
    """Turns nodes into PlacedValues, collects their problems, and counts them."""

    def __init__(self, place: Callable[[int], str]):
        self.problems: list[str] = []
        self._place = place
        self._count = 0

    def item(
        self, node: yaml.Node, parents: tuple[yaml.Node, ...], key_where: str | None = None
    ) -> PlacedValue:
        where = self._place(node.start_mark.line + 1)
        if node in parents:
            self.problems.append(f"{where}: an alias (*) stands inside what it stands for")
            return PlacedValue(None, where, key_where)
        self._count += 1
        if self._count > MAX_VALUES:
            raise ConfigError(
                f"{where}: more than {MAX_VALUES:,} values, those that aliases (*) repeat included"
            )
        if len(parents) > MAX_DEPTH:
            raise _too_deep(where)
        parents = (*parents, node)
        if isinstance(node, yaml.MappingNode):
            return PlacedValue(self._mapping(node, parents), where, key_where)
        if isinstance(node, yaml.SequenceNode):
            return PlacedValue(
                [self.item(child, parents) for child in node.value], where, key_where
            )
        return PlacedValue(_scalar(node, where, self.problems), where, key_where)

    def _mapping(
        self, node: yaml.MappingNode, parents: tuple[yaml.Node, ...]
    ) -> dict[str, PlacedValue]:
        mapping: dict[str, PlacedValue] = {}
        for key, child in node.value:
            where = self._place(key.start_mark.line + 1)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(
                    f"{where}: a key must be plain text; put a text that begins with a brace into "
                    "quotes"
                )
            elif key.value in mapping:
                self.problems.append(
                    f"{where}: key `{key.value}` is written twice, first at "
                    f"{mapping[key.value].place}"
                )
            else:
                mapping[key.value] = self.item(child, parents, where)
        return mapping


def _too_deep(where: str) -> ConfigError:
    return ConfigError(f"{where}: lists and mappings are nested more than {MAX_DEPTH} deep")


def _scalar(node, where: str, problems: list[str]) -> Any:
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    text = node.value
    try:
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            if text[-1] in "fFnN":
                return float(text.lower().replace(".", ""))
            if math.isinf(value := float(text)):
                problems.append(f"{where}: `{text}` is larger than any number of 64 bits")
            return value
    except (ValueError, KeyError):
        problems.append(f"{where}: `{text}` is not a value of the type {kind}")
        return None
    problems.append(f"{where}: the tag {node.tag} is not supported; write plain values")
    return None


def dump(value: JsonValue) -> str:
    """Returns YAML text that `parse` turns into an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def plain(item: PlacedValue) -> Any:
    """Returns the values of a tree without their places."""
    if isinstance(item.value, dict):
        return {key: plain(child) for key, child in item.value.items()}
    if isinstance(item.value, list):
        return [plain(child) for child in item.value]
    return item.value


def locate(tree: PlacedValue, path: tuple) -> str:
    """Returns the place of the value at `path`, or of its nearest ancestor that was written."""
    for part in path:
        value = tree.value
        if isinstance(value, dict) and str(part) in value:
            tree = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            tree = value[part]
        else:
            break
    return tree.place


class Rules(NamedTuple):
    """How the mapping at one place merges.

    shorthand: the key that a plain text sets, so that `model: tiny` and `model: {dtype: bfloat16}`
    merge. replaces: key -> the key that it takes the place of -> keys that go with that one.
    """

    shorthand: str | None = None
    replaces: Mapping[str, Mapping[str, tuple[str, ...]]] = {}


def merge(
    base: PlacedValue, over: PlacedValue, rules_at: Callable[[tuple], Rules], path: tuple = ()
) -> PlacedValue:
    """Merges `over` into `base`: mappings merge key by key, any other value replaces.

    A mapping changes the entries of a list by index (`stages: {1: {steps: 3}}`).
    """
    rules = rules_at(path)
    key = rules.shorthand
    if key and (isinstance(base.value, dict) or isinstance(over.value, dict)):
        base, over = (
            PlacedValue(
                {key: PlacedValue(side.value, side.where, side.key_where)},
                side.where,
                side.key_where,
            )
            if isinstance(side.value, str)
            else side
            for side in (base, over)
        )
    if not isinstance(over.value, dict):
        return over
    if isinstance(base.value, dict):
        gone = _replaced(base.value, over.value, rules)
        merged = {name: child for name, child in base.value.items() if name not in gone}
        for name, child in over.value.items():
            merged[name] = (
                merge(merged[name], child, rules_at, (*path, name)) if name in merged else child
            )
        return PlacedValue(merged, base.where, base.key_where)
    if isinstance(base.value, list):
        entries = list(base.value)
        for name, child in over.value.items():
            if not (name.isdecimal() and int(name) < len(entries)):
                raise _no_entry(".".join(map(str, path)), entries, name, child)
            entries[int(name)] = merge(entries[int(name)], child, rules_at, (*path, int(name)))
        return PlacedValue(entries, base.where, base.key_where)
    return over


def _replaced(
    base: Mapping[str, PlacedValue], over: Mapping[str, PlacedValue], rules: Rules
) -> set[str]:
    """Returns the keys of `base` that keys of `over` replace."""

    def is_set(side: Mapping[str, PlacedValue], name: str) -> bool:
        return name in side and side[name].value is not None

    return {
        name
        for key, others in rules.replaces.items()
        if is_set(over, key)
        for other, more in others.items()
        if is_set(base, other) and not is_set(over, other)
        for name in (other, *more)
    }


def _entry_names(entries: list[PlacedValue]) -> list[str]:
    """Returns what entries of a list are called: stages as in reports (grpo, grpo-2), rewards by
    their name."""
    names = []
    for entry in entries:
        value = plain(entry)
        value = value.get("algorithm", value) if isinstance(value, dict) else value
        names.append(
            str(value.get("name", value.get("preset")) if isinstance(value, dict) else value)
        )
    return numbered(names)


def _no_entry(
    dotted: str, entries: list[PlacedValue], name: str, child: PlacedValue
) -> ConfigError:
    """Returns the error about a list that has no entry `name`, with the override to write
    instead."""
    count = len(entries)
    names = _entry_names(entries)
    is_number = name.lstrip("-").isdecimal()
    where = f"{child.place}: {dotted}.{name}: "
    if not count:
        return ConfigError(f"{where}`{dotted}` is an empty list")
    keys = [] if is_number or name in names else [name]
    value = child
    while isinstance(value.value, dict) and len(value.value) == 1:
        key, value = next(iter(value.value.items()))
        keys.append(key)
    index = names.index(name) if name in names else count - 1 if is_number else 0
    text = (
        yaml.dump(
            plain(value), Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=math.inf
        )
        .removesuffix("\n...\n")
        .strip()
    )
    override = quoted(f"{'.'.join([dotted, str(index), *keys])}={text}")
    one = dotted.removesuffix("s") if "." not in dotted else "entry"
    there = (
        f"there is 1 {one}"
        if count == 1
        else f"there are {count} {dotted if one != 'entry' else 'entries'}"
    )
    if name in names:
        there = f"entries of a list have numbers, from 0, and {name} is number {index}"
    return ConfigError(f"{where}{there}: write {override}")
