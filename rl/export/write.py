"""Writes an export and shows that it holds the weights of its source."""

from __future__ import annotations

from policy.json_types import JsonValue
from rl.export import folder
from rl.export.open import opened
from rl.export.request import ExportRequest
from rl.stages.export.policy import write_policy


def export(request: ExportRequest) -> str:
    """Writes the directory of a request, which appears after it was read back. Returns what to say
    of it.

    Raises ConfigError for a directory that may not be replaced, ModelError for weights that cannot
    be read and for files whose log-probabilities are other ones, ResourceError for a full disk.
    """
    folder.check(request.directory, request.force)
    source = opened(request)
    model = source.exported.model
    facts: dict[str, JsonValue] = {
        "source": source.label,
        "dtype": model.graph.runtime.param_dtype,
    }
    with folder.written(request.directory, request.force, facts) as directory:
        proofs = write_policy(source.exported, directory)
        facts["largest_difference"] = max(each.difference for each in proofs)
        facts["compared_tokens"] = sum(each.tokens for each in proofs)
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return (
        f"{request.directory}: {source.label}, {model.graph.runtime.param_dtype}, "
        f"{size / 1e6:,.1f} MB. Read back, the log-probabilities of {facts['compared_tokens']} "
        f"tokens differ by at most {facts['largest_difference']:.1e}"
    )
