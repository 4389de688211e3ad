"""Declares an option once: its default, description and bounds stand at the field of the component that reads it.

The YAML schema of a run (rl/config/schema.py, `fields_of`) is made from these declarations. Free of pydantic and jax.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any = dataclasses.MISSING, *, description: str, **bounds: Any) -> Any:
    """Declares a dataclass field that is an option.

    Args:
        default: the value where none is set; without one the option is required.
        description: one line for docs/configuration.md.
        bounds: `ge`, `gt`, `le`, `lt` or `min_length`, checked in a configuration.
    """
    return dataclasses.field(default=default, metadata={"description": description, **bounds})
