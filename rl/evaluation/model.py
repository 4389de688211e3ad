"""What identifies the weights that an evaluation measured. Free of jax."""

from __future__ import annotations

import hashlib
from pathlib import Path

from policy.json_types import JsonObject

_BLOCKS = 256
_BLOCK = 4096
"""Blocks of a file that are read, evenly spread, and bytes of each: files of many gigabytes are
told apart within a second."""


def identity(name: str, directory: Path, checkpoint: str | None, dtype: str) -> JsonObject:
    """Returns what identifies weights in eval.json. name: as the command has it. directory: where
    the files are. checkpoint: of a run, the place of the weights in it; None: files."""
    result: JsonObject = {"name": name, "checkpoint": checkpoint, "dtype": dtype}
    if checkpoint is None:
        result["files"] = fingerprint(directory)
    return result


def fingerprint(directory: Path) -> str:
    """Returns a text that tells directories (or GGUF files) apart by the names and sizes of the
    files with weights and configurations, and by evenly spread blocks of their content."""
    digest = hashlib.sha256()
    for file in [directory] if directory.is_file() else sorted(directory.glob("*")):
        if file.suffix in (".safetensors", ".gguf") or file.name.endswith("config.json"):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            step = max(_BLOCK, size // _BLOCKS)
            with file.open("rb") as content:
                for start in range(0, size, step):
                    content.seek(start)
                    digest.update(content.read(_BLOCK))
    return digest.hexdigest()[:16]
