"""Maps the names of tensors in files to those of the families' tables. Free of jax."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from policy.fields import names, tower_files

# Prefixes of stored names -> prefixes in the tables, for text models inside multimodal ones and for
# towers, as all versions of transformers spell them. A family's PREFIXES are tried first.
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
    *((f"model.{root}.", f"{root}.") for root in tower_files.ROOTS),
)


def renamed(family: ModuleType) -> Callable[[str], str]:
    """Returns a function from stored names to the names of the tables, without the prefixes of
    multimodal wrappers and of the family."""
    pairs = prefixes(family)

    def rename(name: str) -> str:
        old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
        return new + name.removeprefix(old)

    return rename


def prefixes(family: ModuleType) -> list[tuple[str, str]]:
    """Returns pairs of a prefix of stored names and its replacement in the tables of a family; the
    first that fits is taken."""
    multimodal = [(stored, ours) for ours, stored in getattr(family, "MULTIMODAL", ())]
    return [*getattr(family, "PREFIXES", ()), *multimodal, *PREFIXES, *_without_base(family)]


def _without_base(family: ModuleType) -> list[tuple[str, str]]:
    """Returns prefixes of a model that was saved by AutoModel, without a head: its names lack the
    first word, "model." in most families."""
    layers = getattr(family, "LAYER_PREFIX", names.LAYER_PREFIX).split("{n}")[0]
    base, _, inner = layers.partition(".")
    if not inner:
        return []  # the family's names have no such word
    stored = [layers, *(place.name for place in getattr(family, "TOP", names.TOP).values())]
    inner = [name.removeprefix(f"{base}.") for name in stored if name.startswith(f"{base}.")]
    return [(name, f"{base}.{name}") for name in inner]


def different_prefixes(one: str, other: str) -> tuple[str, str]:
    """Returns the words by which two names of one tensor differ at the front, each with a dot at
    its end."""
    first = one.split(".")
    second = other.split(".")
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join([*first, ""]), ".".join([*second, ""])
