"""Writes a draft: the YAML file of Duet with the origin of each value, and the report."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from policy.json_types import JsonValue
from rewards.text import quoted
from rl.config import files, yaml_tree
from rl.config.keys import schema_keys
from rl.imports import shell
from rl.imports.draft import Draft, Fate, KeyFate, Written

WRITTEN_BY = "# Written by `rl import"
_COLUMNS = 100
_HEADINGS: dict[Fate, str] = {
    "mapped": "mapped",
    "changed": "changed in meaning",
    "refused": "not supported, and the training depends on it",
    "left": "not supported, and no result depends on it",
}


@dataclass
class _Section:
    """Values and further sections of the file, by key."""

    children: dict[str, Written | _Section] = field(default_factory=dict)

    def section(self, key: str) -> _Section:
        """Returns the section of a key, which it makes where there is none."""
        child = self.children.setdefault(key, _Section())
        assert isinstance(child, _Section)
        return child


def configuration(draft: Draft, sources: Sequence[str]) -> str:
    """Returns the text of the YAML file."""
    names = " ".join(map(quoted, _without_secrets(sources)))
    framework = draft.framework.split()[0].lower()
    start = WRITTEN_BY.removeprefix("# ")
    lines = _comment(f"{start} {framework} {names}`. Comments say where values come from.", "# ")
    refused = [entry for entry in draft.entries if entry.fate == "refused"]
    lines += ["# NOT SUPPORTED, and the training depends on it:"] if refused else []
    for entry in refused:
        lines += _comment(_shown(draft, entry), "#   ")
    lines += ["# Before you train:"] if draft.tasks else []
    for task in draft.tasks:
        lines += _comment(task, "#   ")
    return "\n".join([*lines, *_lines(_tree(draft), 0)]) + "\n"


def _without_secrets(sources: Sequence[str]) -> Iterator[str]:
    """Yields files and keys, with `...` in the place of a value whose key may be one of a secret."""
    is_value = False
    for source in sources:
        key, equals, _ = source.partition("=")
        secret = shell.is_secret(key.rpartition(".")[2])
        if is_value and not source.startswith("-"):
            yield "..."
        else:
            yield f"{key}=..." if equals and secret else source
        is_value = secret and source.startswith("-") and not equals


def faults(text: str) -> list[str]:
    """Returns what the schema of Duet refuses in the text of a configuration."""
    tree = yaml_tree.parse(text, lambda line: f"line {line}")
    _, problems = files.validate(tree)
    return files.report(tree, problems).splitlines() if problems else []


def report(draft: Draft) -> str:
    """Returns the lists of what became of each word."""
    lines: list[str] = []
    for fate, heading in _HEADINGS.items():
        entries = [entry for entry in draft.entries if entry.fate == fate]
        defaults = [entry for entry in entries if fate == "mapped" and draft.is_default(entry)]
        keys = {key for entry in entries if entry not in defaults for key in entry.keys}
        number = f"{len(keys)} key{'s' * (len(keys) > 1)}" if keys else "none"
        lines.append(f"{heading}: {number}")
        lines += [
            f"  {_one_line(_shown(draft, entry))}" for entry in entries if entry not in defaults
        ]
        if defaults:
            values = ", ".join(f"{each.target}: {_flow(each.value)}" for each in defaults)
            lines.append(f"  defaults of {draft.framework}: {values}")
    if draft.tasks:
        lines.append("before you train:")
        lines += [f"  {_one_line(task)}" for task in draft.tasks]
    return "\n".join(lines)


def as_json(draft: Draft) -> dict[str, JsonValue]:
    """Returns the report as values of JSON."""
    return {
        "framework": draft.framework,
        **{
            fate: [_entry_json(draft, entry) for entry in draft.entries if entry.fate == fate]
            for fate in _HEADINGS
        },
        "before_you_train": draft.tasks,
        "supported": not draft.refused,
    }


def _entry_json(draft: Draft, entry: KeyFate) -> dict[str, JsonValue]:
    values: dict[str, JsonValue] = {
        "keys": {draft.name(key): draft.place(key) for key in entry.keys},
        "text": entry.text,
    }
    return values | ({"target": entry.target, "value": entry.value} if entry.target else {})


def _shown(draft: Draft, entry: KeyFate) -> str:
    names = ", ".join(f"{draft.name(key)} ({draft.place(key)})" for key in entry.keys)
    if not entry.target:
        return f"{names}: {entry.text}"
    note = f"; {entry.text}" if entry.text else ""
    return f"{names or 'Duet'} -> {entry.target}: {_flow(entry.value)}{note}"


def _comment(text: str, start: str) -> list[str]:
    """Returns the lines of a comment."""
    return textwrap.wrap(
        _one_line(text),
        _COLUMNS,
        initial_indent=start,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _tree(draft: Draft) -> _Section:
    """Returns the values in their sections, in the order of the schema."""
    places = {key: number for number, key in enumerate(schema_keys())}

    def place(name: str) -> tuple[int, str]:
        key = re.sub(r"\.\d+(?=\.)", ".N", name)
        return places.get(key, len(places)), name

    tree = _Section()
    for name in sorted(draft.values, key=place):
        *parents, last = name.split(".")
        section = tree
        for part in parents:
            section = section.section(part)
        section.children[last] = draft.values[name]
    return tree


def _lines(section: _Section, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for key, child in section.children.items():
        if isinstance(child, Written):
            yield from _leaf(f"{indent}{key}:", child, indent)
            continue
        yield f"{indent}{key}:"
        if all(name.isdecimal() for name in child.children):
            for number in child.children:
                yield from _item(child.section(number), depth)
        else:
            yield from _lines(child, depth + 1)


def _item(section: _Section, depth: int) -> Iterator[str]:
    """Yields the lines of an entry of a list of sections, the first value with its dash."""
    indent = "  " * depth
    lines = list(_lines(section, depth + 2))
    first = next(at for at, line in enumerate(lines) if "#" not in line.split()[0])
    lines[first] = lines[first].replace(f"{indent}    ", f"{indent}  - ", 1)
    yield from lines


def _leaf(start: str, written: Written, indent: str) -> Iterator[str]:
    line = f"{start} {_flow(written.value)}"
    comment = _one_line(written.comment)
    if not comment:
        yield line
    elif len(line) + len(comment) + 4 <= _COLUMNS:
        yield f"{line}  # {comment}"
    else:
        yield from _comment(comment, f"{indent}# ")
        yield line


def _flow(value: JsonValue) -> str:
    """Returns a value as YAML on one line."""
    if isinstance(value, dict):
        pairs = (f"{_flow(str(key))}: {_flow(child)}" for key, child in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_./~][\w./@~-]*", value)
        text = yaml_tree.dump(value).removesuffix("\n").removesuffix("\n...")
        if plain and "\n" not in text:
            return text
        return re.sub(
            r"[\x7f-\x9f\u2028\u2029\ufeff]",
            lambda match: f"\\u{ord(match[0]):04x}",
            json.dumps(value, ensure_ascii=False),
        )
    return yaml_tree.dump(value).removesuffix("\n").removesuffix("\n...")


def _one_line(text: str) -> str:
    """Returns a text for a comment: without line breaks and control characters."""
    return re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]+", " ", text)
