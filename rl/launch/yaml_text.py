"""Writes YAML for people: texts of several lines as blocks, no anchors."""

from __future__ import annotations

import yaml

from policy.json_types import JsonValue


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(value: JsonValue) -> str:
    """Returns a value as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)
