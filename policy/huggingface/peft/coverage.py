"""Compares the tensors of an adapter's file with the modules that its configuration names, and
finds the patterns that name what the file has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from policy import families
from policy.adapter_spec import AdapterSpec
from policy.fields import names
from policy.huggingface.model_directory import StoredWeight
from policy.huggingface.peft.adapter_config import TENSORS, AdapterConfig
from policy.huggingface.peft.targets import (
    adaptable,
    module_name,
    module_names,
    routed,
    target_layers,
)
from policy.huggingface.peft.tensors import AdapterTensors
from policy.huggingface.tensorfiles import ModelFileError
from policy.model import Graph


def check(directory: str, graph: Graph, config: AdapterConfig, tensors: AdapterTensors) -> None:
    """Raises ModelFileError if the configuration names modules that the file has no adapter of: a
    file that was cut, or written by one process of several."""
    present = {(each.place.weight.path, each.place.layer) for each in tensors.adapted}
    present |= {(each.place.weight.path, each.place.layer) for each in tensors.full}
    missing = []
    for place in adaptable(graph):
        first = place.parts(place.stored)[0]
        if first != place.path or routed(graph, place.path):
            continue
        missing += [
            module
            for layer, module in _named(graph, config, place)
            if (place.path, layer) not in present
        ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFileError(
            f"{directory}: {TENSORS}: missing tensors of {', '.join(missing[:3])}{more}, which "
            f"target_modules in {config.path.name} names"
        )


def _named(
    graph: Graph, config: AdapterConfig, place: StoredWeight
) -> Iterator[tuple[int | None, str]]:
    """Yields the layers of a weight that the configuration names, with the names of their
    modules."""
    for layer in place.layers or (None,):
        module = module_names(place, layer)[0]
        if config.layers is not None and layer not in config.layers:
            continue
        if module.rpartition(".")[2] in converted_by_peft(graph):
            continue
        if _matches(config.target_modules, module) and not _matches(config.exclude_modules, module):
            yield layer, module


def converted_by_peft(graph: Graph) -> tuple[str, ...]:
    """Returns the last words of the modules that PEFT 0.19 to 0.21 takes for parts of the experts,
    wherever they stand: dense and shared feed-forwards of these names get no adapter."""
    return getattr(families.get(graph.config.family), "CONVERTED_BY_PEFT", ())


def _matches(modules: tuple[str, ...] | str, name: str) -> bool:
    """Returns whether PEFT's option names a module: a regular expression over full names, or a list
    of names or their ends."""
    if isinstance(modules, str):
        return modules != "all-linear" and re.fullmatch(modules, name) is not None
    return any(name == module or name.endswith(f".{module}") for module in modules)


def with_targets(
    graph: Graph, spec: AdapterSpec, layers_by_path: dict[str, set[int]]
) -> AdapterSpec:
    """Returns the description with targets that name at least these layers of these weights, and no
    others but parts of one stored tensor."""
    everything = replace(spec, targets="all-linear")
    own = {path: tuple(sorted(layers)) for path, layers in layers_by_path.items()}
    if own and own == target_layers(graph, everything):
        return everything
    modules = list(_modules(graph, own))
    patterns = {}
    for place in adaptable(graph):
        if place.path not in own:
            continue
        every = set(own[place.path]) == set(place.layers or (0,))
        for pattern in _candidates(place, own[place.path], every):
            regex = re.compile(rf"(.*\.)?(?:{pattern})")
            if all(is_own for name, is_own in modules if regex.fullmatch(name)):
                patterns[pattern] = None
                break
    return replace(spec, targets=tuple(sorted(patterns)))


def _modules(graph: Graph, own: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, bool]]:
    """Yields the names of modules that can have an adapter, and whether they have one."""
    for place in adaptable(graph):
        paths = {path for stored in _spellings(place) for path in place.parts(stored)}
        for layer in place.layers or (None,):
            is_own = any((layer or 0) in own.get(path, ()) for path in paths)
            for name in module_names(place, layer):
                yield name, is_own


def _candidates(place: StoredWeight, layers: tuple[int, ...], every: bool) -> Iterator[str]:
    """Yields patterns that name layers of a weight, from the shortest to the longest."""
    template = module_name(place.prefix + place.stored.name)
    numbers = "|".join(map(str, layers))
    if every:
        inner = template.rpartition("{n}.")[2]
        yield escaped(inner.rpartition(".")[2], r"\d+")
        yield escaped(inner, r"\d+")
        yield escaped(template, r"\d+")
    yield escaped(template, f"(?:{numbers})")


def escaped(template: str, numbers: str) -> str:
    text = re.escape(template)
    return text.replace(r"\{n\}", numbers).replace(r"\{e\}", r"\d+")


def _spellings(place: StoredWeight) -> tuple[names.Stored, ...]:
    return (place.stored, *place.stored.also)
