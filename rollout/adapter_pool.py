"""Several adapters over one decoder, which requests choose by name.

All of them get the same paths and shapes: weights that an adapter leaves alone, and ranks that it
does not have, are zeros. The decoder without an adapter has zeros alone. So one set of compiled
programs serves them all, and a dispatch computes with the arrays of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from policy.adapter_spec import LORA_B, AdaptedWeight, AdapterSpec
from policy.adapters.learning import Adapters
from policy.huggingface.peft.reader import Adapter, read_adapter
from policy.huggingface.reload import WeightsOnHost
from policy.mesh import processes
from policy.model import Model


class AdapterPool:
    """Adapters by name, with the decoder that they adapt.

    model: the decoder, whose programs multiply by adapters; without a name its adapter is zeros.
    bytes: of the arrays of one adapter, on all devices together.
    """

    def __init__(self, model: Model, directories: Mapping[str, str | os.PathLike]):
        """directories: of adapters of PEFT, by the names that requests give. Raises ModelFileError
        for one that cannot be read or is of another model, ValueError for one that does not go with
        others: with DoRA or weights that are trained in full, for no adapter, and for a model that
        has one already."""
        if not directories:
            raise ValueError("adapters: name at least one")
        if model.graph.runtime.adapter is not None:
            raise ValueError("adapters: the model has an adapter already; merge it first")
        weights = WeightsOnHost(model.graph, model.params)
        stored = {
            name: read_adapter(directory, model.graph, weights)
            for name, directory in directories.items()
        }
        for name, adapter in stored.items():
            if refusal := _refusal(adapter.spec):
                raise ValueError(f"adapters: {name}: {directories[name]} {refusal}")
        spec = _joined(stored)
        graph = model.graph.with_runtime(adapter=spec)
        self._adapters = Adapters(graph)
        zeros = {
            path: processes.device_put_global(
                np.zeros(size, spec.dtype), self._adapters.shardings[path]
            )
            for path, size in self._adapters.sizes.items()
        }
        self.model = Model(graph, {**model.params, **zeros})
        self._arrays = {name: self._padded(adapter) for name, adapter in stored.items()}
        self.bytes = sum(array.nbytes for array in zeros.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the adapters."""
        return tuple(self._arrays)

    def params(self, name: str | None) -> dict[str, Any]:
        """Returns the weights of the decoder with this adapter; None: with none."""
        return self.model.params if name is None else self.model.params | self._arrays[name]

    def _padded(self, adapter: Adapter) -> dict[str, jax.Array]:
        """Returns the arrays of an adapter in the shapes of all, its scale multiplied into b."""
        arrays = {}
        for path, array in adapter.params.items():
            size = self._adapters.sizes[path]
            if path.endswith(LORA_B):
                array = array * np.float32(adapter.spec.scale)
            room = [(0, most - own) for most, own in zip(size, array.shape, strict=True)]
            padded = np.pad(array, room).astype(self._adapters.spec.dtype)
            arrays[path] = processes.device_put_global(padded, self._adapters.shardings[path])
        return arrays


def _refusal(spec: AdapterSpec) -> str | None:
    """Returns why an adapter does not go with others, after its name; None: it does."""
    if spec.dora:
        return "has DoRA, whose lengths belong to one adapter; merge it, and serve it alone"
    if spec.train:
        return (
            f"holds the weights {', '.join(spec.train)} in full (modules_to_save); merge it, and "
            "serve it alone"
        )
    return None


def _joined(stored: Mapping[str, Adapter]) -> AdapterSpec:
    """Returns the spec that has room for all adapters, with the scale 1."""
    ranks: dict[str, int] = {}
    for adapter in stored.values():
        for target in adapter.spec.adapted:
            ranks[target.path] = max(target.rank, ranks.get(target.path, 0))
    adapted = tuple(AdaptedWeight(path, rank) for path, rank in ranks.items())
    return AdapterSpec(rank=1, alpha=1.0, adapted=adapted)
