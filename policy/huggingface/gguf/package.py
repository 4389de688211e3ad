"""The package `gguf`, an extra of this one."""

from __future__ import annotations

from typing import Any

from policy.huggingface.file_error import ModelFileError


def gguf(what: str) -> Any:
    """Returns the module `gguf`. Raises ModelFileError, which says that it is needed for `what`, if
    it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ModelFileError(
            f"{what}: the package gguf is not installed; type: pip install 'duet-rl[gguf]'"
        ) from None
    return gguf
