"""Projections of the features of a policy to the width of a teacher.

E hidden of the policy, D of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from policy.model import Graph
from policy.ops.parameter import MatrixDims


class FeatureProjections:
    """Matrices that map features of the policy to the width of a teacher, one for each pair of
    layers.

    They learn with the policy by the same loss. They are a part of the state of a stage, and no
    part of the policy.

    paths: of each matrix float32[E, D], in the order of the pairs. The other attributes are those
    of a LearningModel.
    """

    def __init__(self, policy: Graph, width: int, pairs: Sequence[tuple[int, int]]):
        """Defines the matrices. width: of the teacher. pairs: (layer of the policy, layer of the
        teacher)."""
        self.paths = [f"teacher.projection.{n}.{m}" for n, m in pairs]  # as checkpoints have them
        shape = (policy.config.hidden_size, width)
        axes = ("embed", None)
        self.trunk = policy
        self.runtime = replace(policy.runtime, param_dtype="float32")
        self.untrained = frozenset()
        self.hosted = frozenset()
        self.host_tables = frozenset()
        self.axes = dict.fromkeys(self.paths, axes)
        self.sizes = dict.fromkeys(self.paths, shape)
        self.matrices = dict.fromkeys(self.paths, MatrixDims(rows=(0,), columns=(1,)))
        self.shardings = dict.fromkeys(self.paths, policy.layout.sharding(axes, shape))

    def init(self, seed: int) -> dict[str, jax.Array]:
        """Draws the matrices, normally distributed with variance 1 / E: a projected feature keeps
        its size."""

        def create(key):
            keys = jax.random.split(key, len(self.paths))
            scale = {path: size[0] ** -0.5 for path, size in self.sizes.items()}
            return {
                path: scale[path] * jax.random.normal(each, self.sizes[path], jnp.float32)
                for path, each in zip(self.paths, keys, strict=True)
            }

        return jax.jit(create, out_shardings=self.shardings)(jax.random.key(seed))

    def maps(self, params: dict[str, jax.Array]) -> list[jax.Array]:
        """Returns the matrices in the order of the pairs."""
        return [params[path] for path in self.paths]

    def operations(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Returns the operations of the products and of their gradients over sequences of these
        lengths."""
        return 6.0 * sum(E * D for E, D in self.sizes.values()) * float(np.sum(lengths))
