"""Whether the updates and passes of a stage compute equal beginnings of sequences once (`stages.N.shared_prefix`), and
in rows of which length. The configuration, the model and the mesh alone decide, so all batches of a stage meet the same
programs."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from rl.errors import ConfigError
from rl.stages.configured import ConfiguredStage

if TYPE_CHECKING:
    from policy.model import Graph
    from rl.config.stage import StageOptions
    from rl.training.packing.trees import Sharing


LONGEST_ON_CPU = 3072
"""Tokens of the longest packed row on a CPU, whose activations would leave its caches and take new pages of memory in
each update."""


def sharing_of(stage: ConfiguredStage, graph: Graph, options: StageOptions) -> Sharing | None:
    """Returns how the sequences of a stage share beginnings on this mesh; None: each is computed alone. options: of the
    stage, with another micro-batch in a plan. Raises ConfigError where `always` cannot be."""
    from policy.attention.flash_attention import LONGEST_TREES
    from policy.layers import batch_split
    from rl.training.packing.trees import Sharing, has_state

    group, config = stage.group, graph.config
    if options.shared_prefix == "never" or group is None or stage.unshared is not None:
        return None
    if options.shared_prefix == "auto" and _unmeasured(graph):
        return None
    length = stage.row_length
    multiple = graph.layout.num_row_shards * (batch_split.PARTS if graph.runtime.batch_split else 1)
    most = max(1, (options.micro_batch or stage.rows_per_update) // multiple) * length
    if graph.layout.platform == "tpu":
        if length > LONGEST_TREES and options.shared_prefix == "always":
            raise ConfigError(
                f"stages.{stage.index}.shared_prefix: always does not go with rows of {length} tokens on a TPU, "
                f"whose kernel takes {LONGEST_TREES}; use auto, or a shorter max_length"
            )
        if length > LONGEST_TREES:
            return None
        most = min(most, LONGEST_TREES)
    if graph.layout.platform == "cpu" and options.micro_batch is None:
        most = min(most, LONGEST_ON_CPU)
    modules = config.multi_token_prediction
    return Sharing(
        Fraction(max(length, group.packed_length(most)), length),
        ahead=modules.depth if options.mtp and modules else 0,
        one_level=has_state(config),
        together=stage.answers_share_prompts,
    )


def full_rows(stage: ConfiguredStage, sharing: Sharing | None, rows: int) -> int:
    """Returns how many packed rows so many rows of a batch fill, if all sequences have their full length."""
    group = stage.group
    if sharing is None or group is None or stage.answers_share_prompts:
        return rows
    together = (sharing.packed_length(stage.row_length) - group.shared) // group.own
    return -(-rows // group.sequences) * -(-group.sequences // together)


def _unmeasured(graph: Graph) -> bool:
    """Whether it is not known that trees gain: in bfloat16 on a GPU, whose kernel reads none."""
    return graph.layout.platform == "gpu" and str(graph.runtime.dtype) != "float32"


def describe(stage: ConfiguredStage, sharing: Sharing | None) -> str | None:
    """Returns a line that says what the sequences of a stage share, or the key that keeps them from it; None: they have
    no groups."""
    if (group := stage.group) is None:
        return None
    if sharing is None:
        if stage.options.shared_prefix == "never":
            return f"shared prefix: off: stages.{stage.index}.shared_prefix: never"
        return f"shared prefix: off: {'this device' if stage.unshared is None else stage.unshared[0]}"
    return (
        f"shared prefix: beginnings of {group.shared} tokens before {group.own} of each of {group.sequences} "
        f"sequences: {group.distinct} of {group.tokens} tokens, {group.tokens / group.distinct:.1f}x; rows of "
        f"{sharing.packed_length(stage.row_length)}"
    )
