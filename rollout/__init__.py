"""Prompts in, completions out. jax is imported at the first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.generator import Generator
    from rollout.request import MediaPrompt
    from rollout.types import Completion, Constraint, GeneratorOptions, SamplingParams

_HOME = {
    "Generator": "generator",
    "GeneratorOptions": "types",
    "Completion": "types",
    "Constraint": "types",
    "MediaPrompt": "request",
    "SamplingParams": "types",
}
__all__ = [
    "Completion",
    "Constraint",
    "Generator",
    "GeneratorOptions",
    "MediaPrompt",
    "SamplingParams",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"rollout.{_HOME[name]}"), name)
