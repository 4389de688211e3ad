"""Creates, loads and saves models: the public functions `policy.create`, `policy.load` and
`policy.save`."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from typing import Literal

import jax

from policy import families
from policy.config import DecoderConfig, Runtime, WeightType
from policy.huggingface import sources
from policy.json_types import JsonObject
from policy.mesh import processes
from policy.mesh.sharding import Layout, layout
from policy.model import Graph, Model

_LOG = logging.getLogger("duet.model")
Dtype = Literal["float32", "bfloat16"]


def create(
    config: DecoderConfig | str,
    seed: int = 0,
    dtype: Dtype = "float32",
    *,
    runtime: Runtime | None = None,
    mesh: Layout | None = None,
    base_weights: WeightType | None = None,
    base_block: int | None = 64,
) -> Model:
    """Creates a model with random weights drawn from `seed`, 0 to 2^32 - 1.

    `config` is a DecoderConfig or the name of a file in configs/models/. `runtime` (default: both
    dtypes are `dtype`) holds the options of the computation, `mesh` (default: one device) the
    devices and the rules for sharding. With `base_weights` the weights of products are stored
    quantised, as `qwix.QArray`s in `Model.params`, with a scale for each block of `base_block`
    numbers along their inputs (None: for each output): for a model whose weights nothing trains.
    Embedding, head, routers and norms stay floats. Raises UnsupportedModel for an unknown name and
    compatibility.Conflict for incompatible features.
    """
    if isinstance(config, str):
        config = sources.preset(config)
    runtime = _runtime(runtime, dtype, base_weights, base_block)
    graph = Graph(config, runtime, mesh or _one_device())
    return Model(graph, graph.init(seed))


def load(
    directory: str | os.PathLike,
    dtype: Dtype = "float32",
    *,
    runtime: Runtime | None = None,
    mesh: Layout | None = None,
    sections: dict | None = None,
    seed: int = 0,
    missing: Literal["refuse", "fresh"] = "refuse",
    media: bool = False,
    base_weights: WeightType | None = None,
    base_block: int | None = 64,
) -> Model:
    """Loads the model of a Hugging Face directory (config.json and safetensors), or of an adapter
    of PEFT (adapter_config.json), which is merged into its base.

    `sections` replace the sections of config.json that policy/fields/extensions.py reads:
    `{"multi_token_prediction": {"depth": 1}}` loads the prediction module that files of DeepSeek-V3
    hold as layer 61. If config.json announces no such modules and no file holds a part of one, they
    start fresh, as `create` draws them with `seed`. With `missing` "fresh" modules that are
    announced, or that follow those in the files, start fresh too. `dtype`, `runtime`, `mesh`,
    `base_weights` and `base_block` are as for `create`; weights are quantised layer by layer as
    they are read. `media`: with the towers of a multimodal model, which make the rows of pictures
    and sounds (Model.encode); such a model is saved as a multimodal one. Raises UnsupportedModel
    for a configuration that the decoder does not compute and ModelFileError for files that are
    damaged, lack a tensor or hold an unexpected one.
    """
    from policy.huggingface.weights import read_weights

    config = sources.read_config(directory, sections, media=media)
    runtime = _runtime(runtime, dtype, base_weights, base_block)
    graph = Graph(config, runtime, mesh or _one_device())
    weights = read_weights(directory, graph, missing=missing, seed=seed)
    base = os.fspath(sources.base_of(directory))
    return Model(graph, weights.params, weights.newly_initialized, base)


def save(
    model: Model,
    directory: str | os.PathLike,
    *,
    generation: JsonObject | None = None,
    source: str | os.PathLike | None = None,
) -> None:
    """Writes a Hugging Face directory that transformers loads with no missing or unexpected keys.
    Of weights that are stored quantised it writes the floats by which products multiply.

    `generation` holds the keys of its generation_config.json (`eos_token_id`, `temperature`, ...);
    None: no such file is written. `source`: the directory that the model was loaded from, to write
    the complete model: towers that were not loaded, prediction modules and other parts are copied
    from there, under the names that they have there. Without it, a text model out of a multimodal
    one is saved as a text model; of families whose text model has no class of its own in
    transformers, the complete model is written anyway, from the directory that was loaded. `source`
    may be `directory`. Raises ValueError if `source` holds another model, ModelFileError if its
    files cannot be read.
    """
    from policy.huggingface import generation_config, model_directory

    if source is None and _lacks_towers(model.config):
        source = model.source
        if source is None:
            _LOG.warning(
                "%s: the towers of the model are not written, and transformers will draw random "
                "ones; give `source`, a directory that holds them",
                os.fspath(directory),
            )
    model_directory.write(directory, model.graph, model.params, source=source)
    if generation is not None and processes.first():
        generation_config.write(directory, generation)


def _runtime(
    runtime: Runtime | None, dtype: Dtype, base_weights: WeightType | None, base_block: int | None
) -> Runtime:
    runtime = runtime or Runtime(dtype=dtype, param_dtype=dtype)
    if base_weights is None:
        return runtime
    return replace(runtime, base_weights=base_weights, base_block=base_block)


def _lacks_towers(config: DecoderConfig) -> bool:
    """Returns whether a text model is stored as a multimodal one."""
    from policy.huggingface.model_directory import has_towers

    wrapped = hasattr(families.get(config.family), "WRAPPED") and "text_config" in json.loads(
        config.hf
    )
    return wrapped and not has_towers(config)


def _one_device() -> Layout:
    return layout({"fsdp": 1}, devices=jax.devices()[:1])
