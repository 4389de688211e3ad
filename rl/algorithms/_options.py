"""Declares the options of an algorithm: `@algorithm_options` on a class whose annotated fields are
its YAML keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

# Strict: `true` is not a number and "3" is not a count. A float option still accepts an int.
_options = dataclass(
    frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
)


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def algorithm_options(
    *, defaults: Mapping[str, object] | None = None
) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that makes the fields of a class options. `defaults`: of inherited
    options."""

    def declare(cls: type[T]) -> type[T]:
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
        return cast(type[T], _options(cls))

    return declare
