"""Reads the weights of a model directory, with the adapter of PEFT that it may hold or be."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy.adapter_spec import LORA_A
from policy.huggingface import model_directory, sources
from policy.huggingface.model_directory import Missing, StoredWeights
from policy.huggingface.peft.merge import SMALL_CHANGE, merged_weight
from policy.huggingface.peft.reader import Adapter, read_adapter
from policy.mesh import processes
from policy.model import Graph

_LOG = logging.getLogger("duet.model")


class LoadedWeights(NamedTuple):
    """params: by path. newly_initialized: paths of those that start, at least in part, as random
    numbers. others: the tensors of the adapter that the caller reads, by stored name."""

    params: dict[str, jax.Array]
    newly_initialized: frozenset[str]
    others: dict[str, np.ndarray]


def read_weights(
    directory: str | os.PathLike,
    graph: Graph,
    ignore: tuple[str, ...] = (),
    missing: Missing = "refuse",
    seed: int = 0,
) -> LoadedWeights:
    """Reads the weights of `graph` as `model_directory.read_weights`. The adapter in `directory`,
    if there is one, is merged in float32 into those of its base, before weights are stored
    quantised.

    Raises ModelFileError for files that are missing, damaged or of another model.
    """
    base = sources.base_of(directory)
    how = {"ignore": ignore, "missing": missing, "seed": seed}
    if not sources.has_adapter(directory):
        return LoadedWeights(*model_directory.read_weights(base, graph, **how), {})
    adapter = read_adapter(directory, graph, StoredWeights(base, graph), ignore)
    small: list[float] = []
    changes = {path: _change(graph, adapter, path, small) for path in _changed(graph, adapter)}
    params, fresh = model_directory.read_weights(base, graph, changes=changes, **how)
    if small:
        _LOG.warning(
            "%s: the adapter changes %d weights by less than %g of their norm (least %.1e): "
            "bfloat16 loses a good part of it; load the model in float32",
            os.fspath(directory),
            len(small),
            SMALL_CHANGE,
            min(small),
        )
    return LoadedWeights(params, fresh, adapter.others)


def _changed(graph: Graph, adapter: Adapter) -> list[str]:
    return [path for path in graph.paths if {path, path + LORA_A} & adapter.params.keys()]


def _change(
    graph: Graph, adapter: Adapter, path: str, small: list[float]
) -> Callable[[jax.Array], jax.Array]:
    """Returns what makes a weight of the base that of the model. It adds a small |change| / |W| of
    a bfloat16 weight to `small`."""
    if path in adapter.params:
        dtype = graph.shapes[path].dtype
        array = adapter.params[path].astype(dtype)
        return lambda _: processes.device_put_global(array, graph.sharding(path))
    return partial(_with_adapter, graph, adapter, path, small)


def _with_adapter(
    graph: Graph, adapter: Adapter, path: str, small: list[float], weight: jax.Array
) -> jax.Array:
    merged = merged_weight(graph, adapter.spec, path, weight, adapter.params)
    total = merged.weight
    change = float(merged.change)
    if total.dtype == jnp.bfloat16 and 0 < change < SMALL_CHANGE:
        small.append(change)
    if total.sharding.is_fully_addressable:
        return jax.device_put(total, graph.sharding(path))
    return jax.jit(lambda array: array, out_shardings=graph.sharding(path))(total)
