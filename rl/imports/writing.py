"""Writes a draft: the YAML file of Duet with the origin of each value, and the report."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rewards.text import quoted
from rl.config import files, yaml_tree
from rl.config.keys import schema_keys
from rl.imports.draft import Draft, Entry, Fate, Written

WRITTEN_BY = "# Written by `rl import"
_COLUMNS = 100
_Tree = dict[str, Any]
_HEADINGS: dict[Fate, str] = {
    "mapped": "mapped",
    "changed": "changed in meaning",
    "refused": "not supported, and the training depends on it",
    "left": "not supported, and no result depends on it",
}


def configuration(draft: Draft, sources: Sequence[str]) -> str:
    """Returns the text of the YAML file."""
    names = " ".join(map(quoted, sources))
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


def as_json(draft: Draft) -> dict[str, Any]:
    """Returns the report as values of JSON."""
    return {
        "framework": draft.framework,
        **{
            fate: [_entry_json(draft, entry) for entry in draft.entries if entry.fate == fate]
            for fate in _HEADINGS
        },
        "before_you_train": draft.tasks,
        "exact": not draft.refused,
    }


def _entry_json(draft: Draft, entry: Entry) -> dict[str, Any]:
    values: dict[str, Any] = {
        "keys": {draft.name(key): draft.place(key) for key in entry.keys},
        "text": entry.text,
    }
    return values | ({"target": entry.target, "value": entry.value} if entry.target else {})


def _shown(draft: Draft, entry: Entry) -> str:
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


def _tree(draft: Draft) -> _Tree:
    """Returns the values as nested mappings, in the order of the schema."""
    places = {key: number for number, key in enumerate(schema_keys())}

    def place(name: str) -> tuple[int, str]:
        key = re.sub(r"\.\d+(?=\.)", ".N", name)
        return places.get(key, len(places)), name

    tree: _Tree = {}
    for name in sorted(draft.values, key=place):
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = draft.values[name]
    return tree


def _lines(node: _Tree, depth: int) -> Iterator[str]:
    for key, child in node.items():
        indent = "  " * depth
        if isinstance(child, Written):
            yield from _leaf(f"{indent}{key}:", child, indent)
        elif all(name.isdecimal() for name in child):  # a list of sections
            yield f"{indent}{key}:"
            for entry in child.values():
                lines = list(_lines(entry, depth + 2))
                first = next(at for at, line in enumerate(lines) if "#" not in line.split()[0])
                lines[first] = lines[first].replace(f"{indent}    ", f"{indent}  - ", 1)
                yield from lines
        else:
            yield f"{indent}{key}:"
            yield from _lines(child, depth + 1)


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


def _flow(value: Any) -> str:
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
