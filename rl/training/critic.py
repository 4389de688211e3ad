"""The critic of PPO: a linear value head on the final hidden states of its own decoder or of the
policy.

B rows, T tokens, E numbers of a state.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from policy.cache.paths import before, scored
from policy.cache.step import Step
from policy.intermediates import Aux
from policy.model import Graph
from policy.modes import VALUE_HEAD
from rl.accounting.flops import Operations
from rl.training.host_memory import copied


class Critic:
    """Computes values of states.

    The critic owns VALUE_HEAD float32[E] and, unless `shared`, the weights of the trunk: a decoder
    with the architecture of the policy, without an output projection. If `shared`, the trunk is the
    policy, which the critic does not change.
    """

    def __init__(self, policy: Graph, shared: bool = False):
        self.shared = shared
        self.runtime = policy.runtime
        self.axes = {VALUE_HEAD: (None,)}
        self.shardings = {VALUE_HEAD: policy.layout.replicated}
        self.sizes = {VALUE_HEAD: (policy.config.hidden_size,)}
        self.matrices = {}
        self.trunk = policy
        self.untrained = frozenset()
        self.hosted = frozenset()
        self.host_tables = frozenset()
        if not shared:
            alone = {
                "tied_head": True,
                "multi_token_prediction": None,
                "image": None,
                "audio": None,
            }
            trunk = dataclasses.replace(policy.config, **alone)  # it reads the table of the policy
            self.trunk = Graph(trunk, policy.runtime, policy.layout)
            self.untrained = self.trunk.untrained
            self.hosted = self.trunk.hosted
            self.host_tables = self.trunk.host_tables
            self.axes = self.trunk.axes | self.axes
            self.shardings = self.trunk.shardings | self.shardings
            self.sizes = self.trunk.sizes | self.sizes
            self.matrices = self.trunk.matrices
        self.flops = Operations(self.trunk, head=False)

    def init(self, params: dict[str, jax.Array], std: float, seed: int) -> dict[str, jax.Array]:
        """Returns the weights of the critic: a new value head and, unless shared, a copy of the
        trunk of the policy.

        std: standard deviation of the head, normally distributed; 0: every value starts at 0.
        """

        def create(params, key):
            head = std * jax.random.normal(key, (self.trunk.config.hidden_size,), jnp.float32)
            paths = () if self.shared else self.trunk.paths
            trunk = copied({path: params[path] for path in paths}, self.host_tables)
            return trunk | {VALUE_HEAD: head}

        return jax.jit(create, out_shardings=self.shardings)(params, jax.random.key(seed))

    def extra_params(self, policy: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the weights of the policy that `values` takes in addition to the weights of the
        critic."""
        return policy if self.shared else {}

    def scores(
        self, params: dict[str, jax.Array], tokens_BT: jax.Array, step: Step
    ) -> tuple[jax.Array, Aux]:
        """Returns (float32[B, T], Aux): at t the score of the sequence up to and including token
        t."""
        with self.trunk.precision():
            hidden, _, aux = self.trunk.decoder(params)(tokens_BT, step, None, self.trunk.runtime)
            return _head_values(hidden, params[VALUE_HEAD]), aux

    def values(
        self, params: dict[str, jax.Array], tokens_BT: jax.Array, step: Step
    ) -> tuple[jax.Array, jax.Array, Aux]:
        """Returns (before, after, Aux): float32[B, T] values of the states before and after token
        t.

        `before` is 0 at the first token of a sequence. With a shared trunk Aux is empty: the update
        of the policy has the losses of the trunk.
        """
        values, aux = self.scores(params, tokens_BT, step)
        return _values_before(values, step), values, Aux({}) if self.shared else aux

    def values_of(self, states_BTE: jax.Array, head_E: jax.Array, step: Step) -> jax.Array:
        """Returns float32[B, T], the values before each token, from detached final states of
        another pass."""
        with self.trunk.precision():
            return _values_before(_head_values(jax.lax.stop_gradient(states_BTE), head_E), step)


def _head_values(states_BTE: jax.Array, head_E: jax.Array) -> jax.Array:
    """Returns float32[B, T], the output of the head after each token."""
    return jnp.einsum("bte,e->bt", states_BTE.astype(jnp.float32), head_E)


def _values_before(values_BT: jax.Array, step: Step) -> jax.Array:
    """Returns the value before each token, given those after it; 0 at the first token of a
    sequence."""
    return jnp.where(scored(step.segments, step.tree), before(values_BT, step.tree), 0.0)
