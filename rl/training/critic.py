"""The critic of PPO: a linear value head on the final hidden states of a decoder, of its own or the policy's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from policy.intermediates import Aux
from policy.model import Graph
from policy.modes import VALUE_HEAD, first_of_segment
from policy.ops.host_memory import fetch
from rl.training.flops import Operations


class Critic:
    """Values of states. Weights of its own: VALUE_HEAD float32[E], and unless `shared` those of the trunk, a decoder of the
    policy's architecture without an output projection. Where `shared` the trunk is the policy, whose weights stay as they are."""

    def __init__(self, policy: Graph, shared: bool = False):
        self.shared, self.runtime = shared, policy.runtime
        self.axes, self.shardings = {VALUE_HEAD: (None,)}, {VALUE_HEAD: policy.layout.replicated}
        self.sizes = {VALUE_HEAD: (policy.config.hidden_size,)}
        self.trunk, self.untrained, self.hosted, self.tables = policy, frozenset(), frozenset(), frozenset()
        if not shared:
            trunk = dataclasses.replace(policy.config, tied_head=True, multi_token_prediction=None)
            self.trunk = Graph(trunk, policy.runtime, policy.layout)
            self.untrained, self.hosted, self.tables = self.trunk.untrained, self.trunk.hosted, self.trunk.tables
            self.axes, self.shardings = self.trunk.axes | self.axes, self.trunk.shardings | self.shardings
            self.sizes |= self.trunk.sizes
        self.flops = Operations(self.trunk, head=False)

    def init(self, params: dict[str, jax.Array], std: float, seed: int) -> dict[str, jax.Array]:
        """The weights of its own: a fresh value head, normal with deviation `std` (0: every value starts at 0), and a copy of the
        policy's trunk."""

        def create(params, key):
            head = std * jax.random.normal(key, (self.trunk.config.hidden_size,), jnp.float32)
            copied = () if self.shared else self.trunk.paths
            return {path: jnp.copy(fetch(params[path])) for path in copied} | {VALUE_HEAD: head}

        return jax.jit(create, out_shardings=self.shardings)(params, jax.random.key(seed))

    def beside(self, policy: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Those of the policy's weights that `values` takes besides its own."""
        return policy if self.shared else {}

    def scores(self, params, tokens_BT, step) -> tuple[jax.Array, Aux]:
        """(float32[B, T], Aux): at t that of the sequence up to token t and with it, as a reward model reads it."""
        with self.trunk.precision():
            hidden, _, aux = self.trunk.decoder(params)(tokens_BT, step, None, self.trunk.runtime)
            return _of(hidden, params[VALUE_HEAD]), aux

    def values(self, params, tokens_BT, step) -> tuple[jax.Array, jax.Array, Aux]:
        """(before, after, Aux), float32[B, T]: the values of the states before token t, 0 at the first token of a sequence, and
        after it. A shared trunk brings no losses along: they are in the policy's update."""
        values, aux = self.scores(params, tokens_BT, step)
        return _before(values, step.segments), values, Aux({}) if self.shared else aux

    def values_of(self, states_BTE: jax.Array, head_E: jax.Array, segments_BT: jax.Array) -> jax.Array:
        """float32[B, T]: the values before each token by final states that another pass has computed, which take no gradient."""
        with self.trunk.precision():
            return _before(_of(jax.lax.stop_gradient(states_BTE), head_E), segments_BT)


def _of(states_BTE: jax.Array, head_E: jax.Array) -> jax.Array:
    return jnp.einsum("bte,e->bt", states_BTE.astype(jnp.float32), head_E)


def _before(values_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    return jnp.where(first_of_segment(segments_BT), 0.0, jnp.pad(values_BT[:, :-1], ((0, 0), (1, 0))))
