"""The critic of PPO: a decoder of the policy's architecture with a linear value head on its final hidden states."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from policy.memory import fetch
from policy.model import Graph
from policy.modes import first_of_segment

VALUE_HEAD = "value_head"


class Critic:
    """Values of states. Weights: those of the trunk (without an output projection), and VALUE_HEAD float32[E]."""

    def __init__(self, policy: Graph):
        trunk = dataclasses.replace(policy.config, tied_head=True, multi_token_prediction=None)
        self.trunk = Graph(trunk, policy.runtime, policy.layout)
        self.runtime, self.untrained = self.trunk.runtime, self.trunk.untrained
        self.hosted, self.tables = self.trunk.hosted, self.trunk.tables
        self.axes = self.trunk.axes | {VALUE_HEAD: (None,)}

    @property
    def shardings(self) -> dict:
        return self.trunk.shardings | {VALUE_HEAD: self.trunk.layout.replicated}

    def init(self, params: dict[str, jax.Array], std: float, seed: int) -> dict[str, jax.Array]:
        """A copy of the policy's trunk with a fresh value head, normal with deviation `std` (0: every value starts at 0)."""

        def create(params, key):
            head = std * jax.random.normal(key, (self.trunk.config.hidden_size,), jnp.float32)
            return {path: jnp.copy(fetch(params[path])) for path in self.trunk.paths} | {VALUE_HEAD: head}

        return jax.jit(create, out_shardings=self.shardings)(params, jax.random.key(seed))

    def scores(self, params, tokens_BT, step) -> tuple[jax.Array, dict]:
        """(float32[B, T], Aux): at t that of the sequence up to token t and with it, as a reward model reads it."""
        with self.trunk.precision():
            hidden, _, aux = self.trunk.decoder(params)(tokens_BT, step, None, self.trunk.runtime)
            return jnp.einsum("bte,e->bt", hidden.astype(jnp.float32), params[VALUE_HEAD]), aux

    def values(self, params, tokens_BT, step) -> tuple[jax.Array, dict]:
        """(float32[B, T], Aux): at t the value of the state before token t; 0 at the first token of a sequence."""
        values, aux = self.scores(params, tokens_BT, step)
        before = jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(first_of_segment(step.segments), 0.0, before), aux
