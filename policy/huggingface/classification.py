"""A decoder with a score in the place of its head, as transformers stores it: a sequence classification model of one label.

Its score is a product of the final hidden state of the last token with SCORE, without a bias.
"""

from __future__ import annotations

import numpy as np

from policy.config import Runtime
from policy.huggingface import hub, sources
from policy.huggingface.tensorfiles import TensorFiles
from policy.mesh import processes
from policy.mesh.sharding import Layout
from policy.model import Graph

SCORE = "score.weight"


def read(directory, runtime: Runtime, mesh: Layout) -> tuple[Graph, dict, np.ndarray]:
    """(graph of the trunk, its weights, SCORE as float32[E]) of a directory. Raises ModelFileError and UnsupportedModel."""
    graph = Graph(sources.classifier(directory), runtime, mesh)
    params, _ = hub.read_weights(directory, graph, apart=(SCORE,))
    shape = (1, graph.config.hidden_size)
    score = TensorFiles(directory, scheme=sources.scheme(directory)).read(SCORE, shape, (slice(None), slice(None)))
    return graph, params, np.asarray(score[0], np.float32)


def write(directory, graph: Graph, params: dict, score_E, pad_id: int | None) -> None:
    """A directory that transformers loads as a sequence classification model with no missing or unexpected keys. `graph` is of a
    `sources.trunk`; `pad_id` tells transformers where padding begins."""
    keys = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    keys |= {} if pad_id is None else {"pad_token_id": pad_id}
    score = processes.on_host(score_E).astype(graph.runtime.param_dtype)[None]
    hub.write(directory, graph, params, tensors={SCORE: score}, keys=keys)
