"""Reads and writes a decoder with a score instead of a head: transformers' sequence classification
model of one label.

The score is the product of the final hidden state [E] of the last token with SCORE, without a bias.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from policy.config import Runtime
from policy.huggingface import model_directory, sources
from policy.huggingface.tensorfiles import ModelFileError, TensorFiles
from policy.huggingface.weights import read_weights
from policy.mesh import processes
from policy.mesh.sharding import Layout
from policy.model import Graph

SCORE = "score.weight"


class Classifier(NamedTuple):
    """A decoder with a score instead of a head.

    graph: of the trunk. params: its weights. score: SCORE as float32[E].
    """

    graph: Graph
    params: dict[str, jax.Array]
    score: np.ndarray


def read(directory: str | os.PathLike, runtime: Runtime, mesh: Layout) -> Classifier:
    """Reads a directory that `write`, or transformers, wrote. Raises ModelFileError and
    UnsupportedModel."""
    graph = Graph(sources.classifier(directory), runtime, mesh)
    weights = read_weights(directory, graph, ignore=(SCORE,))
    shape = (1, graph.config.hidden_size)
    score = weights.others.get(SCORE)
    if score is None:
        files = TensorFiles(sources.base_of(directory), scheme=sources.scheme(directory))
        score = files.read(SCORE, shape, (slice(None), slice(None)))
    elif score.shape != shape:
        raise ModelFileError(
            f"{directory}: the score of the adapter is {list(score.shape)}, and that of a reward "
            f"model {list(shape)}: it has one label"
        )
    return Classifier(graph, weights.params, np.asarray(score[0], np.float32))


def check(directory: str | os.PathLike) -> None:
    """Compares the tensors of a directory with its config.json, as `model_directory.check`."""
    config = sources.classifier(directory)
    model_directory.check_files(directory, config, ignore=(SCORE,))
    if sources.base_of(directory) == Path(directory):  # else the adapter may bring the score
        files = TensorFiles(directory, scheme=sources.scheme(directory))
        files.checked(SCORE, (1, config.hidden_size))


def write(
    directory: str | os.PathLike,
    graph: Graph,
    params: dict,
    score_E: jax.Array | np.ndarray,
    pad_id: int | None,
) -> None:
    """Writes a directory that transformers loads as a sequence classification model with no missing
    or unexpected keys. `graph` is the graph of a `sources.trunk`; `pad_id` tells transformers where
    padding begins."""
    keys: dict[str, Any] = {}
    if len(json.loads(graph.config.hf).get("id2label") or ()) != 1:
        keys = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    keys |= {} if pad_id is None else {"pad_token_id": pad_id}
    score = processes.on_host(score_E).astype(graph.runtime.param_dtype)[None]
    model_directory.write(directory, graph, params, tensors={SCORE: score}, keys=keys)
