"""The base of trainers: how a batch is cut into micro-batches, what a loss reads, and which
operations are counted.

N rows, T tokens, R rows of a micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from policy import modes
from policy.adapters.learning import Adapters
from policy.attention import flash_attention, sequence_shards
from policy.cache.media import MediaTable
from policy.cache.step import Step
from policy.layers import batch_split
from policy.mesh import processes
from policy.mesh.sharding import Layout, block_on_cpu_mesh
from policy.model import Graph
from policy.ops.dropout import Dropout
from rl.accounting.flops import Operations
from rl.algorithms import PolicyInputs
from rl.algorithms._protocols import TrainedLoss
from rl.config.stage import StageOptions
from rl.errors import ModelError
from rl.training.batch import Batch
from rl.training.media import towers
from rl.training.packing.packing import Packing, plan_rows
from rl.training.packing.row_shapes import RowBounds, RowHistory, RowShape
from rl.training.packing.trees import Sharing, plan_tree_rows
from rl.training.updater import LossCall
from rl.training.updates.optimizer_step import ParamState, updates_made

# Target number of tokens in a default micro-batch on a CPU.
CPU_TOKENS = 1024
# Most tokens of a packed row on a CPU, unless a sequence or a tree has more: the activations of
# longer ones leave its caches, and their memory is allocated anew in each update.
LONGEST_ON_CPU = 3072
# Elsewhere, most tokens of a packed row over those of the longest sequence or tree: kernels of
# accelerators compute all pairs of blocks of a row.
LONGEST_FACTOR = 3
# Lengths are multiples of the blocks of kernels if the longest sequence has so many.
FEW_BLOCKS = 8


def row_multiple(graph: Graph) -> int:
    """Returns the number of which the rows of every program are a multiple."""
    return graph.layout.num_row_shards * (batch_split.PARTS if graph.runtime.batch_split else 1)


def shard_rows(tree: Any, layout: Layout) -> Any:
    """Shards host arrays [N, ...] by rows over several processes. With one process it returns them
    unchanged."""
    if processes.count() == 1:
        return tree
    return jax.tree.map(
        lambda a: processes.device_put_global(
            a, layout.sharding(("batch", *[None] * (a.ndim - 1)), a.shape)
        ),
        tree,
    )


def step_of(table: MediaTable | None, micro: Batch, dropout_rate: float = 0.0) -> Step:
    """Returns the forward-pass inputs of a micro-batch: positions, routes, and the places of its
    pictures and sounds, with their table. With a rate, also the seeds of dropout that an update
    adds to its batch."""
    media = towers.in_table(micro.media, table)
    step = modes.make_step(micro.tokens, segments=micro.segments, media=media, tree=micro.tree)
    dropout = None
    if dropout_rate and micro.dropout is not None:
        dropout = Dropout(micro.dropout, rate=dropout_rate)
    return replace(step, routes=micro.routes, dropout=dropout)


def by_micro_batch(
    program: Callable, batch: Batch, packing: Packing, R: int, layout: Layout
) -> tuple[np.ndarray, ...]:
    """Runs `program(micro)`, which returns a tuple of arrays [R, T, ...], on R packed rows of the
    batch at a time, with what a forward pass reads. Returns these arrays as [N, T, ...] on the
    host."""
    packed = packing.inputs(batch)
    outputs = []
    for i in range(0, packing.filled_rows, R):
        outputs.append(
            block_on_cpu_mesh(program(shard_rows(packed.rows(slice(i, i + R)), layout)), layout)
        )
    return tuple(
        packing.unpack(np.concatenate([processes.on_host(p) for p in each]))
        for each in zip(*outputs, strict=True)
    )


_COUNTS = ("num_tokens", "num_sequences", "chosen_tokens")
"""The counts that losses of held-out rows divide by, by their names in PolicyInputs."""
LOSS_TOKENS = "loss_tokens"
"""Among the metrics of an update: the number of tokens in its loss, on the device; no metric of a
run."""
_OF_THE_UPDATE = (
    "optim/",
    "moe/",
    "mtp/",
    "indexer/",
    "activation/",
    "grad_norm/",
    "perf/",
    "distill/projections/",
)
_OF_THE_UPDATE += ("value/optim/", "value/moe/", "sequences/", "sampler/rejected_ratio")
"""What the names of metrics begin with that are no means over the tokens of the loss, so that an
update without such tokens has them too."""


def without_empty(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics of an update on the host, without LOSS_TOKENS.

    If no token is in the loss, its value and the means over its tokens are left out: they are those
    of nothing.
    """
    tokens = metrics.get(LOSS_TOKENS)
    empty = tokens is not None and not tokens > 0
    return {
        name: value
        for name, value in metrics.items()
        if name != LOSS_TOKENS and not (empty and not name.startswith(_OF_THE_UPDATE))
    }


class BatchUpdates(ABC):
    """The base of the trainers of policies and reward models: micro-batch rows, batch totals,
    counts of operations."""

    def __init__(self, graph: Graph, stage: StageOptions, algorithm: TrainedLoss):
        self.graph = graph
        self.stage = stage
        self.algorithm = algorithm
        self.total_flops = 0.0
        self.sharing: Sharing | None = None
        # Most tokens of a row of a batch; None: the length of its arrays.
        self.row_length: int | None = None
        # Of the updates; a checkpoint holds it.
        self.row_history = RowHistory()
        # Only updates may drop tokens of full experts: the generator, and passes that are compared
        # with it, never do.
        self._scoring_graph = graph.with_runtime(skip_blocks=True)
        self._update_graph = self._scoring_graph.with_runtime(**stage.runtime)
        # What of the policy learns, if that is an adapter.
        trains_adapter = self._update_graph.runtime.adapter is not None
        self.adapters = Adapters(self._update_graph) if trains_adapter else None
        self.flops = Operations(graph, adapters=self.adapters)
        self._base: dict[str, Any] = {}

    @property
    def _graph_of_copies(self) -> Graph:
        """Returns the graph of models that start as copies of what learns of the policy."""
        return self._scoring_graph.with_runtime(adapter=self._update_graph.runtime.adapter)

    @property
    def base(self) -> Mapping[str, Any]:
        """Returns the weights of the policy that are not in the state, since the stage trains an
        adapter over them: no update donates them. Their shapes and shardings before `set_base`;
        none if the stage trains the weights themselves."""
        return self._base or self._abstract_base

    @cached_property
    def _abstract_base(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._not_learning(self.graph.abstract)

    @property
    def policy_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the weights of the policy, as `Model.params`."""
        return self.graph.shapes | ({} if self.adapters is None else self.adapters.shapes)

    def set_base(self, params: Mapping[str, Any]) -> None:
        """Takes the weights that the adapter of the stage is over from those of the policy."""
        self._base = self._not_learning(params)

    def _not_learning(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the weights of the policy that an adapter is over, but those that learn in
        full."""
        if self.adapters is None:
            return {}
        return {p: params[p] for p in self.graph.paths if p not in self.adapters.sizes}

    def of_state(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of the weights of the policy that a state holds: its adapter, or all."""
        if self.adapters is None:
            return dict(params)
        return {path: params[path] for path in self.adapters.sizes}

    def policy_params(self, state: Any) -> dict[str, Any]:
        """Returns the weights of the policy of a state, as `Model.params`."""
        return {**self.base, **state.policy.params}

    def packing_of_update(self, batch: Batch) -> tuple[Packing, int]:
        """Returns `packing_of` a batch for its update, and adds it to `row_history`."""
        packing, R = self.packing_of(batch, self.row_history)
        if packing.distinct:
            self.row_history.add(RowShape(R, packing.shape[1]), packing.share(R))
        return packing, R

    def packing_of(self, batch: Batch, history: RowHistory | None = None) -> tuple[Packing, int]:
        """Returns (packing of the sequences of a batch on the host, packed rows per micro-batch).

        A batch in which no group has a beginning worth sharing is packed as sequences alone.
        history: as in choose_shape; an evaluation has None, so that its programs do not depend on
        the step.
        """
        N, T = batch.segments.shape
        T = self.row_length or T
        if self.sharing is not None:
            bounds = self.row_bounds(N, T, self.sharing)
            if planned := plan_tree_rows(batch, bounds, self.sharing, history):
                return planned[0], planned[1].micro_rows
        packing, shape = plan_rows(batch.segments, self.row_bounds(N, T), history)
        return packing, shape.micro_rows

    def row_bounds(self, N: int, T: int, sharing: Sharing | None = None) -> RowBounds:
        """Returns what bounds the packed rows of N rows of at most T tokens.

        With `micro_batch` a micro-batch has at most the tokens of so many rows of T tokens. Without
        it, it has all packed rows, or on a CPU about CPU_TOKENS tokens; `router.balance: batch`
        keeps one micro-batch there too, because several would need an extra forward pass.
        """
        multiple = row_multiple(self.graph)
        limit = T if sharing is None else sharing.packed_length(T)
        on_cpu = self.graph.layout.platform == "cpu"
        rows = self.stage.micro_batch and -(-self.stage.micro_batch // multiple) * multiple
        micro_tokens = rows and rows * T
        most_rows = N if micro_tokens is None else micro_tokens // limit
        stretched = 0
        if micro_tokens is None and on_cpu and self.stage.router.balance == "sequence":
            micro_tokens = CPU_TOKENS
            most_rows = CPU_TOKENS // limit
            stretched = LONGEST_ON_CPU
        longest = LONGEST_ON_CPU if on_cpu else LONGEST_FACTOR * limit
        return RowBounds(
            sequences=N,
            sequence=T,
            limit=limit,
            most_rows=max(1, most_rows),
            micro_tokens=micro_tokens,
            stretched=stretched,
            longest=min(longest, sharing.longest) if sharing and sharing.longest else longest,
            row_multiple=multiple,
            length_multiple=self._length_multiple(limit),
            few_rows_first=on_cpu,
        )

    def _length_multiple(self, limit: int) -> int:
        """Returns the number of which the lengths of packed rows are a multiple: on an accelerator
        the blocks of its kernels divide long rows."""
        multiple = sequence_shards.multiple(self._update_graph.runtime)
        blocks = multiple * flash_attention.LANES
        on_cpu = self.graph.layout.platform == "cpu"
        fit = not on_cpu and limit >= FEW_BLOCKS * blocks and limit % blocks == 0
        return blocks if fit else multiple

    @cached_property
    def loss_inputs(self) -> Callable[..., PolicyInputs]:
        """Returns the jitted function (mini-batch, coefs) -> PolicyInputs, with the totals of the
        mini-batch.

        Outputs of the model that is trained, such as `logp`, are absent: the update computes them.
        """

        def loss_inputs(batch: Batch, coefs: dict[str, jax.Array] | None = None) -> PolicyInputs:
            inputs = PolicyInputs(
                mask=batch.mask,
                old_logp=batch.old_logp,
                sampler_logp=batch.sampler_logp,
                ref_logp=batch.ref_logp,
                entropy=batch.entropy,
                advantages=batch.advantages,
                margin=batch.margin,
                extra=batch.extra,
                segments=batch.segments,
                prompt=batch.prompt,
                correct=batch.correct,
                adaptive_coefs=coefs,
                max_length=self.stage.sampling.max_new_tokens,
            )
            return self.algorithm.with_totals(inputs)

        return jax.jit(loss_inputs)

    def counts(self, batch: Batch) -> dict[str, float]:
        """Returns the counts of a batch on the host that losses divide by, by their names in
        PolicyInputs."""
        packing, _ = self.packing_of(batch)
        inputs = self.loss_inputs(shard_rows(packing.batch(batch), self.graph.layout))
        return {
            name: float(value) for name in _COUNTS if (value := getattr(inputs, name)) is not None
        }

    @abstractmethod
    def held_out_call(
        self,
        state: Any,
        batch: Batch,
        inputs: PolicyInputs,
        table: MediaTable | None,
        micro_rows: int,
    ) -> LossCall:
        """Returns the call of the loss on held-out rows, of arrays or their shapes. table: rows of
        pictures and sounds; None without them."""

    def held_out_loss(
        self,
        state: Any,
        batch: Batch,
        counts: Mapping[str, float],
        table: MediaTable | None = None,
        adaptive_coefs: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Returns the metrics of the loss of a batch on the host, `loss` among them, without a
        gradient.

        counts: what the loss divides by in place of the counts of this batch, so that the sums over
        several batches are the metrics of all of them. table: rows of pictures and sounds; None
        without them.
        """
        packing, R = self.packing_of(batch)
        batch = shard_rows(packing.batch(batch), self.graph.layout)
        coefs = {name: np.float32(value) for name, value in (adaptive_coefs or {}).items()}
        divisors = {name: np.float32(value) for name, value in counts.items()}
        inputs = replace(self.loss_inputs(batch, coefs or None), **divisors)
        values = self.held_out_call(state, batch, inputs, table, R).run()
        return {name: float(value) for name, value in jax.device_get(values).items()}

    def add_forward_flops(self, operations: Operations, packing: Packing) -> None:
        """Adds a forward pass over packed rows to `total_flops`."""
        self.total_flops += operations.of_runs(*packing.runs)

    def add_update_flops(self, operations: Operations, packing: Packing) -> None:
        """Adds a forward pass over packed rows, and its gradient, to `total_flops`."""
        self.total_flops += operations.of_runs_with_gradient(*packing.runs)

    def check_updates(self, learner: ParamState, metrics: dict[str, float]) -> None:
        """Raises ModelError if no update changed `learner` and the last step's updates were not
        finite.

        metrics: metrics of the last step.
        """
        if metrics.get("optim/skipped") == 1.0 and not int(updates_made(learner)):
            raise ModelError(
                "no update of this stage changed the weights: in the last step none was finite, "
                "and each earlier one was not finite or had a gradient of 0. Look for what grows "
                "in the events of the stage: `loss`, `optim/grad_norm`, `reward/mean`. Weights "
                "that are not finite, huge rewards and a narrow dtype are usual causes"
            )
