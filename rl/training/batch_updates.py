"""The base of trainers: how a batch is cut into micro-batches, what a loss reads, and which operations are counted.

N rows, T tokens, R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from policy import modes
from policy.attention import sequence_shards
from policy.cache.step import Step
from policy.layers import batch_split
from policy.mesh import processes
from policy.mesh.sharding import Layout, block_on_cpu_mesh
from policy.model import Graph
from policy.ops.dropout import Dropout
from rl.algorithms import PolicyInputs
from rl.config.stage import StageOptions
from rl.errors import ModelError
from rl.reporting.flops import Operations, lengths
from rl.training import towers
from rl.training.batch import Batch
from rl.training.packing import Packing, plan_packing, row_counts
from rl.training.updater import ParamState, updates_made

# Target number of tokens in a default micro-batch on a CPU.
CPU_TOKENS = 768


def shard_rows(tree: Any, layout: Layout) -> Any:
    """Shards host arrays [N, ...] by rows over several processes. With one process it returns them unchanged."""
    if processes.count() == 1:
        return tree
    return jax.tree.map(
        lambda a: processes.device_put_global(a, layout.sharding(("batch", *[None] * (a.ndim - 1)), a.shape)), tree
    )


def by_micro_batch(program: Callable, batch: Batch, packing: Packing, R: int, layout: Layout) -> tuple[np.ndarray, ...]:
    """Runs `program(tokens, segments, routes)` on R packed rows at a time; of rows with pictures or sounds
    `program(tokens, segments, routes, places)`. Returns arrays [N, T] on the host."""
    packed = packing.pack(batch.tokens), packing.segments, packing.routes(batch)
    packed += () if batch.media is None else (packing.places(batch),)
    outputs = []
    for i in range(0, packing.filled_rows, R):
        outputs.append(
            block_on_cpu_mesh(program(*shard_rows(jax.tree.map(lambda a, i=i: a[i : i + R], packed), layout)), layout)
        )
    return tuple(
        packing.unpack(np.concatenate([processes.on_host(p) for p in each])) for each in zip(*outputs, strict=True)
    )


class BatchUpdates:
    """The base of the trainers of policies and reward models: micro-batch rows, batch totals, counts of operations."""

    def __init__(self, graph: Graph, stage: StageOptions, algorithm: Any):
        self.graph, self.stage, self.algorithm = graph, stage, algorithm
        self.flops, self.total_flops = Operations(graph), 0.0
        # Only updates may drop tokens of full experts: the generator, and passes that are compared with it, never do.
        self._update_graph = graph.at(**stage.runtime)

    def packing_of(self, segments_NT: np.ndarray) -> tuple[Packing, int]:
        """Returns (packing of these sequences, packed rows per micro-batch)."""
        counts, R = self.row_counts(*segments_NT.shape)
        packing = plan_packing(segments_NT, counts, sequence_shards.multiple(self._update_graph.runtime))
        return packing, R or packing.shape[0]

    def row_counts(self, N: int, T: int) -> tuple[list[int], int | None]:
        """Returns (possible numbers of packed rows of N sequences of T tokens, rows of a micro-batch; None: all)."""
        multiple = self.graph.layout.num_row_shards * (batch_split.PARTS if self.graph.runtime.batch_split else 1)
        micro = self.stage.micro_batch or self._micro_batch(N, T)
        if micro is None:
            return row_counts(N, multiple), None
        R = -(-min(micro, N) // multiple) * multiple
        return [-(-N // R) * R], R

    def _micro_batch(self, N: int, T: int) -> int | None:
        """Returns the default rows of a micro-batch; None: all.

        On a CPU small micro-batches keep the activations in the caches. `router.balance: batch` keeps one micro-batch,
        because several would need an extra forward pass.
        """
        on_cpu = self.graph.layout.platform == "cpu"
        return -(-N // -(-N * T // CPU_TOKENS)) if on_cpu and self.stage.router.balance == "sequence" else None

    @cached_property
    def loss_inputs(self) -> Callable[..., PolicyInputs]:
        """Returns the jitted function (mini-batch, coefs) -> PolicyInputs, with the totals of the mini-batch.

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

    def add_flops(self, operations: Operations, batch: Batch, passes: int) -> None:
        """Adds `passes` over `batch` to `total_flops`: a forward pass counts 1, its gradient 2."""
        self.total_flops += passes * operations.forward(lengths(batch.segments))

    def check_updates(self, learner: ParamState, metrics: dict[str, float]) -> None:
        """Raises ModelError if no update changed `learner` and the last step's updates were not finite.

        metrics: metrics of the last step.
        """
        if metrics.get("optim/skipped") == 1.0 and not int(updates_made(learner)):
            raise ModelError(
                "no update of this stage changed the weights: in the last step none was finite, and each earlier one "
                "was not finite or had a gradient of 0. Look for what grows in the events of the stage: "
                "`loss`, `optim/grad_norm`, `reward/mean`. Weights that are not finite, huge rewards and a narrow "
                "dtype are usual causes"
            )

    def step_of(self, params: dict[str, jax.Array], micro: Batch) -> Step:
        """Returns the forward-pass inputs of a micro-batch: positions, routes, dropout seeds, and its places with the
        table among `params`."""
        media = towers.inputs_of(params, micro.places)
        step = replace(modes.make_step(micro.tokens, segments=micro.segments, inputs=media), routes=micro.routes)
        return step if micro.dropout is None else replace(step, dropout=Dropout(micro.dropout, rate=self.stage.dropout))
