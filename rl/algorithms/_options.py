"""How an algorithm declares its options: `@algorithm_options` on a class whose annotated fields are its YAML keys."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

# Strict, so that `true` is no number and "3" no count; int is still taken where a float is asked for.
_options = dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def algorithm_options(*, defaults: dict[str, Any] | None = None):
    """Makes a class one of options. `defaults`: other defaults for options that it inherits."""

    def declare(cls):
        inherited = {
            name: info
            for base in reversed(cls.__mro__)
            for name, info in getattr(base, "__pydantic_fields__", {}).items()
        }
        for name, default in (defaults or {}).items():
            info = inherited[name]
            bounds = {
                limit: value
                for part in info.metadata
                for limit in ("gt", "ge", "lt", "le")
                if (value := getattr(part, limit, None)) is not None
            }
            cls.__annotations__[name] = info.annotation
            setattr(cls, name, Field(default, description=info.description, **bounds))
        return _options(cls)

    return declare
