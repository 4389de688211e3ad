"""Which weights an `AdapterSpec` names. Patterns are matched with the names that modules have in
Hugging Face files, as PEFT matches `target_modules`: a full name, or its end after a dot."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace

from policy.adapter_spec import AdaptedWeight, AdapterSpec
from policy.huggingface.model_directory import MTP, StoredWeight, places
from policy.model import EMBEDDING, HEAD, Graph

# The axis of our weights that counts routed experts.
EXPERTS = "exp"
_NEAREST = 3


class TargetError(ValueError):
    """Raised for a pattern that names no weight, or weights that have no adapter."""


def resolved(graph: Graph, spec: AdapterSpec) -> AdapterSpec:
    """Returns the spec with the weights of `graph` that it names. Raises TargetError as `targets`
    does."""
    return replace(spec, adapted=tuple(targets(graph, spec).values()))


def targets(graph: Graph, spec: AdapterSpec) -> dict[str, AdaptedWeight]:
    """Returns the adapted weights of `graph` by path. Raises TargetError as `target_layers`
    does."""
    stored = {place.path: place for place in adaptable(graph)}
    result = {}
    for path, layers in target_layers(graph, spec).items():
        of_stack = stored[path].layers or ()
        repeats = tuple(repeat for repeat, number in enumerate(of_stack) if number in layers)
        every = len(repeats) == len(of_stack)
        result[path] = AdaptedWeight(path, rank_of(graph, spec, path), None if every else repeats)
    return result


def target_layers(graph: Graph, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of the layers of each weight that have the adapter, (0,) outside of the
    layers. Raises TargetError for a pattern that matches nothing, that is no regular expression, or
    that names some experts of a layer only, and for the embedding of a tied head."""
    stored = {place.path: place for place in adaptable(graph)}
    matched = _matched(stored.values(), spec.exclude, "exclude")
    result = {}
    for path, layers in _chosen(graph, spec, stored).items():
        kept = tuple(n for n in layers if n not in matched.get(path, ()))
        if not kept or path in spec.train or (spec.experts == "none" and routed(graph, path)):
            continue
        result[path] = kept
    if graph.config.tied_head and EMBEDDING in result:
        raise TargetError(
            f"the head of this model is its embedding, so an adapter of {EMBEDDING} would change "
            f"both; take it out of `targets`, or train the weight in full by `train: [{EMBEDDING}]`"
        )
    return result


def adaptable(graph: Graph) -> list[StoredWeight]:
    """Returns the places of the weights that may have an adapter: those whose products may read
    them quantised, the embedding and the head. Routers, indexers, norms and prediction modules
    have none."""
    return [
        place
        for place in places(graph)
        if place.path in (EMBEDDING, HEAD)
        or (
            place.path in graph.inputs
            and not place.path.startswith(f"{MTP}.")
            and ".indexer." not in place.path
        )
    ]


def rank_of(graph: Graph, spec: AdapterSpec, path: str) -> int:
    """Returns the rank of an adapter of the weight at `path`."""
    if not routed(graph, path):
        return spec.rank
    return spec.expert_rank or max(1, spec.rank // _experts_per_token(graph, path))


def routed(graph: Graph, path: str) -> bool:
    """Returns whether the weight belongs to routed experts."""
    return EXPERTS in graph.axes[path]


def module_names(place: StoredWeight, layer: int | None) -> list[str]:
    """Returns the names that the module of a layer of the weight has in files; of numbered experts
    the first's and the last's. The first name of a module is the one that is written."""
    experts = place.graph.shapes[place.path].shape[place.layers is not None]
    result = []
    for stored in (place.stored, *place.stored.also):
        numbers = (0, experts - 1) if stored.numbered else (0,)
        result += [module_name(place.name(stored, layer, number)) for number in numbers]
    return result


def module_name(tensor: str) -> str:
    """Returns the name of the module of a stored tensor; of a parameter that is no module's
    `weight`, its own."""
    return tensor.removesuffix(".weight")


def _experts_per_token(graph: Graph, path: str) -> int:
    match = re.match(r"stacks\.(\d+)\.layers\.(\d+)\.", path)
    assert match is not None  # experts are parts of a layer
    layer = graph.config.stacks[int(match[1])].pattern[int(match[2])]
    assert layer.moe is not None
    return layer.moe.router.experts_per_token


def _chosen(
    graph: Graph, spec: AdapterSpec, stored: dict[str, StoredWeight]
) -> dict[str, tuple[int, ...]]:
    """Returns the layers of each weight that `spec.targets` names, [0] outside the layers."""
    if spec.targets == "all-linear":
        return {
            path: place.layers or (0,) for path, place in stored.items() if path in graph.inputs
        }
    return _matched(stored.values(), spec.targets, "targets")


def _matched(
    stored: Iterable[StoredWeight], patterns: tuple[str, ...], option: str
) -> dict[str, tuple[int, ...]]:
    """Returns the layers of each weight that one of `patterns` matches, [0] outside the layers.
    Raises TargetError."""
    if not patterns:
        return {}
    compiled = {pattern: _compiled(pattern, option) for pattern in patterns}
    unused = set(patterns)
    known: dict[str, None] = {}
    result: dict[str, tuple[int, ...]] = {}
    for place in stored:
        layers = []
        for layer in place.layers or (None,):
            own = module_names(place, layer)
            known |= dict.fromkeys(own)
            for pattern, regex in compiled.items():
                if not (hits := [name for name in own if regex.fullmatch(name)]):
                    continue
                unused.discard(pattern)
                _refuse_single_experts(place, layer, pattern, hits)
                layers.append(0 if layer is None else layer)
        if layers:
            result[place.path] = tuple(sorted(set(layers)))
    if unused:
        raise TargetError(_unknown(min(unused), option, list(known)))
    return result


def _compiled(pattern: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?(?:{pattern})")
    except re.error as error:
        raise TargetError(
            f"{option}: {pattern!r} is no regular expression: {error}; for a plain name escape "
            "its special characters by \\"
        ) from None


def _refuse_single_experts(
    place: StoredWeight, layer: int | None, pattern: str, hits: list[str]
) -> None:
    """Raises TargetError if `hits` are the names of some experts of a layer, but not of all."""
    for stored in (place.stored, *place.stored.also):
        if not stored.numbered:
            continue
        last = place.graph.shapes[place.path].shape[1] - 1
        ends = {module_name(place.name(stored, layer, number)) for number in (0, last)}
        if ends & set(hits) and ends - set(hits):
            raise TargetError(
                f"targets: {pattern!r} matches {min(ends & set(hits))} and not "
                f"{min(ends - set(hits))}: the experts of a layer have adapters together; write "
                r"\d+ for the number of the expert"
            )


def _unknown(pattern: str, option: str, known: list[str]) -> str:
    leaves = [*dict.fromkeys(name.rpartition(".")[2] for name in known)]
    near = difflib.get_close_matches(pattern, [*leaves, *known], n=_NEAREST, cutoff=0.0)
    return (
        f"{option}: {pattern!r} matches no module that can have an adapter (nearest: "
        f"{', '.join(near)}; modules end in {', '.join(leaves)})"
    )
