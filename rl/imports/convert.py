"""Converts files of another framework to a draft."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from rl.imports import given
from rl.imports.draft import Draft, Facts

__all__ = ["Facts", "converted"]


def converted(
    framework: str, sources: Sequence[str], facts: Facts, environment: Mapping[str, str]
) -> Draft:
    """Returns the draft of the run that files and overrides say.

    framework: trl, verl, tunix or openrlhf. environment: variables for scripts of a shell.
    Raises ConfigError: a file cannot be read, or names no training of the framework.
    """
    module = importlib.import_module(f"rl.imports.{framework}")
    words = given.read(sources, module.SYNTAX, environment)
    draft = Draft(module.NAME, words, module.table_of(words, facts), facts)
    module.convert(draft)
    return draft
