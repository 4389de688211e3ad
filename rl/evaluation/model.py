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
    """Returns what identifies weights in eval.json. name: as the command has it; a path counts from
    the working directory, however it was written. directory: where the files are. checkpoint: of a
    run, the place of the weights in it; None: files."""
    result: JsonObject = {"name": _plain(name), "checkpoint": checkpoint, "dtype": dtype}
    if checkpoint is None:
        result["files"] = fingerprint(directory)
    return result


def _plain(name: str) -> str:
    """Returns the one name of a path; names on the hub as they are."""
    if not Path(name).exists():
        return name
    path = Path(name).resolve()
    here = Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


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
