"""Resolves the tensors of an adapter's file: which weight of ours, layer and expert each belongs
to, by the names of the family, and in which form it is stored."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from policy import families
from policy.fields import names
from policy.fields.stored_names import renamed
from policy.huggingface.model_directory import TOWERS, StoredWeight, places
from policy.huggingface.peft.adapter_config import TENSORS, AdapterConfig
from policy.huggingface.peft.factors import FactorForm, FactorPair, factor_form, is_swapped
from policy.huggingface.peft.targets import module_name
from policy.huggingface.tensorfiles import ModelFileError, TensorFiles
from policy.model import Graph

PREFIX = "base_model.model."
INNER = ".base_layer"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<kind>A|B)(\.default)?(\.weight)?")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?")


class TensorPlace(NamedTuple):
    """The place of a tensor: the weight, the form in which it is stored, and the numbers of layer
    and expert that it holds, None where the weight has no such axis or holds all."""

    weight: StoredWeight
    stored: names.Stored
    layer: int | None
    expert: int | None

    @property
    def index(self) -> tuple[int, ...]:
        """The index of the layer and of the expert in our weight."""
        layers = self.weight.layers
        first = () if layers is None or self.layer is None else (layers.index(self.layer),)
        return first if self.expert is None else (*first, self.expert)


class AdaptedTensor(NamedTuple):
    """The factors that the file holds for one stored tensor, in PEFT's form, with their scale."""

    place: TensorPlace
    form: FactorForm
    stored: FactorPair
    scale: float
    rank: int


class FullTensor(NamedTuple):
    """A tensor that the file holds in full: that of a module in `modules_to_save`, or a bias."""

    place: TensorPlace
    name: str
    array: np.ndarray


@dataclass
class AdapterTensors:
    """The tensors of a file. `head` names the modules, and `head_weight` is the weight, of a head
    that the model does not have, since it is the embedding. `others` are those of no weight of the
    graph that the caller asked for."""

    adapted: list[AdaptedTensor] = field(default_factory=list)
    full: list[FullTensor] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    head_weight: np.ndarray | None = None
    others: dict[str, np.ndarray] = field(default_factory=dict)


class _Wrapper(NamedTuple):
    """The factors that one of PEFT's wrappers around a module holds, for one of its parameters, and
    the name of that module in the file."""

    module: str
    pair: FactorPair


class _Parameter(NamedTuple):
    """A parameter of a module, and the form of the factors that it would have."""

    place: TensorPlace
    form: FactorForm
    name: str


# The parameters of a module that its wrappers adapt, by the depth of the wrapper.
_Assignment = dict[int, _Parameter]
# The wrappers around a module by their depth, 0 the outermost.
_Wrappers = dict[int, _Wrapper]


class TensorIndex:
    """The modules and tensors of a graph by the names that files give them, in every spelling that
    is read. `fused` are the modules that hold experts in parameters of three axes."""

    def __init__(self, graph: Graph):
        self.tensors: dict[str, list[TensorPlace]] = defaultdict(list)
        self.modules: dict[str, list[tuple[TensorPlace, FactorForm]]] = defaultdict(list)
        self.fused: dict[str, dict[str, list[TensorPlace]]] = defaultdict(lambda: defaultdict(list))
        for weight in places(graph):
            for stored in (weight.stored, *weight.stored.also):
                if stored.sharded or weight.path != weight.parts(stored)[0]:
                    continue
                self._add(graph, weight, stored)

    def _add(self, graph: Graph, weight: StoredWeight, stored: names.Stored) -> None:
        form = factor_form(weight, stored)
        experts = (
            graph.shapes[weight.path].shape[weight.layers is not None] if stored.numbered else 1
        )
        for layer, number in itertools.product(weight.layers or (None,), range(experts)):
            name = weight.name(stored, layer, number)
            place = TensorPlace(weight, stored, layer, number if stored.numbered else None)
            self.tensors[name].append(place)
            if form is None:
                continue
            if form.experts == 1 and name.endswith(".weight"):
                self.modules[module_name(name)].append((place, form))
                continue
            module, _, parameter = name.rpartition(".")
            self.fused[module][parameter].append(place)


def resolve(
    directory: str,
    graph: Graph,
    config: AdapterConfig,
    files: TensorFiles,
    others: tuple[str, ...] = (),
) -> AdapterTensors:
    """Returns what the file of an adapter holds; `others` names tensors of no weight that
    are read too. Raises
    ModelFileError for tensors that are unexpected, of the wrong shape, or that lack the other
    factor."""
    return _Resolver(directory, graph, config, files).resolve(others)


class _Resolver:
    def __init__(self, directory: str, graph: Graph, config: AdapterConfig, files: TensorFiles):
        family = families.get(graph.config.family)
        self._directory = directory
        self._graph = graph
        self._config = config
        self._files = files
        self._index = TensorIndex(graph)
        self._rename = renamed(family)
        tops = (names.TOP, getattr(family, "TOP", names.TOP))
        self._heads = {module_name(top["lm_head"].name) for top in tops if "lm_head" in top}
        self._result = AdapterTensors()
        self._unexpected: list[str] = []

    def resolve(self, others: tuple[str, ...]) -> AdapterTensors:
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for key in sorted(self._files.unread):
            name = key.removeprefix(PREFIX)
            if match := _FACTOR.fullmatch(name):
                modules[match["module"]][match["kind"]] = key
            elif match := _MAGNITUDE.fullmatch(name):
                modules[match["module"]]["magnitude"] = key
            elif name in others:
                self._result.others[name] = self._array(key)
            else:
                self._add_full(key, name)
        pairs = {module: self._pair(module, keys) for module, keys in modules.items()}
        fused: dict[str, _Wrappers] = defaultdict(dict)
        for module, pair in pairs.items():
            depth = module.count(INNER)
            name = self._own_name(module.replace(INNER, ""))
            if depth == 0 and name in self._index.modules:
                self._add_linear(module, name, pair)
            elif name in self._index.fused:
                fused[name][depth] = _Wrapper(module.replace(INNER, ""), pair)
            elif name in self._heads and self._graph.config.tied_head:
                self._result.head.append(module)
            else:
                self._unexpected += modules[module].values()
        self._refuse_unexpected()
        self._add_fused(fused)
        return self._result

    def _own_name(self, module: str) -> str:
        """Returns the name of a module in the tables of the family."""
        return module_name(self._rename(f"{module}.weight"))

    def _pair(self, module: str, keys: dict[str, str]) -> FactorPair:
        """Reads the tensors of a module. Raises ModelFileError if one is missing."""
        required = {"A", "B", *(("magnitude",) if self._config.dora else ())}
        if lacking := required - keys.keys():
            tensor = {"A": "lora_A", "B": "lora_B", "magnitude": "lora_magnitude_vector"}
            raise ModelFileError(
                f"{self._directory}: {TENSORS}: missing tensor "
                f"{module}.{tensor[min(lacking)]}; the file has {min(keys.values())}"
            )
        if "magnitude" in keys and not self._config.dora:
            raise ModelFileError(
                f"{self._directory}: {TENSORS}: unexpected tensor {keys['magnitude']}, since "
                f"use_dora is not set in {self._config.path.name}"
            )
        magnitude = self._array(keys["magnitude"]) if self._config.dora else None
        return FactorPair(self._array(keys["A"]), self._array(keys["B"]), magnitude)

    def _array(self, key: str) -> np.ndarray:
        """Reads a tensor as float32."""
        tensor = self._files.tensor(key)
        return np.asarray(tensor).astype(np.float32)

    def _add_full(self, key: str, name: str) -> None:
        is_copy = f"{INNER}.weight" in name
        own = self._rename(name.replace(INNER, "").replace(".modules_to_save.default", ""))
        if own in self._index.tensors:
            tensor = self._files.tensor(key)
            fitting = [
                place
                for place in self._index.tensors[own]
                if place.weight.stored_shape(place.stored) == tensor.shape
            ]
            if not fitting:
                raise ModelFileError(self._other_shape(key, own, tensor.shape))
            if not is_copy:
                self._result.full.append(FullTensor(fitting[0], key, np.asarray(tensor)))
        elif module_name(own) in self._heads and self._graph.config.tied_head:
            if not is_copy:
                self._result.head_weight = self._array(key)
        else:
            self._unexpected.append(key)

    def _other_shape(self, key: str, own: str, shape: tuple[int, ...]) -> str:
        place = self._index.tensors[own][0]
        expected = list(place.weight.stored_shape(place.stored))
        resized = len(expected) == 2 and expected[1:] == list(shape[1:])
        hint = "; the adapter was made for another vocabulary size" if resized else ""
        return (
            f"{self._directory}: {TENSORS}: tensor {key} has shape {list(shape)}, the model's has "
            f"{expected}{hint}"
        )

    def _refuse_unexpected(self) -> None:
        if not self._unexpected:
            return
        extra = sorted(self._unexpected)
        more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
        towers = [key for key in extra if re.fullmatch(TOWERS, self._own_name(_bare(key)))]
        hint = "the model has no such modules"
        if towers:
            hint = "the model was read without its towers"
        elif any("token_adapter" in key for key in extra):
            hint = "Duet does not read trainable tokens; save the embedding by modules_to_save"
        raise ModelFileError(
            f"{self._directory}: {TENSORS}: unexpected tensors {', '.join(extra[:5])}{more}: {hint}"
        )

    def _add_linear(self, module: str, name: str, pair: FactorPair) -> None:
        candidates = self._index.modules[name]
        for place, form in candidates:
            if form.fits(pair):
                self._add(module, place, form, pair)
                return
        a, b = candidates[0][1].stored_shapes(self._config.rank_of(module))
        raise ModelFileError(
            f"{self._directory}: {TENSORS}: the adapter of {module} has lora_A "
            f"{list(pair.a.shape)} and lora_B {list(pair.b.shape)}, the model needs {list(a)} and "
            f"{list(b)}"
        )

    def _add(self, module: str, place: TensorPlace, form: FactorForm, pair: FactorPair) -> None:
        rank = form.rank(pair)
        expected = self._config.rank_of(module)
        if rank != expected:
            raise ModelFileError(
                f"{self._directory}: the adapter of {module} has rank {rank}, and "
                f"{self._config.path.name} says {expected}, so that its scale is not known; set "
                "rank_pattern and alpha_pattern there"
            )
        scale = self._config.scale_of(module)
        self._result.adapted.append(AdaptedTensor(place, form, pair, scale, rank))

    def _add_fused(self, fused: dict[str, _Wrappers]) -> None:
        """Adds the adapters of experts in parameters of three axes. All of a file are of versions
        before 0.19 or of later ones, which the shapes tell unless all matrices are square."""
        if not fused:
            return
        options = {
            is_old: {
                name: next(self._assignments(name, wrappers, is_old), None)
                for name, wrappers in fused.items()
            }
            for is_old in (False, True)
        }
        possible = [each for each, modules in options.items() if None not in modules.values()]
        if len(possible) > 1 and _orientations(options[False]) == _orientations(options[True]):
            possible = [False]
        if len(possible) > 1:
            if self._config.is_old is None:
                raise ModelFileError(
                    f"{self._config.path}: no peft_version, and the experts' matrices are square: "
                    "peft 0.17 and 0.18 stored the factors of experts the other way round than "
                    'later versions. Add "peft_version": "0.21" or the version that wrote the file'
                )
            possible = [self._config.is_old]
        if not possible:
            raise ModelFileError(self._no_assignment(fused))
        for name, assignment in options[possible[0]].items():
            for depth, parameter in (assignment or {}).items():
                module, pair = fused[name][depth]
                self._add(f"{module}.{parameter.name}", parameter.place, parameter.form, pair)

    def _assignments(self, name: str, wrappers: _Wrappers, is_old: bool) -> Iterator[_Assignment]:
        """Yields the ways to give each wrapper of a module a parameter. The order in which PEFT
        wraps comes first: the gate and up projection before the down projection."""
        depths = sorted(wrappers, reverse=True)
        if depths[::-1] != list(range(len(depths))):
            return
        parameters = self._parameters(name, is_old)
        for chosen in itertools.permutations(parameters, len(depths)):
            assignment = dict(zip(depths, chosen, strict=True))
            if len({parameter.name for parameter in chosen}) == len(chosen) and all(
                parameter.form.fits(wrappers[depth].pair) for depth, parameter in assignment.items()
            ):
                yield assignment

    def _parameters(self, module: str, is_old: bool) -> list[_Parameter]:
        """Returns the parameters of a module that may have an adapter, in each form in which files
        hold them, the last name first."""
        result = []
        for name in sorted(self._index.fused[module], reverse=True):
            if not self._named(module, name):
                continue
            for place in self._index.fused[module][name]:
                swapped = is_swapped(place.weight, place.stored, is_old)
                form = factor_form(place.weight, place.stored, swapped)
                if form is not None:
                    result.append(_Parameter(place, form, name))
        return result

    def _named(self, module: str, parameter: str) -> bool:
        """Returns whether `target_parameters` names a parameter; if it names none of the module's,
        all are."""
        named = [
            each
            for each in self._index.fused[module]
            if any(
                f"{module}.{each}".endswith(f".{target}") or target == f"{module}.{each}"
                for target in self._config.target_parameters
            )
        ]
        return not named or parameter in named

    def _no_assignment(self, fused: dict[str, _Wrappers]) -> str:
        name = next(
            name
            for name, wrappers in fused.items()
            if not any(
                next(self._assignments(name, wrappers, is_old), None) for is_old in (False, True)
            )
        )
        given = "; ".join(
            f"lora_A {list(pair.a.shape)}, lora_B {list(pair.b.shape)}"
            for _, pair in fused[name].values()
        )
        return (
            f"{self._directory}: {TENSORS}: the adapters of {name} ({given}) fit none of its "
            f"parameters {', '.join(sorted(self._index.fused[name]))}"
        )


def _orientations(modules: dict[str, _Assignment | None]) -> list[bool]:
    """Returns of each parameter that has an adapter whether PEFT's A holds our b."""
    return [
        parameter.form.swapped
        for assignment in modules.values()
        for parameter in (assignment or {}).values()
    ]


def _bare(key: str) -> str:
    """Returns the module of a key of the file, without what PEFT adds to its name."""
    name = key.removeprefix(PREFIX).replace(INNER, "")
    match = _FACTOR.fullmatch(name) or _MAGNITUDE.fullmatch(name)
    return match["module"] if match else module_name(name)
