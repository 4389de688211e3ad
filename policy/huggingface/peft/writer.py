"""Writes an adapter in PEFT's form, for `PeftModel.from_pretrained` and for vLLM.

Routed experts are written in the form that PEFT 0.21 and vLLM read for their model: a pair of
factors for each expert where files hold a tensor for each and PEFT converts adapters
(CONVERTED_BY_PEFT), else PEFT's form for experts in one parameter, which is how transformers 5
holds them. All factors are multiplied by one scale, lora_alpha / r, since vLLM ignores
`rank_pattern` and `alpha_pattern`; `r` is the largest rank of a tensor, which vLLM compares with
its max_lora_rank.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policy import families
from policy.adapter_spec import LORA_A, LORA_B, MAGNITUDE, AdapterSpec
from policy.fields import names
from policy.huggingface.model_directory import StoredWeight, has_towers, places
from policy.huggingface.peft import coverage
from policy.huggingface.peft.adapter_config import CONFIG, TENSORS
from policy.huggingface.peft.factors import (
    FactorForm,
    FactorPair,
    factor_form,
    factor_shapes,
    is_swapped,
)
from policy.huggingface.peft.targets import EMBEDDING, HEAD, module_name, routed
from policy.huggingface.peft.tensors import INNER, PREFIX, TensorIndex
from policy.huggingface.sources import read_object
from policy.mesh import processes
from policy.model import Graph

# The version whose form is written.
VERSION = "0.21.2"


class _Module(NamedTuple):
    """A module with an adapter: its place, PEFT's form of it, and its factors by layer and number
    of expert."""

    place: StoredWeight
    stored: names.Stored
    form: FactorForm
    pairs: dict[tuple[int | None, int], FactorPair]

    @property
    def rank(self) -> int:
        """The rank of the stored tensors."""
        return self.form.rank(next(iter(self.pairs.values())))

    @property
    def template(self) -> str:
        """The name of the module or parameter, with {n} and {e} for layer and expert."""
        name = self.place.prefix + self.stored.name
        return name if self.form.experts > 1 else module_name(name)


def write_adapter(
    directory: str | os.PathLike,
    graph: Graph,
    spec: AdapterSpec,
    params: Mapping[str, Any],
    base: str,
) -> tuple[str, ...]:
    """Writes `adapter_config.json` and `adapter_model.safetensors` in float32 to `directory`.

    `params` has the arrays of the adapter by path, and the weights in `spec.train`. `base` is the
    name of the base model, for `base_model_name_or_path`. If it is the directory of a multimodal
    model, modules have the names of that model, also where `graph` is its text model. Returns the
    names of the tensors that PEFT 0.21 leaves out when it loads the files, without a message:
    adapters of dense and shared feed-forwards where it converts experts, and weights trained in
    full that are no module's `weight` or `bias` in transformers. All processes take part; the first
    one writes.
    """
    host = {path: processes.on_host(array) for path, array in params.items()}
    modules = list(_modules(graph, _with_partners(graph, host)))
    full = dict(_full_tensors(graph, spec, host))
    tensors = dict(_factor_tensors(modules)) | full
    dropped = [
        *_dropped_by_peft(graph, modules),
        *(name for name in full if _outside_modules(name)),
    ]
    rename = dict(_file_names(graph, [*tensors, *dropped], base))
    if processes.first():
        config = _config(graph, spec, modules, list(full), base)
        _save(Path(directory), {rename[name]: array for name, array in tensors.items()}, config)
    return tuple(sorted({rename[name] for name in dropped}))


def _file_names(graph: Graph, tensors: list[str], base: str) -> Iterator[tuple[str, str]]:
    """Yields the names of tensors in the tables of the family with those of PEFT's file."""
    pairs = _multimodal_prefixes(graph, base)
    for name in tensors:
        fits = (pair for pair in pairs if name.startswith(pair[0]))
        inner, outer = next(fits, ("", ""))
        yield name, PREFIX + outer + name.removeprefix(inner)


def _multimodal_prefixes(graph: Graph, base: str) -> Sequence[tuple[str, str]]:
    """Returns pairs of a prefix in the tables of the family and what stands for it in the
    multimodal model that `base` is; none for a text model."""
    config = Path(base) / "config.json"
    hf = read_object(config) if config.exists() else json.loads(graph.config.hf)
    if not (has_towers(graph.config) or "text_config" in hf):
        return ()
    family = families.get(graph.config.family)
    return getattr(family, "MEMORY_PREFIXES", getattr(family, "MULTIMODAL", ()))


def _save(directory: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
    save_file(contiguous, directory / TENSORS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))


def _with_partners(graph: Graph, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds zeros for the other projections of experts where the gate or the up projection alone has
    an adapter: when PEFT converts experts, it takes all three."""
    result = dict(params)
    if not coverage.converted_by_peft(graph):
        return result
    for path in graph.paths:
        module, _, kind = path.rpartition(".")
        if kind not in ("expert_gate_proj", "expert_up_proj") or f"{path}{LORA_A}" not in params:
            continue
        rank = params[f"{path}{LORA_A}"].shape[-1]
        for other in ("expert_gate_proj", "expert_up_proj", "expert_down_proj"):
            shapes = factor_shapes(graph, f"{module}.{other}", rank)
            result.setdefault(f"{module}.{other}{LORA_A}", np.zeros(shapes.a, np.float32))
            result.setdefault(f"{module}.{other}{LORA_B}", np.zeros(shapes.b, np.float32))
    return result


def _modules(graph: Graph, params: Mapping[str, np.ndarray]) -> Iterator[_Module]:
    """Yields the modules that have an adapter. A layer whose factors are 0 has none."""
    for place in places(graph):
        stored = _written(graph, place)
        paths = place.parts(stored)
        if place.path != paths[0] or not any(f"{path}{LORA_A}" in params for path in paths):
            continue
        form = factor_form(place, stored, is_swapped(place, stored, is_old=False))
        assert form is not None  # the weights that can have an adapter have stored forms
        factors_of = [_arrays(graph, params, path) for path in paths]
        experts = range(graph.shapes[place.path].shape[place.layers is not None])
        numbers = experts if stored.numbered else (None,)
        parts = {}
        for row, layer in enumerate(place.layers or (None,)):
            for number in numbers:
                layer_index = () if layer is None else (row,)
                index = layer_index if number is None else (*layer_index, number)
                parts[layer, number or 0] = [_at(form, pair, index) for pair in factors_of]
        pairs = _joined(form, parts, len(graph.product_dims(place.path).columns))
        if not routed(graph, place.path):
            pairs = {key: pair for key, pair in pairs.items() if pair.a.any() or pair.b.any()}
        if pairs:
            yield _Module(place, stored, form, pairs)


def _written(graph: Graph, place: StoredWeight) -> names.Stored:
    """Returns the spelling in which a weight is written."""
    if not routed(graph, place.path) or coverage.converted_by_peft(graph):
        return place.stored
    in_memory = (
        stored
        for stored in (place.stored, *place.stored.also)
        if not stored.numbered and not stored.name.endswith(".weight")
    )
    return next(in_memory, place.stored)


def _arrays(graph: Graph, params: Mapping[str, np.ndarray], path: str) -> FactorPair | None:
    """Returns the factors of a weight, those shared by experts repeated for each; None: it has
    none."""
    if f"{path}{LORA_A}" not in params:
        return None
    rows, columns = graph.product_dims(path)
    shape = graph.shapes[path].shape
    lead = tuple(size for dim, size in enumerate(shape) if dim not in rows + columns)
    a = _repeated(params[f"{path}{LORA_A}"], lead, 1 + len(rows))
    b = _repeated(params[f"{path}{LORA_B}"], lead, 1 + len(columns))
    return FactorPair(a, b, params.get(f"{path}{MAGNITUDE}"))


def _repeated(array: np.ndarray, lead: tuple[int, ...], own: int) -> np.ndarray:
    """Returns a factor with all the dimensions `lead`; a shared one lacks the last of them."""
    array = np.asarray(array, np.float32)
    if array.ndim < len(lead) + own:
        array = np.expand_dims(array, array.ndim - own)
    return np.broadcast_to(array, (*lead, *array.shape[-own:]))


def _at(form: FactorForm, pair: FactorPair | None, index: tuple[int, ...]) -> FactorPair | None:
    """Returns the factors of a layer or of an expert, as `form` stores them. Groups of a matrix
    have one A there: all of theirs stacked, if they differ, of which B of each reads its own."""
    if pair is None:
        return None
    a = pair.a[index]
    b = pair.b[index]
    magnitude = None if pair.magnitude is None else np.asarray(pair.magnitude, np.float32)[index]
    if a.ndim == len(names.layout_axes(form.a.layout).ours):
        return FactorPair(a, b, magnitude)
    if all(np.array_equal(each, a[0]) for each in a):
        return FactorPair(a[0], b, magnitude)
    groups = len(a)
    rank = a.shape[-1]
    stacked = np.zeros((groups, groups * rank, *b.shape[2:]), np.float32)
    for group, own in enumerate(b):
        stacked[group, group * rank : (group + 1) * rank] = own
    return FactorPair(np.concatenate([*a], axis=-1), stacked, magnitude)


_Key = tuple[int | None, int]


def _joined(
    form: FactorForm, parts: dict[_Key, list[FactorPair | None]], outputs: int
) -> dict[_Key, FactorPair]:
    """Joins the factors of the parts of each stored tensor, which have `outputs` dimensions of
    outputs. Parts with equal A share it; otherwise A is stacked and B block-diagonal, in all
    layers, so that all have one rank."""
    groups = [_same_inputs(pairs) for pairs in parts.values()]
    result = {}
    for key, pairs in parts.items():
        result[key] = form.join(
            [pair for pair in pairs if pair is not None]
            if all(groups)
            else _block_diagonal(form, pairs, outputs)
        )
    return result


def _same_inputs(pairs: list[FactorPair | None]) -> bool:
    """Returns whether all parts have an adapter, with equal A."""
    first = pairs[0]
    return first is not None and all(
        pair is not None and np.array_equal(pair.a, first.a) for pair in pairs
    )


def _block_diagonal(
    form: FactorForm, pairs: list[FactorPair | None], outputs: int
) -> list[FactorPair]:
    """Returns factors of parts that read the same inputs with one A, all of theirs stacked: a part
    uses its own columns. A part without an adapter has B = 0."""
    own = [pair for pair in pairs if pair is not None]
    a = np.concatenate([pair.a for pair in own], axis=-1)
    result = []
    start = 0
    for pair, shape in zip(pairs, form.our_shapes(form.b, a.shape[-1]), strict=True):
        b = np.zeros(shape, np.float32)
        if pair is not None:
            stop = start + pair.a.shape[-1]
            b[(..., slice(start, stop), *(slice(None),) * outputs)] = pair.b
            start = stop
        result.append(FactorPair(a, b, None if pair is None else pair.magnitude))
    return result


def _factor_tensors(modules: list[_Module]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of the factors by their names in the tables of the family."""
    names_of = _wrapper_names(modules)
    for module in modules:
        for (layer, number), pair in module.pairs.items():
            name = module_name(module.place.name(module.stored, layer, number))
            name = names_of.get(name, name)
            if module.place.path == EMBEDDING:
                yield f"{name}.lora_embedding_A", pair.a
                yield f"{name}.lora_embedding_B", pair.b
            else:
                yield f"{name}.lora_A.weight", pair.a
                yield f"{name}.lora_B.weight", pair.b
            if pair.magnitude is not None:
                yield f"{name}.lora_magnitude_vector", pair.magnitude


def _wrapper_names(modules: list[_Module]) -> dict[str, str]:
    """Returns PEFT's names of adapters of parameters: those of their module, with a ".base_layer"
    for each wrapper around it. PEFT wraps the parameters of a module in their order there, the gate
    and up projection before the down projection."""
    parameters: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if module.form.experts > 1 and not module.stored.name.endswith(".weight"):
            for layer, number in module.pairs:
                name = module.place.name(module.stored, layer, number)
                parameters[name.rpartition(".")[0]].append(name)
    result = {}
    for name, own in parameters.items():
        for depth, parameter in enumerate(sorted(own)):
            result[parameter] = name + INNER * depth
    return result


def _full_tensors(
    graph: Graph, spec: AdapterSpec, params: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of the weights that are trained in full."""
    for place in places(graph):
        paths = place.parts(place.stored)
        if place.path != paths[0] or not set(paths) & set(spec.train):
            continue
        if lacking := set(paths) - set(spec.train):
            raise ValueError(
                f"train: {min(set(paths) & set(spec.train))} is stored in one tensor with "
                f"{min(lacking)}; train both in full, or neither"
            )
        for row, layer in enumerate(place.layers or (None,)):
            index = () if layer is None else (row,)
            arrays = [np.asarray(params[path], np.float32)[index] for path in paths]
            if not place.stored.numbered:
                yield place.name(place.stored, layer), place.stored.join(arrays)
                continue
            for number, experts in enumerate(zip(*arrays, strict=True)):
                yield place.name(place.stored, layer, number), place.stored.join(experts)
    if graph.config.tied_head and EMBEDDING in spec.train:
        top = getattr(families.get(graph.config.family), "TOP", names.TOP)
        yield top[HEAD].name, np.asarray(params[EMBEDDING], np.float32)


def _outside_modules(name: str) -> bool:
    """Returns whether a tensor that is trained in full is none of a module of transformers 5."""
    return (
        not name.endswith((".weight", ".bias")) or re.search(r"\.experts\.\d+\.", name) is not None
    )


def _dropped_by_peft(graph: Graph, modules: list[_Module]) -> Iterator[str]:
    """Yields the tensors of factors that PEFT 0.21 leaves out."""
    converted = coverage.converted_by_peft(graph)
    for module in modules:
        is_expert = routed(graph, module.place.path)
        leaf = module.template.rpartition(".")[2]
        if (leaf in converted) if not is_expert else (module.stored.numbered and not converted):
            yield from dict(_factor_tensors([module]))


def _config(
    graph: Graph, spec: AdapterSpec, modules: list[_Module], full: list[str], base: str
) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    rank = max((module.rank for module in modules), default=spec.rank)
    ranks = dict(_rank_pattern(graph, modules, rank))
    tied = graph.config.tied_head and EMBEDDING in spec.train
    return ({"ensure_weight_tying": True} if tied else {}) | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "peft_version": VERSION,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(spec.scale * rank),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": spec.dora,
        "bias": "none",
        "fan_in_fan_out": any(_is_conv1d(module) for module in modules),
        "init_lora_weights": True,
        "modules_to_save": sorted({_suffix(name) for name in full}) or None,
        "rank_pattern": ranks,
        "alpha_pattern": {name: _number(spec.scale * own) for name, own in ranks.items()},
        "target_modules": sorted(set(_target_modules(graph, modules))),
        "target_parameters": sorted(
            module.template.rpartition("{n}.")[2]
            + ".weight" * module.stored.name.endswith(".weight")
            for module in modules
            if module.form.experts > 1
        )
        or None,
    }


def _number(value: float) -> float | int:
    """Returns a number without a fraction as an integer, which some programs ask for."""
    return int(value) if value == int(value) else value


def _rank_pattern(graph: Graph, modules: list[_Module], rank: int) -> Iterator[tuple[str, int]]:
    """Yields the patterns of modules that have another rank than `rank`."""
    is_converted = bool(coverage.converted_by_peft(graph))
    for module in modules:
        if is_converted and module.stored.numbered:
            # In transformers 5 the gate and up projections of the experts are one parameter.
            is_down = module.place.path.endswith("down_proj")
            pattern = r"experts\.down_proj" if is_down else r"experts\.gate_up_proj"
            fused = module.rank * (1 if is_down else 2)
            if module.rank != rank:
                yield pattern, fused
        if module.rank != rank:
            yield coverage.escaped(module.template.rpartition("{n}.")[2], r"\d+"), module.rank


def _target_modules(graph: Graph, modules: list[_Module]) -> Iterator[str]:
    """Yields the last words of the adapted modules; the full names of those that share it with a
    module that has no adapter."""
    own = {
        module_name(module.place.name(module.stored, layer, number))
        for module in modules
        if module.form.experts == 1
        for layer, number in module.pairs
    }
    others = {name.rpartition(".")[2] for name in TensorIndex(graph).modules.keys() - own}
    converted = coverage.converted_by_peft(graph)
    for name in own:
        leaf = name.rpartition(".")[2]
        yield _from_layer(name) if leaf in others and leaf not in converted else leaf


def _is_conv1d(module: _Module) -> bool:
    """Returns whether the module stores [inputs, outputs], as Conv1D of GPT-2 does."""
    form = module.form
    layout = module.stored.layout
    if form.experts > 1 or not layout or module.place.path in (EMBEDDING, HEAD):
        return False
    inputs = form.a.layout.split(" -> ")[0].split(" ", 1)[1]
    return names.layout_axes(layout).stored[0].text == inputs


def _suffix(tensor: str) -> str:
    """Returns the name by which PEFT's modules_to_save names the module of a tensor."""
    return _from_layer(re.sub(r"\.(weight|bias)$", "", tensor))


def _from_layer(module: str) -> str:
    """Returns the end of the name of a module that names it in every wrapper of the model: from its
    numbered layer on, or its last word."""
    match = re.search(r"\w+\.\d+\..+", module)
    return match[0] if match else module.rpartition(".")[2]
