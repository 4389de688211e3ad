"""The critic of PPO: a linear value head on the final hidden states of its own decoder or of the
policy.

B rows, T tokens, E numbers of a state.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from policy.adapter_spec import AdapterSpec
from policy.adapters.learning import Adapters
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
    policy, which the critic does not change. If the runtime of the policy has an adapter, the
    critic owns an adapter of the trunk in the place of its weights, and reads those of the policy.
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
        self._reads_policy = shared or policy.runtime.adapter is not None
        self.adapters: Adapters | None = None
        if not shared:
            self.trunk = _without_head(policy)
            if self.trunk.runtime.adapter is not None:
                self.adapters = Adapters(self.trunk)
                self._own(self.adapters)
            elif not self._reads_policy:
                self._own(self.trunk)
        self.flops = Operations(self.trunk, head=False, adapters=self.adapters)

    def _own(self, model: Graph | Adapters) -> None:
        """Takes the weights of a model besides the value head."""
        self.runtime = model.runtime
        self.untrained = model.untrained
        self.hosted = model.hosted
        self.host_tables = model.host_tables
        self.axes = model.axes | self.axes
        self.shardings = model.shardings | self.shardings
        self.sizes = model.sizes | self.sizes
        self.matrices = model.matrices

    def init(self, params: dict[str, jax.Array], std: float, seed: int) -> dict[str, jax.Array]:
        """Returns the weights of the critic: a new value head and, unless shared, a copy of the
        trunk of the policy, or of its adapter.

        std: standard deviation of the head, normally distributed; 0: every value starts at 0.
        """

        def create(params, key):
            head = std * jax.random.normal(key, (self.trunk.config.hidden_size,), jnp.float32)
            paths = [path for path in self.sizes if path != VALUE_HEAD]
            trunk = copied({path: params[path] for path in paths}, self.host_tables)
            return trunk | {VALUE_HEAD: head}

        return jax.jit(create, out_shardings=self.shardings)(params, jax.random.key(seed))

    def extra_params(self, policy: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the weights of the policy that `values` takes in addition to the weights of the
        critic: those under an adapter of its own, or all if shared."""
        if not self._reads_policy:
            return {}
        if self.shared:
            return policy
        return {path: policy[path] for path in self.trunk.paths if path not in self.sizes}

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


def _without_head(policy: Graph) -> Graph:
    """Returns the graph of the decoder of a policy without an output projection, prediction modules
    and towers."""
    alone = {"tied_head": True, "multi_token_prediction": None, "image": None, "audio": None}
    trunk = dataclasses.replace(policy.config, **alone)  # it reads the table of the policy
    graph = Graph(trunk, policy.runtime, policy.layout)
    if (adapter := policy.runtime.adapter) is None:
        return graph
    return graph.with_runtime(adapter=_part_of(adapter, graph))


def _part_of(adapter: AdapterSpec, graph: Graph) -> AdapterSpec | None:
    """Returns what an adapter adapts of the weights of a graph; None: nothing."""
    paths = set(graph.paths)
    adapted = tuple(target for target in adapter.adapted if target.path in paths)
    train = tuple(path for path in adapter.train if path in paths)
    if not adapted and not train:
        return None
    return dataclasses.replace(adapter, adapted=adapted, train=train)


def _head_values(states_BTE: jax.Array, head_E: jax.Array) -> jax.Array:
    """Returns float32[B, T], the output of the head after each token."""
    return jnp.einsum("bte,e->bt", states_BTE.astype(jnp.float32), head_E)


def _values_before(values_BT: jax.Array, step: Step) -> jax.Array:
    """Returns the value before each token, given those after it; 0 at the first token of a
    sequence."""
    return jnp.where(scored(step.segments, step.tree), before(values_BT, step.tree), 0.0)
