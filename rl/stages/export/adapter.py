"""Writes the adapter of a run in the form of peft, and merges it into its base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from policy.adapters.learning import Adapters, is_adapter
from policy.huggingface import sources
from policy.huggingface.peft import merge, writer
from policy.huggingface.peft.adapter_config import CONFIG
from policy.mesh import processes
from policy.model import Model
from rl.data import models
from rl.data.hub import hub_name
from rl.stages.export.base import FOLDER, directory_of, is_trained

if TYPE_CHECKING:
    from rl.stages.context import Context

WriteModel = Callable[[Path], None]
README = "README.md"
_SHOWN = 3  # names of tensors in a note


def has_adapter(model: Model) -> bool:
    """Whether the weights of the model have an adapter."""
    return any(map(is_adapter, model.params))


def write_adapter(context: Context, directory: Path, write_base: WriteModel) -> None:
    """Writes the adapter of a run to `directory`, with the name of its base.

    write_base: writes the weights under the adapter to a directory. It is called if no directory
    has them: where they are random, or an adapter that was merged. A note names the tensors that
    peft leaves out.
    """
    graph = context.model.graph
    spec = Adapters(graph).spec
    base = _base(context, write_base)
    arrays = {path: context.model.params[path] for path in Adapters(graph).sizes}
    left_out = writer.write_adapter(directory, graph, spec, arrays, str(base))
    if left_out:
        more = ", ..." if len(left_out) > _SHOWN else ""
        context.events.note(
            f"export: peft {writer.VERSION} leaves out {len(left_out)} tensors of the adapter when "
            f"it loads it, without a message ({', '.join(left_out[:_SHOWN])}{more}); for programs "
            "that use peft set export.merged=true"
        )
    if processes.first():
        file = directory / CONFIG
        keys = json.loads(file.read_text()) | _name(context, base)
        file.write_text(json.dumps(keys, indent=2, sort_keys=True))
    write_readme(context, directory, "adapter")


def merged_model(context: Context) -> Model:
    """Returns the policy of a run with its adapter merged into its weights. A note says how much of
    it bfloat16 loses."""
    graph = context.model.graph
    merged = merge.merged(graph, Adapters(graph).spec, context.model.params)
    if small := merged.lost_in_bfloat16:
        context.events.note(
            f"export: the adapter changes {len(small)} of {len(merged.changes)} weights by less "
            f"than {merge.SMALL_CHANGE:g} of their norm (least {min(small.values()):.1e}): merged "
            "weights in bfloat16 lose a sixth of such changes and more; use the adapter, or set "
            "model.param_dtype=float32"
        )
    return Model(graph.with_runtime(adapter=None), merged.params)


def write_readme(context: Context, directory: Path, what: Literal["adapter", "merged"]) -> None:
    """Writes a line that says over which base the adapter was trained."""
    if not processes.first():
        return
    spec = Adapters(context.model.graph).spec
    config = context.config
    base = f"{FOLDER}/ of the run" if is_trained(config) else config.model.source
    bits = config.model.base_weights
    stored = f", stored in {bits}" if bits else ""
    if what == "adapter":
        text = f"An adapter of rank {spec.rank} in the form of peft, trained over {base}{stored}."
    else:
        of_bits = f", dequantised from {bits}" if bits else ""
        text = (
            f"The weights of {base}{of_bits}, with an adapter of rank {spec.rank} merged in "
            f"float32 and stored in {config.model.param_dtype}."
        )
    (directory / README).write_text(f"{text}\n", encoding="utf-8")


def _base(context: Context, write_base: WriteModel) -> Path:
    """Returns the directory of the weights under the adapter, which is written if there is none."""
    config = context.config
    directory = directory_of(config)
    if directory is not None and not sources.has_adapter(directory):
        return directory
    directory = config.directory / FOLDER
    if not (directory / "config.json").is_file():
        unfinished = directory.with_name(f"{FOLDER}.tmp")
        if processes.first():
            shutil.rmtree(unfinished, ignore_errors=True)
        write_base(unfinished)
        if processes.first():
            unfinished.rename(directory)
        processes.broadcast(None)
    return directory


def _name(context: Context, base: Path) -> dict[str, str]:
    """Returns the keys of adapter_config.json that name the base: relative to the export for a
    folder of the run, so that the run can be moved; on the hub its name and revision."""
    config = context.config
    if base == config.directory / FOLDER:
        return {"base_model_name_or_path": f"../{FOLDER}"}
    source = config.model.source
    repository = None if Path(source).is_dir() else hub_name(models.pinned(source))
    if repository is None:
        return {"base_model_name_or_path": str(base.absolute())}
    revision = {"revision": repository.revision} if repository.revision else {}
    return {"base_model_name_or_path": repository.name, **revision}
