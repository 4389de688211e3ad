"""Loads functions that a configuration names: `file.py:function` or `package.module:function`, as
for rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from rewards.suggest import nearest


def is_plugin(name: str) -> bool:
    """Tells whether a name is the spec of the user's own function."""
    return ":" in name


def load(spec: str, what: str) -> Callable[..., Any]:
    """Returns the function that `spec` names. Raises ValueError. `what` names its role in messages,
    e.g. "task"."""
    from rewards.registry import RewardError, locate

    try:
        return locate(spec).function
    except RewardError as error:
        raise ValueError(str(error).replace("reward ", f"{what} ", 1)) from None


def check_options(function: Callable[..., Any], name: str, options: Collection[str]) -> None:
    """Raises ValueError for an option that the function does not accept. The message has the option
    in backticks."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    valid = [each.name for each in parameters]
    for option in options:
        if option not in valid:
            raise ValueError(f"{name} has no option `{option}`{nearest(option, valid)}")
