"""A model whose weights no update changes, and where they come from."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.fields.config_fields import UnsupportedModel
from policy.huggingface.tensorfiles import ModelFileError
from policy.huggingface.weights import read_weights
from policy.mesh.sharding import block_on_cpu_mesh
from policy.model import Graph
from rl.errors import ModelError


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A model on the mesh of the run, which is read once.

    graph: its runtime says in which type weights are stored. directory: of the weights; None: they
    are drawn from `seed`.
    """

    graph: Graph
    directory: Path | None = None
    seed: int = 0

    @functools.cached_property
    def abstract(self) -> Mapping[str, Any]:
        """Returns the shapes and shardings of the weights."""
        return self.graph.abstract

    def read(self) -> dict[str, Any]:
        """Returns the weights on the mesh. Raises ModelError if they cannot be read."""
        if self.directory is None:
            params = self.graph.init(self.seed)
        else:
            try:
                params = read_weights(self.directory, self.graph).params
            except (ModelFileError, UnsupportedModel) as error:
                raise ModelError(f"teacher {self.directory}: {error}") from None
        return block_on_cpu_mesh(params, self.graph.layout)
