"""Writes an adapter in the form of peft, and merges it into its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from policy.adapters.learning import Adapters
from policy.huggingface.peft import merge, writer
from policy.huggingface.peft.adapter_config import CONFIG
from policy.mesh import processes
from policy.model import Model
from rl.stages.export.exportable import AdapterBase, Exportable

_SHOWN = 3  # names of tensors in a note


def write_adapter(exported: Exportable, directory: Path, base: AdapterBase) -> None:
    """Writes the adapter of a policy to `directory`, with the name of its base. A note names the
    tensors that peft leaves out."""
    graph = exported.model.graph
    spec = Adapters(graph).spec
    arrays = {path: exported.model.params[path] for path in Adapters(graph).sizes}
    left_out = writer.write_adapter(directory, graph, spec, arrays, str(base.directory))
    if left_out:
        more = ", ..." if len(left_out) > _SHOWN else ""
        exported.note(
            f"export: peft {writer.VERSION} leaves out {len(left_out)} tensors of the adapter when "
            f"it loads it, without a message ({', '.join(left_out[:_SHOWN])}{more}); for programs "
            "that use peft set export.merged=true"
        )
    if processes.first():
        file = directory / CONFIG
        keys = json.loads(file.read_text()) | dict(base.keys)
        file.write_text(json.dumps(keys, indent=2, sort_keys=True))


def merged_model(exported: Exportable) -> Model:
    """Returns the policy with its adapter merged into its weights. A note says how much of it
    bfloat16 loses."""
    graph = exported.model.graph
    merged = merge.merged(graph, Adapters(graph).spec, exported.model.params)
    if small := merged.lost_in_bfloat16:
        exported.note(
            f"export: the adapter changes {len(small)} of {len(merged.changes)} weights by less "
            f"than {merge.SMALL_CHANGE:g} of their norm (least {min(small.values()):.1e}): merged "
            "weights in bfloat16 lose a sixth of such changes and more; use the adapter, or set "
            "model.param_dtype=float32"
        )
    return Model(graph.with_runtime(adapter=None), merged.params)


def describe(exported: Exportable, base: str, what: Literal["adapter", "merged"]) -> str:
    """Returns a sentence that says over which base the adapter was trained."""
    graph = exported.model.graph
    spec = Adapters(graph).spec
    bits = graph.runtime.base_weights
    stored = f", stored in {bits}" if bits else ""
    if what == "adapter":
        return f"An adapter of rank {spec.rank} in the form of peft, trained over {base}{stored}."
    of_bits = f", dequantised from {bits}" if bits else ""
    return (
        f"The weights of {base}{of_bits}, with an adapter of rank {spec.rank} merged in "
        f"float32 and stored in {graph.runtime.param_dtype}."
    )
