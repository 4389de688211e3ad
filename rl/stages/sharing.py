"""Whether the updates and passes of a stage compute equal beginnings of sequences once
(`stages.N.shared_prefix`), and in rows of which length. The configuration, the model and the mesh
alone decide, so batches of a stage with rows of one length meet the same programs. A batch that
shares nothing runs the programs for rows without trees."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from rl.data.teacher import decoders_of
from rl.errors import ConfigError
from rl.stages.configured import ConfiguredStage

if TYPE_CHECKING:
    from policy.model import Graph
    from rl.training.packing.trees import Sharing


def sharing_of(stage: ConfiguredStage, graph: Graph) -> Sharing | None:
    """Returns how the sequences of a stage share beginnings on this mesh; None: each is computed
    alone. Raises ConfigError where `always` cannot be, ModelError for a teacher that cannot be
    read."""
    from policy.attention.flash_attention import LONGEST_TREES
    from rl.training.batch_updates import LONGEST_ON_CPU, row_multiple
    from rl.training.packing.trees import Sharing, has_state

    if (group := stage.group) is None or excluded(stage, graph) is not None:
        return None
    options = stage.options
    length = stage.row_length
    config = graph.config
    platform = graph.layout.platform
    most = max(1, (options.micro_batch or stage.rows_per_update) // row_multiple(graph)) * length
    if _by_kernel(graph):
        most = min(most, LONGEST_TREES)
    if platform == "cpu" and options.micro_batch is None:
        most = min(most, LONGEST_ON_CPU)
    modules = config.multi_token_prediction
    return Sharing(
        Fraction(max(length, group.packed_length(most)), length),
        longest=LONGEST_TREES if _by_kernel(graph) else None,
        ahead=modules.depth if options.mtp and modules else 0,
        one_level=any(map(has_state, (config, *decoders_of(stage.teacher)))),
        together=stage.answers_share_prompts,
    )


def excluded(stage: ConfiguredStage, graph: Graph) -> str | None:
    """Returns what keeps the sequences of a stage with groups from sharing beginnings: a key, or
    what the device cannot do. None: nothing does. Raises ConfigError where `always` cannot be."""
    from policy.attention.flash_attention import LONGEST_TREES

    shared_prefix = stage.options.shared_prefix
    platform = graph.layout.platform
    length = stage.row_length
    if shared_prefix == "never":
        return f"stages.{stage.index}.shared_prefix: never"
    if stage.sharing_conflict is not None:
        return stage.sharing_conflict[0]
    if shared_prefix == "auto" and platform == "gpu" and graph.runtime.dtype == "bfloat16":
        return "bfloat16 on a GPU, whose kernel for attention reads no trees"
    if _by_kernel(graph) and length > LONGEST_TREES:
        pair = " (two of max_length)" * (stage.sequences_per_row == 2)
        limit = (
            f"rows of {length} tokens{pair} in bfloat16 on a TPU, whose kernel takes "
            f"{LONGEST_TREES}"
        )
        if shared_prefix == "always":
            key = f"stages.{stage.index}.shared_prefix"
            most = LONGEST_TREES // stage.sequences_per_row
            raise ConfigError(
                f"{key}: always does not go with {limit}; use auto, or a max_length of at most "
                f"{most}"
            )
        return limit
    return None


def _by_kernel(graph: Graph) -> bool:
    """Whether the kernel of a TPU, which takes no float32, computes the attention of trees."""
    return graph.layout.platform == "tpu" and graph.runtime.dtype == "bfloat16"


def full_rows(stage: ConfiguredStage, sharing: Sharing | None, rows: int) -> int:
    """Returns how many packed rows so many rows of a batch fill, if all sequences have their full
    length."""
    group = stage.group
    if sharing is None or group is None or stage.answers_share_prompts:
        return rows
    return -(-rows // group.sequences) * group.parts(sharing.packed_length(stage.row_length))


def describe(stage: ConfiguredStage, graph: Graph, sharing: Sharing | None) -> str | None:
    """Returns a line that says what the sequences of a stage share, or what keeps them from it;
    None: they have no groups."""
    if (group := stage.group) is None:
        return None
    if sharing is None:
        return f"shared prefix: off: {excluded(stage, graph)}"
    from rl.training.packing.trees import LEAST_SAVED

    length = sharing.packed_length(stage.row_length)
    assumed = " (half of max_length)" * stage.answers_share_prompts
    parts = group.parts(length)
    own = group.sequences * group.own
    computed = parts * group.shared + own
    if parts == group.sequences or group.shared + own > (1 - LEAST_SAVED) * group.tokens:
        return (
            f"shared prefix: rows of {length} tokens, in which only sequences of less than "
            "full length share"
        )
    return (
        f"shared prefix: {group.sequences} sequences share {group.shared} tokens{assumed} and "
        f"have {group.own} each of their own: {computed} of {group.tokens} tokens computed, "
        f"{group.tokens / computed:.1f}x; rows of {length}"
    )
