"""The decoder: arrays in, arrays out, without prompts, rewards or loops. jax is imported at the
first use of a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policy.model import Model
    from policy.public import create, load, save

__all__ = ["Model", "create", "load", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'policy' has no attribute {name!r}")
    from policy import public

    return getattr(public, name)
