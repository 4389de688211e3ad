"""Writes an export and shows that it holds the weights of its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from policy.json_types import JsonValue
from rl.errors import ResourceError
from rl.export import folder, gguf, hub, reward_model
from rl.export.open import opened
from rl.export.request import ExportRequest
from rl.export.reward_model import ExportedRewardModel
from rl.stages.export.exportable import Exportable
from rl.stages.export.policy import write_policy

if TYPE_CHECKING:
    from policy.huggingface.reload import Proof


def _write(request: ExportRequest, exported: Exportable, directory: Path) -> list[Proof]:
    if isinstance(exported, ExportedRewardModel):
        return reward_model.write(exported, directory)
    if request.gguf is None:
        return write_policy(exported, directory)
    return gguf.write(exported, directory, request.gguf, request.directory.name)


def export(request: ExportRequest) -> str:
    """Writes the directory of a request, which appears after it was read back. Returns what to say
    of it.

    Raises ConfigError for a directory that may not be replaced, ModelError for weights that cannot
    be read and for files whose log-probabilities are other ones, ResourceError for a full disk, and
    for an export that was not read back and is to be pushed.
    """
    folder.check(request.directory, request.force)
    if request.push is not None:
        hub.check(request.push)
    source = opened(request)
    if request.gguf is not None:
        gguf.check(source.exported)
    model = source.exported.model
    dtype = request.gguf or model.graph.runtime.param_dtype
    facts: dict[str, JsonValue] = {"source": source.label, "dtype": dtype}
    with folder.written(request.directory, request.force, facts) as directory:
        proofs = _write(request, source.exported, directory)
        if proofs:
            facts["largest_difference"] = max(each.difference for each in proofs)
            facts["compared_tokens"] = sum(each.tokens for each in proofs)
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    measured = _measured(facts, source.exported.compared)
    if request.push is not None and not proofs:
        raise ResourceError(
            f"{request.directory}: written, but no memory had room to read it back, so it was not "
            f"pushed; export it on a larger machine, or push it with `hf upload {request.push} "
            f"{request.directory}`"
        )
    text = f"{request.directory}: {source.label}, {dtype}, {size / 1e6:,.1f} MB. {measured}"
    return text if request.push is None else f"{text}\n{hub.push(request.push, request.directory)}"


def _measured(facts: Mapping[str, JsonValue], compared: str) -> str:
    if "compared_tokens" not in facts:
        return "It was not read back"
    return (
        f"Read back, the {compared} {facts['compared_tokens']} tokens differ by at most "
        f"{facts['largest_difference']:.1e}"
    )
