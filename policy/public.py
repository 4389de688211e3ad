"""Creates, loads and saves models: the public functions `policy.create`, `policy.load` and `policy.save`."""

from __future__ import annotations

from typing import Literal

import jax

from policy.config import DecoderConfig, Runtime
from policy.huggingface import sources
from policy.mesh.sharding import Layout, layout
from policy.model import Graph, Model


def create(
    config: DecoderConfig | str,
    seed: int = 0,
    dtype: str = "float32",
    *,
    runtime: Runtime | None = None,
    mesh: Layout | None = None,
) -> Model:
    """A model with random weights. `config` is a DecoderConfig or the name of a file in configs/models/.

    `runtime` (default: both dtypes are `dtype`) and `mesh` (default: one device) say how and where it is computed.
    """
    if isinstance(config, str):
        config = sources.preset(config)
    graph = Graph(config, runtime or Runtime(dtype=dtype, param_dtype=dtype), mesh or _one_device())
    return Model(graph, graph.init(seed))


def load(
    directory,
    dtype: str = "float32",
    *,
    runtime: Runtime | None = None,
    mesh: Layout | None = None,
    sections: dict | None = None,
    seed: int = 0,
    missing: Literal["refuse", "fresh"] = "refuse",
) -> Model:
    """The model in a Hugging Face directory (config.json and safetensors).

    `sections` are parts of policy/huggingface/extensions.py, in the place of those of config.json: `{"multi_token_prediction": {"depth": 1}}`
    loads the prediction module that files of DeepSeek-V3 hold as layer 61. Where neither config.json announces such modules nor a
    file holds a part of one, they start fresh, as `create` makes them with `seed`. With `missing` "fresh" so do modules that are
    announced, or that follow those in the files. Raises ModelFileError for files that lack a tensor or hold one too many.
    """
    from policy.huggingface import hub

    config = sources.read_config(directory, sections)
    graph = Graph(config, runtime or Runtime(dtype=dtype, param_dtype=dtype), mesh or _one_device())
    params, fresh = hub.read_weights(directory, graph, missing=missing, seed=seed)
    return Model(graph, params, fresh)


def save(model: Model, directory) -> None:
    """Writes a Hugging Face directory that transformers loads with no missing or unexpected keys."""
    from policy.huggingface import hub

    hub.write(directory, model.graph, model.params)


def _one_device() -> Layout:
    return layout({"fsdp": 1}, devices=jax.devices()[:1])
