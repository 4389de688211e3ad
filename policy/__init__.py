"""The decoder. Arrays in, arrays out; knows nothing of prompts, rewards or loops. jax is imported at the first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policy.model import Model
    from policy.public import create, load, save

__all__ = ["Model", "create", "load", "save"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'policy' has no attribute {name!r}")
    from policy import public

    return getattr(public, name)
