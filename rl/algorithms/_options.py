"""How an algorithm declares its options: `@algorithm_options` on a class whose annotated fields are its YAML keys."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

# Strict, so that `true` is no number and "3" no count; int is still taken where a float is asked for.
algorithm_options = dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
