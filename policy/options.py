"""Declares options once: default, description and bounds are metadata of the field in the component
that reads it.

rl/config/schema.py makes the YAML schema of a run from these declarations. Free of pydantic and
jax.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any = dataclasses.MISSING, *, description: str, **bounds: Any) -> Any:
    """Declares a dataclass field that is an option.

    Args:
        default: the value if none is set; without it the option is required.
        description: one line for docs/configuration.md.
        bounds: `ge`, `gt`, `le`, `lt` or `min_length`, checked in a configuration.
    """
    return dataclasses.field(default=default, metadata={"description": description, **bounds})
